"""Counterfactual measurements: a script is run with settings and timed alternately with the script as written."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from trimtab.core.evidence import ProbeRecord
from trimtab.core.measurement import LEAST_GAIN, Interval
from trimtab.core.script_settings import ScriptSettings
from trimtab.errors import MeasurementError
from trimtab.measure.host import other_load
from trimtab.measure.pairs import PROCESS_NOISE, compare
from trimtab.measure.stats import combined
from trimtab.probe.command import Command
from trimtab.probe.line_reuse import with_reuse
from trimtab.probe.loss_runs import Losses, LossRuns, RunFailed
from trimtab.probe.serving import ScriptEnded, ScriptFailed, ServedScript
from trimtab.report.doctor_words import described

TIMING_SHARE = 0.6
"""Share of the budget for timing; the rest is for the comparison of losses."""
LEAST_S, MOST_S = 2.0, 12.0
"""Least and most seconds of one comparison."""
SHORT_SHARE, SHORTEST_S = 0.35, 0.2
"""Time of one comparison for a script that ended while watched: share of the time of its steps, and least seconds."""
MOST_REFINED = 3
"""Settings that are measured twice if the first interval is not sure."""
WIDTH = 0.03
"""An interval that is narrower than this share of the ratio ends a comparison."""
LONG_START_S = 30.0
"""Seconds from a script's start to its first step from which on settings that need new processes come last."""
TRIES, SHORTER = 3, 4
"""Starts per candidate if the script ends before it is timed, and the divisor of the time of the comparison at each."""
TOO_SHORT = "The script ends before enough of its steps can be timed; run it with more steps or epochs."
LEFT_OUT = 0.8
"""Lines are left out if those that can be take at least this share of the time of all of them."""
NO_OVERLAY = "Lines are left out in an overlay only, which is not used or not allowed here."
NO_VALUE = "These lines have no value that could be used again."
OUT_OF_TIME = "There was no time left to measure it; give more with --budget."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The measured effect of settings on a script."""

    settings: ScriptSettings
    gain: Interval | None = None
    """Speed-up of a step: time as written over time with the settings."""
    losses: Losses = "not compared"
    failed: str | None = None
    """Why there is no gain, as a sentence."""
    how: Literal["one process", "fresh processes"] = "one process"
    undecided: bool = False
    """Whether the losses were compared without a decision."""
    one_thread: bool = False
    """Whether both sides computed with one thread, because other processes used the CPUs."""

    @property
    def pays(self) -> bool:
        """Whether the script is surely faster and its losses are equal, or within rounding."""
        return self.gain is not None and self.gain.faster and self.losses in ("equal", "within rounding")

    def combined(self, again: Outcome) -> Outcome:
        """The outcome of two measurements of the same settings: each counts by the width of its interval."""
        if self.gain is None or again.gain is None:
            return self if again.gain is None else again
        losses = self.losses if again.losses == "not compared" else again.losses
        return dataclasses.replace(again, gain=combined(self.gain, again.gain), losses=losses)


OnProgress = Callable[[str], None] | None


def measure(
    command: Command,
    record: ProbeRecord,
    settings: Sequence[ScriptSettings],
    *,
    seconds: float,
    in_place: bool = False,
    on_progress: OnProgress = None,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Measure each of ``settings`` against the script as written, within about ``seconds``. ``on_outcome`` gets each outcome
    as soon as it is known, and again when its losses were compared.

    Settings that can be switched between two steps are timed alternately in one process. Settings that take effect only when
    objects are created get their own processes, after the others unless they come first in ``settings``. Losses are
    compared for settings that may be faster, the fastest first. If the script crashes, the outcome is ``failed`` with its
    last exception, and the remaining settings are still measured.
    """
    measuring = _Measuring(command, record, seconds, in_place, on_progress)
    measuring.on_outcome = on_outcome or measuring.on_outcome
    return measuring.run(settings)


def compare_losses(
    command: Command,
    record: ProbeRecord,
    outcomes: Sequence[Outcome],
    *,
    seconds: float,
    in_place: bool = False,
    on_progress: OnProgress = None,
) -> list[Outcome]:
    """Compare the losses that :func:`measure` had no time for. Returns ``outcomes`` with them."""
    if seconds <= 0 or not any(map(needs_losses, outcomes)):
        return list(outcomes)
    return _Measuring(command, record, seconds, in_place, on_progress).with_all_losses(outcomes)


def confirm(
    command: Command,
    record: ProbeRecord,
    settings: ScriptSettings,
    *,
    seconds: float,
    in_place: bool = False,
    losses: Losses = "not compared",
) -> Outcome:
    """Measure ``settings`` against the script as written in fresh processes, and compare the losses, unless ``losses`` tells
    what an earlier comparison has found."""
    measuring = _Measuring(command, record, seconds, in_place, None)
    known = losses != "not compared"
    timing = min(TIMING_SHARE * seconds, seconds - (0.0 if known else measuring.losses.next_s)) - 2 * record.start_s
    outcome = measuring.time_fresh(settings, max(LEAST_S, timing))
    return dataclasses.replace(outcome, losses=losses) if known else measuring.with_losses(outcome)


