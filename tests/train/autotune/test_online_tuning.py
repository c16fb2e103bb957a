"""Adjusting a run while it goes on: what is seen, tried, kept and undone."""

import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from trimtab import Settings, Trainer
from trimtab.train.autotune.online_tuning import (
    WINDOWS,
    Adjuster,
    Window,
    micro_batch_change,
    workers_change,
    workers_of,
)
from trimtab.train.data.device_prefetch import mover
from trimtab.train.data.loader import Loader
from trimtab.train.data.micro_batches import MicroBatcher
from trimtab.train.run_context import Position
from trimtab.train.runtime.step_clock import HostClock
from trimtab.train.telemetry.events import Adjusted, Event, Progressed

CPU = mover(torch.device("cpu"))
ADJUSTED = Settings(threads=1, adjust=True)


class Slowing(Dataset[tuple[torch.Tensor, int]]):
    """Rows that take no time at first, and a while after ``quick`` of them, in whatever process they are made."""

    def __init__(self, quick: int, *, size: int = 160, draws: bool = False) -> None:
        self.quick, self.size, self.draws, self.given = quick, size, draws, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.given += 1
        if self.given > self.quick or get_worker_info() is not None:
            time.sleep(0.005)
        noise = torch.randn(8) if self.draws else torch.zeros(8)
        return noise + index / self.size, index % 3


def run(data: Any, epochs: int, settings: Settings = ADJUSTED) -> tuple[list[Event], Trainer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    events: list[Event] = []
    trainer = Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        settings=settings,
        log_every=4,
        callbacks=[lambda _, event: events.append(event)],
    )
    trainer.fit(data, epochs=epochs)
    return events, trainer


def adjusted(events: Iterable[Event]) -> list[Adjusted]:
    return [event for event in events if isinstance(event, Adjusted)]


def against_workers(loader: Any) -> str | None:
    return workers_change(MicroBatcher(loader, 1, HostClock(), CPU), Position(), 2).why_not()


def test_what_has_no_workers_says_so() -> None:
    assert against_workers(Loader(Slowing(0), 4, workers=1)) is None
    assert against_workers(Loader(Slowing(0), 4)) == (
        "the loader reads in this process. Give it workers=1 if its dataset can be read in other processes."
    )
    assert (workers_of(Loader(Slowing(0), 4)), workers_of(DataLoader(Slowing(0), 4)), workers_of([])) == (0, 0, None)
    told = ". Use trimtab.train.Loader, whose workers can be changed during a run."
    assert against_workers([(torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64))] * 3) == f"the loader is a list{told}"
    assert against_workers(DataLoader(Slowing(0), 4)) == f"the loader is a DataLoader{told}"


@pytest.mark.parametrize("draws", [False, True])
def test_a_loader_that_becomes_slow_gets_workers_and_the_run_stays_the_same(draws: bool) -> None:
    events, trainer = run(Loader(Slowing(120, size=480, draws=draws), 4, seed=1, workers=1), 1)
    found = [event for event in adjusted(events) if event.what.startswith("loader workers 1 -> ")]
    assert len(found) >= 1, trainer.notes
    for event in found:  # which of them are kept is for the machine to say
        outcome = f"{'kept' if event.kept else 'undone'} at update {event.update}."
        assert any(note.startswith(f"{event.what}: ") and note.endswith(outcome) for note in trainer.notes)
        assert event.unit == "ms per update"
        assert event.after < event.before or not event.kept
    _, plain = run(Loader(Slowing(10_000, size=480, draws=draws), 4, seed=1), 1, Settings(threads=1))
    for a, b in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # micro-batches, if tried, add up in another order


def test_workers_are_changed_in_the_middle_of_an_epoch() -> None:
    loader = Loader(list(range(6)), 1, seed=1, workers=1)
    feed = MicroBatcher(loader, 1, HostClock(), CPU)
    want = [int(batch) for batch in loader]
    feed.begin(0)
    groups = feed.groups()
    seen = [next(groups) for _ in range(2)]
    change = workers_change(feed, Position(), 2)
    assert change.why_not() is None
    change.apply()
    assert loader.workers == 2
    seen += list(groups)
    assert [int(batch) for (batch,) in seen] == want
    change.undo()
    assert loader.workers == 1


def test_micro_batches_leave_batchnorm_alone() -> None:
    feed = MicroBatcher([], 1, HostClock(), CPU)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert micro_batch_change(feed, model, 2).why_not() == "BatchNorm would see other batches."
    change = micro_batch_change(feed, nn.Linear(2, 2), 2)
    assert change.why_not() is None
    change.apply()
    assert feed.micro == 2
    change.undo()
    assert feed.micro is None


class Switch:
    """A change that makes updates ``factor`` times as long."""

    def __init__(self, machine: "Machine", factor: float, reason: str | None = None) -> None:
        self.machine, self.factor, self.reason = machine, factor, reason
        self.what = f"switch to {factor:g}"

    def why_not(self) -> str | None:
        return self.reason

    def apply(self) -> None:
        self.machine.factor = self.factor

    def undo(self) -> None:
        self.machine.factor = 1.0


