"""The state of a run: made by the Trainer, passed to the modules that drive the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trimtab.core.settings import Settings
from trimtab.train.checkpoint.checkpoints import Checkpoints, Figure
from trimtab.train.early_stopping import EarlyStopping
from trimtab.train.engine.hooks import Hooks
from trimtab.train.loss.adapter import LossAdapter
from trimtab.train.optim.ema import Ema, EvalWeights
from trimtab.train.optim.schedules import Schedule
from trimtab.train.runtime.train_modes import Modes
from trimtab.train.runtime.world import World
from trimtab.train.telemetry.events import Callback, Event, Remarked
from trimtab.train.telemetry.log import Log
from trimtab.train.telemetry.metrics import Metric


@dataclasses.dataclass
class Position:
    """The position of a run between two updates."""

    epoch: int = 0
    batch: int = 0
    """Batches of the epoch that were used, in this process."""
    begun_by: int | None = None
    """Number of processes that began the epoch, if another number continues it."""
    update: int = 0
    stale: int = 0
    """Validations in a row without an improvement."""
    best: float | None = None
    """Best figure of the validations so far."""
    skipped: int = 0
    """Updates that were not applied, because loss or gradient was not finite."""
    due: bool = False
    """Whether the last epoch is complete and its validation is not."""
    validated: int | None = None
    """The number of updates before the last complete validation."""


@dataclasses.dataclass
class FitState:
    """The state of one call of ``fit``; each call has a new one."""

    memory_plan: Any
    """The :class:`~trimtab.train.engine.memory_plan.MemoryPlan` of the call."""
    planned: int | None = None
    """Updates in all at the end of the call, if known."""
    epochs: int | None = None
    """Epochs in all at the end of the call, if ``epochs`` was given."""
    continues_iterator: bool = False
    """Whether this call continues the iterator of the last call; reset when its first epoch begins."""
    state_checked: bool = False
    """Whether the state after the first applied update was checked for values that no checkpoint can hold."""
    stop: str | None = None
    """Why the run ends after the current update, if it does."""
    until: tuple[float, str] | None = None
    """The time limit, in seconds of ``time.monotonic``, and the sentence for the summary when it is reached."""
    limit_train: int | None = None
    """Most batches of this process in an epoch."""
    limit_validate: int | None = None
    """Most batches of this process in a validation."""
    saved_best: int | None = None
    """The update whose checkpoint was written because its validation is among the best."""
    interrupted: bool = False
    """Whether a signal ends the run; it ends a validation too."""
    callbacks_running: bool = False
    """Whether callbacks are running: only the first process runs them, so they must not wait for other processes."""


@dataclasses.dataclass(kw_only=True, eq=False)
class RunContext:
    """The checked arguments of :class:`~trimtab.train.trainer.Trainer`, and the state of its run.

    The next call of ``fit`` continues from it. Only :attr:`fit` is new for each call.
    """

    model: nn.Module
    settings: Settings
    world: World
    device: torch.device
    objective: LossAdapter
    optimizer: Optimizer
    early_stopping: EarlyStopping | None
    schedule: Schedule | LRScheduler | None
    checkpoints: Checkpoints | None
    checkpoint_every: int | None
    validate_every: int | None
    log_every: int
    callbacks: list[Callback]
    metrics: Mapping[str, Metric]
    ema: Ema | None
    modes: Modes
    eval_weights: EvalWeights
    hooks: Hooks
    """Functions of the user that every process calls at fixed points of an update."""
    run_callbacks: Callable[[Event], None]
    """Calls the callbacks of the user with an event."""
    watchers: list[Callable[[RunContext, Event], None]] = dataclasses.field(default_factory=list)
    """trimtab's own callbacks during a run; every process calls its own."""
    position: Position = dataclasses.field(default_factory=Position)
    log: Log = dataclasses.field(default_factory=Log)
    """Values given to :func:`trimtab.train.log` since the last event."""
    notes: list[str] = dataclasses.field(default_factory=list)
    decided: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The values chosen for settings that were ``"auto"``, by name."""
    results: dict[str, float] = dataclasses.field(default_factory=dict)
    """The loss and metrics of the last validation, by name."""
    best_parameters: dict[str, Any] | None = None
    """State dict of the model at the best validation, if early stopping restores it."""
    figure: tuple[int, Figure] | None = None
    """The last validation: its update and its watched metric."""
    registered: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Objects of the user whose state checkpoints hold, by name."""
    epoch_random: dict[str, Any] = dataclasses.field(default_factory=dict)
    resuming: dict[str, Any] | None = None
    """The checkpoint that the next call of ``fit`` resumes."""
    override: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Optimizer options from ``Trainer.resume(override=...)`` that replace those of the checkpoint."""
    options: Any = None
    """The optimizer's options when the run began (:func:`~trimtab.train.checkpoint.resume_conflicts.options_of`)."""
    scheduler: LRScheduler | None = None
    """The scheduler that the last call of ``fit`` made from ``schedule``; the next call continues it."""
    scheduled: int | None = None
    """The number of updates that :attr:`scheduler` was made for."""
    schedule_begun: dict[str, Any] | None = None
    """The state of the scheduler before its first update."""
    step_state: dict[str, Any] | None = None
    """State of the last call's step, such as float16's loss scale."""
    loader_place: dict[str, Any] | None = None
    """Position of a loader with ``state_dict()`` at the end of the last call."""
    fit: FitState = dataclasses.field(init=False)
    """State of the current call of ``fit``, or of the last one."""

    @property
    def watched(self) -> EarlyStopping:
        """The watched metric and its direction: those of early stopping, else the loss."""
        return self.early_stopping or EarlyStopping()

    def figure_of(self, value: float) -> Figure:
        """``value`` as a figure of :attr:`watched`."""
        return Figure(metric=self.watched.metric, value=value, mode=self.watched.mode or "min")

    def stop(self, reason: str) -> None:
        """End the run after the current update; ``reason`` is a sentence for the summary."""
        self.fit.stop = reason

    @property
    def ending(self) -> bool:
        """Whether the run ends after the current update."""
        return self.fit.stop is not None

    def note(self, text: str) -> None:
        """Record a sentence for the summary, and emit it to callbacks."""
        self.notes.append(text)
        self.emit(Remarked(update=self.position.update, epoch=self.position.epoch, text=text))

    def note_once(self, text: str | None) -> None:
        """Record ``text`` in the summary once; ignore ``None`` and repeats."""
        if text is not None and text not in self.notes:
            self.note(text)

    def emit(self, event: Event) -> None:
        """Call the watchers of this process, and in the first process the user's callbacks."""
        for watcher in self.watchers:
            watcher(self, event)
        self.run_callbacks(event)
