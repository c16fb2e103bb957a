"""The end of a study: confirm the winner or ship the original, and explain the result."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trimtab._internal.files import delete
from trimtab._internal.serialization import dumps, from_json
from trimtab.core.trial import State, Trial
from trimtab.errors import StorageError, UsageError, WorkloadError
from trimtab.evaluation.evaluate import Objective
from trimtab.evaluation.explain import Explanation
from trimtab.execution.baseline_servers import BaselineServers
from trimtab.execution.trial_runner import RIVALS
from trimtab.hardware.peaks import Peaks
from trimtab.study import conclusions, ranking
from trimtab.study.confirmation import confirm
from trimtab.study.result import ARTIFACT, Best
from trimtab.study.runoff import run_off
from trimtab.study.samplers.ladder import as_written
from trimtab.study.study import Study

NEAR = 1.2
"""An original that misses a limit by less than this factor is measured again: the search measured it only once."""
EXPLAIN = "explain"

Answer = tuple[ranking.Status, str, Best | None]


def ahead(study: Study, remeasured: Mapping[str, Trial] | None = None) -> list[Trial]:
    """The trials, except the model as written, that keep the limits and seem to beat the tuned original, best first.

    Args:
        remeasured: trials with newer measurements, by the hash of their recipe.
    """
    options, latest = study.options, remeasured or {}
    trials = [latest.get(trial.recipe.hash, trial) for trial in study.trials]
    eager = study.to_beat
    if eager is None:
        return []
    eager = latest.get(eager.recipe.hash, eager)
    found = ranking.ahead(trials, options.limits, options.objective, eager)
    others = [trial for trial in found if trial.recipe != study.baseline]
    if not ranking.feasible(eager, options.limits):  # an original that misses a limit cannot ship
        return others
    known = [trial for trial in trials if ranking.value(trial, options.objective) is not None]
    written = [t for t in known if t.recipe == study.baseline and ranking.feasible(t, options.limits)]
    return [trial for trial in others if all(worth_confirming(trial, each, options.objective) for each in (eager, *written))]


def finish(study: Study, *, until: float | None = None, end: float | None = None) -> Answer:
    """Confirm the winner or the next best, or ship the original.

    Args:
        until: latest end of the runoff, of ``time.monotonic``.
        end: latest end of the starts before the confirmation, of ``time.monotonic``.
    """
    eager = study.to_beat
    if eager is None and study.interrupted():
        raise KeyboardInterrupt
    if eager is None and not study.trials:
        raise UsageError("No trial was finished, not even of the model as written. Run it again with a longer --budget.")
    if eager is None:
        raise WorkloadError(no_baseline(study))
    with study.runner.servers(RIVALS) as rivals:
        status, sentence, best = _FinalSelection(study, eager, rivals, end).answer(until)
    if best is not None:
        study.notes += conclusions.baseline_spread(study, best.confirmation.comparison)
    return status, sentence, best


class _FinalSelection:
    """The final selection of one study, with the measurements made for it."""

    def __init__(self, study: Study, eager: Trial, rivals: BaselineServers, end: float | None) -> None:
        self.study, self.eager, self.rivals, self.end = study, eager, rivals, end
        self.limits, self.objective = study.options.limits, study.options.objective
        self.found: dict[str, Best] = {}
        self.remeasured: dict[str, Trial] = {}
        """Trials with the figures of their confirmation, by the hash of their recipe."""

    def answer(self, until: float | None) -> Answer:
        """Confirm the winner or the next best, or ship the original; a runoff ends by ``until``."""
        study, must_win = self.study, self.original_within_limits()
        if not must_win and not ranking.ranked(self.known(), self.limits, self.objective):
            return "limits_not_met", self.unmet(), None
        tried = ranking.to_confirm(run_off(study, ahead(study, self.remeasured), until=until))
        study.report_load_change()
        winner = "confirming the winner in fresh processes, on the test data"
        study.progress.stage(winner if tried else "nothing seems faster: writing the original as an artifact")
        found, lost = self.first_confirmed(tried, must_win=must_win)
        if found is not None:
            return "improved", conclusions.improved(study, found, lost, self.latest(self.eager)), found
        surely = [ranking.surely_ahead(trial, self.eager, self.objective) for trial in tried]
        lead_ins = ("It seemed faster in the search", "It won the search")
        study.notes += [f"{lead_ins[won]} but was not confirmed: {line}" for won, line in zip(surely, lost, strict=True)]
        if not must_win:
            return "limits_not_met", self.unmet(), None
        kept = self.found.get(self.eager.recipe.hash) or self.measure(self.eager, must_win=False)
        best = self.fastest(kept)
        if best.confirmation.ok:
            return "kept_original", conclusions.kept_original(study, self.eager, kept, best, lost), best
        if not ranking.misses(self.latest(best.trial), self.limits):
            words = f"Nothing better was confirmed, and the original cannot ship: {best.confirmation.reason}"
            return "kept_original", words, best
        # the original cannot ship, so that a trial within the limits need not be faster
        refused = self.refused()
        left = [trial for trial in ahead(study, self.remeasured) if trial.recipe.hash not in refused]
        found, lost = self.first_confirmed(ranking.to_confirm(left), must_win=False)
        if found is not None:
            return "improved", conclusions.improved(study, found, lost, self.latest(self.eager)), found
        return "limits_not_met", self.unmet(), None

    def measure(self, trial: Trial, *, must_win: bool) -> Best:
        """Confirm ``trial``, and store its new figures."""
        trial = next(each for each in self.study.trials if each.recipe == trial.recipe)  # with the figures of the search
        found = confirm(self.study, trial, self.eager, self.rivals, must_win=must_win, end=self.end)
        self.found[trial.recipe.hash] = found
        self.remeasured[trial.recipe.hash] = ranking.with_confirmed_figures(trial, found.confirmation)
        self.study.refused += [] if found.confirmation.ok else [found.confirmation]
        return found

    def first_confirmed(self, trials: Sequence[Trial], *, must_win: bool) -> tuple[Best | None, list[str]]:
        """The first of ``trials`` that is confirmed, and the reasons against those before it."""
        lost: list[str] = []
        for trial in trials:
            found = self.measure(trial, must_win=must_win)
            if found.confirmation.ok:
                return found, lost
            lost.append(f"{trial.recipe}: {found.confirmation.reason}")
        return None, lost

    def original_within_limits(self) -> bool:
        """Whether the original keeps the limits. It is measured again if the search saw it narrowly miss one."""
        missed = ranking.misses(self.eager, self.limits)
        if missed and all(miss.limit in ("latency", "memory") and miss.excess < NEAR for miss in missed):
            self.study.progress.stage("measuring the original again, which misses a limit by a little")
            self.measure(self.eager, must_win=False)
        return ranking.feasible(self.latest(self.eager), self.limits)

    def latest(self, trial: Trial) -> Trial:
        """``trial`` with its latest figures."""
        return self.remeasured.get(trial.recipe.hash, trial)

    def refused(self) -> set[str]:
        """Hashes of the recipes whose confirmation failed before the timing."""
        failed = {name: best.confirmation for name, best in self.found.items() if not best.confirmation.ok}
        untimed = (name for name, found in failed.items() if found.latency_ms is None)
        return {name for name in untimed if not ranking.misses(self.remeasured[name], self.limits)}

    def known(self) -> list[Trial]:
        """The trials without :meth:`refused`, with their latest figures."""
        refused = self.refused()
        return [self.latest(trial) for trial in self.study.trials if trial.recipe.hash not in refused]

    def unmet(self) -> str:
        """Why no trial keeps the limits."""
        tried = [trial for trial in self.study.trials if trial.state is not State.SKIPPED]
        if all(trial.recipe.backend.name == "eager" for trial in tried):
            missed = " ".join(miss.words for miss in ranking.misses(self.latest(self.eager), self.limits))
            return (
                f"Nothing but the original was tried. {missed} Where the time was too short for more, the same command goes on "
                "from here."
            )
        words = ranking.unmet(self.known(), self.limits)
        if self.study.interrupted() or self.study.options.sampler == "tpe" or self.study.ask() is not None:
            words += " Not everything was tried when the search ended; the same command goes on from here."
        return words

    def fastest(self, kept: Best) -> Best:
        """``kept``; if it is surely slower than the model as written, the fastest exact alternative: the form as written
        or the best exact recipe."""
        ratio = kept.confirmation.speedup
        slower = kept.artifact is not None and ratio is not None and ratio.high < 1
        if not slower or ratio is None or self.objective not in ("latency", "throughput") or self.study.interrupted():
            return kept
        original, ranked = self.study.baseline, ranking.ranked(self.known(), self.limits, self.objective)
        others = [t for t in ranked if t.recipe.exact and t.size_mb is not None and t.recipe.hash != kept.trial.recipe.hash]
        written = [trial for trial in others if trial.recipe == original]
        hopeful = [t for t in others if t not in written and t.speedup is not None and t.speedup.value > ratio.value]
        best = kept
        for trial in (*written, *hopeful[:1]):
            with _restorable(self.study.folder / ARTIFACT) as keep_new:
                found = self.measure(trial, must_win=False)
                if found.artifact is not None and _sure_speedup(found) > _sure_speedup(best):
                    best = found
                    keep_new()
        return best


@contextlib.contextmanager
def _restorable(artifact: pathlib.Path) -> Iterator[Callable[[], None]]:
    """A block that may write another ``artifact``. The old one is restored after it, unless the block calls the yielded
    function."""
    aside = artifact.with_name(f".{artifact.name}.kept.tmp")  # the next run deletes it if this one is killed
    delete(aside)
    os.replace(artifact, aside)
    try:
        yield lambda: delete(aside)
    finally:
        if aside.exists():
            delete(artifact)
            os.replace(aside, artifact)


def _sure_speedup(found: Best) -> float:
    return 0.0 if found.confirmation.speedup is None else found.confirmation.speedup.low


def worth_confirming(trial: Trial, eager: Trial, objective: Objective) -> bool:
    """Whether ``trial`` is worth a confirmation. For speed always: the confirmation decides by its interval."""
    return objective in ("latency", "throughput") or ranking.surely_better(trial, eager, objective)


def explain(study: Study, best: Best | None, *, late: bool = False) -> tuple[Peaks | None, dict[str, Explanation]]:
    """Profile the model as written and what ships; return the peaks of the machine and the explanations.

    Explanations decide nothing. A failure only adds a note; after an interrupt, or if it is ``late``, they are left out.
    """
    first = next((trial for trial in study.trials if trial.recipe == as_written()), None)
    if first is None or first.comparison is None:
        return None, {}
    found = best.confirmation.comparison if best is not None else None
    times = found if found is not None else first.comparison
    asked: dict[str, dict[str, Any]] = {
        "as_written": {"recipe": as_written().to_json(), "files": None, "seconds": times.rival.median / 1e3}
    }
    if best is not None and found is not None:
        files, seconds = str(study.runner.files(best.trial)), found.candidate.median / 1e3
        asked["best"] = {"recipe": best.trial.recipe.to_json(), "files": files, "seconds": seconds}
    key = f"explained {hashlib.sha256(dumps(asked, indent=None).encode()).hexdigest()[:16]}"  # databases limit its length
    known = study.storage.get(key)
    if known is None and late:
        study.notes.append(
            "Where the time goes was not looked at, as the budget was over; with a longer one the same command does."
        )
    if known is None and (late or study.interrupted()):
        return None, {}
    if known is None:
        study.progress.stage("looking where the time goes")
        try:
            outcome = study.runner.run_job(study.runner.job() | {"kind": "explain", "recipes": asked}, study.folder / EXPLAIN)
            known, reason = outcome.result, outcome.reason
        except StorageError as error:
            reason = str(error)
        if known is None:
            study.notes.append(f"Where the time goes is not known: {reason}")
            return None, {}
        study.storage.put(key, known)
    explanations = {name: from_json(Explanation, value) for name, value in known["explanations"].items()}
    return from_json(Peaks, known["peaks"]), explanations


def no_baseline(study: Study) -> str:
    """Why the baseline could not be measured."""
    first = next((trial for trial in study.trials if trial.recipe == study.baseline), None)
    if first is None:
        return "The model as written was not among the finished trials. Start again with --fresh (in Python, fresh=True)."
    again = f"Once that is mended, start again with {study.record().options[0]}. Log: {study.folder / str(first.log)}"
    return f"The model as written could not be measured ({first.state}): {first.reason} {again}"