class Machine:
    """Windows as they would be measured on a machine whose updates take 10 ms, a tenth of it for data."""

    def __init__(self) -> None:
        self.factor, self.extra = 1.0, {"data": 0.0, "forward": 0.0}
        self.events: list[Adjusted] = []
        _, self.trainer = run([(torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64))], 1, Settings(threads=1))
        self.trainer.context.callbacks = [lambda _, event: self.events.extend(adjusted([event]))]
        self.trainer.context.notes = []

    def windows(self, adjuster: Adjuster, count: int) -> None:
        for _ in range(count):
            spent = {"data": 1.0 + self.extra["data"], "forward": 4.0 + self.extra["forward"], "backward": 5.0}
            spent = {phase: ms * self.factor for phase, ms in spent.items()}
            step, self.trainer.position.update = sum(spent.values()), self.trainer.position.update + 4
            shares = {phase: ms / step for phase, ms in spent.items()}
            self.trainer.context.watchers = [adjuster]
            self.trainer.context.emit(
                Progressed(
                    update=self.trainer.position.update,
                    epoch=0,
                    updates=None,
                    loss=1.0,
                    norm=1.0,
                    rate=0.1,
                    examples_per_s=400.0,
                    step_ms=step,
                    skipped=0,
                    shares=shares,
                )
            )


def adjuster(machine: Machine, **changes: list[Switch]) -> Adjuster:
    def giving(name: str) -> Any:
        def give(now: Window) -> list[Switch]:
            return changes.get(name, [])

        return give

    return Adjuster({name: giving(name) for name in ("data", "compute")})


def test_nothing_is_done_while_nothing_changes() -> None:
    machine = Machine()
    watching = adjuster(machine, data=[Switch(machine, 0.5)], compute=[Switch(machine, 0.5)])
    machine.windows(watching, 20)
    assert machine.events == []
    assert watching.reference == Window(step=10.0, data=1.0, compute=9.0, examples=4.0)


@pytest.mark.parametrize("phase", ["data", "forward"])
def test_what_helps_is_kept_and_what_does_not_is_undone(phase: str) -> None:
    machine = Machine()
    changes = [Switch(machine, 1.2), Switch(machine, 0.1, "it is not allowed."), Switch(machine, 0.5), Switch(machine, 0.4)]
    kind = "data" if phase == "data" else "compute"
    watching = adjuster(machine, **{kind: changes})
    machine.windows(watching, 1 + WINDOWS)
    machine.extra[phase] = 10.0
    machine.windows(watching, WINDOWS + 2 * (WINDOWS + 1))
    assert [(event.what, event.kept) for event in machine.events] == [("switch to 1.2", False), ("switch to 0.5", True)]
    assert machine.events[1].before == pytest.approx(20.0)
    assert machine.events[1].after == pytest.approx(10.0)
    assert machine.factor == 0.5
    assert "switch to 0.1 was not tried: it is not allowed." in machine.trainer.notes
    machine.windows(watching, 20)
    assert len(machine.events) == 2  # what is usual now is not tried to be mended for ever


@pytest.mark.parametrize(("target", "kept"), [(9.0, [True]), (2.0, [True, False])])
def test_a_target_is_aimed_at_although_nothing_has_slowed_down(target: float, kept: list[bool]) -> None:
    machine = Machine()
    watching = adjuster(machine, compute=[Switch(machine, 0.8)], data=[Switch(machine, 1.2)])
    watching.target_ms = target
    machine.windows(watching, 40)
    assert [event.kept for event in machine.events][: len(kept)] == kept
    missed = [text for text in machine.trainer.notes if "Precision, compilation and layout are never changed" in text]
    assert len(missed) == (target == 2.0)
    assert len(machine.events) < 5


def test_what_helps_a_little_against_what_stays_slow_is_kept() -> None:
    machine = Machine()
    watching = adjuster(machine, compute=[Switch(machine, 0.8)])
    machine.windows(watching, 1 + WINDOWS)
    machine.extra["forward"] = 20.0
    machine.windows(watching, 2 * WINDOWS + 1)
    assert [event.kept for event in machine.events] == [True]
    assert machine.factor == 0.8


def test_a_shift_of_a_moment_is_no_shift() -> None:
    machine = Machine()
    watching = adjuster(machine, compute=[Switch(machine, 0.5)])
    machine.windows(watching, 1 + WINDOWS)
    for _ in range(4):
        machine.extra["forward"] = 10.0
        machine.windows(watching, WINDOWS - 1)
        machine.extra["forward"] = 0.0
        machine.windows(watching, 1)
    assert machine.events == []


def test_an_attempt_at_smaller_batches_ends_no_run() -> None:
    graphs = [(torch.randn(6, 3), torch.zeros(2, 9), torch.zeros(4))] * 2
    feed = MicroBatcher(graphs, 1, HostClock(), lambda batch: batch)
    change = micro_batch_change(feed, nn.Linear(3, 1), 3)
    change.apply()
    feed.begin(0)
    assert [len(group) for group in feed.groups()] == [1, 1]
    assert feed.micro is None
    change.undo()
    assert feed.fallback is None
