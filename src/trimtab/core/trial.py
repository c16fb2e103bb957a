"""A trial: one recipe and its measured results."""

from __future__ import annotations

import dataclasses
import enum
from typing import ClassVar, Literal

from trimtab.core.measurement import Comparison, Drop, Interval, Measurement, Parity
from trimtab.core.network import Network
from trimtab.core.recipe import Recipe


class State(enum.StrEnum):
    """The outcome of a trial."""

    COMPLETE = "COMPLETE"
    """Measured completely. It may still miss a limit."""
    SKIPPED = "SKIPPED"
    """Not tried, because it cannot run on this machine or model, or for lack of time."""
    FAILED = "FAILED"
    """Ended by an exception, a crash, a time-out or too much memory. The log is kept."""
    MISMATCH = "MISMATCH"
    """The outputs are wrong: NaN, another shape or dtype, or beyond the tolerance of an exact recipe."""
    STOPPED = "STOPPED"
    """Ended early, because it could no longer win, or other trials needed the time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of one recipe. Frozen; values that were not measured are ``None``."""

    schema: ClassVar[int] = 1

    recipe: Recipe
    state: State
    reason: str | None = None
    """Why the state is not COMPLETE, or which limit a complete trial misses: a sentence with a remedy."""
    number: int = 0
    stage: str = ""
    """The stage of the search, such as ``lossless`` or ``precision``."""
    speedup: Interval | None = None
    """Speed-up against the baseline in the study's objective; above 1 is faster."""
    comparison: Comparison | None = None
    """The timing against the baseline that gives ``speedup``."""
    latency_ms: Measurement | None = None
    """Latency of one call on the example; in training, of one update."""
    throughput: Measurement | None = None
    """Examples per second; measured in training, or if it is the objective."""
    score: float | None = None
    """Score on the data of the search; in training, the final loss."""
    drop: Drop | None = None
    """Loss of score against the baseline on the same data; in training, the increase of the final loss."""
    parity: Parity | None = None
    """Errors of the outputs against the baseline's; in training, of the losses."""
    size_mb: float | None = None
    """Size of the runtime's files in MB (10**6 bytes); ``None`` if it cannot be saved, and in training."""
    peak_mb: float | None = None
    """Peak memory in MB (10**6 bytes) of a fresh process that loads and calls the model, above its memory after importing
    torch; in training, of the updates."""
    cold_s: float | None = None
    """Seconds from start to first result in a fresh process, without imports; in training, to the end of the first update."""
    network: Network | None = None
    """Layers of the compressed network; ``None`` if the recipe does not compress."""
    sensitivity: tuple[tuple[str, float], ...] = ()
    """Layers of the model as written, each with the mean squared change of the outputs when it alone is rounded to 8 bits,
    relative to their variance; most sensitive first. Empty if it was not measured."""
    seconds: float = 0.0
    """Duration of the whole trial."""
    dims: tuple[str, ...] = ()
    """Dynamic dimensions that the executable supports."""
    notes: tuple[str, ...] = ()
    log: str | None = None
    """Path of the log, relative to the run folder."""
    traceback: str | None = None
    ended_by: Literal["time", "memory"] | None = None
    """The worker limit that ended the trial, if any. The trial may succeed with a higher limit."""
    limit: float | None = None
    """Value of that limit, in seconds or megabytes."""
