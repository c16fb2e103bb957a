"""Where a run stands."""

from __future__ import annotations

import dataclasses


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
