"""The whole of it: search, confirm the winner, ship it or the original, and say so."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import pathlib
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, ClassVar, Self

from trimtab._json import dumps, from_json, to_json, write_json
from trimtab._units import seconds
from trimtab.artifact import Artifact, open_artifact
from trimtab.confirm import Confirmation
from trimtab.errors import ArtifactError, StorageError, UsageError, WorkloadError
from trimtab.evaluate import UNRELIABLE, Objective
from trimtab.study import verdict
from trimtab.study.progress import Progress
from trimtab.study.rivals import Rivals
from trimtab.study.sampler import as_written
from trimtab.study.study import KEEP, OWNER, PREPARE, REFERENCE, RIVALS, SCRATCH, TRIALS, Options, Study
from trimtab.trial import State, Trial
from trimtab.workload import Limits, Workload

CONFIRM = 2
"""Each paired timing of the confirmation may take this many times as long as that of a trial."""
ARTIFACT, RESULT_FILE, CONFIRM_FOLDER = "artifact", "result.json", "confirm"
ENTRIES = {
    *(ARTIFACT, RESULT_FILE, CONFIRM_FOLDER, OWNER, TRIALS, RIVALS, REFERENCE, SCRATCH, PREPARE),
    *("study.db", "study.db-journal", "workload.pkl", "report.html"),
}
"""What a run folder may hold; whatever else lies there is somebody's own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Best:
    """What ships: the winner as it was measured again, or the original where nothing beat it."""

    trial: Trial
    confirmation: Confirmation
    artifact: Artifact | None


