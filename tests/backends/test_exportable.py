"""Models that exporters do not take as they are, on every backend: TorchScript within, experts of transformers."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from _backends import needs_compiler, reloaded
from trimtab.backends.aoti import Aoti
from trimtab.backends.eager import Eager
from trimtab.backends.inductor import Inductor
from trimtab.backends.onnxruntime import OnnxRuntime
from trimtab.backends.openvino import OpenVino
from trimtab.backends.torchscript import TorchScript
from trimtab.core.backend import Backend
from trimtab.core.candidate import Candidate

BACKENDS = [
    Eager(),
    TorchScript(),
    OnnxRuntime(),
    OpenVino(),
    Inductor(),
    Aoti(),
]


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(rows)).relu())


def body() -> nn.Module:
    torch.manual_seed(0)
    return Body().eval()


def saved(script: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    buffer = io.BytesIO()
    torch.jit.save(script, buffer)
    buffer.seek(0)
    loaded: torch.jit.ScriptModule = torch.jit.load(buffer)
    return loaded


class Around(nn.Module):
    """Asks the part within for more than a call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(6, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(rows) + self.inner.last.bias)


def within() -> nn.Module:
    return Around(torch.jit.script(body()))


def in_a_row() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), torch.jit.trace(body(), torch.zeros(2, 6)), nn.Tanh())


def twice() -> nn.Module:
    part = torch.jit.script(body())
    return nn.Sequential(part, nn.Tanh(), part)


def whole() -> nn.Module:
    return torch.jit.script(body())


def from_a_file() -> nn.Module:
    return saved(torch.jit.script(body()))


def without_weights() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), torch.jit.freeze(torch.jit.script(body())))


def parametrized() -> nn.Module:
    """Weights computed at every call: by a matrix exponential, which converters do not know, from a norm, from two parts."""
    torch.manual_seed(0)
    first = parametrizations.orthogonal(nn.Linear(6, 6), orthogonal_map="matrix_exp")
    last = parametrizations.weight_norm(nn.Linear(6, 4))
    return nn.Sequential(first, nn.Tanh(), parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh(), last)


MODELS = [within, in_a_row, twice, whole, from_a_file, without_weights, parametrized]
SLOW = [within]
"""For AOTInductor, which compiles for ten seconds what was exported as it is for eager PyTorch."""
COMPILED = [within, in_a_row, parametrized]
"""For TorchInductor: the other models take its same path."""
ASKED = [(backend, make) for backend in BACKENDS for make in MODELS if make in SLOW or not isinstance(backend, Aoti)]


def compiled(backend: Backend, make: Callable[[], nn.Module]) -> list[Any]:
    """The marks of what a compiler makes."""
    return [] if backend.cost != "minute" else [needs_compiler] if make in COMPILED else [needs_compiler, pytest.mark.long]


@pytest.mark.parametrize(
    ("backend", "make"),
    [pytest.param(*each, marks=compiled(*each)) for each in ASKED],
    ids=lambda each: getattr(each, "name", None) or each.__name__,
)
def test_what_ships_says_what_the_model_says(backend: Backend, make: Callable[[], nn.Module], tmp_path: pathlib.Path) -> None:
    model = make().eval()
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    candidate = Candidate.of(model, (rows,))
    with torch.no_grad():
        before = model(rows).clone()
        executable = backend.compile(candidate)
        for run in (executable, reloaded(backend, executable, tmp_path)):
            torch.testing.assert_close(run(rows), before, atol=1e-2 if backend.name == "openvino" else 1e-5, rtol=1e-5)
        assert torch.equal(model(rows), before)


@pytest.mark.parametrize("backend", [Eager(), OnnxRuntime(), OpenVino()], ids=lambda backend: backend.name)
def test_experts_of_transformers_are_computed_by_operators_of_torch(backend: Backend, tmp_path: pathlib.Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MixtralConfig(**small, num_key_value_heads=2, num_local_experts=3)
    model = transformers.MixtralForCausalLM(config).eval()
    chosen = model.config._experts_implementation
    ids = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(0))
    candidate = Candidate.of(model, (), {"input_ids": ids, "use_cache": False})
    with torch.no_grad():
        want = model(input_ids=ids, use_cache=False).logits
        loaded = reloaded(backend, backend.compile(candidate), tmp_path)
        found = loaded(input_ids=ids, use_cache=False)
    torch.testing.assert_close(found["logits"], want, atol=1e-2 if backend.name == "openvino" else 1e-5, rtol=1e-5)
    assert model.config._experts_implementation == chosen == "grouped_mm"
