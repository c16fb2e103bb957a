"""The result of a check."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from trimtab.core.measurement import Interval, Scalar
from trimtab.core.recipe import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule that applies to a workload, with its evidence and a remedy."""

    rule: str
    level: Literal["note", "warning", "error"]
    message: str
    evidence: Mapping[str, Scalar] = dataclasses.field(default_factory=dict)
    gain: Interval | None = None
    """Measured speed-up of the remedy on this workload; ``None`` if it was not measured."""
    remedy: Recipe | None = None
