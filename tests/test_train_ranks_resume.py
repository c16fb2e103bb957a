"""Several processes that go on where others were: more or fewer of them, cut off in a validation, with few batches for it."""

from __future__ import annotations

import functools
import os
import pathlib
import signal
import types
from typing import Any

import pytest
import torch
from torch import nn

from _ranks import on_ranks
from trimtab.candidate import Settings
from trimtab.errors import TrimtabError
from trimtab.train import epoch
from trimtab.train.trainer import Trainer

COUNT = 8
Batches = list[tuple[torch.Tensor, torch.Tensor]]


class Line(nn.Module):
    """Remembers the batches that it was trained on, each of which is its number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.append(int(x[0, 0]))
        found: torch.Tensor = self.layer(x / COUNT)
        return found


def batches(count: int = COUNT) -> Batches:
    """The later ones are larger."""
    return [(torch.full((1 + index, 1), float(index)), torch.ones(1 + index, 1)) for index in range(count)]


def trainer(checkpoint: pathlib.Path | None = None, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        Line(),
        loss=nn.MSELoss(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        settings=Settings(**settings),
        checkpoint=checkpoint,
        metrics={"low": lambda outputs, targets: outputs < targets},
    )


def gone_on(checkpoint: pathlib.Path) -> dict[str, Any]:
    """What is left of the epoch."""
    made = trainer(checkpoint).resume()
    made.fit(batches(), batches(), epochs=1)
    return {"seen": made.model.seen, "notes": made.notes}


def validated(held_out: Batches, learn: int = 2, **settings: Any) -> dict[str, float]:
    """What the validation found, and what should have been found."""
    made = trainer(**settings)
    updates = made.fit(batches(learn), held_out, epochs=1).updates
    inputs, targets = (torch.cat(parts) for parts in zip(*held_out, strict=True))
    with torch.no_grad():
        outputs = made.model(inputs)
    return {
        **{name: made.results[name] for name in ("loss", "low")},
        "updates": updates,
        "expected": float(nn.functional.mse_loss(outputs, targets)),
        "expected low": float((outputs < targets).double().mean()),
    }


def refused() -> str:
    try:
        trainer(sharding="shard").fit(batches(2), batches(1), epochs=1)
    except TrimtabError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def cut_off(folder: pathlib.Path, **settings: Any) -> dict[str, Any]:
    """A run whose second process gets a SIGTERM in its validation, the run that goes on, and one without all that."""
    made, validated = trainer(folder, **settings), list[int]()

    def end(*_: Any) -> None:
        if not made.model.training:
            validated.append(1)
            if made.world.rank == 1 and len(validated) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    made.model.register_forward_pre_hook(end)
    ended = made.fit(batches(4), batches(), epochs=1).ended
    due, whole, again = made.position.due, trainer(**settings), trainer(folder, **settings).resume()
    whole.fit(batches(4), batches(), epochs=1)
    updates = again.fit(batches(4), batches(), epochs=1).updates
    return {
        **{"ended": ended, "due": due, "validated": len(validated), "updates": updates},
        **{"again": again.results, "whole": whole.results},
    }


def all_checks(folder: pathlib.Path) -> dict[str, Any]:
    found = {
        "from one": gone_on(folder / "even"),
        "from one, odd": gone_on(folder / "odd"),
        "one batch": validated(batches(1)),
        "three batches": validated(batches(3)),
        "shards": validated(batches(3), 3, sharding="shard"),
        "refused": refused(),
        "cut off": {sharding: cut_off(folder / sharding, sharding=sharding) for sharding in ("replicate", "shard")},
    }
    made = trainer(folder / "two")
    made.fit(batches(), batches(), steps=2)
    return {**found, "seen": made.model.seen}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("worlds")
    for name, steps in (("even", 4), ("odd", 3)):
        trainer(folder / name).fit(batches(), batches(), steps=steps)
    return {"ranks": on_ranks(all_checks, folder), "alone": gone_on(folder / "two")}


def test_two_processes_go_on_with_the_batches_that_one_has_left(found: dict[str, Any]) -> None:
    first, second = (rank["from one"] for rank in found["ranks"])
    assert first["seen"] + second["seen"] == [4, 6, 5, 7]
    assert "Processes: 1 before, 2 now. The epoch goes on after batch 2 of each." in first["notes"][0]


def test_what_does_not_share_out_comes_again_and_is_told(found: dict[str, Any]) -> None:
    first, second = (rank["from one, odd"] for rank in found["ranks"])
    assert first["seen"] + second["seen"] == [2, 4, 6, 3, 5, 7]
    assert "1 of the 3 batches that it had used come again" in first["notes"][0]


def test_one_process_goes_on_with_the_batches_that_two_have_left(found: dict[str, Any]) -> None:
    assert [rank["seen"] for rank in found["ranks"]] == [[0, 2], [1, 3]]
    assert found["alone"]["seen"] == [4, 5, 6, 7]
    assert "Processes: 2 before, 1 now. The epoch goes on after batch 4 of each." in found["alone"]["notes"][0]


@pytest.mark.parametrize("name", ["one batch", "three batches", "shards"])
def test_a_validation_may_have_fewer_batches_than_there_are_processes(found: dict[str, Any], name: str) -> None:
    first, second = (rank[name] for rank in found["ranks"])
    assert first == pytest.approx(second)
    assert first["loss"] == pytest.approx(first["expected"])
    assert first["low"] == pytest.approx(first["expected low"])


def test_shards_learn_from_all_batches_of_an_uneven_split(found: dict[str, Any]) -> None:
    assert [rank["shards"]["updates"] for rank in found["ranks"]] == [2, 2]


def test_a_sharded_model_needs_a_batch_in_each_process(found: dict[str, Any]) -> None:
    for rank in found["ranks"]:
        assert rank["refused"] == (
            "UsageError: validate has no batch for the process of rank 1, and all processes must call a sharded model "
            "together. Give it at least 2 batches, smaller ones for instance."
        )


@pytest.mark.parametrize("sharding", ["replicate", "shard"])
def test_a_signal_to_one_process_cuts_off_the_validation_of_all(found: dict[str, Any], sharding: str) -> None:
    ranks = [rank["cut off"][sharding] for rank in found["ranks"]]
    first, second = (rank["validated"] for rank in ranks)
    assert second < COUNT / 2, "not all of its batches, however late the handler of the signal runs"
    assert sharding == "replicate" or first == second, "where all have to call the model together"
    assert [rank["ended"] for rank in ranks] == ["Another process was asked to stop.", "It was interrupted by SIGTERM."]
    for rank in ranks:
        assert (rank["due"], rank["updates"]) == (True, 0)
        assert rank["again"] == pytest.approx(rank["whole"])


def test_of_all_processes_each_goes_on_with_its_own_random_numbers() -> None:
    made: Any = types.SimpleNamespace(world=types.SimpleNamespace(rank=1, size=2, index=2, processes=4))
    assert epoch._own(made, ["a", "b", "c", "d"]) == "c"
    assert epoch._own(made, ["a", "b"]) == "b"  # of another number of processes, those with the same data have the same
