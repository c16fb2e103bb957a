"""Batches that hold lists: how many examples they have, and how they are taken apart and joined."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trimtab import Settings, Trainer
from trimtab.errors import WorkloadError
from trimtab.train.feed import join, split
from trimtab.train.objective import examples


def detection(count: int, side: int = 4) -> Any:
    """Images and what is in them, as torchvision's references join them."""
    samples = [(torch.rand(3, side, side), {"v": torch.tensor(1.0), "boxes": torch.rand(2, 4)}) for _ in range(count)]
    return tuple(zip(*samples, strict=True))


X8, Y8 = torch.rand(8, 4), torch.rand(8)
BATCHES: list[tuple[Any, int]] = [
    (detection(10), 10),
    ((tuple(torch.rand(3, 5 + n, 5) for n in range(6)), torch.zeros(6)), 6),
    ((tuple(torch.rand(3, 5 + n, 5) for n in range(6)), tuple(torch.rand(n, 4) for n in range(6))), 6),
    ([torch.rand(n, 4) for n in (5, 2, 7)], 3),
    ([{"ids": torch.zeros(n)} for n in (5, 4, 3)], 3),
    (["a", "b", "c"], 3),
    ({"x": np.zeros((7, 2)), "y": np.zeros(7)}, 7),
    # and what must stay as it is
    ((X8, torch.rand(8, 1)), 8),
    ((X8, torch.rand(20, 6)), 8),
    (((X8, torch.rand(8, 2)), (Y8, torch.rand(8, 3))), 8),
    ([{"x": X8}, {"y": Y8}], 8),
    ([{"x": X8}, {"x": Y8}], 8),
    (((X8[:2], X8[:2]), Y8[:2]), 2),
    ({"kind": ["a", "b"], "x": X8}, 8),
]


@pytest.mark.parametrize(("batch", "count"), BATCHES)
def test_examples_are_counted(batch: Any, count: int) -> None:
    assert examples(batch) == count


def test_lists_of_examples_are_taken_apart_and_joined() -> None:
    for count, size, want in ((10, 4, [4, 3, 3]), (4, 3, [2, 2])):
        whole = detection(count)
        parts = split(whole, size)
        assert [(len(images), len(found)) for images, found in parts] == [(n, n) for n in want]
        again = join(parts)
        assert all(one is other for one, other in zip(again[0], whole[0], strict=True))
        assert list(again[1]) == list(whole[1])
    images = [torch.rand(4, 8, 8) for _ in range(10)]
    with pytest.raises(WorkloadError, match=r"a list of 10 tensors, which may be 10 examples, or columns of 4 each\. Stack"):
        split(images, 2)
    with pytest.raises(WorkloadError, match="its tensors differ in their first axis"):
        split([[X8, torch.rand(20, 4)], Y8], 2)


def test_unequal_batches_of_lists_count_by_their_examples() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.level = nn.Parameter(torch.zeros(()))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return torch.stack([(model.level - found["v"]) ** 2 for found in batch[1]]).mean()

    few = detection(2)
    many = (detection(10)[0], tuple({"v": torch.tensor(0.0), "boxes": torch.rand(1, 4)} for _ in range(10)))
    optimizer = functools.partial(torch.optim.SGD, lr=0.5)
    made = Trainer(Mean(), loss=loss, optimizer=optimizer, settings=Settings(accumulate=2))
    assert made.fit([many, few], epochs=1).notes == ()
    assert made.model.level.item() == pytest.approx(2 / 12)
