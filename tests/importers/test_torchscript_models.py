"""Models that were made TorchScript before they came, and traces that cannot be written."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trimtab.backends.onnxruntime import OnnxRuntime
from trimtab.backends.torchscript import TorchScript
from trimtab.core.candidate import Candidate
from trimtab.core.signature import Dim, parameter_names
from trimtab.core.workload import Workload
from trimtab.errors import CompileError
from trimtab.evaluation.prepared_workload import prepare


class Swish(torch.autograd.Function):
    """A function of the user's own, of which a trace keeps the call into Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class Swished(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Swish.apply(self.proj(x))  # type: ignore[no-untyped-call, no-any-return]


def test_a_trace_that_calls_python_runs_and_says_that_it_cannot_be_written(tmp_path: pathlib.Path) -> None:
    model, x = Swished().eval(), torch.randn(2, 4)
    executable = TorchScript().compile(Candidate.of(model, (x,)))
    torch.testing.assert_close(executable(x), model(x))
    with pytest.raises(CompileError, match="TorchScript cannot be written: RuntimeError: .*'Swish'"):
        executable.save(tmp_path)


class Around(nn.Module):
    """A model of which a part is TorchScript."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.part(images)
        return 2.0 * found


@pytest.mark.parametrize("make", [lambda part: part, Around], ids=["whole", "part"])
def test_a_traced_convolution_reaches_onnx_with_its_sizes(make: Callable[[nn.Module], nn.Module]) -> None:
    pytest.importorskip("onnxruntime")
    x = torch.randn(2, 3, 8, 8)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)).eval()
    model = make(torch.jit.trace(plain, x)).eval()  # type: ignore[no-untyped-call]
    name = parameter_names(model.forward, 1)[0]
    dims = {0: Dim("batch"), 2: Dim("height", min=3), 3: Dim("width", min=3)}
    executable = OnnxRuntime().compile(Candidate.of(model, (x,), dynamic={name: dims}))
    assert len(executable.signature.dims) == 3
    for shape in ((1, 3, 3, 9), (5, 3, 20, 3)):
        images = torch.randn(shape)
        torch.testing.assert_close(executable(images), model(images))


def test_a_frozen_script_has_no_mode_of_training(tmp_path: pathlib.Path) -> None:
    x = torch.randn(2, 4)
    torch.jit.freeze(torch.jit.trace(nn.Linear(4, 3).eval(), x)).save(str(tmp_path / "linear.pt"))  # type: ignore[no-untyped-call]
    model = torch.jit.load(str(tmp_path / "linear.pt"))  # type: ignore[no-untyped-call]
    subject = prepare(Workload(model=model, inputs=x))
    assert not any("training mode" in note for note in subject.notes)
    torch.testing.assert_close(subject.candidate.flat()(x)[0], model(x))
