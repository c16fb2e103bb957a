"""Models whose weights are half precision: right conversions and folds differ by a few of their large roundings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trimtab.backends.onnxruntime import OnnxRuntime
from trimtab.backends.openvino import OpenVino
from trimtab.core.backend import Backend
from trimtab.core.candidate import Candidate
from trimtab.errors import CompileError, UsageError
from trimtab.passes.fold_bn import FoldBn
from trimtab.testing.models import CASES


def deep(dtype: torch.dtype) -> Candidate:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128)) for _ in range(6)]
    return Candidate.of(nn.Sequential(*blocks).to(dtype).eval(), (torch.randn(4, 128).to(dtype),))


@pytest.mark.parametrize("backend", [OnnxRuntime(), OpenVino()], ids=["onnxruntime", "openvino"])
def test_runtimes_take_float16(backend: Backend) -> None:
    if reason := backend.blocked(deep(torch.float16)):
        pytest.skip(reason)
    candidate = deep(torch.float16)
    executable = backend.compile(candidate)
    with torch.no_grad():
        want = candidate.model(*candidate.args)
    got = executable(*candidate.args)
    assert got.dtype is torch.float16
    assert float((got - want).abs().max()) < 0.05 * float(want.abs().max())
    executable.close()


def test_onnxruntime_tells_what_it_has_no_kernel_for() -> None:
    if reason := OnnxRuntime().blocked(deep(torch.float16)):
        pytest.skip(reason)
    casts = "Computes in float32, with casts around it, where it has no kernel for float16."
    half, full = (OnnxRuntime().compile(deep(dtype)) for dtype in (torch.float16, torch.float32))
    assert OnnxRuntime.tells_fallbacks
    assert (half.notes, full.notes) == ([casts], [])
    with pytest.raises(CompileError, match="NOT_IMPLEMENTED|Could not find an implementation"):
        OnnxRuntime().compile(deep(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_batch_norms_of_half_precision_are_folded(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    candidate = Candidate.of(model.to(dtype).eval(), (torch.randn(2, 3, 12, 12).to(dtype),))
    folded = FoldBn().apply(candidate).model
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())


def test_a_wrong_graph_is_still_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnnxRuntime, "_open_run", lambda self, folder, signature: lambda leaves: [leaves[0] * 0.5])
    with pytest.raises(CompileError, match="not the model"):
        OnnxRuntime().compile(deep(torch.float16))


def test_what_is_beside_int8_is_asked_of_int8_only() -> None:
    plain = CASES["convnet"]()
    with pytest.raises(UsageError, match="Leave it at f32"):
        OpenVino(rest="bf16")
    everything = OpenVino(precision="int8_static", operators="all")
    assert "about recurrent layers, and the model has none" in str(everything.why_not(plain))
    assert "the rest in bfloat16" in OpenVino(precision="int8_static", rest="bf16").describe()
    assert OpenVino(precision="int8_weights", rest="bf16").exact is False
