"""Options of a study."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Literal, get_args

from trimtab.core.limits import Limits
from trimtab.errors import UsageError
from trimtab.evaluation.evaluate import Objective

WAYS = ("prune", "quantize", "distill", "activations")
"""Ways to compress: fewer channels and units, fewer bits with training, a network of the user's own, ReLU as activation."""
OFF, AUTO = "off", "auto"
SEEDS = 2**32
"""Seeds of samplers are below this number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a study, apart from its workload."""

    objective: Objective = "latency"
    limits: Limits = Limits()
    sampler: Literal["ladder", "tpe"] = "ladder"
    compress: tuple[str, ...] = ()
    """The :data:`WAYS` in which smaller networks are tried, from :func:`parse_ways`; ``("auto",)`` stands for all but
    ``activations``, and whole layers are then removed too."""
    storage: str | None = None
    """URL of a database; ``None`` stands for an SQLite file in the run folder."""
    train_s: float | None = None
    """Seconds that all trainings of smaller networks may take; ``None`` limits each by :attr:`trial_s`."""
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
        if self.compress and self.sampler != "ladder":
            raise UsageError("compress needs the sampler ladder, which times smaller networks before it trains them.")
        if self.train_s is not None and not self.compress:
            raise UsageError(
                "train_budget limits the training of smaller networks, which compress is off for: give compress='auto' "
                "(--compress auto), or leave it out."
            )
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


def parse_ways(text: str) -> tuple[str, ...]:
    """``"prune,distill"`` as the words in it, each once; empty for ``off``.

    Raises:
        UsageError: an unknown word, or ``off`` or ``auto`` beside other words.
    """
    words = tuple(dict.fromkeys(word.strip() for word in str(text).split(",")))
    if words == (OFF,):
        return ()
    if words != (AUTO,) and (unknown := [word for word in words if word not in WAYS]):
        known = ", ".join(WAYS)
        alone = " alone" if unknown[0] in (OFF, AUTO) else ""
        raise UsageError(
            f"compress is {text!r}: {unknown[0]!r} can{'' if alone else 'not'} stand there{alone}. It can be {OFF}, {AUTO}, or "
            f"some of {known} with commas between them."
        )
    return words
