"""Inputs that mean something in their order only, such as the offsets of an embedding bag, are put to models in other sizes and
with other values only as what they are."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import nn

from _backends import reloaded
from trimtab.backends.eager import Eager
from trimtab.backends.onnxruntime import OnnxRuntime
from trimtab.backends.openvino import OpenVino
from trimtab.backends.torchscript import TorchScript
from trimtab.core.backend import Backend
from trimtab.core.candidate import Candidate
from trimtab.core.signature import Dim
from trimtab.core.workload import Workload
from trimtab.evaluation.prepared_workload import prepare
from trimtab.tensors.comparison import is_sorted, repeat_sorted, resample_sorted, resize_sorted


class Bags(nn.Module):
    """tokens (N,), offsets (B,), rows (B, 3) -> (B, 2)"""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.head = nn.EmbeddingBag(50, 8, mode="sum"), nn.Linear(11, 2)

    def forward(self, tokens: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(torch.cat([self.bag(tokens, offsets), rows], 1))
        return scores


def bags(*offsets: int, tokens: int) -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 50, (tokens,)), torch.tensor(offsets), torch.randn(len(offsets), 3)


@pytest.mark.parametrize("backend", [Eager(), TorchScript(), OnnxRuntime(), OpenVino()], ids=str)
def test_a_model_with_offsets_keeps_its_sizes(backend: Backend, tmp_path: pathlib.Path) -> None:
    tokens, batch = Dim("tokens"), Dim("batch")
    dynamic = {"tokens": {0: tokens}, "offsets": {0: batch}, "rows": {0: batch}}
    candidate = Candidate.of(Bags().eval(), bags(0, 3, 3, 8, tokens=12), dynamic=dynamic)
    executable = backend.compile(candidate)
    again = reloaded(backend, executable, tmp_path)
    for form in (executable, again):
        assert {dim.name for dim in form.signature.dims} == {"tokens", "batch"}, form.notes
        for call in (bags(0, 1, tokens=4), bags(0, 2, 2, 9, 14, 30, tokens=41)):
            assert torch.allclose(form(*call), candidate.model(*call), atol=1e-5)


def test_a_model_with_offsets_is_compared_on_other_values_too() -> None:
    subject = prepare(Workload(name="bags", model=Bags, inputs=bags(0, 3, 3, 8, tokens=12)))
    calls = [batch.call[0] for batch in subject.splits.selection]
    assert len(calls) > 4
    assert len({tuple(offsets.tolist()) for _, offsets, _ in calls}) > 1


def test_rows_of_whole_numbers_that_rise_are_ordered() -> None:
    assert is_sorted(torch.tensor([0, 3, 3, 8]))
    assert is_sorted(torch.tensor([0, 1], dtype=torch.uint8))
    for leaf in ([3, 0, 8], [2, 2, 2], [4], [], [0.0, 1.0], [False, True], [[0, 1], [2, 3]]):
        assert not is_sorted(torch.tensor(leaf)), leaf


def test_what_is_made_of_an_ordered_row_is_one() -> None:
    row = torch.tensor([0, 3, 3, 8])
    assert resize_sorted(row, 6).tolist() == [0, 3, 3, 8, 8, 8]
    assert resize_sorted(row, 2).tolist() == [0, 3]
    assert repeat_sorted(row).tolist() == [0, 0, 3, 3]
    assert resample_sorted(row, torch.tensor([3, 1, 3, 0])).tolist() == [0, 3, 8, 8]
