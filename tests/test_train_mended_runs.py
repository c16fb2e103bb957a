"""Runs that are gone on with, ended early, or given something odd: each of these once went wrong."""

from __future__ import annotations

import functools
import math
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiplicativeLR, OneCycleLR, ReduceLROnPlateau, SequentialLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trimtab import Trainer
from trimtab.errors import StorageError, UsageError, WorkloadError
from trimtab.train.checkpoint import TENSORS, Checkpoints
from trimtab.train.events import Event, Progressed, Validated
from trimtab.train.loader import Loader
from trimtab.train.schedule import cosine, linear, one_cycle
from trimtab.train.stopping import EarlyStopping


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, and torch's threads as they were afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def dataset() -> TensorDataset:
    """Each example is its number."""
    return TensorDataset(torch.arange(32.0)[:, None], torch.arange(32.0)[:, None])


def loader(**options: Any) -> DataLoader[Any]:
    """Eight batches of four."""
    return DataLoader(dataset(), **{"batch_size": 4, "shuffle": True, **options})


class Line(nn.Module):
    """Remembers the examples that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += x[:, 0].int().tolist()
        found: torch.Tensor = self.layer(x / 32)
        return found


def trainer(model: nn.Module | None = None, **options: Any) -> Trainer:
    """A trainer of a line."""
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"loss": nn.MSELoss(), "optimizer": functools.partial(torch.optim.SGD, lr=0.01), "log_every": 1}
    return Trainer(model or Line(), **{**defaults, **options})


def rates(made: Trainer) -> list[float]:
    """The learning rate of every update of the run to come."""
    found: list[float] = []
    made.callbacks.append(lambda _, event: found.append(event.rate) if isinstance(event, Progressed) else None)
    return found


class Falling:
    """A factor that is an object, not a function."""

    def __call__(self, update: int) -> float:
        return 0.9**update


def sequential(optimizer: torch.optim.Optimizer, updates: int) -> LRScheduler:
    """One after another, with functions inside."""
    parts = [LambdaLR(optimizer, lambda update: (update + 1) / 4), LambdaLR(optimizer, Falling())]
    return SequentialLR(optimizer, parts, milestones=[3])


SCHEDULES: dict[str, Any] = {
    "one_cycle": one_cycle(0.05), "cosine": cosine(), "linear": linear(floor=0.1), "sequential": sequential,
    "object": lambda optimizer, updates: LambdaLR(optimizer, Falling()),
    "multiplicative": lambda optimizer, updates: MultiplicativeLR(optimizer, lambda update: 0.9),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_goes_on_where_it_stood(name: str, tmp_path: pathlib.Path) -> None:
    want = rates(whole := trainer(schedule=SCHEDULES[name]))
    whole.fit(loader(), epochs=2)

    def stop(made: Trainer, event: Event) -> None:
        if event.update == 6:
            made.stop("enough")

    got = rates(cut := trainer(schedule=SCHEDULES[name], checkpoint=tmp_path, callbacks=[stop]))
    cut.fit(batches := loader(), epochs=2)
    rest = rates(resumed := trainer(schedule=SCHEDULES[name], checkpoint=tmp_path).resume())
    resumed.fit(loader(), epochs=2)
    again = rates(cut)  # and so does a second run of the same trainer
    cut.fit(batches, epochs=2)
    assert len(want) == 16
    assert got[:6] + rest == want
    assert got[:6] + again == want


def test_a_cycle_is_as_long_as_the_run_that_goes_on(tmp_path: pathlib.Path) -> None:
    trainer(schedule=one_cycle(0.05), checkpoint=tmp_path).fit(loader(), epochs=1)
    resumed = trainer(schedule=one_cycle(0.05), checkpoint=tmp_path).resume()
    assert resumed.fit(loader(), epochs=2).updates == 8
    assert isinstance(resumed.scheduler, OneCycleLR)
    assert resumed.scheduler.total_steps == 17


def test_a_cycle_that_is_too_short_is_refused_at_once() -> None:
    made = trainer(optimizer=torch.optim.SGD((model := Line()).parameters(), lr=0.1), model=model)
    made.schedule = OneCycleLR(made.optimizer, 0.1, total_steps=10)
    with pytest.raises(
        UsageError, match=r"The OneCycleLR has 10 steps, of which 0 are made, and the run has 16 updates to come"
    ):
        made.fit(loader(), epochs=2)
    assert made.position.update == 0


def test_a_plateau_is_found_in_the_validation(tmp_path: pathlib.Path) -> None:
    def schedule(optimizer: torch.optim.Optimizer, updates: int) -> LRScheduler:
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs")

    made = trainer(schedule=schedule, checkpoint=tmp_path)
    with pytest.raises(UsageError, match="ReduceLROnPlateau goes by the validation, and there is none"):
        made.fit(loader(), epochs=3)
    found = rates(made)
    made.fit(loader(), loader(), epochs=3)
    assert sorted(set(found), reverse=True) == [0.01, 0.005]  # the first validation is the best so far
    rest = rates(resumed := trainer(schedule=schedule, checkpoint=tmp_path).resume())
    resumed.fit(loader(), loader(), epochs=4)
    assert set(rest) == {0.0025}


@pytest.mark.parametrize("again", ["resume", "second fit"])
def test_an_epoch_that_is_gone_on_with_has_every_example_once(again: str, tmp_path: pathlib.Path) -> None:
    for generator in (torch.Generator().manual_seed(7), None):
        folder = tmp_path / str(generator is None)
        first = trainer(checkpoint=folder)
        batches = loader(generator=generator)
        first.fit(batches, steps=3)
        seen = first.model.seen[:]
        torch.manual_seed(99)
        if again == "resume":
            first = trainer(checkpoint=folder).resume()
            batches = loader(generator=None if generator is None else torch.Generator().manual_seed(8))
        else:
            first.model.seen.clear()
        first.fit(batches, epochs=1)
        assert sorted(seen + first.model.seen) == list(range(32))


def test_an_iterator_loses_nothing_between_two_runs() -> None:
    made, batches = trainer(), iter(list(loader()))
    made.fit(batches, steps=3)
    made.fit(batches, epochs=1)
    assert sorted(made.model.seen) == list(range(32))


def damage(place: pathlib.Path) -> None:
    (place / TENSORS).write_bytes(b"")


def test_damaged_checkpoints_do_not_push_out_whole_ones(tmp_path: pathlib.Path) -> None:
    for update in (8, 9):
        damage(Checkpoints(tmp_path).save(update, {"x": torch.ones(1)}))
    checkpoints = Checkpoints(tmp_path, keep=2)
    for update in (5, 6, 7):
        assert checkpoints.save(update, {"x": torch.ones(1)}).exists()
    assert [int(place.name[-2:]) for place in checkpoints._places()] == [9, 8, 7, 6]
    checkpoints.save(10, {"x": torch.ones(1)})
    Checkpoints(tmp_path, keep=1).save(1, {"x": torch.ones(1)})
    assert (tmp_path / "update-00000001").exists()


def test_numbers_that_are_not_finite_come_back(tmp_path: pathlib.Path) -> None:
    Checkpoints(tmp_path).save(1, {"rates": [math.inf, -math.inf, math.nan, 1.0]})
    found = Checkpoints(tmp_path).load()["rates"]
    assert found[:2] == [math.inf, -math.inf]
    assert math.isnan(found[2])


def test_other_groups_of_parameters_are_refused(tmp_path: pathlib.Path) -> None:
    trainer(checkpoint=tmp_path).fit(loader(), steps=1)
    model = Line()
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    made, before = trainer(model, optimizer=torch.optim.SGD(groups, lr=0.1), checkpoint=tmp_path), model.layer.weight.clone()
    with pytest.raises(
        UsageError, match=r"was made with optimizer groups of 2 parameters, not of 1 and 1\. Give the optimizer"
    ):
        made.resume()
    assert torch.equal(before, model.layer.weight)


def test_a_trainer_that_has_shown_its_average_resumes_without_it(tmp_path: pathlib.Path) -> None:
    made = trainer(ema=0.9, checkpoint=tmp_path)
    made.fit(loader(), steps=8)
    made.resume().fit(loader(), steps=16)
    other = trainer(ema=0.9, checkpoint=tmp_path / "other")
    other.fit(loader(), steps=8)
    fresh = trainer(ema=0.9, checkpoint=tmp_path / "other").resume()
    fresh.fit(loader(), steps=16)
    assert torch.equal(made.model.layer.weight, fresh.model.layer.weight)


def test_steps_that_end_with_an_epoch_complete_it() -> None:
    events: list[Event] = []
    made = trainer(callbacks=[lambda _, event: events.append(event)])
    summary = made.fit(loader(), loader(), steps=8)
    assert summary.epochs == 1
    assert summary.updates == 8
    assert sum(isinstance(event, Validated) for event in events) == 1
    short = trainer().fit(loader(), loader(), steps=7)
    assert "No epoch came to its end, so nothing was validated; give more steps, or epochs." in short.notes


def test_a_run_that_early_stopping_had_ended_stays_ended(tmp_path: pathlib.Path) -> None:
    options: dict[str, Any] = {"early_stopping": EarlyStopping(patience=2, min_delta=1e9), "checkpoint": tmp_path}
    assert trainer(**options).fit(loader(), loader(), epochs=9).epochs == 3
    summary = trainer(**options).resume().fit(loader(), loader(), epochs=9)
    assert summary.updates == 0
    assert summary.ended == "The validation's loss did not improve 2 times in a row."


class Ended(Dataset[Any]):
    """A worker gets the signal that its parent got too, which is sent while the parent waits for data."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, place: int) -> torch.Tensor:
        if place == 12 and torch.utils.data.get_worker_info() is not None:
            time.sleep(0.3)
            os.kill(os.getppid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(1)


@pytest.mark.own_process
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Ended(), batch_size=4, num_workers=1, timeout=1),
        lambda: Loader(Ended(), batch=4, workers=1, shuffle=False),
    ],
    ids=["torch", "trimtab"],
)
def test_a_signal_that_ends_the_workers_too_ends_the_run_with_a_checkpoint(
    make: Callable[[], Any], tmp_path: pathlib.Path
) -> None:
    made = trainer(loss=lambda model, batch: model(batch).square().mean(), checkpoint=tmp_path)
    summary = made.fit(make(), epochs=2)
    assert summary.ended == "It was interrupted by SIGTERM."
    assert Checkpoints(tmp_path).load()["position"]["update"] == summary.updates > 0


