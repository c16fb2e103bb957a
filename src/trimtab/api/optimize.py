"""Optimize a model for inference: search, confirm the winner, and write it or the original as an artifact."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import shlex
import signal
import threading
import time
from types import FrameType
from typing import Any, Self, TypeVar

from trimtab._internal.serialization import write_json
from trimtab._internal.text import of_type
from trimtab._internal.units import positive, seconds
from trimtab._internal.user_code import refuse_in_worker
from trimtab._internal.validation import checked_call
from trimtab.artifact.staging import check_replaceable
from trimtab.core.limits import Limits
from trimtab.core.workload import Workload
from trimtab.errors import TrimtabError, UsageError
from trimtab.evaluation.evaluate import Objective
from trimtab.execution.fork_pool import Workers
from trimtab.importers.load import is_python, load_workload
from trimtab.report import write as write_report
from trimtab.study import confirmation_starts
from trimtab.study.confirmation import CONFIRM
from trimtab.study.final_selection import ahead, explain, finish
from trimtab.study.options import Options, parse_ways
from trimtab.study.progress import Printed, Progress
from trimtab.study.result import ARTIFACT, NOTE, Result
from trimtab.study.run_folder import RESULT_FILE, disk_errors, exclusive, run_folder, starting_afresh
from trimtab.study.runoff import contenders, cost_s
from trimtab.study.storage import hide_password
from trimtab.study.study import Study

R = TypeVar("R", bound=Result)
OVERRUN = 1.2
"""Multiple of the budget from which on a run notes the excess, and which the explanations must not exceed."""
EXPLAINING, EXPLAINED_CALLS = 0.5, 8
"""Expected duration of the explanations: in dry runs of the workload, and calls of the original beside."""
RESERVED = 0.4
"""Largest share of a budget that is kept for the steps after the search."""


class Interrupt:
    """A context for Ctrl-C during a study: the first ends the search, the second stops at once. Only in the main thread."""

    def __init__(self, progress: Progress) -> None:
        if not isinstance(progress, Progress):
            raise UsageError(f"progress is {progress!r}; give a trimtab.Progress, which by itself is silent, or leave it out.")
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
        self._progress.interrupted()


@checked_call("trimtab.optimize")
def optimize(
    workload: Workload | str | os.PathLike[str],
    *,
    limits: Limits | None = None,
    budget: str | float | None = None,
    trials: int | None = None,
    objective: Objective = "latency",
    sampler: str = "ladder",
    compress: str = "off",
    train_budget: str | float | None = None,
    out: str | pathlib.Path | None = None,
    storage: str | None = None,
    fresh: bool = False,
    worker_memory_mb: float | None = None,
    trial_seconds: float = 600.0,
    timing_seconds: float = 5.0,
    seed: int = 0,
    note: str | None = None,
    progress: Progress | None = None,
) -> Result:
    """Search for the recipe that makes ``workload`` fastest within ``limits``, confirm it, and write its artifact.

    Example::

        import torch, trimtab
        workload = trimtab.Workload(model=torch.nn.Linear(64, 8), inputs=torch.randn(32, 64))
        print(trimtab.optimize(workload, budget="30s", out="runs/linear"))

    Args:
        workload: a :class:`Workload`, or a reference such as ``"model.py:workload"`` (see :func:`trimtab.load_workload`).
        limits: limits that a recipe must keep; by default the score may drop by 1%.
        budget: time for the run, as ``"10m"`` or in seconds; ``None`` tries everything. A late confirmation may exceed it.
        trials: largest number of new trials, besides that of the model as written.
        objective: ``latency``, ``throughput``, ``memory`` or ``size``.
        sampler, seed: ``ladder``, or ``tpe`` for long budgets, and its seed.
        compress: ``auto``, or some of ``prune,quantize,distill,activations``: also try smaller networks, which are trained
            to follow the model.
        train_budget: time for all their trainings, as ``"20m"`` or in seconds; one that does not fit in is not begun.
        out: the run folder; default ``runs/NAME``. A study in it is resumed.
        storage: URL of a database, which other studies may share, instead of an SQLite file in the run folder.
        fresh: first delete the study in the run folder and in ``storage``.
        worker_memory_mb, trial_seconds, timing_seconds: limits of a worker's memory, of one trial, and of its paired timing.
        note: your own words, for the record and the report; ``""`` removes those of an earlier run.
        progress: progress callbacks; ``None`` prints lines to standard error, ``trimtab.Progress()`` prints nothing.

    Raises:
        UsageError: an argument, the workload's form, or the run folder is wrong; nothing was tried.
        ArtifactError, WorkloadError: the artifact folder has foreign files, or the workload fails.
        StorageError, KeyboardInterrupt: the storage cannot be used, or Ctrl-C came twice or before the first trial ended.
    """
    began = time.monotonic()
    options = Options(
        objective=objective,
        limits=limits or Limits(),
        sampler=_checked_sampler(sampler),
        compress=parse_ways(compress),
        train_s=_seconds(train_budget, "train_budget"),
        storage=storage,
        trial_s=positive(trial_seconds, "trial_seconds"),
        timing_s=positive(timing_seconds, "timing_seconds"),
        worker_mb=None if worker_memory_mb is None else positive(worker_memory_mb, "worker_memory_mb"),
        seed=seed,
        fresh=fresh,
    )
    most = None if trials is None else positive(trials, "trials")
    limit_s = _seconds(budget, "budget")
    words = _checked_note(note)
    progress = Printed(budget_s=limit_s) if progress is None else progress
    workload = checked_workload(workload, "trimtab.optimize")
    workload = load_workload(workload) if isinstance(workload, str) and not is_python(workload) else workload
    folder = run_folder(workload, out)
    with Interrupt(progress) as interrupt, disk_errors(folder), exclusive(folder), Workers() as workers:
        began = progress.began_at or began  # the command line's clock also counts the imports
        command = command_line(workload, options, budget, trials, folder)
        with starting_afresh(folder) if fresh else contextlib.nullcontext():
            check_replaceable(folder / ARTIFACT)  # before the search, not after it
            study = Study(workload, folder, options, progress=progress, interrupted=interrupt, command=command, workers=workers)
        _put_note(study, words)
        study.record().write(folder)
        return _conclude(study, began, *_search(study, began, limit_s, study.besides_baseline(most)))


def _checked_note(note: str | None) -> str | None:
    if note is None or isinstance(note, str):
        return note and note.strip()
    raise UsageError(f"note is {of_type(note)}; give a text.")


def _put_note(study: Study, words: str | None) -> None:
    """Write the user's note to the storage. An empty one removes the earlier note, ``None`` leaves it."""
    if words is not None:
        study.storage.put(NOTE, words or None)


