"""What a check found."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from trimtab.core.measurement import Interval, Scalar
from trimtab.core.recipe import Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A datum, not prose: a rule that holds here, the evidence for it, and what to do about it."""

    rule: str
    level: Literal["note", "warning", "error"]
    message: str
    evidence: Mapping[str, Scalar] = dataclasses.field(default_factory=dict)
    gain: Interval | None = None
    """Measured speed-up of the remedy on this very subject; ``None`` where it was not measured."""
    remedy: Recipe | None = None
