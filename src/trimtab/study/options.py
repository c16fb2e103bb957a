"""How a study goes about its work."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from trimtab.errors import UsageError
from trimtab.evaluate import Objective
from trimtab.workload import Limits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a study goes about its work, apart from what it is about."""

    objective: Objective = "latency"
    limits: Limits = Limits()
    sampler: Literal["ladder", "tpe"] = "ladder"
    storage: str | None = None
    """URL of a database; ``None`` is an SQLite file in the run folder."""
    trial_s: float = 600.0
    """Time limit of one trial."""
    timing_s: float = 5.0
    """Most time for the paired timing of one trial."""
    worker_mb: float | None = None
    """Memory limit of one worker; ``None`` is 80% of what is available when the study starts."""
    seed: int = 0
    fresh: bool = False
    """Whether a study of that name in the storage is forgotten first."""

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            known = ", ".join(get_args(Objective))
            raise UsageError(f"objective is {self.objective!r}; it can be {known}.")
        if not isinstance(self.limits, Limits):
            raise UsageError(f"limits is {self.limits!r}; give trimtab.Limits, such as Limits(max_drop=0.01).")
