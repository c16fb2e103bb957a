"""The training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trimtab.candidate import Settings
from trimtab.errors import StorageError, UsageError
from trimtab.train import auto, prepare, progress
from trimtab.train.checkpoint import Checkpoints
from trimtab.train.distributed.processes import join
from trimtab.train.events import Callback, Ended, Event, Remarked, Saved, Validated
from trimtab.train.feed import Feed, check_loader
from trimtab.train.memory import Room
from trimtab.train.meter import Meter
from trimtab.train.objective import Batch, Objective
from trimtab.train.runtime import random_state, running, set_random_state
from trimtab.train.schedule import Schedule
from trimtab.train.step import Update
from trimtab.train.stopping import EarlyStopping, Ema
from trimtab.train.summary import Summary
from trimtab.train.validation import Metric, validate
from trimtab.train.world import World
from trimtab.workload import user_code

_STEP = user_code("The model or its loss raised")


@dataclasses.dataclass
class Position:
    """Where a run stands: between two updates."""

    epoch: int = 0
    batch: int = 0
    """Batches of the epoch that were used."""
    update: int = 0
    stale: int = 0
    """Validations in a row without an improvement."""
    best: float | None = None
    skipped: int = 0


class Trainer:
    """Trains ``model`` on batches: fast by default, right where accumulated, resumable to the bit.

    Args:
        model: trained in place.
        loss: see :class:`~trimtab.train.objective.Objective`; ``None`` for models that compute their own.
        optimizer: one over the model's parameters, or a function of the parameters that makes it.
        settings: precision, accumulation, memory and the like; what is ``"auto"`` is decided by measurement when
            :meth:`fit` begins.
        schedule: ``schedule(optimizer, updates)`` -> one of torch's schedulers, such as
            :func:`~trimtab.train.schedule.one_cycle`; or a scheduler itself. Stepped once per update.
        early_stopping: ends the run when the validation has stopped getting better.
        checkpoint: folder for checkpoints, written every ``checkpoint_every`` updates (or epochs, if ``None``) and at the end.
        callbacks: called as ``callback(trainer, event)`` with everything that happens.
        metrics: by name, ``metric(outputs, targets)`` -> one value per example; their means are part of the validation.
        ema: decay of a running average of the parameters, which is what is validated and kept in the end.
        log_every: updates between two :class:`~trimtab.train.events.Progressed`.
        progress: whether the run is shown on standard error: as a live line in a terminal, else as lines of text. By default it
            is where that is a terminal.

    Raises:
        UsageError: the model has nothing to train, or the optimizer is over other parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Callable[..., Any] | None = None,
        optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer],
        settings: Settings = Settings(),
        schedule: Schedule | LRScheduler | None = None,
        early_stopping: EarlyStopping | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        callbacks: Sequence[Callback] = (),
        metrics: Mapping[str, Metric] | None = None,
        ema: float | None = None,
        log_every: int = 50,
        progress: bool | None = None,
        world: World | None = None,
    ) -> None:
        self.model = model
        self.objective = Objective(loss)
        self.settings = settings
        self.world = world or join(settings)
        prepare.check_device(settings.device)
        self.device = self.world.device(settings.device)
        self.model.to(self.device)
        self.world.place(self.model, settings)
        self.optimizer = prepare.optimizer_for(model, optimizer)
        self.early_stopping, self.schedule = early_stopping, schedule
        self.checkpoints = None if checkpoint is None else Checkpoints(checkpoint)
        self.checkpoint_every, self.log_every = checkpoint_every, log_every
        self.callbacks, self.metrics = list(callbacks), dict(metrics or {})
        self.progress = progress
        self.watchers: list[Callback] = []
        """Our own callbacks while a run lasts; every process calls its own."""
        self.ema = None if ema is None else Ema(model, ema)
        self.position = Position()
        self.notes: list[str] = []
        self.decided: dict[str, Any] = {}
        """What became of the settings that were ``"auto"``."""
        self.results: dict[str, float] = {}
        """The figures of the last validation."""
        self.best_parameters: dict[str, torch.Tensor] | None = None
        """Of the best validation, where early stopping puts them back."""
        self.epoch_random: dict[str, Any] = {}
        self.resuming: dict[str, Any] | None = None
        self.room = Room(self)
        self._shows_average = False
        self._stop: str | None = None

    def fit(
        self,
        train: Iterable[Batch],
        validate: Iterable[Batch] | None = None,
        *,
        epochs: int | None = None,
        steps: int | None = None,
    ) -> Summary:
        """Train on the batches of ``train`` for so many epochs or updates in all, and validate after each epoch.

        After :meth:`resume` this goes on where the checkpoint was written, and ends where it would have ended. Ctrl-C, or
        SIGTERM, ends the run after the update that is under way, with a checkpoint if there is a folder for them.

        Raises:
            UsageError: the call makes no sense; nothing was run.
            WorkloadError: the model, the loss or the loader failed, or the loss is not finite.
            StorageError: a checkpoint or the log cannot be written.
        """
        run = self.updates(train, validate, epochs=epochs, steps=steps)
        while True:
            try:
                next(run)
            except StopIteration as ended:
                summary: Summary = ended.value
                return summary

    def updates(
        self,
        train: Iterable[Batch],
        validate: Iterable[Batch] | None = None,
        *,
        epochs: int | None = None,
        steps: int | None = None,
    ) -> Generator[Update, None, Summary]:
        """What :meth:`fit` does, for who drives it: each ``next()`` makes one update and everything that belongs to it."""
        prepare.check_lengths(epochs, steps)
        check_loader(train, "train")
        if validate is not None:
            check_loader(validate, "validate")
        prepare.check_folder(self)
        self._stop, self.room = None, Room(self)
        with prepare.interruptible(self):
            train = self.world.share(train, "train")
            validate = None if validate is None else self.world.share(validate, "validate")
            updates = steps or prepare.updates_of(train, self.settings.accumulate, epochs or 0)
            with progress.shown(self, self.progress, updates):
                train = auto.decide(self, train, updates)
                with running(self.settings), self.room:
                    return (yield from self._run(train, validate, epochs, steps))

    def resume(self, *, missing_ok: bool = False) -> Self:
        """Take up the newest whole checkpoint; the :meth:`fit` that follows goes on from there.

        With ``missing_ok`` a run without any begins anew, so that a script that is started again after a failure, by torchrun
        or a batch system, needs to know nothing of the time before.

        Raises:
            UsageError: there is no checkpoint folder, or it is of another model or optimizer.
            StorageError: no checkpoint in it is whole.
        """
        if self.checkpoints is None:
            raise UsageError("resume() needs to know where the checkpoints are: Trainer(..., checkpoint='folder').")
        found = self.world.gathered(self.checkpoints.update())
        if missing_ok and not any(found):
            return self
        if len(set(found)) > 1:
            raise StorageError(
                f"The processes see different checkpoints in {self.checkpoints.folder}: after the updates {found}. Put the "
                "folder where all hosts have it."
            )
        state = self.checkpoints.load()
        prepare.restore(self, state)
        self.best_parameters = state["best"]
        self.resuming = state
        return self

    def stop(self, reason: str) -> None:
        """End the run after the update that is under way."""
        self._stop = reason

    @property
    def ending(self) -> bool:
        """Whether the run ends after the update that is under way."""
        return self._stop is not None

    def note(self, text: str) -> None:
        """Keep a sentence for the summary, and tell the callbacks of it now."""
        self.notes.append(text)
        self.emit(Remarked(update=self.position.update, epoch=self.position.epoch, text=text))

    def emit(self, event: Event) -> None:
        """Tell the callbacks; of several processes only those of the first one."""
        for callback in (*self.watchers, *(self.callbacks if self.world.leads else ())):
            callback(self, event)

    def _run(
        self, train: Iterable[Batch], held_out: Iterable[Batch] | None, epochs: int | None, steps: int | None
    ) -> Generator[Update, None, Summary]:
        """The loop itself: epochs of updates, a validation after each."""
        position = self.position
        if self.ema is not None and self._shows_average:  # the run before ended with it in the model
            self.ema.exchange(self.model)
            self._shows_average = False
        ready = prepare.ready(self, train, epochs, steps)
        step, feed, meter = ready.step, ready.feed, Meter(self, ready.clock, ready.updates)
        step.discard()  # whatever was computed before this run
        while not self.world.any(self.ending) and not _over(position, epochs, steps):
            self.model.train()
            self._begin_epoch(feed)
            for group in self.world.rounds(feed.groups(), feed.length()):
                with _STEP:
                    update = self.room.update(ready, group)
                if ready.scheduler is not None and update.applied:
                    ready.scheduler.step()
                if self.ema is not None:
                    self.ema.update(self.model)
                position.batch, position.update = feed.taken, position.update + 1
                position.skipped += not update.applied
                meter.count(update, group if self.world.counts else [])
                if not update.applied and self.settings.nonfinite == "stop":
                    self.stop("The loss was not finite.")
                if self.checkpoint_every is not None and position.update % self.checkpoint_every == 0:
                    self._save(ready)
                yield update
                if self.world.stopping(self.ending) or position.update == steps:
                    break
            else:  # the epoch is whole
                position.epoch, position.batch = position.epoch + 1, 0
                meter.report()
                self._validate(held_out, ready)
                if self.checkpoint_every is None:
                    self._save(ready)
        step.check()
        meter.report()
        return self._finish(ready, meter, epochs, steps)

    def _begin_epoch(self, feed: Feed) -> None:
        """Start the loader; after a resumption in mid-epoch, where it stood, with the same random numbers to come."""
        resumed, self.resuming = self.resuming, None
        if resumed is not None:
            set_random_state(self._own(resumed["epoch_random" if self.position.batch else "random"]))
        self.epoch_random = random_state()
        feed.begin(self.position.epoch, self.position.batch)
        if resumed is not None and self.position.batch:
            set_random_state(self._own(resumed["random"]))

    def _own(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """This process's state of what every process has one of; another number of processes makes do with those there are."""
        return states[self.world.rank % len(states)]

    def _validate(self, held_out: Iterable[Batch] | None, ready: prepare.Ready) -> None:
        """Go through the validation data, keep the best parameters, and stop where it has stopped getting better."""
        if held_out is None:
            return
        self.world.settle(self.model)
        with self._averaged():
            self.results = validate(self.model, self.objective, held_out, self.metrics, ready)
            stopping, position = self.early_stopping or EarlyStopping(), self.position
            if stopping.metric not in self.results:
                raise UsageError(
                    f"EarlyStopping watches {stopping.metric!r}, but the validation has {', '.join(self.results)}. "
                    "Name one of these, or give metrics={...}."
                )
            better = stopping.better(self.results[stopping.metric], position.best)
            if better:
                position.best, position.stale = self.results[stopping.metric], 0
                if self.early_stopping is not None and stopping.restore_best:
                    self.best_parameters = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
            else:
                position.stale += 1
        self.emit(Validated(update=position.update, epoch=position.epoch, metrics=self.results, best=better))
        if self.early_stopping is not None and position.stale >= stopping.patience:
            self.stop(f"The validation's {stopping.metric} did not improve {position.stale} times in a row.")

    def _save(self, ready: prepare.Ready) -> None:
        """Write a checkpoint, unless the last update was not finite."""
        if self.checkpoints is None:
            return
        ready.clock.enter("other")
        ready.step.check()
        self.world.settle(self.model)
        state, checkpoints = prepare.state_of(self, ready), self.checkpoints
        path = self.world.led(lambda: checkpoints.save(self.position.update, state))
        self.emit(Saved(update=self.position.update, epoch=self.position.epoch, path=str(path)))

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """A block in which the model has the running average of its parameters, if one is kept."""
        if self.ema is None:
            yield
            return
        self.ema.exchange(self.model)
        try:
            yield
        finally:
            self.ema.exchange(self.model)

    def _finish(self, ready: prepare.Ready, meter: Meter, epochs: int | None, steps: int | None) -> Summary:
        """The last checkpoint, then the parameters that the user is to have, then the summary."""
        newest = None if self.checkpoints is None else self.checkpoints.newest()
        if self.world.any(newest is None or newest.name != f"update-{self.position.update:08d}"):
            self._save(ready)
        if self.ema is not None:
            self.ema.exchange(self.model)
            self._shows_average = True
        if self.best_parameters is not None:
            self.model.load_state_dict(self.best_parameters)
        self.model.eval()
        count, what = (steps, "update") if steps is not None else (epochs, "epoch")
        done = f"1 {what} is done." if count == 1 else f"{count} {what}s are done."
        over = _over(self.position, epochs, steps)
        summary = meter.summary(self._stop or (done if over else "Another process was asked to stop."))
        self.emit(Ended(update=self.position.update, epoch=self.position.epoch, summary=summary))
        return summary


def _over(position: Position, epochs: int | None, steps: int | None) -> bool:
    return position.epoch >= epochs if epochs is not None else position.update >= (steps or 0)
