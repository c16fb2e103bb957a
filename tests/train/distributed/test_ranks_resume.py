"""Several processes that go on where others were: more or fewer of them, cut off in a validation, with few batches for it."""

from __future__ import annotations

import datetime as dt
import functools
import multiprocessing
import os
import pathlib
import signal
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from _ranks import on_ranks
from _runs import settings_of
from trimtab.errors import TrimtabError
from trimtab.train.data.loader import Loader
from trimtab.train.engine import epoch
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


def trainer(
    checkpoint: pathlib.Path | None = None, model: nn.Module | None = None, loss: Any = None, **settings: Any
) -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        model or Line(),
        loss=loss or nn.MSELoss(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        settings=settings_of(**settings),
        checkpoint=checkpoint,
        metrics={"low": lambda outputs, targets: outputs < targets} if model is None else None,
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


def unequal(folder: pathlib.Path) -> dict[str, list[int]]:
    """Shares of unequal length, cut off where one is used up: of a list, and of what each process has for itself."""
    own = Own([0, 1, 2] if dist.get_rank() == 0 else [3, 4, 5, 6, 7])
    found = {}
    for name, data, steps in (("list", batches(5), 2), ("own", own, 4)):
        first = trainer(folder / name, Line())
        first.fit(data, steps=steps)
        second = trainer(folder / name, Line()).resume()
        second.fit(data, epochs=1)
        found[name] = [first.model.seen, second.model.seen]
    return found


class Own(list[Any]):
    """Batches of this process."""

    sharded = True

    def __init__(self, places: list[int]) -> None:
        super().__init__(batches()[place] for place in places)


class Draws(nn.Module):
    """Draws a number in each forward pass, as dropout does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.drawn: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.drawn.append(float(torch.rand(())))
        found: torch.Tensor = self.layer(x)
        return found


def drawn(checkpoint: pathlib.Path | None, *steps: int) -> list[float]:
    made = trainer(checkpoint, Draws())
    if checkpoint is not None:
        made.resume(missing_ok=True)
    for count in steps:
        made.fit(batches(), steps=count)
    found: list[float] = made.model.drawn
    return found


def by_length(checkpoint: pathlib.Path, steps: int | None) -> list[int]:
    """The examples of an epoch of batches of similar length; of what is left of it without ``steps``."""
    random, seen, last = torch.Generator().manual_seed(0), list[int](), list[int]()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        last[:] = batch["place"].tolist()
        found: torch.Tensor = model(batch["x"]).square().mean()
        return found

    data = {"x": torch.randn(67, 1, generator=random), "place": torch.arange(67)}
    loader = Loader(data, batch=4, lengths=torch.randint(1, 200, (67,), generator=random))
    made = trainer(checkpoint, nn.Linear(1, 1), loss)
    made.optimizer.register_step_post_hook(lambda *_: seen.extend(last))  # what is looked at beside the run makes no update
    made.resume(missing_ok=True).fit(loader, **({"epochs": 1} if steps is None else {"steps": steps}))
    return seen


class Places(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Examples that are their numbers."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((1,), float(place)), torch.ones(1)


def without_workers(folder: pathlib.Path, ranks: tuple[int, ...]) -> list[list[int]]:
    """An epoch cut off by a signal to the loader's workers too, as torchrun sends it, in some processes; and what was left."""
    data = DataLoader(Places(), batch_size=1, num_workers=1, sampler=DistributedSampler(Places(), shuffle=False))
    made = trainer(folder, Line())

    def end(model: Any, *_: Any) -> None:
        if len(model.seen) == 3 and dist.get_rank() in ranks:
            for number in (os.getpid(), *(child.pid for child in multiprocessing.active_children() if child.pid)):
                os.kill(number, signal.SIGTERM)

    made.model.register_forward_hook(end)
    made.fit(data, epochs=1)
    again = trainer(folder, Line()).resume()
    again.fit(data, epochs=1)
    return [made.model.seen, again.model.seen]


def all_checks(folder: pathlib.Path) -> dict[str, Any]:
    dist.init_process_group("gloo", timeout=dt.timedelta(minutes=7))
    patience = trainer().world.gloo._get_backend(torch.device("cpu")).options._timeout  # type: ignore[attr-defined]
    found = {
        "patience": patience.total_seconds(),
        "unequal": unequal(folder),
        "drawn": drawn(None, 3, 6),
        "drawn on": drawn(folder / "drawn", COUNT),
        "by length": by_length(folder / "by length", 3),
        "no workers": {len(ended): without_workers(folder / f"ended{len(ended)}", ended) for ended in ((1,), (0, 1))},
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
    drawn(folder / "drawn", 4)
    ranks = on_ranks(all_checks, folder)
    return {"ranks": ranks, "alone": gone_on(folder / "two"), "by length": by_length(folder / "by length", None)}


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
    assert epoch._state_of_process(made, ["a", "b", "c", "d"]) == "c"
    assert epoch._state_of_process(made, ["a", "b"]) == "b"  # with another number of processes, by rank of data


def test_what_others_have_left_of_an_epoch_is_trained_on_where_one_share_is_used_up(found: dict[str, Any]) -> None:
    first, second = (rank["unequal"] for rank in found["ranks"])
    assert (first["list"], second["list"]) == ([[0, 2], [4]], [[1, 3], [1]])  # the last again, for nothing
    assert (first["own"], second["own"]) == ([[0, 1, 2, 2], [0]], [[3, 4, 5, 6], [7]])


def test_a_second_run_does_not_draw_the_numbers_of_the_first_again(found: dict[str, Any]) -> None:
    for rank in found["ranks"]:
        assert len(set(rank["drawn"])) == 6


def test_processes_that_go_on_from_fewer_draw_numbers_of_their_own(found: dict[str, Any]) -> None:
    first, second = (rank["drawn on"] for rank in found["ranks"])
    assert len(set(first + second)) == len(first + second) > 4


def test_batches_by_length_come_once_whatever_the_number_of_processes(found: dict[str, Any]) -> None:
    seen = sum((rank["by length"] for rank in found["ranks"]), found["by length"])
    assert sorted(seen) == list(range(67))


@pytest.mark.parametrize("ended", ["1", "2"])
def test_a_signal_that_ends_the_workers_too_costs_nothing(found: dict[str, Any], ended: str) -> None:
    for place, rank in enumerate(found["ranks"]):
        before, after = rank["no workers"][ended]
        assert 3 <= len(before) < 12
        assert sorted({*before, *after}) == list(range(place, 24, 2))


def test_decisions_are_waited_for_as_long_as_the_script_has_said(found: dict[str, Any]) -> None:
    assert [rank["patience"] for rank in found["ranks"]] == [420.0, 420.0]
