"""Loaders over data that does something of its own: draws, hears of epochs, grows, raises, or is joined by somebody else."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

from trimtab.errors import UsageError, WorkloadError
from trimtab.train.data.collate import Collate
from trimtab.train.data.loader import Loader
from trimtab.train.trainer import Trainer

TOKENS = {"input_ids": [[1], [2, 3], [4, 5, 6], [7]], "labels": [0, 1, 0, 1]}
MASK = [[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doubling(Collate):
    """Does something to the whole batch, as one does that hides words."""

    def __call__(self, examples: Sequence[Any]) -> Any:
        """Twice the inputs."""
        batch = super().__call__(examples)
        return batch | {"input_ids": 2 * batch["input_ids"]}


@pytest.mark.parametrize("subset", [False, True])
def test_what_is_made_of_whole_examples_is_made_of_columns_too(subset: bool) -> None:
    data: Any = TOKENS
    if subset:
        data = Subset(Subset(TOKENS, range(4)), range(4))  # type: ignore[arg-type]
    (batch,) = Loader(data, 4, shuffle=False, collate=Collate(mask="mask"))
    assert batch["mask"].tolist() == MASK
    (batch,) = Loader(data, 4, shuffle=False, collate=Doubling())
    assert batch["input_ids"][2].tolist() == [8, 10, 12]
    (texts,) = Loader(data, 4, shuffle=False, collate=lambda examples: [len(example["input_ids"]) for example in examples])
    assert texts == [1, 2, 3, 1]


def test_a_tuple_of_columns_is_given_to_a_collate_of_ones_own_as_examples() -> None:
    inputs, labels = torch.arange(12.0).reshape(6, 2), np.arange(6)
    loader = Loader((inputs, labels), 3, shuffle=False, collate=lambda pairs: [int(label) for _, label in pairs])
    assert list(loader) == [[0, 1, 2], [3, 4, 5]]


def test_a_part_of_a_part_is_read_as_a_whole() -> None:
    whole = TensorDataset(torch.arange(40.0).reshape(20, 2), torch.arange(20))
    part, _ = random_split(random_split(whole, [12, 8])[0], [6, 6])
    inputs, labels = next(iter(Loader(part, 6, shuffle=False)))
    assert torch.equal(inputs, torch.stack([part[place][0] for place in range(6)]))
    assert torch.equal(labels, torch.stack([part[place][1] for place in range(6)]))


class Lazy(Sequence[torch.Tensor]):
    """A column whose items are made when they are asked for."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: Any) -> Any:
        if self.fault is not None and place == 5:
            raise self.fault
        return torch.full((2,), float(place)) + torch.rand(2)


class Noisy(list[float]):
    """A list whose items are not what it holds."""

    def __getitem__(self, place: Any) -> Any:
        return super().__getitem__(place) + random.random()


def plain(batch: Any) -> list[Any]:
    found: list[Any] = torch.as_tensor(batch["image"] if isinstance(batch, dict) else batch).tolist()
    return found


@pytest.mark.parametrize("make", [lambda: {"image": Lazy(), "label": list(range(8))}, lambda: Noisy(map(float, range(8)))])
def test_code_within_columns_draws_what_depends_on_nothing_but_the_place(make: Any) -> None:
    torch.manual_seed(3)
    random.seed(3)
    before, state = torch.get_rng_state(), random.getstate()
    here = [plain(batch) for batch in Loader(make(), 4)]
    assert torch.equal(before, torch.get_rng_state())
    assert random.getstate() == state
    torch.rand(1)
    random.random()
    assert [plain(batch) for batch in Loader(make(), 4)] == here
    assert [plain(batch) for batch in Loader(make(), 4, workers=1)] == here


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("fault", [RuntimeError("no such image"), OSError("no such image")])
def test_what_a_column_raises_is_told_as_that(fault: Exception, workers: int) -> None:
    loader = Loader({"image": Lazy(fault), "label": list(range(8))}, 4, shuffle=False, workers=workers)
    with pytest.raises(WorkloadError, match=rf"^The columns of the dataset could not be read: {type(fault).__name__}: no such"):
        list(loader)


class Told(Dataset[torch.Tensor]):
    """Gives the epoch that it was told."""

    def __init__(self) -> None:
        self.epoch = -1

    def __len__(self) -> int:
        return 4

    def set_epoch(self, epoch: int) -> None:
        """Called as each epoch begins."""
        self.epoch = epoch

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((1,), float(self.epoch)), torch.ones(1)


class Seeing(nn.Linear):
    """Keeps what it was given."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.seen = [*vars(self).get("seen", []), *input.flatten().tolist()]
        return super().forward(input)


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_workers_hear_of_the_epoch_too(workers: int, part: bool) -> None:
    model, data = Seeing(1, 1), Told()
    made = Trainer(model, loss=nn.MSELoss(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    made.fit(Loader(Subset(data, range(4)) if part else data, 2, workers=workers), epochs=3)
    assert model.seen == [0.0] * 4 + [1.0] * 4 + [2.0] * 4


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("form", ["examples", "columns"])
def test_what_is_added_between_two_epochs_belongs_to_the_next(form: str, workers: int) -> None:
    held = list(range(6))
    loader = Loader(held if form == "examples" else {"x": held}, 4, workers=workers)

    def epoch() -> list[int]:
        found = [batch if form == "examples" else batch["x"] for batch in loader]
        return sorted(torch.cat(found).tolist())

    assert (len(loader), epoch()) == (2, list(range(6)))
    held += range(6, 11)
    assert (len(loader), epoch()) == (3, list(range(11)))
    del held[3:]
    assert (len(loader), epoch()) == (1, [0, 1, 2])
    loader.close()


def test_lengths_of_what_has_grown_are_asked_for() -> None:
    held = [[1], [2, 3]]
    loader = Loader(held, 2, lengths=len)
    held.append([4])
    with pytest.raises(UsageError, match="The dataset has 3 examples now, and had 2 when their lengths were taken"):
        next(iter(loader))


class Cropped(Dataset[Any]):
    """Sequences of random lengths."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, place: int) -> torch.Tensor:
        return torch.zeros(1 + random.randrange(4) + int(torch.randint(0, 2, ())))


def test_asking_for_lengths_leaves_random_numbers_alone() -> None:
    before, state = torch.get_rng_state(), random.getstate()
    loader = Loader(Cropped(), 2, lengths=len)
    assert torch.equal(before, torch.get_rng_state())
    assert random.getstate() == state
    torch.rand(1)
    random.random()
    assert np.array_equal(Loader(Cropped(), 2, lengths=len).lengths, loader.lengths)  # type: ignore[arg-type]


def test_a_function_of_lengths_that_raises_is_named() -> None:
    with pytest.raises(WorkloadError, match="^lengths raised on example 0: KeyError: 'ids'"):
        Loader(TOKENS, 2, lengths=lambda example: len(example["ids"]))
