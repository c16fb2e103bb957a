"""The result of ``trimtab doctor``: what was seen, what was measured, and the score."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from trimtab._internal.serialization import fields_from_json, fields_to_json
from trimtab._internal.text import counted
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.measurement import Interval
from trimtab.core.script_settings import ScriptSettings

Category = Literal["data", "step", "precision", "memory", "run"]
Standing = Literal["pays", "no gain", "other losses", "advice", "not measured"]
"""``pays``: the remedy was measured as surely faster and the losses stayed. ``other losses``: faster, but the losses differ.
``advice``: only the script's author can apply it. ``not measured``: it could be, but was not; or its interval is too wide to
tell anything; or the losses were not compared."""
LOSSES_STAY = ("equal", "within rounding")


def standing(finding: Finding) -> Standing:
    """Classify the remedy of ``finding`` by its measurement."""
    if finding.settings is None or not finding.settings.changes():
        return "advice"
    if finding.gain is None or finding.gain.unclear:
        return "not measured"
    if not finding.gain.faster:
        return "no gain"
    if finding.losses == "not compared":
        return "not measured"
    return "pays" if finding.losses in LOSSES_STAY else "other losses"


def saving(finding: Finding) -> float:
    """Share of the time of a step, 0 to 1, that the remedy saves; for advice the measured maximum. Of a vague gain the lower
    bound counts."""
    found = {"pays": finding.gain, "advice": finding.most}.get(standing(finding))
    return 1 - 1 / (found.low if found.vague else found.value) if found is not None and found.faster else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """100 less the share of the time, or of the peak memory, that the measured remedies save."""

    total: int
    """0 to 100; of the time of a step."""
    categories: Mapping[str, int]
    """``data``, ``step``, ``precision``, ``memory``, ``run`` -> 0 to 100."""
    saved: float
    """Share of the time of a step that could be saved, 0 to 1."""
    first: str | None = None
    """What to do first; ``None`` if nothing measured is left to do."""
    unmeasured: int = 0
    """Findings whose remedy or ceiling was not measured, which cost no points."""

    @property
    def sentence(self) -> str:
        """``91 of 100: 9% of the step could be saved``. Below 90 the first thing to do follows."""
        rest = f"; {counted(self.unmeasured, 'finding')} could not be measured" if self.unmeasured else ""
        if self.total > 99:
            return f"{self.total} of 100: nothing that was measured is left to gain{rest}"
        head = f"{self.total} of 100: {self.saved:.0%} of the step could be saved{rest}"
        return f"{head}. First: {self.first}" if self.total < 90 and self.first else head


@dataclasses.dataclass(frozen=True, kw_only=True)
class Together:
    """All remedies that pay, measured together against the script as written, in fresh processes."""

    settings: ScriptSettings
    gain: Interval | None = None
    losses: Literal["equal", "within rounding", "different", "not compared"] = "not compared"
    reason: str | None = None
    """Why the gain is unknown, as a sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patch:
    """The edits of findings as a unified diff of the script."""

    text: str
    rules: tuple[str, ...] = ()
    """The checks whose edits the patch has."""
    left_out: tuple[str, ...] = ()
    """Edits that the patch lacks, with the reason."""
    gain: Interval | None = None
    """Measured speed-up of the patched script."""
    losses: Literal["equal", "within rounding", "different", "not compared"] = "not compared"
    reason: str | None = None
    """Why the gain is unknown, as a sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """The resource that limits the speed of a step."""

    kind: Literal["data", "CPU", "memory bandwidth", "compute", "Python", "communication", "not known"]
    sentence: str
    share: float | None = None
    """Share of what the roofline of this machine allows, 0 to 1; ``None`` if the operations or the peaks are not known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of :func:`trimtab.doctor`: where the time of a script goes, and what each remedy brings on it."""

    schema: ClassVar[int] = 1

    words: tuple[str, ...]
    """Arguments of ``trimtab doctor`` on the command line, without options."""
    record: ProbeRecord
    findings: tuple[Finding, ...]
    """Errors first, then by measured gain, then by the most that advice can bring."""
    score: Score
    bound: Bound
    together: Together | None = None
    """``None`` if fewer than two remedies pay."""
    patch: Patch | None = None
    """``None`` if none was asked for."""
    files: tuple[str, ...] = ()
    """Files that were written: report, JSON, traces, patch."""
    seconds: float = 0.0
    """Duration of the diagnosis."""
    budget_s: float = 0.0
    notes: tuple[str, ...] = ()
    """What was not measured, and why, as sentences."""

    @property
    def settings(self) -> ScriptSettings:
        """All remedies that pay. ``trimtab tune`` searches further and writes them for ``trimtab run``."""
        found = ScriptSettings()
        for finding in reversed(self.findings):  # the remedy with the highest gain wins where two set a field
            if finding.settings is not None and standing(finding) == "pays":
                found = found.merged(finding.settings)
        return found

    def __repr__(self) -> str:
        found = self.record
        return f"Diagnosis({' '.join(self.words)!r}, {found.step_ms:.3g} ms a step, score {self.score.sentence})"

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as a JSON object."""
        return fields_to_json(self)

    @classmethod
    def from_json(cls, data: Any) -> Diagnosis:
        """The inverse of :meth:`to_json`.

        Raises:
            UsageError: fields are missing, unknown or of a wrong type, or the schema version differs.
        """
        return fields_from_json(cls, data)
