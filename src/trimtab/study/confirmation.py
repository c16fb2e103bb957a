"""Confirmation: measure a trial again in new processes on the test data, and write its artifact."""

from __future__ import annotations

import dataclasses
import datetime as dt
import time

from trimtab._internal.serialization import dumps, from_json, to_json
from trimtab.artifact.artifact import Artifact, open_artifact
from trimtab.core.recipe import Recipe
from trimtab.core.trial import Trial
from trimtab.errors import ArtifactError, StorageError, WorkloadError
from trimtab.evaluation.confirm import Confirmation
from trimtab.execution.baseline_servers import BaselineServers
from trimtab.execution.process import LOG, Outcome
from trimtab.measure.pooled import start_timing
from trimtab.study import confirmation_starts, ranking
from trimtab.study.result import ARTIFACT, TRIED, Best
from trimtab.study.study import Study

CONFIRM = 2
"""Timing of all starts of a confirmation together, in multiples of the timing of a trial."""
CONFIRM_FOLDER, ORIGINAL, PROBE = "confirm", "original", "probe"


def confirm(
    study: Study,
    trial: Trial,
    eager: Trial,
    rivals: BaselineServers,
    *,
    must_win: bool,
    end: float | None = None,
    once_more: bool = True,
) -> Best:
    """Measure ``trial`` again and write its artifact, unless an earlier run of this study has confirmed it.

    If load on the machine leaves the result undecided, the measurement is repeated once (``once_more``), so that the
    next best trial does not win by accident.

    Raises:
        StorageError: the artifact cannot be written. No other trial ships instead.
    """
    itself = trial is eager and not (trial.recipe.passes or must_win or ranking.misses(trial, study.options.limits))
    if itself and trial.size_mb is None:
        return Best(trial=trial, confirmation=_as_searched(trial), artifact=None)
    wanted = _rivals(study, trial, eager, itself=itself, late=end is not None and time.monotonic() > end)
    key = f"confirmed {trial.recipe.hash} {eager.recipe.hash} {dumps(study.options.limits, indent=None)}"
    key += "" if must_win else " without a gain"  # a trial refused for lack of gain may still ship as the original
    key += "" if wanted else ", untimed"
    if (before := _confirmed_before(study, trial, key)) is not None:
        return before
    timing_s = CONFIRM * study.options.timing_s
    if trial is eager:
        timing_s = ranking.in_time(0.5 * study.options.timing_s, end)
    count = 1 if itself else confirmation_starts.expected(study, trial, timing_s)
    if count == 1:  # two rivals, and twice the time on a busy machine
        timing_s = ranking.in_time(timing_s, end, 0.25)
    plan = study.plan(**start_timing(timing_s, count)._asdict(), width=0.02)
    common = study.runner.job() | {
        "recipe": trial.recipe.to_json(),
        "files": str(study.runner.files(trial)),
        "plan": to_json(plan),
        "seconds": study.options.trial_s,
        "weights": study.prepared.weights,
        "ships": trial.size_mb is not None,
    }
    earlier = confirmation_starts.EarlierStarts({})
    if not itself:
        earlier = confirmation_starts.run_earlier_starts(study, trial, wanted, common, count - 1, end)
    if earlier.judged is not None and not earlier.judged.ok:
        return _stored(study, trial, key, earlier.judged, f"{confirmation_starts.FOLDER}/{trial.recipe.hash}/{LOG}")
    job = common | {
        "kind": "confirm",
        "earlier": to_json(earlier.comparisons),
        "seen": [to_json(each.comparison) for each in study.trials if each.comparison is not None],
        "judged": to_json(earlier.judged),
        "threads": study.thread_limit or study.prepared.threads,
        "must_win": must_win,
        "costs": _costs(study, trial, eager if must_win and study.options.objective == "memory" else None, again=bool(wanted)),
        "artifact": str(study.folder.absolute() / ARTIFACT),
        "trial": to_json(trial),
        "environment": to_json(study.environment),
    }
    outcome = confirmation_starts.run_with_rivals(study, rivals, wanted, job, study.folder / CONFIRM_FOLDER / trial.recipe.hash)
    log = f"{CONFIRM_FOLDER}/{trial.recipe.hash}/{LOG}"
    if outcome.result is None:
        return Best(trial=trial, confirmation=_failed(trial, outcome, log, original=trial is eager), artifact=None)
    found = from_json(Confirmation, outcome.result)
    if not wanted:
        found = dataclasses.replace(found, latency_ms=trial.latency_ms, throughput=trial.throughput)
    if found.undecided and once_more and not study.interrupted():
        _store_tried(study, trial)
        return confirm(study, trial, eager, rivals, must_win=must_win, end=end, once_more=False)
    return _stored(study, trial, key, found, log)


