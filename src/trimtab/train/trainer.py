"""The training loop: epochs of updates, validation and checkpoints."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trimtab._internal.validation import checked_call
from trimtab.core.settings import Settings
from trimtab.errors import StorageError, UsageError
from trimtab.train.autotune import auto_settings
from trimtab.train.checkpoint import registered
from trimtab.train.checkpoint.checkpoints import Checkpoints
from trimtab.train.checkpoint.resume_conflicts import check_types, checked_override
from trimtab.train.data.micro_batches import check_loader
from trimtab.train.data.peek import preserved_random_state
from trimtab.train.distributed import consistency
from trimtab.train.distributed.launch import join
from trimtab.train.early_stopping import EarlyStopping
from trimtab.train.engine import best_weights, checkpoint_policy, duration, loop, predict, setup, validation
from trimtab.train.engine import evaluate as held_out
from trimtab.train.engine.bounds import Bounds
from trimtab.train.engine.hooks import Hook, Hooks
from trimtab.train.engine.memory_plan import MemoryPlan
from trimtab.train.engine.signals import closed_at_exit, interruptible
from trimtab.train.engine.step import Update
from trimtab.train.loss.adapter import Batch, LossAdapter
from trimtab.train.optim import schedules
from trimtab.train.optim.ema import Ema, EvalWeights
from trimtab.train.optim.optimizer_dict import named
from trimtab.train.optim.optimizer_state import OptimizerModes
from trimtab.train.optim.schedules import Schedule
from trimtab.train.run_context import FitState, Position, RunContext
from trimtab.train.runtime.memory_errors import explaining_gpu_asserts
from trimtab.train.runtime.torch_settings import allocate, refuse_autocast, running
from trimtab.train.runtime.train_modes import Modes
from trimtab.train.runtime.world import World
from trimtab.train.telemetry import events, progress
from trimtab.train.telemetry.events import Callback, Event
from trimtab.train.telemetry.metrics import Metric, checked_metrics
from trimtab.train.telemetry.summary import Summary

OptimizerLike = Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer]
"""An optimizer, or a function that makes it from the parameters."""


class Trainer:
    """Trains a model on batches: exact gradient accumulation, and runs that resume bit-identically.

    Example, with the mean loss of the last updates printed::

        import torch
        from torch import nn
        from trimtab import DataSettings, Settings, Trainer
        x = torch.randn(64, 8)
        batches = list(zip(x.split(16), x.sum(1, keepdim=True).split(16)))
        trainer = Trainer(
            nn.Linear(8, 1),
            loss=nn.MSELoss(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
            settings=Settings(data=DataSettings(accumulate=2)),
        )
        print(trainer.fit(batches, epochs=20).loss)

    Args:
        model: trained in place.
        loss: ``loss(outputs, targets)`` for batches of ``(inputs, targets)``; or a function whose first parameter is called
            ``model``, ``loss(model, batch)``, which returns the mean or ``(mean, weight)``; ``None`` if the model computes its
            loss. A loss is a scalar tensor. A function whose first parameter is called ``run``,
            ``step(run, batch)``, makes the backward passes and steps itself, through a
            :class:`~trimtab.train.loss.manual_run.ManualRun`.
        optimizer: over the parameters of the model, and of the loss if it has some; or a function of these that makes it.
            Several by name: ``{"generator": Adam, "critic": Adam}``; a function gets the parameters of the part of the model
            with that name.
        settings: precision, accumulation, memory and the like; values that are ``"auto"`` are chosen by measurement when
            :meth:`fit` begins.
        schedule: ``schedule(optimizer, updates)`` -> one of torch's schedulers, such as
            :func:`~trimtab.train.optim.schedules.one_cycle`; or a scheduler itself; or schedules by the name of their
            optimizer. Stepped once per update; ``ReduceLROnPlateau`` after each validation, with the figure that
            ``early_stopping`` watches.
        early_stopping: ends the run when the validation no longer improves.
        checkpoint: folder for checkpoints.
        checkpoint_every: updates between two checkpoints; by default one is written after each epoch and each validation. The
            last update always gets one.
        validate_every: updates between two validations; by default there is one after each epoch. The last update gets one too,
            unless the run is stopped.
        keep_last: how many of the newest checkpoints to keep.
        keep_best: how many checkpoints to keep besides, of those with the best validation: by the figure that
            ``early_stopping`` watches, else the loss. Each is written right after its validation.
        callbacks: called as ``callback(trainer, event)`` with each event.
        hooks: functions that every process calls as epochs begin and end and in each update, by the names in
            :data:`~trimtab.train.engine.hooks.POINTS`, such as ``{"after_backward": lambda trainer: ...}``.
        metrics: by name. Either ``metric(outputs, targets)`` -> one value per example, shape ``(n,)``, whose mean is reported;
            or an object with ``reset()``, ``update(outputs, targets)`` and ``compute()``, as in torchmetrics. If the model
            computes its loss, a metric gets the model's whole output and the whole batch.
        ema: decay of an exponential moving average of the parameters, between 0 and 1; or decays by the name of a part of the
            model. The average is validated, and is what the model holds at the end.
        log_every: updates between two :class:`~trimtab.train.telemetry.events.Progressed`.
        progress: whether progress is shown on standard error: as a live line in a terminal, else as lines of text. By default
            only in a terminal.
        world: the processes of the run, from :func:`~trimtab.train.distributed.launch.join`; needed only for a model whose
            layers are split between processes.

    Raises:
        UsageError: the model has nothing to train, the optimizer has other parameters, or an argument is out of its range.
    """

    @checked_call("Trainer")
    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Callable[..., Any] | None = None,
        optimizer: OptimizerLike | Mapping[str, OptimizerLike],
        settings: Settings = Settings(),
        schedule: Schedule | LRScheduler | Mapping[str, Schedule] | None = None,
        early_stopping: EarlyStopping | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        validate_every: int | None = None,
        keep_last: int = 2,
        keep_best: int = 0,
        callbacks: Sequence[Callback] = (),
        hooks: Mapping[str, Hook] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        ema: float | Mapping[str, float] | None = None,
        log_every: int = 50,
        progress: bool | None = None,
        world: World | None = None,
    ) -> None:
        duration.check_counts(checkpoint_every=checkpoint_every, validate_every=validate_every, log_every=log_every)
        schedules.check_given(schedule)
        if keep_best and checkpoint is None:
            raise UsageError(f"keep_best is {keep_best}, and there is no folder for checkpoints. Give checkpoint='folder'.")
        check_types(settings, early_stopping, metrics, ema, world)
        setup.check_model(model)
        world = world or join(settings)
        setup.check_device(settings.device)
        device = world.device(settings.device)
        setup.check_place(model, device)
        allocate(settings)
        world.place(model, settings)
        objective = LossAdapter(setup.loss_on(loss, device))
        made = setup.optimizer_for(model, optimizer, objective.module, processes=world.processes)
        objective.optimizers = named(made)
        setup.check_manual(objective, settings, world)
        setup.check_closure(made, settings)
        average = None if ema is None else Ema(model, ema)
        self.context = RunContext(
            model=model,
            settings=settings,
            world=world,
            device=device,
            objective=objective,
            optimizer=made,
            early_stopping=early_stopping,
            schedule=schedules.by_name(schedule, made),
            checkpoints=None if checkpoint is None else Checkpoints(checkpoint, keep_last=keep_last, keep_best=keep_best),
            checkpoint_every=checkpoint_every,
            validate_every=validate_every,
            log_every=log_every,
            callbacks=events.checked(callbacks),
            metrics=checked_metrics(metrics),
            ema=average,
            modes=Modes(model),
            eval_weights=EvalWeights(model, average, OptimizerModes(model, made)),
            hooks=Hooks(hooks, weakref.ref(self)),
            run_callbacks=_callback_runner(self),
        )
        """State of the run; passed to modules that drive it in place of the Trainer."""
        self.context.fit = FitState(MemoryPlan(self.context))
        self.progress = progress
        self._last: tuple[Any, Any] | None = None
        """The training data of the last run, and the loader that it read; for an iterator, one over its remaining batches."""

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
        """The settings; ``"auto"`` is replaced by the chosen value once :meth:`fit` began."""
        return self.context.settings

    @property
    def scheduler(self) -> LRScheduler | None:
        """The scheduler made from ``schedule``; ``None`` before the first run, or without a schedule."""
        return self.context.scheduler

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.context.device

    @property
    def world(self) -> World:
        """The processes of the run."""
        return self.context.world

    @property
    def position(self) -> Position:
        """Epoch, batch and update that the run has reached."""
        return self.context.position

    @property
    def notes(self) -> list[str]:
        """Sentences recorded for the summary."""
        return self.context.notes

    @property
    def decided(self) -> dict[str, Any]:
        """The values chosen for settings that were ``"auto"``, by name."""
        return self.context.decided

    @property
    def results(self) -> dict[str, float]:
        """The loss and metrics of the last validation, by name."""
        return self.context.results

    @property
    def best_parameters(self) -> dict[str, Any] | None:
        """State dict of the model at the best validation, if early stopping restores it."""
        return self.context.best_parameters

    @property
    def ema(self) -> Ema | None:
        """The moving average of the parameters, if ``ema`` was given."""
        return self.context.ema

    @property
    def ending(self) -> bool:
        """Whether the run ends after the current update."""
        return self.context.ending

    def stop(self, reason: str) -> None:
        """End the run after the current update; ``reason`` is a sentence for the summary."""
        self.context.stop(reason)

    def note(self, text: str) -> None:
        """Record a sentence for the summary, and emit it to callbacks."""
        self.context.note(text)

    @checked_call("Trainer.fit")
    def fit(
        self,
        train: Iterable[Batch],
        validate: Iterable[Batch] | None = None,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        max_time: str | float | None = None,
        limit_train: float | None = None,
        limit_validate: float | None = None,
        fast_dev_run: bool | int = False,
    ) -> Summary:
        """Train until ``epochs`` or ``steps`` are reached, and validate after each epoch.

        Example, in which the second call adds two epochs::

            import torch
            from trimtab import Trainer
            batches = [(torch.randn(16, 8), torch.randn(16, 1)) for _ in range(4)]
            trainer = Trainer(torch.nn.Linear(8, 1), loss=torch.nn.MSELoss(), optimizer=torch.optim.Adam)
            trainer.fit(batches, batches[:1], epochs=3)
            print(trainer.fit(batches, batches[:1], epochs=5).metrics)

        After :meth:`resume`, the run continues at the checkpoint. A second call with the same data continues too, also in the
        middle of an epoch; data is the same if it is the same object, or a loader of the same dataset with as many batches.
        Other data starts at its beginning, and early stopping starts again.

        Ctrl-C and SIGTERM end the run after the current update, with a checkpoint if there is a folder for it. A validation is
        interrupted; the run that continues begins with it.

        Args:
            train: loader of batches, iterated once per epoch.
            validate: loader of batches for the validation.
            epochs: epochs in all, counted from the first call; give this or ``steps``.
            steps: updates in all.
            max_time: time after which the run ends with its update, such as ``"2h"``; a number counts seconds.
            limit_train: most batches of an epoch, in each process: a number, or a share such as 0.1.
            limit_validate: most batches of a validation, likewise.
            fast_dev_run: makes one update, or as many as the number given, and validates on as many batches, to try the script;
                no checkpoint is written, and ``epochs`` and ``steps`` do not count.

        Raises:
            UsageError: an argument makes no sense; nothing was run.
            WorkloadError: the model, the loss or the loader failed, or the loss is not finite.
            StorageError: a checkpoint or the log cannot be written.
        """
        bounds = Bounds(max_time=max_time, limit_train=limit_train, limit_validate=limit_validate, fast_dev_run=fast_dev_run)
        run = self._updates(train, validate, epochs, steps, bounds)
        while True:
            try:
                next(run)
            except StopIteration as ended:
                summary: Summary = ended.value
                return summary

    @checked_call("Trainer.updates")
    def updates(
        self,
        train: Iterable[Batch],
        validate: Iterable[Batch] | None = None,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        max_time: str | float | None = None,
        limit_train: float | None = None,
        limit_validate: float | None = None,
        fast_dev_run: bool | int = False,
    ) -> Generator[Update, None, Summary]:
        """:meth:`fit` as a generator: each ``next()`` makes one update, with its events, checkpoint and validation.

        A loop that is left by ``break`` or an error ends the run with a checkpoint of the last update, if there is a folder for
        it and the process trains alone.
        """
        bounds = Bounds(max_time=max_time, limit_train=limit_train, limit_validate=limit_validate, fast_dev_run=fast_dev_run)
        return closed_at_exit(self._updates(train, validate, epochs, steps, bounds))

    def _updates(
        self,
        train: Iterable[Batch],
        validate: Iterable[Batch] | None,
        epochs: int | None,
        steps: int | None,
        bounds: Bounds,
    ) -> Generator[Update, None, Summary]:
        if bounds.fast_dev_run:
            epochs, steps = self.context.position.epoch + 1, None
        duration.check_lengths(self.context, epochs, steps)
        refuse_autocast(self.context.device)
        check_loader(train, "train")
        if validate is not None:
            check_loader(validate, "validate")
        consistency.refuse_differences(self.context, validated=validate is not None, epochs=epochs, steps=steps)
        self.context.fit = run = FitState(MemoryPlan(self.context), epochs=epochs)
        saved = checkpoint_policy.disabled(self.context) if bounds.fast_dev_run else checkpoint_policy.locked(self.context)
        with saved, interruptible(self.context), explaining_gpu_asserts():
            last, given, train = self._last, train, self.context.world.share(train, "train")
            run.continues_iterator = (
                isinstance(given, Iterator) and last is not None and last[0] is given and self.context.resuming is None
            )
            train = last[1] if last is not None and run.continues_iterator else train
            validate = None if validate is None else self.context.world.share(validate, "validate")
            validate = validation.checked(self.context, validate)
            with progress.shown(self.context, self.progress):
                self.context.note_once(self.context.modes.find_frozen())
                self.context.modes.train()
                self.context.eval_weights.restore_last(
                    update=self.context.position.update, same=not duration.begin_other_data(self.context, last, given)
                )
                duration.check_epoch(self.context, train)
                bounds.begin(self.context, train, validate)
                run.planned = duration.total_updates(self.context, train, epochs, steps)
                train = auto_settings.decide(self.context, train, run.planned)
                self._last = (given, train)
                with running(self.context.settings), run.memory_plan, self.context.log.open():
                    return (yield from loop.updates(self.context, train, validate, epochs, steps))

    @checked_call("Trainer.resume")
    def resume(self, *, missing_ok: bool = False, override: Mapping[str, Any] | None = None) -> Self:
        """Load the newest intact checkpoint; the next :meth:`fit` continues there.

        Where checkpoint and script differ, the checkpoint wins.

        Args:
            missing_ok: start from the beginning if there is no checkpoint, as in a script that is restarted after failures.
            override: numeric options that replace those of the checkpoint, in all groups of the optimizer, such as
                ``{"lr": 3e-4}``. The learning rates of the schedule change by the same factor.

        Raises:
            UsageError: there is no checkpoint folder, it is of another model or optimizer, or there is no such option.
            StorageError: no checkpoint in the folder is intact.
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
        self.context.eval_weights.modes.train()  # the parameters that it would convert are overwritten next
        setup.restore(self.context, state)
        self.context.note_once(self.context.checkpoints.skipped_note())
        self.context.resuming = state
        self.context.eval_weights.forget()
        return self

    def load_best(self) -> Self:
        """Give the model the weights of the best validation: of this run, or of those in its checkpoint folder.

        The next :meth:`fit` goes on from the weights of the last update all the same.

        Raises:
            UsageError: neither ``keep_best`` nor early stopping has kept any, or they are of another model.
            StorageError: no checkpoint in the folder is intact.
        """
        best_weights.load(self.context)
        return self

    def register(self, **things: Any) -> Self:
        """Have checkpoints hold the state of objects with ``state_dict()`` and ``load_state_dict()``, by name.

        :meth:`resume` gives them their state; an object that is registered after it gets its state at once.

        Raises:
            UsageError: an object lacks a method, its state cannot be saved, or the name is taken by another object.
        """
        registered.register(self.context, things)
        return self

    def predict(self, batches: Iterable[Batch], *, limit: int | None = None, joined: bool = True) -> Any:
        """The model's outputs for ``batches``, in evaluation mode and without gradients, on the CPU.

        Args:
            batches: a loader of inputs, or of pairs of inputs and targets, of which the inputs are taken. Several processes
                each go through all of them.
            limit: most batches.
            joined: whether the outputs are joined along their first axis, those of ``n`` examples into tensors of shape
                ``(n, ...)``; else a list has an item per batch.

        Raises:
            UsageError: ``batches`` is no loader.
            WorkloadError: the model or the loader failed, there is no batch, or the outputs cannot be joined.
        """
        return predict.outputs(self.context, batches, limit=limit, joined=joined)

    def validate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """The loss and metrics of the current model on other data, such as a test set; all processes must call it."""
        return held_out.figures(self.context, batches)


def _callback_runner(trainer: Trainer) -> Callable[[Event], None]:
    """A function that calls the callbacks of ``trainer`` in the first process, without keeping ``trainer`` alive.

    Random generators are restored afterwards: a resumed run may call callbacks at other times, and must stay bit-identical.
    """
    known = weakref.ref(trainer)

    def run(event: Event) -> None:
        found = known()
        assert found is not None, "a run has its Trainer"
        with preserved_random_state() if found.context.callbacks else contextlib.nullcontext():
            consistency.run_callbacks(found.context, found, event)

    return run
