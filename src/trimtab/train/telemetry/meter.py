"""Measure the loss and speed of a run, and report them every ``log_every`` updates."""

from __future__ import annotations

import array
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from trimtab.train.distributed.consistency import emit_together
from trimtab.train.engine.step import Update
from trimtab.train.loss.adapter import Batch, examples
from trimtab.train.optim.optimizer_dict import OptimizerDict
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.step_clock import PHASES, Clock
from trimtab.train.telemetry.distribution import memory, of_updates
from trimtab.train.telemetry.events import Progressed
from trimtab.train.telemetry.log import means
from trimtab.train.telemetry.mfu import flops_share
from trimtab.train.telemetry.stragglers import Pace, slow_process
from trimtab.train.telemetry.summary import Summary


class Meter:
    """The measurements of one run. Losses stay on their device until the next report."""

    def __init__(self, context: RunContext, clock: Clock, updates: int | None) -> None:
        self.context, self.clock, self.updates = context, clock, updates
        self._began = self._since = time.perf_counter()
        self._first = context.position.update
        self._unread: list[Update] = []
        self._examples = self._all_examples = 0
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._last_end: float | None = None
        """When the last update ended, in s; pauses since then are added."""
        self._times = array.array("d")
        """Seconds of the updates since the last report."""
        self._all_times = array.array("d")
        self._distribution: dict[str, float | None] = {}
        """Statistics of times and losses in the last report."""
        self._paused_s = 0.0
        """Seconds of pauses, such as validations, since the last report."""
        self._loss: float | None = None
        self._norm = float("nan")
        self._group: Sequence[Batch] = ()
        """The batches of the last update."""
        self._slow: int | None = None
        """Rank of the process that was slow in the last report."""
        self._named: set[int] = set()
        """Ranks of the slow processes that a note has named."""
        clock.take()

    def count(self, update: Update, group: Sequence[Batch]) -> None:
        """Count an update that was made from the batches of ``group``."""
        now = time.perf_counter()
        if self._last_end is not None:
            self._times.append(now - self._last_end)
        self._last_end = now
        self._unread.append(update)
        self._group = group or self._group
        for batch in group:
            self._examples += examples(batch)
        if len(self._unread) >= self.context.log_every:
            self.report()

    def report(self) -> None:
        """Emit a ``Progressed`` event for the updates since the last one; waits for the device."""
        if not self._unread:
            return
        self.clock.enter("other")
        spent, now, position = dict(self.clock.take()), time.perf_counter(), self.context.position
        losses = torch.stack([each.loss for each in self._unread]).tolist()  # waits for the device, once
        taken = [each for each in self._unread if each.norm is not None]
        latest = next((each.norm for each in reversed(taken) if each.applied), taken[-1].norm if taken else None)
        if latest is not None:
            self._norm = float(latest)
        applied = [loss for loss, each in zip(losses, self._unread, strict=True) if each.applied]
        skipped = len(losses) - len(applied)
        losses = applied or losses
        self._loss = sum(losses) / len(losses)
        self._distribution = of_updates(self._times, losses)
        spent["other"], self._paused_s = max(spent["other"] - self._paused_s, 0.0), 0.0
        both = self.context.world.gathered((Pace(self._examples, spent), self.context.log.take()))
        paces = [pace for pace, _ in both]
        made = sum(pace.examples for pace in paces)
        total = sum(spent.values())
        for phase, seconds in spent.items():
            self._spent[phase] += seconds
        event = Progressed(
            update=position.update,
            epoch=position.epoch,
            updates=self.updates,
            loss=self._loss,
            norm=self._norm,
            rate=_rate(self.context.optimizer),
            rates=_rates(self.context.optimizer),
            examples_per_s=made / max(now - self._since, 1e-9),
            step_ms=1e3 * total / len(self._unread),
            skipped=skipped,
            shares=_shares(spent, total),
            **self._distribution,
            **memory(self.context.device),
            logged=means([sums for _, sums in both]),
        )
        self._all_times.extend(self._times)
        self._times = array.array("d")
        self._all_examples += made
        self._unread, self._examples, self._since = [], 0, now
        emit_together(self.context, event)
        slow = slow_process(paces)
        rank, text = slow or (None, "")
        if rank is not None and rank == self._slow and rank not in self._named:  # slow twice in a row
            self._named.add(rank)
            with self.context.world.together():  # all processes have the same paces, and so the same note
                self.context.note(text)
        self._slow = rank

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A block, such as a validation, whose time is not that of updates."""
        self.clock.enter("other")
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self._since += seconds
            self._paused_s += seconds
            self._last_end = None if self._last_end is None else self._last_end + seconds

    def summary(self, ended: str) -> Summary:
        """The summary of the run, which ended for the reason ``ended``."""
        context, seconds = self.context, time.perf_counter() - self._began
        peak_mb = context.fit.memory_plan.peak_mb  # before operations are counted, which takes memory too
        share, remark = self._flops_share()
        context.note_once(remark)
        return Summary(
            updates=context.position.update - self._first,
            epochs=context.position.epoch,
            seconds=seconds,
            ended=ended,
            loss=self._loss,
            best=context.position.best,
            metrics=context.results,
            restored=_restored(context),
            examples_per_s=self._all_examples / seconds if self._all_examples else None,
            peak_mb=peak_mb,
            flops_share=share,
            shares=_shares(self._spent, sum(self._spent.values())),
            skipped=context.position.skipped,
            **{
                **self._distribution,
                **{name: value for name, value in of_updates(self._all_times, ()).items() if name.endswith("_ms")},
            },
            **memory(context.device),
            settings=context.settings,
            notes=(*context.notes, *context.world.notes()),
        )

    def _flops_share(self) -> tuple[float | None, str | None]:
        """:func:`flops_share` for the time within updates, without the work between them.

        It calls the loss once more, so it runs only with ``"auto"`` settings or ``compile``.
        """
        if not (self.context.decided or self.context.settings.compile is True):
            return None, None
        busy = sum(seconds for phase, seconds in self._spent.items() if phase != "other")
        if not busy or not self._group:
            return None, None
        return flops_share(self.context, self._group, self._all_examples / busy / self.context.world.size)


def _restored(context: RunContext) -> str | None:
    """The watched metric, if the model gets the parameters of its best validation and not those of the last update."""
    stopping, position = context.early_stopping, context.position
    changed = position.stale or position.validated != position.update  # a validation that was no better, or updates after it
    return stopping.metric if stopping is not None and context.best_parameters is not None and changed else None


def _rate(optimizer: torch.optim.Optimizer) -> float:
    """The learning rate of the first parameter group; NaN if it has none."""
    rate = optimizer.param_groups[0].get("lr")
    return float("nan") if rate is None else float(rate)


def _rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The learning rate of each of several optimizers, by name."""
    several = optimizer.optimizers if isinstance(optimizer, OptimizerDict) else {}
    return {name: _rate(each) for name, each in several.items()}


def _shares(spent: Mapping[str, float], total: float) -> dict[str, float]:
    return {phase: seconds / total for phase, seconds in spent.items()} if total else {}
