"""One recipe, evaluated once."""

from __future__ import annotations

import dataclasses
import enum
from typing import ClassVar, Literal

from trimtab.core.measurement import Comparison, Drop, Interval, Measurement, Parity
from trimtab.core.recipe import Recipe


class State(enum.StrEnum):
    """How a trial ended."""

    COMPLETE = "COMPLETE"
    """Measured to the end. Whether it keeps the limits is another question."""
    SKIPPED = "SKIPPED"
    """Cannot run here, for a reason that was known before it was tried."""
    FAILED = "FAILED"
    """Broke: an exception, a crash, a hang or too much memory. The log is kept."""
    MISMATCH = "MISMATCH"
    """Its outputs are not the model's: NaN, another shape or dtype, or beyond the tolerance of an exact recipe."""
    STOPPED = "STOPPED"
    """Ended early by a rule, because more measuring could not have made it win."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """Frozen when it ends. Figures that were not measured are ``None``."""

    schema: ClassVar[int] = 1

    recipe: Recipe
    state: State
    reason: str | None = None
    """For a state other than COMPLETE, and for a complete trial that misses a limit: a sentence that a person can act on."""
    number: int = 0
    stage: str = ""
    """The stage of the search that asked for it, such as ``lossless`` or ``precision``."""
    speedup: Interval | None = None
    """Against the model as written, in the study's objective; above 1 is better."""
    comparison: Comparison | None = None
    """The timing in turns that ``speedup`` comes from."""
    latency_ms: Measurement | None = None
    """Of one call on the example; in training, of one update."""
    throughput: Measurement | None = None
    """Examples per second, where that is the objective, and in training."""
    score: float | None = None
    """On the data that the search sees; in training, the loss that it ends with."""
    drop: Drop | None = None
    """Of the score, against the original's on the same data; in training, how much higher the loss ends up."""
    parity: Parity | None = None
    """How far the outputs are from the original's; in training, the losses from those as written."""
    size_mb: float | None = None
    """Of the runtime's files, in MB (10**6 bytes); ``None`` where it has no form that stands alone, and in training."""
    peak_mb: float | None = None
    """Peak memory, in MB (10**6 bytes), of a fresh process that loads the files and calls them, above what it has with torch
    imported; in training, what the updates need above that."""
    cold_s: float | None = None
    """Seconds until the first answer of a fresh process that loads the files, imports aside; in training, the first update."""
    seconds: float = 0.0
    """What the trial took in all."""
    dims: tuple[str, ...] = ()
    """The dynamic dimensions that it kept."""
    notes: tuple[str, ...] = ()
    log: str | None = None
    """Path of the kept log, relative to the run folder."""
    traceback: str | None = None
    ended_by: Literal["time", "memory"] | None = None
    """The limit of a worker that ended it, if one did: with more of that it deserves another try."""
    limit: float | None = None
    """How much that was, in seconds or megabytes."""
