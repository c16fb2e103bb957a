"""``trimtab doctor``: watch a script, look for causes, measure what each remedy brings, and score the script."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence

from trimtab.core.diagnosis import Diagnosis, Patch, Together, saving, standing
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.script_settings import ScriptSettings
from trimtab.hardware.environment import Environment, known_peaks
from trimtab.probe import counterfactuals
from trimtab.probe.bound import bound
from trimtab.probe.command import Command
from trimtab.probe.counterfactuals import Outcome
from trimtab.probe.findings import run_checks
from trimtab.probe.observe import observe
from trimtab.probe.patch import edited
from trimtab.probe.score import score
from trimtab.report.doctor_words import described

Said = Callable[[str], None] | None
BUDGET_S = 180.0
WATCHING, SCREENING = 0.4, 0.7
"""Shares of the budget, counted from its begin, after which watching and the measurement of single remedies end."""
WARNING = 0.05
"""A remedy that surely saves this share of a step is a warning."""
STARTS = 2
"""Fresh processes that a comparison needs at least."""


def diagnose(
    command: Command,
    *,
    words: Sequence[str] = (),
    seconds: float = BUDGET_S,
    steps: int = 40,
    in_place: bool = False,
    patch: bool = False,
    on_progress: Said = None,
) -> Diagnosis:
    """Watch ``command`` for ``steps`` steps and measure the remedy of each finding, in at most ``seconds`` altogether.

    ``patch`` makes a :class:`~trimtab.core.diagnosis.Patch` of the complete edits of the findings and measures its gain.

    Raises:
        UsageError: the script cannot be started.
        WorkloadError: the script failed, or made no step that could be seen.
    """
    began = time.monotonic()
    environment = Environment.capture()
    record = observe(command, steps=steps, seconds=WATCHING * seconds, in_place=in_place, on_progress=on_progress)
    _say(on_progress, f"first step after {record.start_s:.1f} s; each fresh process costs that")
    findings = run_checks(record, environment)
    left = SCREENING * seconds - (time.monotonic() - began)
    outcomes, notes = _measured(command, record, findings, left, on_progress)
    findings = sorted((_judged(finding, outcomes) for finding in findings), key=_order)
    left = seconds - (time.monotonic() - began)
    together, note = _together(command, record, findings, left / 2 if patch else left, on_progress)
    notes += [note] if note else []
    made = _patched(command, record, findings, seconds - (time.monotonic() - began), on_progress) if patch else None
    return Diagnosis(
        words=tuple(words) or (command.name,),
        record=record,
        findings=tuple(findings),
        score=score(record, findings, together),
        bound=bound(record, known_peaks(environment)),
        together=together,
        patch=made,
        seconds=round(time.monotonic() - began, 3),
        budget_s=seconds,
        notes=tuple(notes),
    )


def _say(on_progress: Said, sentence: str) -> None:
    if on_progress is not None:
        on_progress(sentence)


def _measured(
    command: Command, record: ProbeRecord, findings: Sequence[Finding], seconds: float, on_progress: Said
) -> tuple[list[Outcome], list[str]]:
    """The outcomes of all remedies and ceilings of ``findings``, each measured once, and notes about what was not measured."""
    found = [one for f in findings for one in (f.settings, f.ceiling) if one is not None and one.changes()]
    wanted = [one for n, one in enumerate(found) if one not in found[:n]]
    if not wanted:
        return [], []
    if seconds < STARTS * record.start_s:
        return [], [
            f"No remedy: {max(seconds, 0):.0f} s of the budget were left after watching, and a start takes "
            f"{record.start_s:.0f} s. Give a larger --budget."
        ]
    _say(on_progress, f"measuring {len(wanted)} remedies and ceilings on the script itself")
    return list(counterfactuals.measure(command, record, wanted, seconds=seconds, on_progress=on_progress)), []


def _judged(finding: Finding, outcomes: Sequence[Outcome]) -> Finding:
    """``finding`` with what was measured, and the level that follows."""
    own = next((one for one in outcomes if one.settings == finding.settings), None) if finding.settings else None
    most = next((one for one in outcomes if one.settings == finding.ceiling), None) if finding.ceiling else None
    changed: dict[str, object] = {"most": most.gain if most is not None else finding.most}
    if own is not None:
        changed |= {"gain": own.gain, "losses": own.losses, "unmeasured": own.failed if own.gain is None else None}
    judged = dataclasses.replace(finding, **changed)  # type: ignore[arg-type]
    if judged.level == "error":
        return judged
    return dataclasses.replace(judged, level="warning" if standing(judged) == "pays" and saving(judged) >= WARNING else "note")


def _order(finding: Finding) -> tuple[bool, float, float]:
    """Errors first, then by what was measured, then by the share of a step that the evidence shows."""
    return finding.level != "error", -saving(finding), -(finding.share or 0.0)


def _together(
    command: Command, record: ProbeRecord, findings: Sequence[Finding], seconds: float, on_progress: Said
) -> tuple[Together | None, str | None]:
    """All remedies that pay, measured together; and a note if they were not."""
    pays = [f for f in findings if standing(f) == "pays" and f.settings is not None]
    if len(pays) < 2:
        return None, None
    settings = ScriptSettings()
    for finding in reversed(pays):
        assert finding.settings is not None
        settings = settings.merged(finding.settings)
    if seconds < STARTS * record.start_s:
        reason = f"All that pays together: {max(seconds, 0):.0f} s of the budget were left. Give a larger --budget."
        return Together(settings=settings, reason=reason), reason
    _say(on_progress, f"measuring all that pays together in fresh processes: {described(settings)}")
    found = counterfactuals.confirm(command, record, settings, seconds=seconds)
    reason = f"All that pays together failed: {found.failed}" if found.failed else None
    return Together(settings=settings, gain=found.gain, losses=found.losses, reason=reason), reason


def _patched(
    command: Command, record: ProbeRecord, findings: Sequence[Finding], seconds: float, on_progress: Said
) -> Patch | None:
    """The patch of the complete edits, and its gain: the patched script in the overlay against the script as written."""
    found, texts = edited(pathlib.Path(command.folder), findings)
    if found is None:
        return None
    if record.contained != "overlay":
        reason = "a patch is measured in an overlay, which this system does not allow here"
        return dataclasses.replace(found, reason=reason)
    if seconds < STARTS * record.start_s:
        return dataclasses.replace(found, reason=f"{max(seconds, 0):.0f} s of the budget were left; give a larger --budget")
    _say(on_progress, f"measuring the patch for {', '.join(found.rules)} in fresh processes")
    settings = ScriptSettings(files={str(path): text for path, text in texts.items()})
    outcome = counterfactuals.confirm(command, record, settings, seconds=seconds)
    return dataclasses.replace(found, gain=outcome.gain, losses=outcome.losses, reason=outcome.failed)
