"""The generated function of an exported graph does what the graph does."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from trimtab.backends.common.exported_program import bare_module, export_program
from trimtab.backends.common.graph_call import graph_call
from trimtab.core.candidate import Candidate
from trimtab.core.signature import Dim
from trimtab.testing import models


class Literals(nn.Module):
    """Arguments of every kind: infinities, slices, lists of tensors, dtypes, sizes that are symbols."""

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        masked = rows.masked_fill(rows < 0, float("-inf")).softmax(-1)
        joined = torch.cat([masked, rows[:, 1::2]], dim=1).to(torch.float64)
        return joined, torch.zeros(rows.shape[0] * 2, 3) + rows.shape[0], rows


class Counting(nn.Module):
    """Writes to a buffer in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return rows * self.calls


@pytest.mark.parametrize("make", [models.convnet, models.encoder, models.recurrent, models.branches, models.structured])
def test_same_operations_same_bits(make) -> None:
    candidate = make()
    module = bare_module(export_program(candidate)[0])
    call = graph_call(module)
    assert call is not module
    with torch.no_grad():
        wanted, got = module(*candidate.leaves), call(*candidate.leaves)
    assert len(wanted) == len(got)
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


def test_every_kind_of_argument_at_other_sizes() -> None:
    candidate = Candidate.of(Literals().eval(), (torch.randn(3, 6),), dynamic={"rows": {0: Dim("batch")}})
    call = graph_call(bare_module(export_program(candidate)[0]))
    for rows in (torch.randn(2, 6), torch.randn(7, 6)):
        for want, got in zip(Literals()(rows), call(rows), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)  # a row without a number above zero is NaN


def test_buffers_that_the_model_writes_to_are_written_to() -> None:
    program = torch.export.export(Counting(), (torch.ones(1),))
    module = bare_module(program)
    call = graph_call(module)
    assert [call(torch.ones(1))[0].item() for _ in range(3)] == [1.0, 2.0, 3.0]
    assert module.calls.item() == 3.0


def test_intermediate_results_are_freed_after_their_last_use() -> None:
    born: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def double(value: torch.Tensor) -> torch.Tensor:
        alive.append(sum(ref() is not None for ref in born))
        result = value * 2
        born.append(weakref.ref(result))
        return result

    graph = torch.fx.Graph()
    value = graph.placeholder("value")
    for _ in range(5):
        value = graph.call_function(double, (value,))
    graph.output((value,))
    assert graph_call(torch.fx.GraphModule(nn.Module(), graph))(torch.ones(1))[0].item() == 32
    assert max(alive) == 1


def test_a_graph_of_another_kind_is_called_as_it_is() -> None:
    module = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    assert graph_call(module) is module
