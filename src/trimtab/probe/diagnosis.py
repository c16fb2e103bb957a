"""``trimtab doctor``: watch a script, look for causes, measure what each remedy brings, and score the script."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Sequence

from trimtab._internal.text import counted
from trimtab.core.diagnosis import Diagnosis, Patch, Together, saving, standing
from trimtab.core.evidence import ProbeRecord
from trimtab.core.finding import Finding
from trimtab.core.measurement import LEAST_GAIN
from trimtab.core.script_settings import ScriptSettings
from trimtab.hardware.environment import Environment, known_peaks
from trimtab.probe import counterfactuals
from trimtab.probe.bound import bound
from trimtab.probe.command import Command
from trimtab.probe.counterfactuals import OnProgress, Outcome
from trimtab.probe.findings import run_checks
from trimtab.probe.observe import observe
from trimtab.probe.patch import make_patch
from trimtab.probe.score import score
from trimtab.report.doctor_words import described

BUDGET_S = 180.0
WATCHING, SCREENING = 0.4, 0.7
"""Watching, and the measurement of single remedies, end after these shares of the budget."""
WARNING = 0.05
"""A remedy that surely saves this share of a step is a warning."""
LEAST_AGAIN_S = 10.0
"""A measurement is repeated only if this many seconds of timing are left."""
STARTS = 2
"""Starts of the script that a comparison in fresh processes needs."""


def diagnose(
    command: Command,
    *,
    words: Sequence[str] = (),
    seconds: float = BUDGET_S,
    steps: int = 40,
    in_place: bool = False,
    patch: bool = False,
    on_progress: OnProgress = None,
) -> Diagnosis:
    """Watch ``command`` for ``steps`` steps and measure the remedy of each finding, in at most ``seconds`` altogether.

    ``patch`` makes a :class:`~trimtab.core.diagnosis.Patch` of the complete edits of the findings and measures its gain.

    Raises:
        UsageError: the script cannot be started.
        WorkloadError: the script failed, or made no step that could be seen.
    """
    start = time.monotonic()
    environment = Environment.capture()
    record = observe(command, steps=steps, seconds=WATCHING * seconds, in_place=in_place, on_progress=on_progress)
    _report(on_progress, f"first step after {record.start_s:.1f} s; each fresh process costs that")
    found, notes = run_checks(record, environment)
    measurements = _Measurements(command, record, in_place, on_progress)
    left = seconds - (time.monotonic() - start)
    screening = left - (1 - SCREENING) * seconds
    # if the budget allows one comparison only, single remedies get it
    outcomes = measurements.single(found, screening if screening >= STARTS * record.start_s else left)
    pays = [one for one in outcomes if one.gain is not None and one.gain.low > 1 and one.settings.without is None]
    if not pays:  # the time reserved for confirmation goes to the remedies that were not measured, and to what may pay
        outcomes = measurements.decided(found, outcomes, seconds - (time.monotonic() - start))
    # a gain counts once its losses were compared; half of the time is for the measurement of all that pays, or of the patch
    sure = sum(one.pays or (counterfactuals.needs_losses(one) and one.gain is not None and one.gain.faster) for one in outcomes)
    left = (seconds - (time.monotonic() - start)) / (2 if patch or sure > 1 else 1)
    outcomes = counterfactuals.compare_losses(
        command, record, outcomes, seconds=left, in_place=in_place, on_progress=on_progress
    )
    findings = sorted((_with_outcomes(finding, outcomes) for finding in found), key=_order)
    left = seconds - (time.monotonic() - start)
    together = measurements.together(findings, left / 2 if patch else left)
    patched = measurements.patch(findings, seconds - (time.monotonic() - start)) if patch else None
    return Diagnosis(
        words=tuple(words) or (command.name,),
        record=record,
        findings=tuple(findings),
        score=score(record, findings, together),
        bound=bound(record, known_peaks(environment)),
        together=together,
        patch=patched,
        seconds=round(time.monotonic() - start, 3),
        budget_s=seconds,
        notes=(*notes, *measurements.notes),
    )


def _report(on_progress: OnProgress, sentence: str) -> None:
    if on_progress is not None:
        on_progress(sentence)


def _with_outcomes(finding: Finding, outcomes: Sequence[Outcome]) -> Finding:
    """``finding`` with its measured gains, and the level that follows from them."""
    own = next((one for one in outcomes if one.settings == finding.settings), None) if finding.settings else None
    most = next((one for one in outcomes if one.settings == finding.ceiling), None) if finding.ceiling else None
    changed: dict[str, object] = {"most": most.gain if most is not None else finding.most}
    if own is not None:
        changed |= {"gain": own.gain, "losses": own.losses, "unmeasured": _why_unmeasured(own)}
    judged = dataclasses.replace(finding, **changed)  # type: ignore[arg-type]
    if judged.level == "error":
        return judged
    return dataclasses.replace(judged, level="warning" if standing(judged) == "pays" and saving(judged) >= WARNING else "note")


def _why_unmeasured(outcome: Outcome) -> str | None:
    """A clause with the reason if ``outcome`` does not decide whether its settings pay; else ``None``."""
    gain = outcome.gain
    if gain is None:
        return outcome.failed
    if gain.unclear:
        return (
            f"its speed-up is between {gain.bounds(' and ')}: the machine is too busy for the budget, or the script too short"
        )
    if gain.faster and outcome.losses == "not compared":
        return f"{gain.times()}, but the losses were not compared; give a larger --budget"
    return None


def _may_pay(outcome: Outcome) -> bool:
    """Whether the settings of ``outcome`` are faster as measured, and not surely."""
    gain = outcome.gain
    return gain is not None and gain.value >= 1 + LEAST_GAIN and not gain.faster and outcome.settings.without is None


def _order(finding: Finding) -> tuple[bool, float, bool, float]:
    """Sort key: errors first, then by the measured saving of a step, or without a measurement by the share in the evidence;
    remedies that were measured and do not pay are last. Where a measurement is vague, the share in the evidence counts, within
    the interval."""
    worth, found, share = saving(finding), standing(finding), finding.share or 0.0
    measured = finding.gain if found == "pays" else finding.most if found == "advice" else None
    if found == "not measured" or (found == "advice" and (measured is None or measured.unclear)):
        worth = share
    elif measured is not None and measured.vague:
        worth = max(worth, min(share, 1 - 1 / measured.high))
    return finding.level != "error", -worth, found in ("no gain", "other losses"), -share


class _Measurements:
    """The measurements of one diagnosis."""

    def __init__(self, command: Command, record: ProbeRecord, in_place: bool, on_progress: OnProgress) -> None:
        self._command, self._record, self._in_place, self._on_progress = command, record, in_place, on_progress
        self.notes: list[str] = []
        """Sentences about what was not measured, with the reason."""

    def _too_little_time(self, seconds: float) -> str | None:
        """A clause if ``seconds`` are too few for a comparison."""
        if seconds >= STARTS * self._record.start_s:
            return None
        start = f"a start takes {self._record.start_s:.0f} s"
        return f"{max(seconds, 0):.0f} s of the budget were left and {start}; give a larger --budget"

    def single(self, findings: Sequence[Finding], seconds: float) -> list[Outcome]:
        """The outcomes of all remedies and ceilings of ``findings``, each measured once."""
        found = [one for f in findings for one in (f.settings, f.ceiling) if one is not None and one.changes()]
        wanted = [one for n, one in enumerate(found) if one not in found[:n]]
        if not wanted:
            return []
        if shortage := self._too_little_time(seconds):
            return [Outcome(settings=one, failed=shortage) for one in wanted]
        until = time.monotonic() + seconds
        _report(self._on_progress, f"measuring {counted(len(wanted), 'setting')} on the script itself")
        outcomes = counterfactuals.measure(
            self._command, self._record, wanted, seconds=seconds, in_place=self._in_place, on_progress=self._on_progress
        )
        return self._repeat_unclear(outcomes, until)

    def decided(self, findings: Sequence[Finding], outcomes: Sequence[Outcome], seconds: float) -> list[Outcome]:
        """``outcomes`` with the remedies measured that there was no time for, and those measured again that may pay. Two
        measurements are combined."""
        again = [one.settings for one in outcomes if one.failed == counterfactuals.OUT_OF_TIME or _may_pay(one)]
        rest = [dataclasses.replace(finding, ceiling=None) for finding in findings if finding.settings in again]
        for new in self.single(rest, seconds):
            outcomes = [one.combined(new) if one.settings == new.settings else one for one in outcomes]
        return list(outcomes)

    def _repeat_unclear(self, outcomes: list[Outcome], until: float) -> list[Outcome]:
        """Measure unclear outcomes again in fresh processes, the fastest first, while time is left. Returns all outcomes."""
        unclear = [one for one in outcomes if one.gain is not None and one.gain.unclear and one.settings.without is None]
        for one in sorted(unclear, key=lambda one: -one.gain.value if one.gain is not None else 0.0):
            left = until - time.monotonic()
            if left < LEAST_AGAIN_S + STARTS * self._record.start_s:
                break
            _report(self._on_progress, f"measuring once more, in fresh processes: {described(one.settings)}")
            found = self._confirm(one.settings, left)
            outcomes[outcomes.index(one)] = one if found.gain is None else found
        return outcomes

    def together(self, findings: Sequence[Finding], seconds: float) -> Together | None:
        """All remedies that pay, measured together; ``None`` if fewer than two do."""
        pays = [f.settings for f in findings if standing(f) == "pays" and f.settings is not None]
        if len(pays) < 2:
            return None
        settings = ScriptSettings()
        for one in reversed(pays):  # of two that set a field, the one with the larger gain wins
            settings = settings.merged(one)
        if shortage := self._too_little_time(seconds):
            self.notes.append(f"All that pays together: {shortage}.")
            return Together(settings=settings, reason=shortage)
        _report(self._on_progress, f"measuring all that pays together in fresh processes: {described(settings)}")
        found = self._confirm(settings, seconds)
        if found.failed:
            self.notes.append(f"All that pays together: {found.failed}")
        return Together(settings=settings, gain=found.gain, losses=found.losses, reason=found.failed)

    def patch(self, findings: Sequence[Finding], seconds: float) -> Patch | None:
        """The patch of the complete edits, and its gain: the patched script in the overlay against the script as written."""
        found, texts = make_patch(pathlib.Path(self._command.folder), findings)
        if found is None:
            return None
        if self._record.contained != "overlay":
            why = "the gain of a patch is measured in an overlay, which is not used or not allowed here"
            return dataclasses.replace(found, reason=why)
        if shortage := self._too_little_time(seconds):
            return dataclasses.replace(found, reason=shortage)
        _report(self._on_progress, f"measuring the patch for {', '.join(found.rules)} in fresh processes")
        outcome = self._confirm(ScriptSettings(files={str(path): text for path, text in texts.items()}), seconds)
        return dataclasses.replace(found, gain=outcome.gain, losses=outcome.losses, reason=outcome.failed)

    def _confirm(self, settings: ScriptSettings, seconds: float) -> Outcome:
        return counterfactuals.confirm(self._command, self._record, settings, seconds=seconds, in_place=self._in_place)
