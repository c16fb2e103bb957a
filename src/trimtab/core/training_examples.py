"""Examples to train on: calls of the model with their targets, apart from all data that a study judges by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingExamples:
    """Data for passes that train. None of the examples is among the selection or the test data."""

    batches: tuple[tuple[Any, Any], ...]
    """``(inputs, target)`` of each batch. ``inputs`` is a tuple of positional or a dict of keyword arguments of the model;
    ``target`` is ``None`` without labels."""
    held_out: tuple[tuple[Any, Any], ...] = ()
    """Batches that are not trained on. Their loss decides which update is kept."""
    loss: Callable[..., Any] | None = None
    """The user's loss, as :class:`~trimtab.train.trainer.Trainer` takes it; ``None`` without one."""
    examples: int
    """Number of examples in :attr:`batches`."""
    source: str
    """Where the examples come from, for notes: ``training data`` or ``calibration inputs``."""
    digest: str
    """Hash of all inputs and targets. Trained weights are kept under it."""
    cached_only: bool = False
    """Whether a pass may only load weights that the job of the study trained."""