def _search(study: Study, began: float, limit_s: float | None, most: int | None) -> tuple[float | None, float | None]:
    """Search within ``limit_s`` seconds. Returns when the steps before the confirmation have to end, and when the run has."""
    if limit_s is None:
        study.search(most=most)
        return None, None
    study.search(deadline=began + limit_s, reserve=lambda: _reserve_s(study, limit_s), most=most)
    return began + limit_s - confirm_s(study, limit_s), began + limit_s


def _conclude(study: Study, began: float, until: float | None, end: float | None) -> Result:
    """Confirm, ship, explain and report the result by ``end``; steps before the confirmation end by ``until``."""
    status, sentence, best = finish(study, until=until, end=end)
    took, budget = time.monotonic() - began, math.inf if end is None else end - began
    peaks, explanations = explain(study, best, late=took + _explaining_s(study) > OVERRUN * budget)
    if (took := time.monotonic() - began) > OVERRUN * budget:
        study.notes.append(
            f"This took {took:.0f} s, where the budget is {budget:.0f} s: to check the workload, to measure the model as "
            "written and to confirm what ships takes its time, whatever the budget."
        )
    return write_results(
        Result(study=study, status=status, sentence=sentence, best=best, seconds=took, peaks=peaks, explanations=explanations)
    )


def write_results(result: R) -> R:
    """Write the record, the result and the report to the run folder. Returns ``result`` with the path of the report."""
    study = result.study
    result.record().write(study.folder)
    write_json(study.folder / RESULT_FILE, result)
    try:
        result = dataclasses.replace(result, report=write_report(study.folder))
    except (TrimtabError, OSError) as error:  # the result is valid without a report
        study.progress.remark(f"There is no report. {error}")
    write_json(study.folder / RESULT_FILE, result)
    if type(study.progress) is Printed:  # a caller's own progress decides what to show
        study.progress.stage(result.sentence)
    return result