@dataclasses.dataclass(frozen=True)
class Ladder:
    """The four rungs, as written to best; ``str()`` of it is a table."""

    rungs: tuple[Mapping[str, Any], ...]

    def __str__(self) -> str:
        lines = [f"{'rung':<11} {'speed-up':<22} {'latency':>10} {'score':>8} {'drop (up to)':>18}  recipe"]
        return "\n".join([*lines, *(_line(rung) for rung in self.rungs)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The answer of a study."""

    schema: ClassVar[int] = 1

    study: Study
    status: verdict.Status
    sentence: str
    best: Best | None
    seconds: float

    @property
    def trials(self) -> list[Trial]:
        """Every finished trial."""
        return self.study.trials

    def ladder(self) -> Ladder:
        """As written, tuned, lossless, best."""
        limits, trials = self.study.options.limits, self.study.trials
        exact = [t for t in verdict.ranked(trials, limits, self.study.options.objective) if t.recipe.exact]
        found: dict[verdict.Rung, Trial | None] = {
            "as_written": next((t for t in trials if t.recipe == as_written()), None),
            "tuned": verdict.best_eager(trials),
            "lossless": exact[0] if exact else None,
        }
        rungs = [verdict.entry(trial, limits, rung=rung) for rung, trial in found.items() if trial is not None]
        if self.best is not None:
            rungs.append(verdict.entry(self.best.trial, limits, rung="best", confirmed=self.best.confirmation))
        return Ladder(tuple(rungs))

    def to_json(self) -> dict[str, Any]:
        """The answer as ``trimtab optimize --json`` prints it."""
        study, best = self.study, self.best
        limits = study.options.limits
        return {
            "schema": self.schema,
            "workload": study.prepared.name,
            "status": self.status,
            "environment": to_json(study.environment),
            "conditions": self._conditions(),
            "ladder": list(self.ladder().rungs),
            "trials": [verdict.entry(trial, limits) for trial in study.trials],
            "best": None if best is None else verdict.entry(best.trial, limits, confirmed=best.confirmation),
            "artifact": None if best is None or best.artifact is None else str(best.artifact.path),
            "report": None,
            "seconds": self.seconds,
        }

    def _conditions(self) -> dict[str, Any]:
        study = self.study
        comparison = self.best.confirmation.comparison if self.best is not None else None
        return {
            "objective": study.options.objective,
            "sampler": study.options.sampler,
            "limits": to_json(study.options.limits),
            "inputs": study.prepared.inputs,
            "threads": study.prepared.threads,
            "pairs": None if comparison is None else comparison.pairs,
            "noise": None if comparison is None else comparison.noise,
            "foreign_cpu": None if comparison is None else comparison.foreign,
            "stolen_cpu": None if comparison is None else comparison.stolen,
            "verdict": self.sentence,
            "notes": [*study.prepared.notes, *study.notes, *busy(study.trials)],
        }


class Interrupt:
    """Counts Ctrl-C while a study runs: once ends the search cleanly, twice stops at once. A context; main thread only."""

    def __init__(self, progress: Progress) -> None:
        self.asked = False
        self._progress = progress
        self._before: Any = None

    def __call__(self) -> bool:
        return self.asked

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._progress.stage("interrupted: finishing with the best so far; press Ctrl-C again to stop at once")


def optimize(
    workload: Workload | str,
    *,
    limits: Limits | None = None,
    budget: str | float | None = None,
    trials: int | None = None,
    objective: Objective = "latency",
    sampler: str = "ladder",
    out: str | pathlib.Path | None = None,
    storage: str | None = None,
    fresh: bool = False,
    worker_memory_mb: float | None = None,
    trial_seconds: float = 600.0,
    timing_seconds: float = 5.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Result:
    """Search for the recipe that makes ``workload`` fastest within ``limits``, prove it, and write its artifact.

    Args:
        workload: a :class:`Workload`, or a reference such as ``"model.py:workload"``.
        limits: what a recipe must keep; one percent of the score may be lost if nothing is said.
        budget: time for everything, as ``"10m"`` or in seconds; ``None`` ends when the search has nothing left to try.
        trials: at most so many new trials.
        objective: ``latency``, ``throughput``, ``memory`` or ``size``.
        sampler: ``ladder``, or ``tpe`` for long budgets.
        out: the run folder; ``runs/NAME`` if not said. A study found there goes on.
        storage: URL of a database instead of an SQLite file in the run folder.
        fresh: delete what is in the run folder first.
        worker_memory_mb: memory limit of one worker process, in megabytes.
        trial_seconds: time limit of one trial.
        timing_seconds: most time for the paired timing of one trial; it ends sooner where the interval is narrow.
        seed: of the sampler.
        progress: told what happens; silent if ``None``.

    Raises:
        UsageError: an argument, the workload's form, or the run folder is wrong; nothing was tried.
        WorkloadError: the workload itself fails.
        StorageError: the storage cannot be used; finished trials are kept.
        KeyboardInterrupt: on the second Ctrl-C; finished trials are kept.
    """
    progress = progress or Progress()
    began = time.monotonic()
    options = Options(
        objective=objective,
        limits=limits or Limits(),
        sampler=_sampler(sampler),
        storage=storage,
        trial_s=trial_seconds,
        timing_s=timing_seconds,
        worker_mb=worker_memory_mb,
        seed=seed,
    )
    limit_s = None if budget is None else seconds(budget, "budget")
    folder = run_folder(workload, out)
    if fresh:
        forget(folder)
    with Interrupt(progress) as interrupt, disk_errors(folder):
        study = Study(workload, folder, options, progress=progress, interrupted=interrupt)
        deadline = None if limit_s is None else began + limit_s - reserve_s(study, limit_s)
        study.search(deadline=deadline, most=trials)
        status, sentence, best = _finish(study)
        result = Result(study=study, status=status, sentence=sentence, best=best, seconds=time.monotonic() - began)
        write_json(folder / RESULT_FILE, result)
    return result


@contextlib.contextmanager
def disk_errors(folder: pathlib.Path) -> Iterator[None]:
    """Turns the system's complaints about the run folder into a sentence."""
    try:
        yield
    except OSError as error:
        full = error.errno == errno.ENOSPC
        what = "the disk that holds it is full; free some space" if full else f"{error.strerror}; mend that or use --out"
        raise StorageError(
            f"The run folder {folder} cannot be written: {what}. What is finished is kept; the same command goes on from it."
        ) from error


def forget(folder: pathlib.Path) -> None:
    """Delete a study, and nothing but a study.

    Raises:
        UsageError: the folder holds something else.
    """
    if not folder.exists():
        return
    strange = sorted(path.name for path in folder.iterdir() if path.name not in ENTRIES)
    if strange:
        raise UsageError(
            f"--fresh deletes a run folder, but {folder} holds {strange[0]!r}, which no study made. Use another --out."
        )
    shutil.rmtree(folder)


def run_folder(workload: Workload | str, out: str | pathlib.Path | None) -> pathlib.Path:
    """Where a study lives: as said, else ``runs/`` and the name of the workload or of its file."""
    if out is not None:
        return pathlib.Path(out)
    if isinstance(workload, Workload):
        return pathlib.Path("runs") / workload.name
    place, _, name = workload.rpartition(":") if not workload.endswith(".py") else (workload, "", "")
    stem = pathlib.Path(place).stem if place.endswith(".py") else place
    return pathlib.Path("runs") / (f"{stem}-{name}" if name else stem)


def reserve_s(study: Study, budget_s: float) -> float:
    """Seconds to keep for the confirmation: three processes start, two timings run; never more than 40% of the budget."""
    return min(2.5 * study.startup_s + 2 * CONFIRM * study.options.timing_s, 0.4 * budget_s)


def _finish(study: Study) -> tuple[verdict.Status, str, Best | None]:
    """Confirm the winner, or the next best, or ship the original."""
    limits, objective = study.options.limits, study.options.objective
    ranked = verdict.ranked(study.trials, limits, objective)
    eager = verdict.best_eager(study.trials)
    if eager is None and not study.trials:
        raise UsageError("No trial was finished, not even of the model as written. Run it again with a longer --budget.")
    if eager is None:
        raise WorkloadError(_no_baseline(study))
    if not ranked:
        return "limits_not_met", verdict.unmet(study.trials, limits), None
    ahead = ranked[: ranked.index(eager)] if eager in ranked else ranked
    must_win = verdict.feasible(eager, limits)  # an original that misses a limit is no alternative
    study.progress.stage("confirming the winner in fresh processes, on the test data")
    lost: list[str] = []
    with Rivals(study.job(), study.folder / RIVALS) as rivals:
        for trial in ahead[:KEEP]:
            found = _confirm(study, trial, eager, rivals, must_win=must_win)
            if found.confirmation.ok:
                return "improved", _improved(study, found, lost), found
            lost.append(f"{trial.recipe}: {found.confirmation.reason}")
        study.notes += [f"It won the search but was not confirmed: {line}" for line in lost]
        if not verdict.feasible(eager, limits):
            return "limits_not_met", verdict.unmet([t for t in study.trials if t not in ahead], limits), None
        kept = _confirm(study, eager, eager, rivals, must_win=False)
    if not kept.confirmation.ok:
        return "kept_original", f"Nothing better was confirmed, and the original cannot ship: {kept.confirmation.reason}", kept
    why = " ".join(lost) or f"none of {len(study.trials)} trials was faster than the tuned original within the limits"
    slower = ""
    ratio = kept.confirmation.speedup
    if kept.artifact is not None and ratio is not None and ratio.high < 1:
        slower = (
            f" In the form that stands alone it runs at {ratio.value:.2f}x ({ratio.low:.2f} to {ratio.high:.2f}) of the model "
            "as written; where its class is at hand, go on using the model itself."
        )
    return "kept_original", f"The original ships: {why}.{slower}", kept


def _confirm(study: Study, trial: Trial, eager: Trial, rivals: Rivals, *, must_win: bool) -> Best:
    """Measure ``trial`` again and write the artifact; what an earlier run of this study confirmed is not done twice."""
    key = f"confirmed {trial.recipe.hash} {eager.recipe.hash} {dumps(study.options.limits, indent=None)}"
    known = study.storage.noted(key)
    if known is not None and not known["ok"]:
        return Best(trial=trial, confirmation=from_json(Confirmation, known), artifact=None)  # no second throw of the dice
    if known is not None and (artifact := _shipped(study, trial)) is not None:
        return Best(trial=trial, confirmation=from_json(Confirmation, known), artifact=artifact)
    wanted = {"as_written": as_written()} | ({} if eager.recipe == as_written() else {"tuned": eager.recipe})
    for name, recipe in wanted.items():
        if not rivals.alive(name):
            study.start_rival(rivals, name, recipe, fresh=True, final=True)
    job = study.job() | {
        "kind": "confirm",
        "recipe": trial.recipe.to_json(),
        "files": str(study.files(trial)),
        "rivals": rivals.addresses,
        "plan": to_json(study.plan(seconds=CONFIRM * study.options.timing_s, width=0.02)),
        "must_win": must_win,
        "ships": trial.size_mb is not None,
        "artifact": str(study.folder / ARTIFACT),
        "trial": to_json(trial),
        "environment": to_json(study.environment),
    }
    outcome = study.run_job(job, study.folder / CONFIRM_FOLDER / trial.recipe.hash, final=True)
    if outcome.result is None:
        reason = f"The confirmation failed: {outcome.reason}"
        return Best(trial=trial, confirmation=Confirmation(recipe=trial.recipe, ok=False, reason=reason), artifact=None)
    study.storage.note(key, outcome.result)
    return Best(trial=trial, confirmation=from_json(Confirmation, outcome.result), artifact=_shipped(study, trial))


def _shipped(study: Study, trial: Trial) -> Artifact | None:
    """The artifact in the run folder, if it is that of ``trial``."""
    try:
        artifact = open_artifact(study.folder / ARTIFACT)
    except ArtifactError:
        return None
    return artifact if artifact.manifest.recipe == trial.recipe.to_json() else None


def busy(trials: list[Trial]) -> list[str]:
    """A sentence where the machine was too busy for many of the trials."""
    timed = [trial for trial in trials if trial.comparison is not None and trial.state is State.COMPLETE]
    poor = [trial for trial in timed if trial.comparison is not None and trial.comparison.ratio.width > UNRELIABLE]
    if len(poor) <= len(timed) / 4:
        return []
    return [
        f"The machine was too busy to measure well: {len(poor)} of {len(timed)} ratios are known to no better than "
        f"{UNRELIABLE:.0%}. Run it again with --fresh when it is quiet."
    ]


def _improved(study: Study, found: Best, lost: list[str]) -> str:
    confirmation = found.confirmation
    ratio = confirmation.speedup
    assert ratio is not None
    words = f"{found.trial.recipe} is {ratio.value:.2f}x as fast as written (95% interval {ratio.low:.2f} to {ratio.high:.2f})"
    if confirmation.against_tuned is not None:
        tuned = confirmation.against_tuned
        words += f" and {tuned.value:.2f}x the tuned original ({tuned.low:.2f} to {tuned.high:.2f})"
    if confirmation.drop is not None:
        words += f"; its score drops by {confirmation.drop.value:.3%}, at most {confirmation.drop.upper:.3%}"
    first = next((trial for trial in study.trials if trial.recipe == as_written()), None)
    if study.options.objective == "size" and first is not None and first.size_mb and found.trial.size_mb:
        words += f"; it has {found.trial.size_mb:.3g} MB, where the original has {first.size_mb:.3g} MB"
    if study.options.objective == "memory" and first is not None and first.peak_mb and confirmation.peak_mb:
        words += f"; it needs {confirmation.peak_mb:.3g} MB of memory, where the original needs {first.peak_mb:.3g} MB"
    return words + "." + (f" Faster in the search, but not confirmed: {' '.join(lost)}" if lost else "")


def _no_baseline(study: Study) -> str:
    first = next((trial for trial in study.trials if trial.recipe == as_written()), None)
    if first is None:
        return "The model as written was not among the finished trials. Start again with --fresh."
    return f"The model as written could not be measured ({first.state}): {first.reason} Log: {study.folder / str(first.log)}"


def _sampler(name: str) -> Any:
    if name not in ("ladder", "tpe"):
        raise UsageError(f"There is no sampler {name!r}. Known are: ladder, tpe.")
    return name


def _line(rung: Mapping[str, Any]) -> str:
    speedup, latency, drop = rung["speedup"], rung["latency_ms"]["median"], rung["drop"]
    times = "-" if speedup["value"] is None else f"{speedup['value']:.2f}x ({speedup['low']:.2f} to {speedup['high']:.2f})"
    ms = "-" if latency is None else f"{latency:.3g} ms"
    score = "-" if rung["score"]["value"] is None else f"{rung['score']['value']:.4f}"
    lost = "-" if drop["value"] is None else f"{drop['value']:.2%} ({drop['upper']:.2%})"
    return f"{rung['rung']:<11} {times:<22} {ms:>10} {score:>8} {lost:>18}  {rung['recipe']}"
