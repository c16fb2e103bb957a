"""Options of a study."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Literal, get_args

from trimtab.core.workload import Limits
from trimtab.errors import UsageError
from trimtab.evaluation.evaluate import Objective

Compress = Literal["off", "auto", "prune"]
SEEDS = 2**32
"""Seeds of samplers are below this number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a study, apart from its workload."""

    objective: Objective = "latency"
    limits: Limits = Limits()
    sampler: Literal["ladder", "tpe"] = "ladder"
    compress: Compress = "off"
    """Whether smaller networks are tried: ``prune`` removes channels, units and heads, ``auto`` whole layers too."""
    storage: str | None = None
    """URL of a database; ``None`` stands for an SQLite file in the run folder."""
    trial_s: float = 600.0
    """Time limit of one trial, in seconds."""
    timing_s: float = 5.0
    """Longest paired timing of one trial, in seconds."""
    worker_mb: float | None = None
    """Memory limit of one worker, in MB; ``None`` stands for 80% of the memory available at the start."""
    seed: int = 0
    fresh: bool = False
    """Whether to delete a study of that name in the storage first."""

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            known = ", ".join(get_args(Objective))
            raise UsageError(f"objective is {self.objective!r}; it can be {known}.")
        if self.compress != "off" and self.sampler != "ladder":
            raise UsageError("compress needs the sampler ladder, which times smaller networks before it trains them.")
        if not isinstance(self.limits, Limits):
            raise UsageError(f"limits is {self.limits!r}; give trimtab.Limits, such as Limits(max_drop=0.01).")
        if self.limits.throughput is not None and self.objective != "throughput":
            raise UsageError(
                "Limits throughput is a limit on what only the objective throughput measures: give objective='throughput' "
                "(--objective throughput), or limit the latency of one call with latency_ms (--latency)."
            )
        for name, value in (("trial_seconds", self.trial_s), ("timing_seconds", self.timing_s)):
            if not math.isfinite(value):
                raise UsageError(f"{name} is {value}; it must have an end. Give a large number, such as 86400 for a day.")
        if not isinstance(self.seed, numbers.Integral) or not 0 <= self.seed < SEEDS:
            raise UsageError(f"seed is {self.seed!r}; it must be a whole number from 0 to {SEEDS - 1}.")
        if self.storage is not None and not (self.storage and isinstance(self.storage, str)):
            raise UsageError(
                f"storage is {self.storage!r}; give the URL of a database, such as 'sqlite:////data/studies.db', or none."
            )
