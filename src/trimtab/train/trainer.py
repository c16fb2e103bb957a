"""The training loop."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trimtab.core.settings import Settings
from trimtab.errors import StorageError, UsageError
from trimtab.train.autotune import auto_settings
from trimtab.train.checkpoint.checkpoints import Checkpoints
from trimtab.train.checkpoint.resume_conflicts import Options, check_kinds, checked_override
from trimtab.train.data.micro_batches import check_loader
from trimtab.train.data.peek import kept_random
from trimtab.train.distributed import consistency
from trimtab.train.distributed.launch import join
from trimtab.train.early_stopping import EarlyStopping
from trimtab.train.engine import checkpoint_policy, duration, epoch, setup, validation
from trimtab.train.engine import evaluate as held_out
from trimtab.train.engine.out_of_memory import MemoryPlan
from trimtab.train.engine.signals import interruptible
from trimtab.train.engine.step import Update
from trimtab.train.loss.adapter import Batch, LossAdapter, in_step
from trimtab.train.optim import schedules
from trimtab.train.optim.ema import Ema, EvalWeights
from trimtab.train.optim.optimizer_state import OptimizerModes
from trimtab.train.optim.schedules import Schedule
from trimtab.train.position import Position
from trimtab.train.run import Run
from trimtab.train.runtime import state_dict_versions
from trimtab.train.runtime.memory_errors import telling_stops
from trimtab.train.runtime.torch_settings import allocate, refuse_autocast, running
from trimtab.train.runtime.train_modes import Modes
from trimtab.train.runtime.world import World
from trimtab.train.telemetry import events, progress
from trimtab.train.telemetry.events import Callback, Ended, Event, Remarked, Validated
from trimtab.train.telemetry.meter import Meter
from trimtab.train.telemetry.metrics import Metric, checked_metrics
from trimtab.train.telemetry.summary import Summary

_STEP = in_step("The model or its loss raised")


class Trainer:
    """Trains ``model`` on batches: fast by default, right where accumulated, resumable to the bit.

    Args:
        model: trained in place.
        loss: ``loss(outputs, targets)`` for batches of ``(inputs, targets)``; or one whose first parameter is called ``model``,
            ``loss(model, batch)``, which gives the mean or ``(mean, weight)``; ``None`` for models that compute their own.
        optimizer: one over the parameters of the model, and of the loss if it has some; or a function of them that makes it.
        settings: precision, accumulation, memory and the like; what is ``"auto"`` is decided by measurement when
            :meth:`fit` begins.
        schedule: ``schedule(optimizer, updates)`` -> one of torch's schedulers, such as
            :func:`~trimtab.train.optim.schedules.one_cycle`; or a scheduler itself. Stepped once per update;
            ``ReduceLROnPlateau`` after each validation, with the figure that ``early_stopping`` watches.
        early_stopping: ends the run when the validation has stopped getting better.
        checkpoint: folder for checkpoints, written every ``checkpoint_every`` updates (or epochs, if ``None``) and at the end.
        callbacks: called as ``callback(trainer, event)`` with everything that happens.
        metrics: by name, ``metric(outputs, targets)`` -> one value per example, of which the validation has the mean; or of the
            whole set, an object with ``reset()``, ``update(outputs, targets)`` and ``compute()``, as torchmetrics has them. A
            model that computes its own loss gives its whole answer, which is held against the whole batch.
        ema: decay of a running average of the parameters, which is what is validated and kept in the end.
        log_every: updates between two :class:`~trimtab.train.telemetry.events.Progressed`.
        progress: whether the run is shown on standard error: as a live line in a terminal, else as lines of text. By default it
            is where that is a terminal.
        world: the processes of the run, as :func:`~trimtab.train.distributed.launch.join` gives them for a model whose
            layers are split between some; otherwise found out.

    Raises:
        UsageError: the model has nothing to train, the optimizer is over other parameters, or a number makes no sense.
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
        duration.check_counts(checkpoint_every=checkpoint_every, log_every=log_every)
        schedules.check_given(schedule)
        check_kinds(settings, early_stopping, metrics, ema, world)
        setup.check_model(model)
        self.model = model
        self.settings = settings
        self.world = world or join(settings)
        setup.check_device(settings.device)
        self.device = self.world.device(settings.device)
        setup.check_place(model, self.device)
        allocate(settings)
        self.world.place(self.model, settings)
        self.objective = LossAdapter(setup.loss_on(loss, self.device))
        self.optimizer = setup.optimizer_for(model, optimizer, self.objective.module, processes=self.world.processes)
        self.early_stopping, self.schedule = early_stopping, schedule
        self.checkpoints = None if checkpoint is None else Checkpoints(checkpoint)
        self.checkpoint_every, self.log_every = checkpoint_every, log_every
        self.callbacks, self.metrics = events.checked(callbacks), checked_metrics(metrics)
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
        self.best_parameters: dict[str, Any] | None = None
        """Of the best validation, where early stopping puts them back."""
        self.epoch_random: dict[str, Any] = {}
        self.resuming: dict[str, Any] | None = None
        self.override: dict[str, Any] = {}
        """What :meth:`resume` was told to have another way than the checkpoint."""
        self.options: Options | None = None
        """Of the optimizer when the run began; ``None`` until it has."""
        self.scheduler: LRScheduler | None = None
        """What was made of ``schedule`` for the last run; the next one goes on from it."""
        self.scheduled: tuple[Any, int] | None = None
        """The function that it was made by, and for how many updates."""
        self.step_state: dict[str, Any] | None = None
        """Of the last run's step, such as float16's scale, which the next one need not find again."""
        self.loader_place: dict[str, Any] | None = None
        """Where a loader with ``state_dict()`` stood when the last run ended."""
        self.modes = Modes(model)
        self._last: tuple[Any, Any] | None = None
        """The training data that the last run was given, and what it went through: of an iterator, what is left."""
        self.run = Run(MemoryPlan(self))
        """What belongs to the run under way alone; of the last one where none is."""
        self.shown = EvalWeights(model, self.ema, OptimizerModes(model, self.optimizer))

    def fit(
        self,
        train: Iterable[Batch],
        validate: Iterable[Batch] | None = None,
        *,
        epochs: int | None = None,
        steps: int | None = None,
    ) -> Summary:
        """Train on the batches of ``train`` for so many epochs or updates in all, and validate after each epoch.

        After :meth:`resume` this goes on where the checkpoint was written, and ends where it would have ended. So does a second
        call with the same data: that object, or a loader of that dataset with as many batches. Other data begins at its
        beginning, and early stopping with it; epochs and updates are counted on.

        Ctrl-C, or SIGTERM, ends the run after the update that is under way, with a checkpoint if there is a folder for them. It
        cuts off a validation, with which the run that goes on begins.

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
        duration.check_lengths(self, epochs, steps)
        refuse_autocast(self.device)
        check_loader(train, "train")
        if validate is not None:
            check_loader(validate, "validate")
        consistency.refuse_differences(self, validated=validate is not None, epochs=epochs, steps=steps)
        self.run = run = Run(MemoryPlan(self))
        with checkpoint_policy.folder_held(self), interruptible(self), telling_stops():
            last, given, train = self._last, train, self.world.share(train, "train")
            run.goes_on = isinstance(given, Iterator) and last is not None and last[0] is given and self.resuming is None
            train = last[1] if last is not None and run.goes_on else train
            validate = None if validate is None else self.world.share(validate, "validate")
            validate = validation.checked(self, validate)
            with progress.shown(self, self.progress):
                self.note_once(self.modes.look())
                self.modes.train()
                self.shown.take_back(update=self.position.update, same=not duration.begin_other(self, last, given))
                duration.check_epoch(self, train)
                run.planned = duration.updates_in_all(self, train, epochs, steps)
                train = auto_settings.decide(self, train, run.planned)
                self._last = (given, train)
                with running(self.settings), run.room:
                    return (yield from self._run(train, validate, epochs, steps))

    def resume(self, *, missing_ok: bool = False, override: Mapping[str, Any] | None = None) -> Self:
        """Take up the newest whole checkpoint, which wins over the script; the :meth:`fit` that follows goes on from there.

        Args:
            missing_ok: begin anew where there is no checkpoint, as in a script that is started again after a failure.
            override: what the run is to have instead, for all groups of the optimizer: its options that are numbers, by name,
                such as ``{"lr": 3e-4}``. The rates of the schedule are multiplied by as much.

        Raises:
            UsageError: there is no checkpoint folder, it is of another model or optimizer, or there is no such option.
            StorageError: no checkpoint in it is whole.
        """
        if self.checkpoints is None:
            raise UsageError("resume() needs to know where the checkpoints are: Trainer(..., checkpoint='folder').")
        self.override = checked_override(self.optimizer, override or {})
        found = self.world.gathered(self.checkpoints.update())
        if missing_ok and set(found) == {None}:
            return self
        if len(set(found)) > 1:
            raise StorageError(
                f"The processes see different checkpoints in {self.checkpoints.folder}: after the updates {found}. Put the "
                "folder where all hosts have it."
            )
        state = self.checkpoints.load()
        self.shown.modes.train()  # what it would make of parameters now is written over
        setup.restore(self, state)
        self.note_once(self.checkpoints.passed_over())
        self.resuming = state
        self.shown.forget()
        return self

    def validate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """The loss and metrics of the model as it is now, over other data, such as a test set; all processes must ask."""
        return held_out.figures(self, batches)

    def stop(self, reason: str) -> None:
        """End the run after the update that is under way."""
        self.run.stop = reason

    @property
    def ending(self) -> bool:
        """Whether the run ends after the update that is under way."""
        return self.run.stop is not None

    def note(self, text: str) -> None:
        """Keep a sentence for the summary, and tell the callbacks of it now."""
        self.notes.append(text)
        self.emit(Remarked(update=self.position.update, epoch=self.position.epoch, text=text))

    def note_once(self, text: str | None) -> None:
        """The same, if there is a sentence and it was not told before."""
        if text is not None and text not in self.notes:
            self.note(text)

    def emit(self, event: Event) -> None:
        """Tell the callbacks; of several processes only those of the first one.

        What they draw from random generators, or do to these, leaves no trace in the run: when they are called again after a
        resumption depends on where that was.
        """
        for watcher in self.watchers:
            watcher(self, event)
        with kept_random() if self.callbacks else contextlib.nullcontext():
            consistency.call_back(self, event)

    def _run(
        self, train: Iterable[Batch], held_out: Iterable[Batch] | None, epochs: int | None, steps: int | None
    ) -> Generator[Update, None, Summary]:
        """The loop itself: epochs of updates, a validation after each."""
        position = self.position
        ready = setup.ready(self, train)
        step, meter = ready.step, Meter(self, ready.clock, ready.updates)
        to_come = None if ready.updates is None else ready.updates - position.update
        schedules.check(ready.scheduler, to_come, None if held_out is None else self.early_stopping or EarlyStopping())
        self.note_once(schedules.remark(ready.scheduler, ready.updates, ready.feed.length()))
        self.note_once(checkpoint_policy.remark(self, ready, steps))
        first, began = position.epoch, position.update
        self._stop_if_stale()  # which the run that is gone on with had ended by
        while not self.world.any(self.ending) and not duration.over(self, epochs, steps):
            if not position.due:
                for text in self.modes.follow():
                    self.note_once(text)
                self.modes.train()
                epoch.begin(self, ready.feed)
                if not (yield from self._epoch(ready, meter, steps)):
                    continue
                position.epoch, position.batch, position.due = position.epoch + 1, 0, True
            self._close_epoch(ready, meter, held_out)
        step.check()
        meter.report()
        if held_out is not None and position.epoch == first and position.update > began and not self.ending:
            self.note("No epoch came to its end, so nothing was validated; give more steps, or epochs.")
        return self._finish(ready, meter, epochs, steps)

    def _epoch(self, ready: setup.Ready, meter: Meter, steps: int | None) -> Generator[Update, None, bool]:
        """What is left of the epoch; returns whether it is whole."""
        feed, position, kept = ready.feed, self.position, checkpoint_policy.Saving(self, ready)
        for group in checkpoint_policy.rounds(self, ready, kept):
            update, remarks = self._update(ready, group)
            if not self.world.used:
                break
            position.batch, position.update = feed.taken, position.update + 1
            position.skipped += not update.applied
            with kept:
                for remark in remarks:
                    self.note_once(remark)
                meter.count(update, group if self.world.counts else [])
            if not (update.applied or update.overflowed) and self.settings.nonfinite == "stop":
                self.stop("The loss was not finite.")
            if self.checkpoint_every is not None and position.update % self.checkpoint_every == 0:
                checkpoint_policy.save(self, ready)
            yield update
            if self.world.stopping(self.ending):
                return False
            if position.update == steps:
                left = feed.length()
                return not self.world.any(left is None or left > 0)
        whole = not self.world.any(feed.cut)
        self.note_once(feed.missing() if whole and self.world.used else None)
        return whole

    def _close_epoch(self, ready: setup.Ready, meter: Meter, held_out: Iterable[Batch] | None) -> None:
        """What comes at the end of an epoch: it is told of, validated and saved; what fails there does not cost the epoch."""
        try:
            with epoch.close(self, ready.feed):
                meter.report()
                self._validate(held_out, ready)
        except Exception as error:
            if self.world.heard(error):
                checkpoint_policy.save(self, ready)
            raise
        if self.checkpoint_every is None and not self.position.due:
            checkpoint_policy.save(self, ready)

    def _update(self, ready: setup.Ready, group: list[Batch]) -> tuple[Update, list[str | None]]:
        """One update and what goes along with it, and what there is to tell of it once it counts."""
        with _STEP:
            update = self.run.room.update(ready, group)
        remarks = [self.objective.doubt(group, alone=self.world.size == 1)]
        if ready.scheduler is not None and update.applied:
            remarks.append(schedules.advance(ready.scheduler))
        if self.ema is not None and update.applied:
            self.ema.update(self.model)
        if update.applied and not self.run.kept:
            self.run.kept = True
            setup.refuse_unkept(self, ready.feed)
        return update, remarks

    def _validate(self, held_out: Iterable[Batch] | None, ready: setup.Ready) -> None:
        """Go through the validation data, keep the best parameters, and stop where it has stopped getting better."""
        stopping, position = self.early_stopping or EarlyStopping(), self.position
        if held_out is None:
            position.due = False
            return
        setup.settle(self)
        with self.shown.during():
            found = validation.validate(self, held_out, ready.step, ready.move, lambda: self.run.interrupted)
            if found is None:
                self.note("The validation was cut off; the run that goes on begins with it.")
                return
            self.results, position.due = found, False
            better = stopping.better(self.results[stopping.metric], position.best)
            if better:
                position.best, position.stale = self.results[stopping.metric], 0
                if self.early_stopping is not None and stopping.restore_best:
                    self.best_parameters = state_dict_versions.copied(self.model)
            else:
                position.stale += 1
            if isinstance(ready.scheduler, ReduceLROnPlateau):
                ready.scheduler.step(self.results[stopping.metric])
            # The callbacks see the parameters that these are the figures of.
            consistency.tell(self, Validated(update=position.update, epoch=position.epoch, metrics=self.results, best=better))
        self._stop_if_stale()

    def _stop_if_stale(self) -> None:
        stopping, stale = self.early_stopping, self.position.stale
        if stopping is not None and stale >= stopping.patience:
            self.stop(f"The validation's {stopping.metric} did not improve {stale} times in a row.")

    def _finish(self, ready: setup.Ready, meter: Meter, epochs: int | None, steps: int | None) -> Summary:
        """The last checkpoint, then the parameters that the user is to have, then the summary."""
        newest = None if self.checkpoints is None else self.checkpoints.newest()
        made = self.position.update or self.decided  # else there is nothing to go on with
        old = newest is None or newest.name != f"update-{self.position.update:08d}" or self.position.due
        if made and self.world.any(old):
            checkpoint_policy.save(self, ready)
        setup.settle(self)
        self.step_state, self.loader_place = ready.step.state_dict(), epoch.place_of(self, ready.feed)
        self.shown.show(self.best_parameters)
        self.model.eval()
        count, what = (steps, "update") if steps is not None else (epochs, "epoch")
        done = f"1 {what} is done." if count == 1 else f"{count} {what}s are done."
        over = duration.over(self, epochs, steps)
        summary = meter.summary(self.run.stop or (done if over else "Another process was asked to stop."))
        consistency.tell(self, Ended(update=self.position.update, epoch=self.position.epoch, summary=summary))
        return summary
