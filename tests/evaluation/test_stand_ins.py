"""Inputs of our own making, where a workload has no data: only those to which the model has an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trimtab.artifact.test_vectors import Golden
from trimtab.backends.eager import Eager
from trimtab.core.candidate import Candidate
from trimtab.core.signature import Dim
from trimtab.core.workload import Evaluation, Workload
from trimtab.errors import WorkloadError
from trimtab.evaluation.prepared_workload import RESAMPLED, fresh_inputs, prepare
from trimtab.evaluation.reference import reference_of


class Doing(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


class Own(Exception):
    """Raised by a model of somebody's own."""


def sizes(boxes: torch.Tensor) -> torch.Tensor:
    return torch.log(boxes[:, 2:] - boxes[:, :2])  # NaN where columns are mixed


def mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    kept = int(mask.sum())
    return (x * mask[..., None]).sum(1) * (1 / kept)  # divides by zero where nothing is left


def picky(x: torch.Tensor) -> torch.Tensor:
    if not torch.equal(x, x.sort().values):
        raise Own("not in order")
    return x * 2


def missing(x: torch.Tensor) -> torch.Tensor:
    return x * {True: 1.0}[bool(x[0, 0] == 0)]


CASES: list[tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = [
    (sizes, (torch.tensor([[10.0, 10.0, 50.0, 60.0]]),)),
    (mean, (torch.randn(1, 64, 4), torch.arange(64)[None] == 0)),
    (picky, (torch.arange(12.0)[None],)),
    (missing, (torch.arange(12.0)[None],)),
]


@pytest.mark.parametrize(("function", "inputs"), CASES)
def test_what_the_model_has_no_answer_to_is_not_asked(
    function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]
) -> None:
    subject = prepare(Workload(name="picky", model=Doing(function), inputs=inputs))
    assert 1 <= len(subject.splits.selection) <= RESAMPLED
    reference_of(Eager().compile(subject.candidate), subject.splits.selection, None)  # which refuses NaN
    found = fresh_inputs(subject)
    assert subject.model(*found.args).isfinite().all()


def test_what_the_model_answers_is_asked() -> None:
    subject = prepare(Workload(name="plain", model=nn.Linear(4, 2), inputs=torch.randn(3, 4)))
    assert len(subject.splits.selection) == 1 + RESAMPLED
    assert not torch.equal(fresh_inputs(subject).leaves[0], subject.candidate.leaves[0])


def test_a_workload_with_labels_is_timed_on_its_example_where_resampling_fails() -> None:
    x, mask = CASES[1][1]
    items = [((torch.randn(1, 64, 4), torch.arange(64)[None] <= i), torch.zeros(1)) for i in range(24)]
    evaluation = Evaluation(data=items, score=lambda output, target: output[:, 0] > target, run=lambda call, item: call(*item))
    subject = prepare(Workload(name="masked", model=Doing(mean), inputs=(x, mask), evaluation=evaluation))
    seen = [fresh_inputs(subject, seed).leaves for seed in range(8)]
    assert all(leaves[1].any() for leaves in seen)


@pytest.mark.parametrize("error", [Own, ZeroDivisionError, KeyError, TypeError, AssertionError])
def test_vectors_at_sizes_that_the_model_refuses_are_left_out(error: type[Exception]) -> None:
    def even(x: torch.Tensor) -> torch.Tensor:
        if asked and x.shape[0] != 2:
            raise error("an odd number")
        return x * 2

    asked: list[Any] = []
    candidate = Candidate.of(Doing(even).eval(), (torch.ones(2, 3),), dynamic={"input_0": {0: Dim("batch")}})
    asked.append(True)
    golden = Golden.of(candidate, candidate.signature, [[torch.zeros(2, 3)], [torch.zeros(5, 3)]])
    assert [len(case.inputs[0]) for case in golden.cases] == [2, 2]
    with pytest.raises(WorkloadError, match="failed on a test vector"):
        Golden.of(candidate, candidate.signature.without_dims([torch.ones(3, 3)], [torch.ones(3, 3)]))
