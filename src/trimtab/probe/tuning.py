"""Find the settings that make an unmodified script faster and leave its losses as they are."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from trimtab._internal.serialization import from_json, write_json
from trimtab._internal.text import counted
from trimtab.core.evidence import ProbeRecord
from trimtab.core.measurement import LEAST_GAIN, Interval
from trimtab.core.script_settings import ScriptSettings
from trimtab.errors import StorageError
from trimtab.hardware.environment import Environment
from trimtab.probe import configuration
from trimtab.probe.candidates import candidates, left_out
from trimtab.probe.command import Command
from trimtab.probe.configuration import Conditions, Configuration, Evidence
from trimtab.probe.counterfactuals import Outcome, confirm, least_confirm_s, measure
from trimtab.probe.findings import run_checks
from trimtab.probe.loss_runs import LossRuns
from trimtab.probe.observe import observe
from trimtab.probe.script_study import ScriptStudy
from trimtab.report.doctor_words import described

BUDGET_S = 180.0
WATCH_SHARE, CONFIRM_SHARE = 0.4, 0.3
"""Shares of the time for watching the script, at most, and for confirming what pays."""
STEPS = 40
NO_COMPILE = "torch.compile was left out: its seconds of compilation pay off in long runs only. trimtab doctor measures it."
NO_AUTOCAST = "Autocast to {} was left out: losses would differ. trimtab doctor measures it."


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunedScript:
    """The result of :func:`tune_script`; ``str()`` is a report."""

    command: tuple[str, ...]
    """Words of the command line."""
    record: ProbeRecord
    outcomes: tuple[Outcome, ...] = ()
    """The outcome of every candidate, the fastest first."""
    left_out: tuple[str, ...] = ()
    """Sentences about settings that were not tried, and why."""
    kept: ScriptSettings = dataclasses.field(default_factory=ScriptSettings)
    """The settings that pay; the default settings if none do."""
    confirmed: Outcome | None = None
    """All kept settings together against the script as written, in fresh processes."""
    configuration: Configuration | None = None
    """The written configuration; ``None`` if nothing pays."""
    path: pathlib.Path
    folder: pathlib.Path
    """Run folder of the study, which the same command resumes."""
    seconds: float = 0.0
    finished: bool = False
    """Whether all settings were measured and the kept ones confirmed; otherwise the same command resumes."""

    @classmethod
    def read(cls, folder: pathlib.Path) -> TunedScript:
        """Read the result from the run folder of a tune, finished or not.

        Raises:
            StorageError: the file cannot be read.
        """
        path = folder / configuration.TUNED
        try:
            return from_json(cls, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:  # a UsageError is a ValueError
            raise StorageError(f"{path} cannot be read: {error}. The same tune command writes it anew.") from error

    def __str__(self) -> str:
        one = " Busy machine: both sides were timed with one thread." if any(each.one_thread for each in self.outcomes) else ""
        step = f"a step takes {self.record.step_ms:.4g} ms as written ({self.record.anchor} at {self.record.anchor_site}).{one}"
        lines = [step, *(_line(outcome) for outcome in self.outcomes), *self.left_out]
        if not self.finished:
            lines.append("The search is not finished; the same command goes on from here.")
        elif self.configuration is None or self.confirmed is None or self.confirmed.gain is None:
            lines.append("Nothing that can be applied from outside makes this script surely faster; it stays as written.")
        else:
            lines.append(
                f"kept: {described(self.kept)}\ntogether {self.confirmed.gain.times()} in fresh processes, losses "
                f"{self.confirmed.losses}; written to {self.path}"
            )
        return "\n".join(lines)


def tune_script(
    command: Command,
    *,
    budget_s: float = BUDGET_S,
    path: pathlib.Path | None = None,
    folder: pathlib.Path | None = None,
    fresh: bool = False,
    overwrite: bool = False,
    in_place: bool = False,
    settings: Sequence[ScriptSettings] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> TunedScript:
    """Measure the settings that fit a script, keep those that make it surely faster with its losses equal or within rounding,
    confirm them together in fresh processes, and write ``trimtab.toml``.

    Each measurement is stored in the run folder as soon as it is finished. The same call resumes from there, even after the
    process was killed. Once all is measured it writes the result again if the file is missing.

    Args:
        budget_s: about how many seconds the whole takes.
        path: of the file; default ``trimtab.toml`` in the script's folder.
        folder: of the study; default ``runs/NAME-tune``.
        fresh: forget what was measured.
        settings: what to try; default :func:`candidate_settings`.

    Raises:
        UsageError: the file is there and ``overwrite`` is false, or the folder has the study of another script.
        WorkloadError: the script fails as written.
        StorageError: the study cannot be stored.
    """
    path = command.folder / configuration.FILE if path is None else path
    configuration.refuse_existing(path, overwrite)
    progress, start = on_progress or (lambda words: None), time.monotonic()
    with ScriptStudy.opened(command, folder, fresh) as study:
        record = study.record
        if record is None:
            seconds = WATCH_SHARE * budget_s
            record = study.record = observe(command, steps=STEPS, seconds=seconds, in_place=in_place, on_progress=progress)
        found = TunedScript(command=configuration.command_words(command), record=record, path=path, folder=study.folder)
        offered, left = candidate_settings(record, Environment.capture())
        if settings is None:
            found = replace(found, left_out=tuple(left))

        def keep(outcome: Outcome) -> None:
            study.keep(outcome)
            so_far = replace(found, outcomes=tuple(study.outcomes), seconds=time.monotonic() - start)
            write_json(study.folder / configuration.TUNED, so_far)

        wanted = list(offered if settings is None else settings)
        known = [outcome for outcome in study.outcomes if outcome.settings in wanted]
        if known:
            progress(f"{counted(len(known), 'setting')} of {len(wanted)} measured before, in {study.folder}")
        wanted = [one for one in wanted if one not in [outcome.settings for outcome in known]]
        confirming = min(max(CONFIRM_SHARE * budget_s, least_confirm_s(command, record)), 0.5 * budget_s)
        seconds = budget_s - (time.monotonic() - start) - confirming
        if wanted:
            known += measure(command, record, wanted, seconds=seconds, in_place=in_place, on_progress=progress, on_outcome=keep)
        outcomes = sorted(known, key=lambda each: -(each.gain.value if each.gain else 0.0))
        kept, confirmed = ScriptSettings(), None
        for choice in _choices(outcomes):
            confirmed = study.confirmed(choice)
            if confirmed is None:
                progress(f"confirming in fresh processes: {described(choice)}")
                seconds = max(0.5 * CONFIRM_SHARE * budget_s, budget_s - (time.monotonic() - start))
                known_losses = {each.losses for each in outcomes if each.settings == choice} or {"not compared"}
                confirmed = confirm(command, record, choice, seconds=seconds, in_place=in_place, losses=known_losses.pop())
                study.keep_confirmed(choice, confirmed)
            if confirmed.pays:
                kept = choice
                break
            if time.monotonic() - start > budget_s:
                break
    written = None
    if kept.changes() and confirmed is not None and confirmed.gain is not None:
        written = _configuration(command, record, kept, confirmed, confirmed.gain)
        written.write(path, overwrite=overwrite)
    found = replace(found, outcomes=tuple(outcomes), kept=kept, confirmed=confirmed, configuration=written, finished=True)
    found = replace(found, seconds=time.monotonic() - start)
    write_json(found.folder / configuration.TUNED, found)
    return found


def _configuration(
    command: Command, record: ProbeRecord, kept: ScriptSettings, confirmed: Outcome, gain: Interval
) -> Configuration:
    """The configuration for ``trimtab run``: settings, conditions and evidence."""
    return Configuration(
        name=command.name,
        command=configuration.command_words(command),
        files=configuration.fingerprints(command, record.sources),
        settings=kept,
        conditions=Conditions.here(),
        evidence=Evidence(
            speedup=(gain.value, gain.low, gain.high),
            losses=confirmed.losses,
            steps=LossRuns(command, record).steps,
            step_ms=record.step_ms,
            one_thread=confirmed.one_thread,
        ),
    )


def candidate_settings(record: ProbeRecord, environment: Environment) -> tuple[list[ScriptSettings], list[str]]:
    """The remedies of the checks' findings, the clearest first, then :func:`~trimtab.probe.candidates.candidates` that change
    something else; and a sentence for each remedy that is left out, and for each check that failed."""
    findings, failures = run_checks(record, environment)
    given = [finding.settings for finding in findings if finding.settings is not None]
    found, why = list[ScriptSettings](), dict[str, None]()
    for settings in [*given, *candidates(record)]:
        if settings.compile:
            why[NO_COMPILE] = None
        elif settings.autocast is not None:
            why[NO_AUTOCAST.format(settings.autocast)] = None
        elif settings.without is None and settings.changes() and settings not in found:
            found.append(settings)
    found.sort(key=lambda settings: settings.threads is not None)  # a busy machine cannot tell about threads
    return found, [*why, *left_out(record), *failures]


def _choices(outcomes: Sequence[Outcome]) -> list[ScriptSettings]:
    """The settings to confirm, in this order: all that are surely faster, merged; the best alone, in case they do not add up.
    If none is surely faster, all that may be. The confirmation compares losses that were not compared yet."""
    known = [each for each in outcomes if each.settings.without is None and each.losses != "different"]
    paying = [each for each in known if each.gain is not None and each.gain.faster]
    likely = [each for each in known if each.gain is not None and each.gain.value >= 1 + LEAST_GAIN]
    chosen = paying or likely
    merged = ScriptSettings()
    for outcome in chosen:  # the fastest first; of several for one loader, or one field, only that
        changes = outcome.settings.changes()
        sites = set(changes.pop("loaders", {})) & set(merged.loaders)
        if not sites and not changes.keys() & merged.changes().keys():
            merged = merged.merged(outcome.settings)
    alone = [chosen[0].settings] if chosen and chosen[0].settings != merged else []
    return [merged, *alone] if chosen else []


def _line(outcome: Outcome) -> str:
    words = described(outcome.settings)
    if outcome.gain is None:
        return f"  {'-':<26} {words}: {outcome.failed}"
    losses = "" if outcome.losses == "not compared" else f"losses {outcome.losses}"
    verdict = "faster" if outcome.gain.faster else "slower" if outcome.gain.slower else "not sure"
    return f"  {outcome.gain.times():<26} {words:<44} {losses:<23} {verdict}".rstrip()
