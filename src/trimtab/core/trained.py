"""The result of a training by passes, which all recipes that begin with these passes share."""

from __future__ import annotations

import dataclasses
from typing import Literal

from trimtab.core.recipe import Recipe
from trimtab.core.trial import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """The result of one training. Frozen; figures of a training that did not end are those of its last report."""

    recipe: Recipe
    """The passes up to the last one that trains."""
    state: State
    """``COMPLETE``, ``FAILED``, ``STOPPED`` by a limit of time, or ``SKIPPED``."""
    reason: str | None = None
    seconds: float = 0.0
    """Duration of the training, over all runs of the study."""
    pace_s: float | None = None
    """Seconds per update in its last run; ``None`` if it was too short to know."""
    update: int = 0
    """Updates that were made."""
    updates: int = 0
    """Updates that were asked for."""
    examples: int = 0
    labels: str = ""
    """``with labels`` or ``without labels``."""
    before: float | None = None
    """Mean loss on the held-out examples before the training."""
    after: float | None = None
    losses: tuple[tuple[int, float], ...] = ()
    """Curve of the training loss: updates, and the mean loss since the point before."""
    held_out: tuple[tuple[int, float], ...] = ()
    """Curve of the loss on the held-out examples."""
    files: tuple[str, ...] = ()
    """Names of the files with weights."""
    log: str | None = None
    """Path of the log, relative to the run folder."""
    traceback: str | None = None
    ended_by: Literal["time", "memory"] | None = None
    limit: float | None = None
    """Limit that ended it, in seconds or megabytes."""
