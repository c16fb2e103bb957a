"""Runs that are gone on with: workers that stay, runs that ended at once, schedules of another length or kind."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset

from trimtab import Settings, Trainer
from trimtab.errors import UsageError
from trimtab.train.checkpoint import Checkpoints
from trimtab.train.events import Event, Remarked
from trimtab.train.schedule import cosine, one_cycle

EPOCH = 8
"""Updates."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, and torch's threads as they were afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Line(nn.Module):
    """Remembers the examples that it was trained on, each of which is its number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += x[:, 0].int().tolist()
        found: torch.Tensor = self.layer(x / 32)
        return found


def loader(*, staying: bool = False) -> DataLoader[Any]:
    """Eight batches of four, in a random order; read by a worker that stays, or here."""
    data = TensorDataset(torch.arange(32.0)[:, None], torch.arange(32.0)[:, None])
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True} if staying else {}
    return DataLoader(data, batch_size=4, shuffle=True, **options)


def trainer(**options: Any) -> Trainer:
    """A trainer of a line."""
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"loss": nn.MSELoss(), "optimizer": functools.partial(torch.optim.SGD, lr=0.01)}
    return Trainer(Line(), **{**defaults, **options})


@pytest.mark.parametrize("steps", [3, EPOCH, EPOCH + 3])
def test_workers_that_stay_give_the_order_that_they_would_have_given(steps: int, tmp_path: pathlib.Path) -> None:
    whole = trainer()
    whole.fit(loader(staying=True), epochs=2)
    cut = trainer(checkpoint=tmp_path)
    cut.fit(loader(staying=True), steps=steps)
    resumed = trainer(checkpoint=tmp_path).resume()
    resumed.fit(loader(staying=True), epochs=2)
    assert cut.model.seen + resumed.model.seen == whole.model.seen


@pytest.mark.parametrize("steps", [3, EPOCH + 3])
def test_a_second_run_over_workers_that_stay_has_every_example_once(steps: int) -> None:
    made, batches = trainer(), loader(staying=True)
    made.fit(batches, steps=steps)
    made.fit(batches, epochs=1 + steps // EPOCH)
    assert sorted(made.model.seen[-32:]) == list(range(32))
    whole = trainer()
    whole.fit(loader(staying=True), epochs=1 + steps // EPOCH)
    assert made.model.seen == whole.model.seen


def test_workers_of_the_validation_that_stay_leave_the_training_as_it_was(tmp_path: pathlib.Path) -> None:
    whole = trainer()
    whole.fit(loader(), loader(staying=True), epochs=3)
    cut = trainer(checkpoint=tmp_path)
    cut.fit(loader(), loader(staying=True), epochs=1)
    resumed = trainer(checkpoint=tmp_path).resume()
    resumed.fit(loader(), loader(staying=True), epochs=3)
    assert cut.model.seen + resumed.model.seen == whole.model.seen


class Ending(list[Any]):
    """Batches whose run is asked to end before it has begun."""

    made: Trainer

    def __len__(self) -> int:
        self.made.stop("SIGTERM")
        return super().__len__()


def test_a_run_that_ended_before_anything_was_done_leaves_nothing(tmp_path: pathlib.Path) -> None:
    batches = Ending(loader())
    batches.made = trainer(checkpoint=tmp_path)
    assert batches.made.fit(batches, epochs=1).updates == 0
    assert Checkpoints(tmp_path).update() is None
    assert trainer(checkpoint=tmp_path).fit(loader(), epochs=1).updates == EPOCH


def test_a_run_that_ended_before_its_first_update_can_be_started_again(tmp_path: pathlib.Path) -> None:
    def stop(made: Trainer, event: Event) -> None:
        if isinstance(event, Remarked):
            made.stop("SIGTERM")

    options: dict[str, Any] = {"settings": Settings(optimizer="auto"), "checkpoint": tmp_path}
    first = trainer(callbacks=[stop], **options)
    assert first.fit(loader(), epochs=1).updates == 0
    assert Checkpoints(tmp_path).update() == (0 if first.decided else None)
    again = trainer(**options).resume(missing_ok=True)
    assert again.fit(loader(), epochs=1).updates == EPOCH


def test_a_checkpoint_of_no_update_is_one(tmp_path: pathlib.Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.update() is None
    checkpoints.save(0, {"x": torch.ones(1)})
    assert checkpoints.update() == 0


def warmed_up(optimizer: Optimizer, updates: int) -> LRScheduler:
    """A quarter up, then along a cosine."""
    rise = updates // 4
    parts = [LinearLR(optimizer, 0.1, total_iters=rise), CosineAnnealingLR(optimizer, T_max=updates - rise)]
    return SequentialLR(optimizer, parts, milestones=[rise])


SHAPES: dict[str, Callable[[Optimizer, int], LRScheduler]] = {
    "one_cycle": one_cycle(0.05),
    "cosine": cosine(),
    "annealing": lambda optimizer, updates: CosineAnnealingLR(optimizer, T_max=updates, eta_min=1e-4),
    "linear": lambda optimizer, updates: LinearLR(optimizer, 1.0, 0.1, total_iters=updates),
    "polynomial": lambda optimizer, updates: PolynomialLR(optimizer, total_iters=updates),
    "step": lambda optimizer, updates: StepLR(optimizer, step_size=updates // 4),
    "steps": lambda optimizer, updates: MultiStepLR(optimizer, [updates // 2, 3 * updates // 4]),
    "sequential": warmed_up,
}


def rates(made: Trainer) -> list[float]:
    """The rate of every update to come, as the optimizer has it."""
    found: list[float] = []
    made.optimizer.register_step_pre_hook(lambda optimizer, *_: found.append(optimizer.param_groups[0]["lr"]))
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_a_run_that_is_made_longer_has_the_rates_of_the_longer_one(name: str, tmp_path: pathlib.Path) -> None:
    want = rates(whole := trainer(schedule=SHAPES[name]))
    whole.fit(loader(), epochs=2)
    first = rates(short := trainer(schedule=SHAPES[name], checkpoint=tmp_path))
    short.fit(loader(), epochs=1)
    assert len(first) == EPOCH
    rest = rates(resumed := trainer(schedule=SHAPES[name], checkpoint=tmp_path).resume())
    resumed.fit(loader(), epochs=2)
    short.fit(loader(), epochs=2)
    assert rest == pytest.approx(want[EPOCH:], rel=1e-6)
    assert first[EPOCH:] == pytest.approx(want[EPOCH:], rel=1e-6)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (one_cycle(0.05), cosine(), "The run began with OneCycleLR, and this is LambdaLR"),
        (cosine(), one_cycle(0.05), "The run began with LambdaLR, and this is OneCycleLR"),
        (None, one_cycle(0.05), "The run began with no schedule, and this is OneCycleLR"),
        (cosine(), None, "The run began with LambdaLR, and this is no schedule"),
        (SHAPES["sequential"], lambda optimizer, updates: SequentialLR(
            optimizer, [ConstantLR(optimizer), CosineAnnealingLR(optimizer, 4)], [4]
        ), "The run began with LinearLR, and this is ConstantLR"),
    ],
)  # fmt: skip
def test_another_kind_of_schedule_is_refused(before: Any, after: Any, said: str, tmp_path: pathlib.Path) -> None:
    trainer(schedule=before, checkpoint=tmp_path).fit(loader(), epochs=1)
    resumed = trainer(schedule=after, checkpoint=tmp_path).resume()
    with pytest.raises(UsageError, match=rf"{said}\. Give the schedule that it began with\."):
        resumed.fit(loader(), epochs=2)
    assert resumed.position.update == EPOCH


def test_schedulers_that_are_multiplied_keep_their_lengths(tmp_path: pathlib.Path) -> None:
    def chained(optimizer: Optimizer, updates: int, length: int | None = None) -> LRScheduler:
        return ChainedScheduler([ConstantLR(optimizer, 0.5, total_iters=3), CosineAnnealingLR(optimizer, length or updates)])

    trainer(schedule=chained, checkpoint=tmp_path).fit(loader(), epochs=1)
    resumed = trainer(schedule=chained, checkpoint=tmp_path).resume()
    with pytest.raises(UsageError, match=r"The CosineAnnealingLR in a ChainedScheduler lasts {'T_max': 16} now, unlike in the"):
        resumed.fit(loader(), epochs=2)
    resumed.schedule = functools.partial(chained, length=EPOCH)
    assert resumed.fit(loader(), epochs=2).updates == EPOCH


def test_a_cycle_that_is_over_is_not_asked_for_more(tmp_path: pathlib.Path) -> None:
    trainer(schedule=one_cycle(0.05), checkpoint=tmp_path).fit(loader(), epochs=2)
    assert trainer(schedule=one_cycle(0.05), checkpoint=tmp_path).resume().fit(loader(), epochs=1).updates == 0
