"""Decisions in Python on values of tensors: they are found, and refused where a trace would keep one path."""

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trimtab.backends.common.decisions import first_decision
from trimtab.backends.torchscript import TorchScript
from trimtab.core.backend import BACKENDS
from trimtab.core.candidate import Candidate
from trimtab.errors import CompileError
from trimtab.testing.models import CASES, clipping


class Doing(nn.Module):
    """A linear layer with any function behind it."""

    def __init__(self, function: Callable[..., Any], width: int = 6) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(width, width), function
        self.register_buffer("on", torch.ones(1))

    def forward(self, rows: torch.Tensor) -> Any:
        return self.function(self.layer(rows))


def of(function: Callable[..., Any]) -> Candidate:
    return Candidate.of(Doing(function).eval(), (torch.randn(2, 6),))


def cut(x: torch.Tensor) -> torch.Tensor:
    norm = x.norm()
    return x * (10 / norm) if norm > 10 else x


def counted(x: torch.Tensor) -> torch.Tensor:
    return x + len([v for v in x.flatten().tolist() if v > 0])


def alike(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.equal(x, x.abs()) else x


def looked(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.numpy().max() > 3 else x


def handed_over(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if np.from_dlpack(x).max() > 3 else x


def filled(x: torch.Tensor) -> torch.Tensor:
    rows = torch.zeros(2, 6)
    rows[:, 0] = x[:, 0]  # from here on it holds data
    return x * 2 if rows.sum() > 0 else x


def none_found(x: torch.Tensor) -> torch.Tensor:
    loud = (x.abs() > 30).nonzero()
    return x / 2 if loud.shape[0] > 0 else x


def few_kept(x: torch.Tensor) -> torch.Tensor:
    kept = x[x > 0].flatten() * 2
    return x * 2 if len(kept) < 100 else x


def each_found(x: torch.Tensor) -> torch.Tensor:
    for _ in range(torch.masked_select(x, x > 0).numel()):
        x = x + 1
    return x


@pytest.mark.parametrize("function", [cut, counted, alike, looked, handed_over, filled, none_found, few_kept, each_found])
def test_what_python_reads_of_data_is_found(function: Callable[..., Any]) -> None:
    candidate = of(function)
    place = first_decision(candidate, candidate.leaves)
    assert place is not None
    first = function.__code__.co_firstlineno
    assert pathlib.Path(place[0]).name == pathlib.Path(__file__).name
    assert first < place[1] <= first + 4


def sized(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] > 1 else x


def picked(x: torch.Tensor) -> torch.Tensor:
    return x[x[0, 0].long().abs() % 2]  # the tracer follows that


def guarded(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if not torch.jit.is_tracing() and x.sum() > 1e9 else x


def sized_beside(x: torch.Tensor) -> torch.Tensor:
    found = (x > 0).nonzero()
    return x * found.shape[0] if x.shape[0] > 1 and x[0].numel() > 2 else x


def sized_by_a_weight(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.eye(3).nonzero().shape[0] > 2 else x


@pytest.mark.parametrize("function", [sized, picked, guarded, sized_beside, sized_by_a_weight])
def test_sizes_indices_and_checks_outside_of_a_trace_decide_nothing(function: Callable[..., Any]) -> None:
    candidate = of(function)
    assert first_decision(candidate, candidate.leaves) is None


def test_what_is_read_of_weights_alone_decides_nothing() -> None:
    class Switched(Doing):
        def forward(self, rows: torch.Tensor) -> Any:
            return self.layer(rows) if self.on[0] * 2 > 1 else rows

    candidate = Candidate.of(Switched(cut).eval(), (torch.randn(2, 6),))
    assert first_decision(candidate, candidate.leaves) is None


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_suites_models_decide_nothing(name: str) -> None:
    candidate = CASES[name]()
    assert first_decision(candidate, candidate.dynamic_leaves()) is None


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_trace_of_one_path_is_refused_with_the_line(name: str) -> None:
    if BACKENDS[name]().blocked(candidate := clipping()):
        pytest.skip(f"{name} is not here")
    with pytest.raises(CompileError, match=r"decides in Python on values of its tensors \(.*models.py:\d+\)") as caught:
        BACKENDS[name]().compile(candidate)
    assert "torch.where" in str(caught.value)


def test_torchscript_compiles_the_source_of_a_decision_and_refuses_where_it_cannot() -> None:
    candidate = clipping()
    executable = TorchScript().compile(candidate)
    assert "models.py" in executable.notes[0]
    large = candidate.args[0] * 50
    torch.testing.assert_close(executable(large), candidate.model(large))
    with pytest.raises(CompileError, match="a trace keeps one path"):
        TorchScript().compile(of(lambda x: {**{"a": cut(x)}}["a"]))  # no word of TorchScript
