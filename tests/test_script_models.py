"""Models that were made TorchScript before they came, and traces that cannot be written."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import nn

from trimtab.backends.torchscript import TorchScript
from trimtab.candidate import Candidate
from trimtab.errors import CompileError
from trimtab.subject import prepare
from trimtab.workload import Workload


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


def test_a_frozen_script_has_no_mode_of_training(tmp_path: pathlib.Path) -> None:
    x = torch.randn(2, 4)
    torch.jit.freeze(torch.jit.trace(nn.Linear(4, 3).eval(), x)).save(str(tmp_path / "linear.pt"))  # type: ignore[no-untyped-call]
    model = torch.jit.load(str(tmp_path / "linear.pt"))  # type: ignore[no-untyped-call]
    subject = prepare(Workload(model=model, inputs=x))
    assert not any("training mode" in note for note in subject.notes)
    torch.testing.assert_close(subject.candidate.flat()(x)[0], model(x))
