"""The training loop."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trimtab.core.settings import Settings
from trimtab.errors import StorageError, UsageError
from trimtab.train.autotune import auto_settings, online_tuning
from trimtab.train.checkpoint.checkpoints import Checkpoints
from trimtab.train.checkpoint.resume_conflicts import check_kinds, checked_override
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
from trimtab.train.run_context import FitState, Position, RunContext
from trimtab.train.runtime import state_dict_versions
from trimtab.train.runtime.memory_errors import telling_stops
from trimtab.train.runtime.torch_settings import allocate, refuse_autocast, running
from trimtab.train.runtime.train_modes import Modes
from trimtab.train.runtime.world import World
from trimtab.train.telemetry import events, progress
from trimtab.train.telemetry.events import Callback, Ended, Event, Validated
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
        world = world or join(settings)
        setup.check_device(settings.device)
        device = world.device(settings.device)
        setup.check_place(model, device)
        allocate(settings)
        world.place(model, settings)
        objective = LossAdapter(setup.loss_on(loss, device))
        made = setup.optimizer_for(model, optimizer, objective.module, processes=world.processes)
        average = None if ema is None else Ema(model, ema)
        self.context = RunContext(
            model=model,
            settings=settings,
            world=world,
            device=device,
            objective=objective,
            optimizer=made,
            early_stopping=early_stopping,
            schedule=schedule,
            checkpoints=None if checkpoint is None else Checkpoints(checkpoint),
            checkpoint_every=checkpoint_every,
            log_every=log_every,
            callbacks=events.checked(callbacks),
            metrics=checked_metrics(metrics),
            ema=average,
            modes=Modes(model),
            shown=EvalWeights(model, average, OptimizerModes(model, made)),
            tell=_telling(self),
        )
        """What drives a run is given this, and not the Trainer."""
        self.context.fit = FitState(MemoryPlan(self.context))
        self.progress = progress
        self._last: tuple[Any, Any] | None = None
        """The training data that the last run was given, and what it went through: of an iterator, what is left."""

    @property
    def model(self) -> nn.Module:
        """The model, trained in place."""
        return self.context.model

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        return self.context.optimizer

    @property
    def settings(self) -> Settings:
        """The settings; those that were ``"auto"`` are decided once :meth:`fit` began."""
        return self.context.settings

    @property
    def scheduler(self) -> LRScheduler | None:
        """What was made of ``schedule``; ``None`` before the first run and without one."""
        return self.context.scheduler

    @property
    def device(self) -> torch.device:
        """Where the model is trained."""
        return self.context.device

    @property
    def world(self) -> World:
        """The processes of the run."""
        return self.context.world

    @property
    def position(self) -> Position:
        """Where the run stands."""
        return self.context.position

    @property
    def notes(self) -> list[str]:
        """Sentences for the summary."""
        return self.context.notes

    @property
    def decided(self) -> dict[str, Any]:
        """What became of the settings that were ``"auto"``."""
        return self.context.decided

    @property
    def results(self) -> dict[str, float]:
        """The figures of the last validation."""
        return self.context.results

    @property
    def best_parameters(self) -> dict[str, Any] | None:
        """Of the best validation, where early stopping puts them back."""
        return self.context.best_parameters

    @property
    def ema(self) -> Ema | None:
        """The running average of the parameters."""
        return self.context.ema

    @property
    def ending(self) -> bool:
        """Whether the run ends after the update that is under way."""
        return self.context.ending

    def stop(self, reason: str) -> None:
        """End the run after the update that is under way."""
        self.context.stop(reason)

    def note(self, text: str) -> None:
        """Record a sentence for the summary, and tell the callbacks of it now."""
        self.context.note(text)

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
        duration.check_lengths(self.context, epochs, steps)
        refuse_autocast(self.context.device)
        check_loader(train, "train")
        if validate is not None:
            check_loader(validate, "validate")
        consistency.refuse_differences(self.context, validated=validate is not None, epochs=epochs, steps=steps)
        self.context.fit = run = FitState(MemoryPlan(self.context))
        with checkpoint_policy.folder_held(self.context), interruptible(self.context), telling_stops():
            last, given, train = self._last, train, self.context.world.share(train, "train")
            run.goes_on = (
                isinstance(given, Iterator) and last is not None and last[0] is given and self.context.resuming is None
            )
            train = last[1] if last is not None and run.goes_on else train
            validate = None if validate is None else self.context.world.share(validate, "validate")
            validate = validation.checked(self.context, validate)
            with progress.shown(self.context, self.progress):
                self.context.note_once(self.context.modes.look())
                self.context.modes.train()
                self.context.shown.take_back(
                    update=self.context.position.update, same=not duration.begin_other(self.context, last, given)
                )
                duration.check_epoch(self.context, train)
                run.planned = duration.updates_in_all(self.context, train, epochs, steps)
                train = auto_settings.decide(self.context, train, run.planned)
                self._last = (given, train)
                with running(self.context.settings), run.memory_plan:
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
        if self.context.checkpoints is None:
            raise UsageError("resume() needs to know where the checkpoints are: Trainer(..., checkpoint='folder').")
        self.context.override = checked_override(self.context.optimizer, override or {})
        found = self.context.world.gathered(self.context.checkpoints.update())
        if missing_ok and set(found) == {None}:
            return self
        if len(set(found)) > 1:
            raise StorageError(
                f"The processes see different checkpoints in {self.context.checkpoints.folder}: after the updates {found}. Put "
                "the folder where all hosts have it."
            )
        state = self.context.checkpoints.load()
        self.context.shown.modes.train()  # what it would make of parameters now is written over
        setup.restore(self.context, state)
        self.context.note_once(self.context.checkpoints.passed_over())
        self.context.resuming = state
        self.context.shown.forget()
        return self

    def validate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """The loss and metrics of the model as it is now, over other data, such as a test set; all processes must ask."""
        return held_out.figures(self.context, batches)

    def _run(
        self, train: Iterable[Batch], held_out: Iterable[Batch] | None, epochs: int | None, steps: int | None
    ) -> Generator[Update, None, Summary]:
        """The loop itself: epochs of updates, a validation after each."""
        position = self.context.position
        ready = setup.ready(self.context, train)
        if self.context.settings.adjust:
            self.context.watchers.append(online_tuning.adjuster(self.context, ready))
        step, meter = ready.step, Meter(self.context, ready.clock, ready.updates)
        to_come = None if ready.updates is None else ready.updates - position.update
        schedules.check(ready.scheduler, to_come, None if held_out is None else self.context.early_stopping or EarlyStopping())
        self.context.note_once(schedules.remark(ready.scheduler, ready.updates, ready.feed.length()))
        self.context.note_once(checkpoint_policy.remark(self.context, ready, steps))
        first, began = position.epoch, position.update
        self._stop_if_stale()  # which the run that is gone on with had ended by
        while not self.context.world.any(self.context.ending) and not duration.over(self.context, epochs, steps):
            if not position.due:
                for text in self.context.modes.follow():
                    self.context.note_once(text)
                self.context.modes.train()
                epoch.begin(self.context, ready.feed)
                if not (yield from self._epoch(ready, meter, steps)):
                    continue
                position.epoch, position.batch, position.due = position.epoch + 1, 0, True
            self._close_epoch(ready, meter, held_out)
        step.check()
        meter.report()
        if held_out is not None and position.epoch == first and position.update > began and not self.context.ending:
            self.context.note("No epoch came to its end, so nothing was validated; give more steps, or epochs.")
        return self._finish(ready, meter, epochs, steps)

    def _epoch(self, ready: setup.Ready, meter: Meter, steps: int | None) -> Generator[Update, None, bool]:
        """What is left of the epoch; returns whether it is whole."""
        feed, position, kept = ready.feed, self.context.position, checkpoint_policy.Saving(self.context, ready)
        for group in checkpoint_policy.rounds(self.context, ready, kept):
            update, remarks = self._update(ready, group)
            if not self.context.world.used:
                break
            position.batch, position.update = feed.taken, position.update + 1
            position.skipped += not update.applied
            with kept:
                for remark in remarks:
                    self.context.note_once(remark)
                meter.count(update, group if self.context.world.counts else [])
            if not (update.applied or update.overflowed) and self.context.settings.optimizer.nonfinite == "stop":
                self.context.stop("The loss was not finite.")
            if self.context.checkpoint_every is not None and position.update % self.context.checkpoint_every == 0:
                checkpoint_policy.save(self.context, ready)
            yield update
            if self.context.world.stopping(self.context.ending):
                return False
            if position.update == steps:
                left = feed.length()
                return not self.context.world.any(left is None or left > 0)
        whole = not self.context.world.any(feed.cut)
        self.context.note_once(feed.missing() if whole and self.context.world.used else None)
        return whole

    def _close_epoch(self, ready: setup.Ready, meter: Meter, held_out: Iterable[Batch] | None) -> None:
        """What comes at the end of an epoch: it is told of, validated and saved; what fails there does not cost the epoch."""
        try:
            with epoch.close(self.context, ready.feed):
                meter.report()
                self._validate(held_out, ready)
        except Exception as error:
            if self.context.world.heard(error):
                checkpoint_policy.save(self.context, ready)
            raise
        if self.context.checkpoint_every is None and not self.context.position.due:
            checkpoint_policy.save(self.context, ready)

    def _update(self, ready: setup.Ready, group: list[Batch]) -> tuple[Update, list[str | None]]:
        """One update and what goes along with it, and what there is to tell of it once it counts."""
        with _STEP:
            update = self.context.fit.memory_plan.update(ready, group)
        remarks = [self.context.objective.doubt(group, alone=self.context.world.size == 1)]
        if ready.scheduler is not None and update.applied:
            remarks.append(schedules.advance(ready.scheduler))
        if self.context.ema is not None and update.applied:
            self.context.ema.update(self.context.model)
        if update.applied and not self.context.fit.kept:
            self.context.fit.kept = True
            setup.refuse_unkept(self.context, ready.feed)
        return update, remarks

    def _validate(self, held_out: Iterable[Batch] | None, ready: setup.Ready) -> None:
        """Go through the validation data, keep the best parameters, and stop where it has stopped getting better."""
        stopping, position = self.context.early_stopping or EarlyStopping(), self.context.position
        if held_out is None:
            position.due = False
            return
        setup.settle(self.context)
        with self.context.shown.during():
            found = validation.validate(self.context, held_out, ready.step, ready.move, lambda: self.context.fit.interrupted)
            if found is None:
                self.context.note("The validation was cut off; the run that goes on begins with it.")
                return
            self.context.results, position.due = found, False
            better = stopping.better(self.context.results[stopping.metric], position.best)
            if better:
                position.best, position.stale = self.context.results[stopping.metric], 0
                if self.context.early_stopping is not None and stopping.restore_best:
                    self.context.best_parameters = state_dict_versions.copied(self.context.model)
            else:
                position.stale += 1
            if isinstance(ready.scheduler, ReduceLROnPlateau):
                ready.scheduler.step(self.context.results[stopping.metric])
            # The callbacks see the parameters that these are the figures of.
            consistency.tell(
                self.context, Validated(update=position.update, epoch=position.epoch, metrics=self.context.results, best=better)
            )
        self._stop_if_stale()

    def _stop_if_stale(self) -> None:
        stopping, stale = self.context.early_stopping, self.context.position.stale
        if stopping is not None and stale >= stopping.patience:
            self.context.stop(f"The validation's {stopping.metric} did not improve {stale} times in a row.")

    def _finish(self, ready: setup.Ready, meter: Meter, epochs: int | None, steps: int | None) -> Summary:
        """The last checkpoint, then the parameters that the user is to have, then the summary."""
        newest = None if self.context.checkpoints is None else self.context.checkpoints.newest()
        made = self.context.position.update or self.context.decided  # else there is nothing to go on with
        old = newest is None or newest.name != f"update-{self.context.position.update:08d}" or self.context.position.due
        if made and self.context.world.any(old):
            checkpoint_policy.save(self.context, ready)
        setup.settle(self.context)
        self.context.step_state, self.context.loader_place = ready.step.state_dict(), epoch.place_of(self.context, ready.feed)
        self.context.shown.show(self.context.best_parameters)
        self.context.model.eval()
        count, what = (steps, "update") if steps is not None else (epochs, "epoch")
        done = f"1 {what} is done." if count == 1 else f"{count} {what}s are done."
        over = duration.over(self.context, epochs, steps)
        summary = meter.summary(self.context.fit.stop or (done if over else "Another process was asked to stop."))
        consistency.tell(
            self.context, Ended(update=self.context.position.update, epoch=self.context.position.epoch, summary=summary)
        )
        return summary


def _telling(trainer: Trainer) -> Callable[[Event], None]:
    """What calls the callbacks of ``trainer``, without keeping it alive; of several processes only those of the first one.

    What they draw from random generators, or do to these, leaves no trace in the run: when they are called again after a
    resumption depends on where that was.
    """
    known = weakref.ref(trainer)

    def tell(event: Event) -> None:
        found = known()
        assert found is not None, "a run has its Trainer"
        with kept_random() if found.context.callbacks else contextlib.nullcontext():
            consistency.call_back(found.context, found, event)

    return tell