def _rivals(study: Study, trial: Trial, eager: Trial, *, itself: bool, late: bool) -> dict[str, Recipe]:
    """The recipes that ``trial`` is timed against, never itself. The original that stays (``itself``) is timed in the form that
    ships, whose speed may differ; if nothing else was measured, or if the budget is over (``late``), it is not timed."""
    if itself and (late or not ranking.other_runtimes(study.trials)):
        return {}
    tuned = eager.recipe not in (study.baseline, trial.recipe)
    return {"as_written": study.baseline} | ({"tuned": eager.recipe} if tuned else {})


def _as_searched(trial: Trial) -> Confirmation:
    """The confirmation of an original without files: the figures of the search, because nothing was selected. Its speed-up over
    itself is none."""
    shared = ("latency_ms", "throughput", "score", "drop", "parity", "cold_s", "peak_mb")
    figures = {name: getattr(trial, name) for name in shared} | {"baseline_score": trial.score}
    return Confirmation(recipe=trial.recipe, ok=True, loaded=False, again=False, **figures)


def _confirmed_before(study: Study, trial: Trial, key: str) -> Best | None:
    """The result that an earlier run stored under ``key``; ``None`` if there is none, or if its artifact is gone."""
    known = study.storage.get(key)
    if known is None:
        return None
    found = from_json(Confirmation, known)
    if not (found.ok and study.task.ships):
        return Best(trial=trial, confirmation=found, artifact=None)  # a refusal is final: repeating it would select by luck
    artifact = shipped(study, trial)
    return None if artifact is None else Best(trial=trial, confirmation=found, artifact=artifact)


def _failed(trial: Trial, outcome: Outcome, log: str, *, original: bool) -> Confirmation:
    """The confirmation of a trial whose process failed.

    Raises:
        WorkloadError: the ``original`` failed, and so the workload.
        StorageError: the artifact cannot be written.
    """
    if original and outcome.error == WorkloadError.__name__:
        raise WorkloadError(str(outcome.reason))
    if outcome.error == StorageError.__name__:
        raise StorageError(str(outcome.reason))
    why = f"The confirmation failed: {outcome.reason}"
    return Confirmation(recipe=trial.recipe, ok=False, reason=why, traceback=outcome.traceback, log=log)


def _stored(study: Study, trial: Trial, key: str, found: Confirmation, log: str) -> Best:
    """Store ``found``, unless it is undecided, and that ``trial`` has seen the test data."""
    at = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    found = dataclasses.replace(found, measured_at=at, log=log)
    _store_tried(study, trial)
    if not found.undecided:
        study.storage.put(key, to_json(found))
    return Best(trial=trial, confirmation=found, artifact=shipped(study, trial))


def _store_tried(study: Study, trial: Trial) -> None:
    known, name = study.storage.get(TRIED) or [], str(trial.recipe)
    if name not in known:
        study.storage.put(TRIED, [*known, name])


def _costs(study: Study, trial: Trial, rival: Trial | None, *, again: bool) -> dict[str, float | None]:
    """Cold start and memory of ``trial`` in new processes, or as its trial found them unless they are measured ``again``; if
    memory is the objective, also the memory of ``rival``."""
    if not again and trial.peak_mb is not None:
        return {"cold_s": trial.cold_s, "peak_mb": trial.peak_mb, "original_mb": None}
    folder = study.folder / CONFIRM_FOLDER
    cold_s, peak_mb = study.runner.costs(trial, folder / trial.recipe.hash / PROBE)
    original_mb = None if rival is None else study.runner.costs(rival, folder / ORIGINAL)[1]
    return {"cold_s": cold_s, "peak_mb": peak_mb, "original_mb": original_mb}


def shipped(study: Study, trial: Trial) -> Artifact | None:
    """The artifact in the run folder, if it is that of ``trial`` and unchanged; else ``None``."""
    try:
        artifact = open_artifact(study.folder / ARTIFACT)
        artifact.check()
    except ArtifactError:
        return None
    return artifact if artifact.manifest.recipe == trial.recipe.to_json() else None
