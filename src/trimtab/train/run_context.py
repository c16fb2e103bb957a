"""What a run knows and changes as it goes: made by the Trainer, given to what drives the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trimtab.core.settings import Settings
from trimtab.train.checkpoint.checkpoints import Checkpoints
from trimtab.train.early_stopping import EarlyStopping
from trimtab.train.loss.adapter import LossAdapter
from trimtab.train.optim.ema import Ema, EvalWeights
from trimtab.train.optim.schedules import Schedule
from trimtab.train.runtime.train_modes import Modes
from trimtab.train.runtime.world import World
from trimtab.train.telemetry.events import Callback, Event, Remarked
from trimtab.train.telemetry.metrics import Metric


@dataclasses.dataclass
class Position:
    """Where a run stands: between two updates."""

    epoch: int = 0
    batch: int = 0
    """Batches of the epoch that were used."""
    begun_by: int | None = None
    """How many processes have begun the epoch, where others go on with it."""
    update: int = 0
    stale: int = 0
    """Validations in a row without an improvement."""
    best: float | None = None
    skipped: int = 0
    due: bool = False
    """Whether the last epoch has come to its end, and its validation has not."""


@dataclasses.dataclass
class FitState:
    """What belongs to one call of ``fit`` alone: the next one has another, of which nothing is known."""

    memory_plan: Any
    """The :class:`~trimtab.train.engine.memory_plan.MemoryPlan` of the call."""
    planned: int | None = None
    """How many updates there will be when it has ended, where that is known."""
    goes_on: bool = False
    """Whether it has the very iterator that the last one had begun, until its first epoch has."""
    kept: bool = False
    """Whether what an update of it has made was looked at: a checkpoint may not be able to hold it."""
    stop: str | None = None
    """Why it ends after the update that is under way, if it does."""
    interrupted: bool = False
    """Whether a signal ends it, which cuts off a validation too."""
    calling: bool = False
    """Whether callbacks are being called, of which other processes know nothing."""


@dataclasses.dataclass(kw_only=True, eq=False)
class RunContext:
    """What a run is made of and what it has come to; the arguments of :class:`~trimtab.train.trainer.Trainer`, checked.

    It outlives a call of ``fit``: the next one goes on from it. Only :attr:`fit` is made anew for each.
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
    log_every: int
    callbacks: list[Callback]
    metrics: Mapping[str, Metric]
    ema: Ema | None
    modes: Modes
    shown: EvalWeights
    tell: Callable[[Event], None]
    """Calls the callbacks of the user with an event."""
    watchers: list[Callable[[RunContext, Event], None]] = dataclasses.field(default_factory=list)
    """Our own callbacks while a run lasts; every process calls its own."""
    position: Position = dataclasses.field(default_factory=Position)
    notes: list[str] = dataclasses.field(default_factory=list)
    decided: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What became of the settings that were ``"auto"``."""
    results: dict[str, float] = dataclasses.field(default_factory=dict)
    """The figures of the last validation."""
    best_parameters: dict[str, Any] | None = None
    """Of the best validation, where early stopping puts them back."""
    epoch_random: dict[str, Any] = dataclasses.field(default_factory=dict)
    resuming: dict[str, Any] | None = None
    """The checkpoint that the next run goes on from."""
    override: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What :meth:`~trimtab.train.trainer.Trainer.resume` was told to have another way than the checkpoint."""
    options: Any = None
    """Of the optimizer when the run began (:func:`~trimtab.train.checkpoint.resume_conflicts.options_of`); ``None`` until it
    has."""
    scheduler: LRScheduler | None = None
    """What was made of ``schedule`` for the last run; the next one goes on from it."""
    scheduled: tuple[Any, int] | None = None
    """The function that it was made by, and for how many updates."""
    step_state: dict[str, Any] | None = None
    """Of the last run's step, such as float16's scale, which the next one need not find again."""
    loader_place: dict[str, Any] | None = None
    """Where a loader with ``state_dict()`` stood when the last run ended."""
    fit: FitState = dataclasses.field(init=False)
    """What belongs to the call of ``fit`` under way alone; of the last one where none is."""

    def stop(self, reason: str) -> None:
        """End the run after the update that is under way."""
        self.fit.stop = reason

    @property
    def ending(self) -> bool:
        """Whether the run ends after the update that is under way."""
        return self.fit.stop is not None

    def note(self, text: str) -> None:
        """Record a sentence for the summary, and tell the callbacks of it now."""
        self.notes.append(text)
        self.emit(Remarked(update=self.position.update, epoch=self.position.epoch, text=text))

    def note_once(self, text: str | None) -> None:
        """Record ``text`` once; ``None`` and repeats are ignored."""
        if text is not None and text not in self.notes:
            self.note(text)

    def emit(self, event: Event) -> None:
        """Tell the watchers of every process, and the user's callbacks in the first one."""
        for watcher in self.watchers:
            watcher(self, event)
        self.tell(event)