def command_line(
    workload: Workload | str, options: Options, budget: str | float | None, trials: int | None, folder: pathlib.Path
) -> str:
    """The command that resumes a study, or repeats it, without options at their defaults."""
    if isinstance(workload, Workload) and not workload.reference:
        return f"trimtab.optimize(workload, out={str(folder)!r})  # and its other arguments; {workload.name} was made in Python"
    limits, default = options.limits, Options()
    given = {
        "--max-drop": limits.max_drop,
        "--max-error": None if limits.max_error == default.limits.max_error else limits.max_error,
        "--latency": None if limits.latency_ms is None else f"{_exact(limits.latency_ms)}ms",
        "--memory": None if limits.memory_mb is None else f"{_exact(limits.memory_mb)}MB",
        "--size": None if limits.size_mb is None else f"{_exact(limits.size_mb)}MB",
        "--throughput": None if limits.throughput is None else f"{_exact(limits.throughput)}/s",
        "--objective": None if options.objective == default.objective else options.objective,
        "--sampler": None if options.sampler == default.sampler else options.sampler,
        "--compress": ",".join(options.compress) or None,
        "--train-budget": None if options.train_s is None else f"{options.train_s:g}s",
        "--budget": f"{budget:g}s" if isinstance(budget, (int, float)) else budget,
        "--trials": trials,
        "--trial-time": None if options.trial_s == default.trial_s else f"{options.trial_s:g}s",
        "--timing": None if options.timing_s == default.timing_s else f"{options.timing_s:g}s",
        "--worker-memory": None if options.worker_mb is None else f"{_exact(options.worker_mb)}MB",
        "--seed": options.seed or None,
        "--storage": None if options.storage is None else hide_password(options.storage),
        "--out": folder,
    }
    words = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    source = workload.reference if isinstance(workload, Workload) else (workload,)
    return shlex.join(["trimtab", "optimize", *source, *words])


def _exact(value: float) -> str:
    """``value`` in the fewest digits that parse to the same number: a study is resumed only with equal limits."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def checked_workload(workload: Workload | str | os.PathLike[str], caller: str) -> Workload | str:
    """Check the argument ``workload`` of the function ``caller``; paths become strings.

    Raises:
        UsageError: ``workload`` has another type, for example a model; or a worker process of a study calls this.
    """
    refuse_in_worker(caller)
    found = os.fspath(workload) if isinstance(workload, os.PathLike) else workload
    if not isinstance(found, (Workload, str)):
        raise UsageError(
            "A study needs a trimtab.Workload, such as Workload(model=model, inputs=example), or a reference to one, such as "
            f"'model.py:workload', not {of_type(found)}."
        )
    return found


def confirm_s(study: Study, budget_s: float) -> float:
    """Seconds reserved for the confirmation and the explanations, at most the share :data:`RESERVED` of the budget."""
    likely_s = confirmation_starts.expected_s(study, study.leader, CONFIRM * study.options.timing_s, budget_s)
    return min(likely_s + EXPLAINING * study.runner.startup_s, RESERVED * budget_s)


def _explaining_s(study: Study) -> float:
    """Expected seconds of the explanations, which call slow models too."""
    latency = next((trial.latency_ms for trial in study.trials if trial.recipe == study.baseline), None)
    calls_s = 0.0 if latency is None else EXPLAINED_CALLS * latency.median / 1e3
    return EXPLAINING * study.runner.startup_s + calls_s


def _reserve_s(study: Study, budget_s: float) -> float:
    """Seconds of :func:`confirm_s`, and of a runoff if the search has left one open."""
    open_question = len(contenders(ahead(study), study.options.objective)) > 1
    return min(confirm_s(study, budget_s) + open_question * 1.5 * cost_s(study), RESERVED * budget_s)


def _seconds(time: str | float | None, name: str) -> float | None:
    return None if time is None else seconds(time, name)


def _checked_sampler(name: str) -> Any:
    if name not in ("ladder", "tpe"):
        raise UsageError(f"There is no sampler {name!r}. Known are: ladder, tpe.")
    return name