@pytest.mark.skipif(not pathlib.Path("/proc/self").exists(), reason="needs a folder that nobody can write to")
def test_a_folder_that_cannot_be_written_is_refused_before_the_run() -> None:
    made = trainer(checkpoint="/proc/nope")
    with pytest.raises(
        StorageError, match=r"Checkpoints cannot be written to /proc/nope: .*\. Give another checkpoint folder\."
    ):
        made.fit(loader(), epochs=1)
    assert made.position.update == 0


@pytest.mark.parametrize("name", ["checkpoint_every", "log_every"])
def test_a_number_of_updates_below_one_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is 0; it is a number of updates: a whole number of at least 1"):
        trainer(**{name: 0})


def failing(*_: Any) -> Any:
    raise KeyError("mine")


class Evaluated(Line):
    """Fails in evaluation only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.training else failing()


def broken() -> Iterator[Any]:
    yield from loader()
    failing()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: trainer().fit(loader(), broken(), epochs=1), "The validation loader raised: KeyError: 'mine'"),
        (
            lambda: trainer(Evaluated()).fit(loader(), loader(), epochs=1),
            "In validation the model or its loss raised: KeyError",
        ),
        (
            lambda: trainer(metrics={"mine": failing}).fit(loader(), loader(), epochs=1),
            "The metric 'mine' raised: KeyError",
        ),
    ],
)
def test_what_fails_in_validation_is_said(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(WorkloadError, match=sentence):
        call()


def test_frozen_modules_stay_frozen_and_a_model_in_evaluation_mode_is_trained() -> None:
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].eval()
    made = trainer(model, optimizer=functools.partial(torch.optim.SGD, lr=1e-6))
    for epochs in (2, 3):
        made.fit(loader(), loader(), epochs=epochs)
        assert model[1].num_batches_tracked == 0
    other = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).eval()
    trainer(other).fit(loader(), epochs=1)
    assert other[1].num_batches_tracked == 8
