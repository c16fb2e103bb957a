"""The result of a check."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from trimtab.core.measurement import Interval, Scalar
from trimtab.core.recipe import Recipe
from trimtab.core.script_settings import CodeEdit, ScriptSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule that applies to a workload or a script, with its evidence and a remedy."""

    rule: str
    level: Literal["note", "warning", "error"]
    message: str
    evidence: Mapping[str, Scalar] = dataclasses.field(default_factory=dict)
    gain: Interval | None = None
    """Measured speed-up of the remedy on this workload; ``None`` if it was not measured."""
    remedy: Recipe | None = None
    where: str | None = None
    """The line of the script, such as ``train.py:35``."""
    category: Literal["data", "step", "precision", "memory", "run"] = "step"
    """Part of the score that the finding belongs to."""
    settings: ScriptSettings | None = None
    """The remedy for a script, which ``trimtab tune`` can apply from outside."""
    edit: CodeEdit | None = None
    """The remedy for a script, which its author applies."""
    ceiling: ScriptSettings | None = None
    """Settings with ``without=``, whose measured speed-up is the most that a remedy can bring."""
    most: Interval | None = None
    """Measured speed-up with :attr:`ceiling`."""
    share: float | None = None
    """Share of the time of a step, 0 to 1, that the evidence shows to be lost, before anything is measured: findings
    without a measured gain are sorted by it. ``None`` if only a measurement can tell, as of another precision or layout."""
    losses: Literal["equal", "within rounding", "different", "not compared"] = "not compared"
    """The losses with :attr:`settings` against those of the script as written."""
    unmeasured: str | None = None
    """Why the gain of the remedy of a script is not known, as a clause; ``None`` if it is, or if nothing was to be measured."""
