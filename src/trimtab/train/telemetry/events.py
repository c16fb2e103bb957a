"""Events of a run, which callbacks, the log and the progress line get; two callbacks that write them."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trimtab._internal.files import path_of
from trimtab._internal.serialization import to_json
from trimtab._internal.text import of_type
from trimtab._internal.validation import refuses
from trimtab.core.technique import require
from trimtab.errors import StorageError, UsageError

if TYPE_CHECKING:
    from trimtab.train.telemetry.summary import Summary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened after ``update`` updates, in epoch ``epoch`` (counted from 0)."""

    update: int
    epoch: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progressed(Event):
    """Updates were made; ``loss`` is their mean loss since the last event of this kind."""

    updates: int | None
    """Updates of the whole run, if known."""
    loss: float
    norm: float
    """Gradient norm of the latest update for which it was computed: one in ``log_every``, or all if gradients are clipped."""
    rate: float
    """Learning rate of the first parameter group; NaN for optimizers without one."""
    examples_per_s: float
    step_ms: float
    """Milliseconds per update, including all work between updates."""
    skipped: int
    """Updates left out because the loss or a gradient was not finite."""
    shares: Mapping[str, float]
    """Share of the time by phase; together 1."""
    median_ms: float | None = None
    """Median milliseconds of an update: the host's time from one update to the next, without validations."""
    spread_ms: float | None = None
    """Standard deviation of an update's milliseconds."""
    p95_ms: float | None = None
    """95th percentile of the milliseconds of these updates; ``None`` for fewer than 20."""
    loss_spread: float | None = None
    """Standard deviation of the loss over these updates."""
    loss_p95: float | None = None
    """95th percentile of the loss over these updates; ``None`` for fewer than 20."""
    resident_mb: float | None = None
    """Resident memory of the process now, in MB (10**6 bytes)."""
    allocated_mb: float | None = None
    """Memory of the GPU that tensors take now."""
    reserved_mb: float | None = None
    """Memory of the GPU that torch's allocator holds now."""
    logged: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Means of the values given to :func:`trimtab.train.log` since the last event of this kind, by name."""
    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """With several optimizers: the learning rate of the first parameter group of each, by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Validated(Event):
    """A validation has ended."""

    metrics: Mapping[str, float]
    best: bool
    logged: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Means of the values given to :func:`trimtab.train.log` in the validation, by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochStarted(Event):
    """An epoch begins; a run that goes on in the middle of one has no such event."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochEnded(Event):
    """An epoch is complete; its validation has not begun. ``epoch`` is the one that ended, counted from 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved(Event):
    """A checkpoint was written."""

    path: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adjusted(Event):
    """A change of a setting during the run was kept or undone; ``before`` and ``after`` are in ``unit``."""

    what: str
    before: float
    after: float
    unit: str
    kept: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remarked(Event):
    """A sentence for the user, which the summary has too."""

    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended(Event):
    """The run ended without an error."""

    summary: Summary


Callback = Callable[[Any, Event], None]
"""Called as ``callback(trainer, event)``; ``trainer.stop(reason)`` ends the run after this update."""


def checked(callbacks: Sequence[Callback]) -> list[Callback]:
    """``callbacks`` as a list, after a check that each can be called with a trainer and an event.

    Raises:
        UsageError: they are no sequence, or one of them cannot be called like that.
    """
    fix = "A callback is called as callback(trainer, event): callbacks=[lambda trainer, event: print(event)]."
    if not isinstance(callbacks, Sequence):
        raise UsageError(f"callbacks is {_name(callbacks)}, and no list. {fix}")
    for callback in callbacks:
        if not callable(callback):
            raise UsageError(f"callbacks holds {_name(callback)}, {of_type(callback)}, which cannot be called. {fix}")
        if error := refuses(callback, None, None):
            raise UsageError(f"callbacks holds {_name(callback)}, which cannot be called with (trainer, event): {error}. {fix}")
    return list(callbacks)


def _name(callback: Any) -> str:
    return getattr(callback, "__name__", None) or repr(callback)


class JsonLines:
    """A callback that appends every event to a file as a line of JSON."""

    def __init__(self, path: str | pathlib.Path) -> None:
        self.path = path_of(path, "path", "runs/events.jsonl")

    def __call__(self, trainer: Any, event: Event) -> None:
        """Append ``event``."""
        line = json.dumps({"event": type(event).__name__.lower(), **to_json(event)})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                whole, data = file.tell(), f"{line}\n".encode()
                if file.write(data) < len(data):  # the disk is full: half a line would make the file unreadable
                    file.truncate(whole)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise StorageError(
                f"The log {self.path} cannot be written: {error.strerror}. Make room, or give another "
                "file; the last checkpoint is whole."
            ) from error


_LOSS = ("loss_spread", "loss_p95")
_TIMES = ("median_ms", "spread_ms", "p95_ms")
_MEMORY = ("resident_mb", "allocated_mb", "reserved_mb")


class TensorBoard:
    """A callback that writes loss, rate, speed and validation metrics for TensorBoard (``pip install tensorboard``)."""

    def __init__(self, folder: str | pathlib.Path) -> None:
        place = path_of(folder, "folder", "runs/events")
        require("tensorboard")
        self._writer: Any = require("torch.utils.tensorboard").SummaryWriter(str(place))

    def __call__(self, trainer: Any, event: Event) -> None:
        """Write the values of ``event``."""
        for name, value in figures_of(event).items():
            self._writer.add_scalar(name, value, event.update)
        if isinstance(event, (Validated, Ended)):
            self._writer.flush()


def figures_of(event: Event) -> dict[str, float]:
    """The figures of ``event`` by name, such as ``train/loss``, for tools that draw curves; empty if it has none."""
    if isinstance(event, Progressed):
        figures = {"train/loss": event.loss, "train/norm": event.norm, "train/rate": event.rate}
        figures |= {f"train/rates/{name}": value for name, value in event.rates.items()}
        figures |= {f"train/{name}": value for name, value in event.logged.items()}
        figures |= {"speed/examples_per_s": event.examples_per_s}
        for room, names in (("train", _LOSS), ("speed", _TIMES), ("memory", _MEMORY)):
            figures |= {f"{room}/{name}": value for name in names if (value := getattr(event, name)) is not None}
        return figures | {f"time/{phase}": share for phase, share in event.shares.items()}
    if isinstance(event, Validated):
        return {f"validate/{name}": value for name, value in {**event.logged, **event.metrics}.items()}
    return {}