def least_confirm_s(command: Command, record: ProbeRecord) -> float:
    """Estimated seconds of :func:`confirm` with the shortest timing."""
    return 2 * record.start_s + LEAST_S + LossRuns(command, record).next_s


class _Measuring:
    """One call of :func:`measure`."""

    def __init__(self, command: Command, record: ProbeRecord, seconds: float, in_place: bool, on_progress: OnProgress) -> None:
        self.command, self.record, self.in_place = command, record, in_place
        self.start, self.seconds = time.monotonic(), seconds
        self.progress = on_progress or (lambda words: None)
        self.on_outcome: Callable[[Outcome], None] = lambda outcome: None
        self.losses = LossRuns(command, record, in_place=in_place)
        found = other_load()
        self.busy = found if found is not None and found.busy else None
        self.one_thread = self.busy is not None and record.threads > 1
        self.baseline = ScriptSettings(threads=1) if self.one_thread else ScriptSettings()
        """Settings of both sides of every comparison."""
        if self.one_thread:
            self.progress(f"busy machine: {self.busy}, so that both sides are timed with one thread")

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.start + self.seconds - time.monotonic()

    def run(self, settings: Sequence[ScriptSettings]) -> list[Outcome]:
        found: dict[int, Outcome] = {}
        fresh = [i for i, each in enumerate(settings) if each.fresh]
        switched = {i: each for i, each in enumerate(settings) if not each.fresh}
        remedies = [i for i, each in switched.items() if each.without is None]
        first = [i for i in fresh if i < min(remedies, default=len(settings))]  # they have the strongest evidence
        if self.record.start_s > LONG_START_S and switched:  # one start screens all that a running process is switched to
            first = []
        self._time_each_fresh(first, settings, found, len(settings), 2 * (len(fresh) - len(first)) + bool(switched))
        copied = self._reusable({i: each for i, each in switched.items() if each.lines}, found)
        groups = [copied, {i: each for i, each in switched.items() if not each.lines}]
        groups = sorted((group for group in groups if group), key=min)  # the one with the strongest evidence is first
        for place, group in enumerate(groups):
            rest, processes = groups[place + 1 :], len(fresh) - len(first)
            self._time_switched(group, found, sum(map(len, rest)) + processes, len(rest) + 2 * processes)
        self._time_each_fresh(fresh[len(first) :], settings, found, len(fresh) - len(first), 0)
        return self.with_all_losses([found[i] for i in range(len(settings))])

    def _reusable(self, settings: dict[int, ScriptSettings], found: dict[int, Outcome]) -> dict[int, ScriptSettings]:
        """``settings`` whose lines can be left out; the others are added to ``found`` as failed."""
        changed = with_reuse(self.command.folder, _all_lines(settings.values()))[1]
        shares = {line.site: line.share for line in self.record.lines}
        possible = dict[int, ScriptSettings]()
        for i, each in settings.items():
            out = changed & set(each.lines)
            enough = sum(shares.get(line, 0.0) for line in out) >= LEFT_OUT * sum(shares.get(line, 0.0) for line in each.lines)
            if self.record.contained != "overlay":
                found[i] = _failed(each, NO_OVERLAY)
            elif not out or not enough:
                found[i] = _failed(each, NO_VALUE)
            else:
                possible[i] = each
        return possible

    def _prepared(self, settings: Iterable[ScriptSettings]) -> ScriptSettings:
        """The baseline of a process in which all of ``settings`` can be switched on."""
        if not (lines := _all_lines(settings)):
            return self.baseline
        return dataclasses.replace(self.baseline, lines=lines, files=with_reuse(self.command.folder, lines)[0])

    def with_all_losses(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Compare the losses of outcomes that may be faster, the fastest first, while time is left."""
        found = list(outcomes)
        for i in sorted(range(len(found)), key=lambda i: -_upper_speedup(found[i])):
            if needs_losses(found[i]) and self.left > self.losses.next_s:
                self.progress(f"comparing the losses: {described(found[i].settings)}")
                found[i] = self.with_losses(found[i])
                self.on_outcome(found[i])
        return found

    def _time_each_fresh(
        self,
        which: Sequence[int],
        settings: Sequence[ScriptSettings],
        found: dict[int, Outcome],
        comparisons: int,
        later_starts: int,
    ) -> None:
        """Time the settings at the indices ``which`` and add them to ``found``; ``comparisons`` are left, these included."""
        for place, i in enumerate(which):
            self.progress(f"in fresh processes: {described(settings[i])}")
            seconds = self._seconds_for(comparisons - place, 2 * (len(which) - place) + later_starts)
            timed = self._has_time(seconds, found, starts=2)
            found[i] = self.time_fresh(settings[i], seconds) if timed else _failed(settings[i], OUT_OF_TIME)
            self.on_outcome(found[i])

    def _seconds_for(self, comparisons: int, starts: int) -> float:
        """Seconds for one comparison, if ``comparisons`` are left that need ``starts`` further starts of the script."""
        spare = self.left - (1 - TIMING_SHARE) * self.seconds - starts * self.record.start_s
        seconds = max(LEAST_S, min(MOST_S, spare / max(1, comparisons)))
        if self.record.finished:  # a script of few steps is started again for each two or three comparisons
            seconds = min(seconds, max(SHORTEST_S, SHORT_SHARE * self.record.run_s.get("steps", seconds)))
        return seconds

    def _has_time(self, seconds: float, found: dict[int, Outcome], starts: int = 1) -> bool:
        """Whether there is time for a further comparison, and for the losses of what was ``found`` to be surely faster."""
        surely = any(one.gain is not None and one.gain.faster and needs_losses(one) for one in found.values())
        return self.left > min(seconds, LEAST_S) + starts * self.record.start_s + (self.losses.next_s if surely else 0.0)

    def _serve(self, settings: ScriptSettings) -> ServedScript:
        return ServedScript(self.command, self.record, settings, seconds=max(60.0, 2 * self.left), in_place=self.in_place)

    # in one process

    def _time_switched(self, settings: dict[int, ScriptSettings], found: dict[int, Outcome], later: int, starts: int) -> None:
        """Time ``settings`` in one process and add them to ``found``; after a crash a new process goes on. ``later``
        comparisons, with ``starts`` of the script, follow afterwards."""
        tries = dict.fromkeys(settings, 0)
        waiting, alone = list(settings), False
        while waiting:
            if not self._has_time(LEAST_S, found):
                found |= {i: _failed(settings[i], OUT_OF_TIME) for i in waiting}
                return
            first, together = waiting[0], waiting[:1] if alone else list(waiting)
            tries[first] += 1
            try:
                with self._serve(self._prepared(settings[i] for i in together)) as script:
                    while waiting and waiting[0] in together and self._has_time(LEAST_S, found, starts=0):
                        i = waiting[0]
                        self.progress(described(settings[i]))
                        seconds = self._seconds_for(len(waiting) + later, starts)
                        found[i] = self._compare_switched(script, settings[i], seconds / SHORTER ** max(0, tries[i] - 1))
                        self.on_outcome(found[i])
                        waiting.pop(0)
                    with contextlib.suppress(ScriptFailed, ScriptEnded, MeasurementError):  # earlier results are kept
                        self._refine(script, {i: found[i] for i in settings if i in found}, found, later, starts)
            except ScriptFailed as error:
                if settings[waiting[0]].lines and len(together) > 1:  # the copy fails, for one line of several
                    alone = True
                    continue
                found[waiting[0]] = _failed(settings[waiting[0]], str(error))
                self.on_outcome(found[waiting[0]])
                waiting.pop(0)
            except ScriptEnded:
                if waiting[0] == first and tries[first] >= TRIES:
                    found[first] = _failed(settings[first], TOO_SHORT)
                    waiting.pop(0)
            except MeasurementError as error:
                found |= {i: _failed(settings[i], str(error)) for i in waiting}
                return

    def _refine(
        self, script: ServedScript, timed: dict[int, Outcome], found: dict[int, Outcome], later: int, starts: int
    ) -> None:
        """Repeat the unclear measurements of ``timed`` that may pay, by upper bound of the speed-up, while time is left."""
        unsure = [i for i, each in timed.items() if each.settings.without is None]
        unsure = [i for i in unsure if (gain := found[i].gain) and gain.value >= 1 + LEAST_GAIN and not gain.faster]
        for n, i in enumerate(sorted(unsure, key=lambda i: -_upper_speedup(found[i]))[:MOST_REFINED]):
            needed = later * LEAST_S + starts * self.record.start_s + LEAST_S
            if self.left < (1 - TIMING_SHARE) * self.seconds + needed:
                return
            self.progress(f"once more: {described(found[i].settings)}")
            again = self._compare_switched(script, found[i].settings, self._seconds_for(len(unsure) - n + later, starts))
            before = found[i].gain
            if again.gain is not None and before is not None and again.gain.width < before.width:
                found[i] = again
                self.on_outcome(again)

    def _compare_switched(self, script: ServedScript, settings: ScriptSettings, seconds: float) -> Outcome:
        if self.busy is not None and settings.threads is not None:
            return _failed(settings, f"Numbers of threads cannot be compared now: {self.busy}.")
        every = _mixed_every(settings, self.record)
        if problem := _too_rare(every, settings, self.record, seconds):
            return _failed(settings, problem)
        with _explain_end(script):
            ratio = compare(
                script.runner(script.settings.merged(settings), every),
                script.runner(script.settings, every),
                width=WIDTH,
                seconds=seconds,
                min_quads=4,
                process_noise=0.0,
                keep_slowed=True,
                pids={os.getpid(), script.process.pid},
            ).ratio
        return Outcome(settings=settings, gain=ratio, how="one process", one_thread=self.one_thread)

    # in fresh processes

    def time_fresh(self, settings: ScriptSettings, seconds: float) -> Outcome:
        """Time ``settings`` in a new process against another new process of the script as written."""
        failed = TOO_SHORT
        for attempt in range(TRIES):
            try:
                gain = self._compare_fresh(settings, seconds / SHORTER**attempt)
                return Outcome(settings=settings, gain=gain, how="fresh processes", one_thread=self.one_thread)
            except ScriptEnded:
                continue
            except (ScriptFailed, MeasurementError) as error:
                failed = str(error)
                break
        return dataclasses.replace(_failed(settings, failed), how="fresh processes")

    def _compare_fresh(self, settings: ScriptSettings, seconds: float) -> Interval:
        given, every = self.baseline.merged(settings), _mixed_every(settings, self.record)
        if problem := _too_rare(every, settings, self.record, seconds):
            raise MeasurementError(problem)
        with self._serve(given) as candidate, self._serve(self.baseline) as written, _explain_end(candidate, written):
            return compare(
                candidate.runner(given, every),
                written.runner(self.baseline, every),
                width=WIDTH,
                seconds=seconds,
                min_quads=4,
                process_noise=PROCESS_NOISE,
                keep_slowed=True,
                pids={os.getpid(), candidate.process.pid, written.process.pid},
            ).ratio

    def with_losses(self, outcome: Outcome) -> Outcome:
        """``outcome`` with its losses compared."""
        if outcome.gain is None:
            return outcome
        try:
            losses = self.losses.compare(outcome.settings)
            return dataclasses.replace(outcome, losses=losses, undecided=losses == "not compared")
        except RunFailed as error:
            return dataclasses.replace(outcome, gain=None, failed=str(error))


def _all_lines(settings: Iterable[ScriptSettings]) -> tuple[str, ...]:
    """The lines that any of ``settings`` leaves out."""
    return tuple(dict.fromkeys(line for each in settings for line in each.lines))


def _mixed_every(settings: ScriptSettings, record: ProbeRecord) -> int:
    """Steps per step whose evaluation or saving ``settings`` change; such steps then count. 0 if there is none."""
    if settings.without == "saving":  # blocks with and without a save would hide how long a save takes
        saves = [call for call in record.calls if call.name == "torch.save" and call.calls]
        return max(1, round(1 / max(saves, key=lambda call: call.ms).calls)) if saves else 1
    changes = settings.no_grad or settings.without == "evaluation"
    return math.ceil(record.evaluation_every) if changes else 0


def _too_rare(every: int, settings: ScriptSettings, record: ProbeRecord, seconds: float) -> str | None:
    """A sentence if four blocks, each from one evaluation or save to the next, take longer than ``seconds``."""
    saving = settings.without == "saving"
    further_s = record.run_s.get("saving" if saving else "evaluation", 0.0) / max(record.steps, 1)
    if every < 2 or 4 * every * (record.step_ms / 1e3 + further_s) <= seconds:
        return None
    has = "saves" if saving else "has an evaluation"
    return f"One of {every} steps {has}, too few to measure it in {seconds:.0f} s; give more with --budget."


@contextlib.contextmanager
def _explain_end(*scripts: ServedScript) -> Iterator[None]:
    """Replace the error of a lost connection by the reason why a script ended."""
    try:
        yield
    except MeasurementError as error:
        found = [script.end_reason(error) for script in scripts]
        ended = [each for each in found if isinstance(each, ScriptEnded)]
        raise (ended or found)[0] from error


def _failed(settings: ScriptSettings, why: str) -> Outcome:
    return Outcome(settings=settings, failed=why, how="fresh processes" if settings.fresh else "one process")


def _upper_speedup(outcome: Outcome) -> float:
    """Upper bound of the speed-up; 0 if the script was not faster."""
    return outcome.gain.high if outcome.gain is not None and outcome.gain.value > 1.0 else 0.0


def needs_losses(outcome: Outcome) -> bool:
    """Whether the losses are still to be compared: the settings may be faster, can be applied, and were not compared."""
    not_compared = outcome.losses == "not compared" and not outcome.undecided
    return _upper_speedup(outcome) > 1.0 and outcome.settings.without is None and not_compared
