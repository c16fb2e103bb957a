"""What belongs to one run alone."""

from __future__ import annotations

import dataclasses

from trimtab.train.engine.out_of_memory import MemoryPlan


@dataclasses.dataclass
class Run:
    """What belongs to one call of ``fit`` alone: the next one has another, of which nothing is known."""

    room: MemoryPlan
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
