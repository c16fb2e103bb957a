"""The score of a script: 100 less the share of the time that measured remedies save."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterable, Sequence

from trimtab.core.diagnosis import Category, Score, Together, saving, standing
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import ScriptSettings
from trimtab.report.doctor_words import remedy

CATEGORIES: tuple[str, ...] = typing.get_args(Category)
GROWTH = "memory_growth"
"""The check whose finding is scored by memory instead of time."""


def score(record: ProbeRecord, findings: Sequence[Finding], together: Together | None = None) -> Score:
    """The total and one score per category.

    Remedies that pay count with their measured gain; all of them with the gain that was measured together, if it was. Advice
    counts with its measured ceiling. Category ``memory`` is also lowered by the share of the peak that grows without bound.
    """
    pays = [finding for finding in findings if standing(finding) == "pays"]
    joint = _remaining(pays)
    if together is not None and together.gain is not None:
        joint = 1 / together.gain.value if together.gain.faster else min((1 - saving(one) for one in pays), default=1.0)
    advice = _remaining(_ceilings(findings))
    remaining = joint * advice
    categories = {}
    for name in CATEGORIES:
        own = [finding for finding in findings if finding.category == name]
        alone = max(_remaining(f for f in own if standing(f) == "pays"), joint) * _remaining(_ceilings(own))
        categories[name] = _points(alone - (_growth_share(record, own) if name == "memory" else 0.0))
    first = next((finding for finding in findings if finding.level == "error" or saving(finding) > 0), None)
    return Score(
        total=_points(remaining),
        categories=categories,
        saved=round(1 - remaining, 4),
        first=None if first is None else remedy(first),
        unmeasured=sum(map(_is_unmeasured, findings)),
    )


def _ceilings(findings: Iterable[Finding]) -> list[Finding]:
    """Advice with a measured ceiling, one for each thing that is left out: two findings may share a ceiling, or lines."""
    found = [f for f in findings if f.ceiling is not None and standing(f) != "pays" and saving(f) > 0]
    counted, lines = dict[str | None, Finding](), set[str]()
    for finding in sorted(found, key=saving, reverse=True):
        ceiling = finding.ceiling or ScriptSettings()
        if ceiling.lines and not lines & set(ceiling.lines):
            counted[ceiling.lines[0]] = finding
        elif not ceiling.lines:
            counted.setdefault(ceiling.without, finding)
        lines |= set(ceiling.lines)
    return list(counted.values())


def _is_unmeasured(finding: Finding) -> bool:
    """Whether the remedy of ``finding`` may save time, or advice, and it is not known how much."""
    if standing(finding) == "advice":
        costs = finding.ceiling is not None or bool(finding.share)
        return costs and (finding.most is None or finding.most.unclear)
    return standing(finding) == "not measured"


def _remaining(findings: Iterable[Finding]) -> float:
    """Share of the step time that remains with all remedies, if their gains multiply."""
    return math.prod(1 - saving(finding) for finding in findings)


def _growth_share(record: ProbeRecord, findings: Sequence[Finding]) -> float:
    """Share of the peak memory that grew over the measured steps, if a finding says that it grows without bound."""
    memory = record.memory
    if memory is None or memory.peak_mb <= 0 or not any(finding.rule == GROWTH for finding in findings):
        return 0.0
    return min(max(memory.growth_mb, 0.0) * record.steps / memory.peak_mb, 1.0)


def _points(share: float) -> int:
    """Points of a remaining share. 100 is never rounded up to: it means that nothing measured is left to save."""
    return max(0, min(100, math.floor(100 * share + 1e-9 + (0.5 if share < 0.99 else 0.0))))
