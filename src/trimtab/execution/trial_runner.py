"""Run the processes of one study: dry run, trials, probes of saved files, and repeated timings."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trimtab import errors
from trimtab._internal.serialization import from_json, to_json
from trimtab.core.measurement import Interval
from trimtab.core.recipe import Recipe
from trimtab.core.trial import State, Trial
from trimtab.errors import MeasurementError, WorkloadError
from trimtab.evaluation.evaluate import BUILT, UNSAVED, Objective, Plan
from trimtab.execution.baseline_servers import BaselineServers
from trimtab.execution.fork_pool import Workers
from trimtab.execution.jobs.inference import EXAMPLE
from trimtab.execution.preloaded_imports import IMPORTED, PRELOADED, write_preload
from trimtab.execution.process import LOG, Outcome, WorkerProcess

TRIALS, RIVALS, REFERENCE, SCRATCH, PREPARE, PREPARED = "trials", "rivals", "reference", "scratch", "prepare", "prepared"
"""Names of folders in the run folder."""
SLOW_READING_S = 2.0
"""Seconds of reading a workload above which a note says that it is read again."""
READ_LIMIT = 3.0
"""Time limit for a server to read the workload, in multiples of the dry run."""
UNPROBED = "The time ended before its cold start and peak memory were measured."
"""A note on a trial that was checked and timed, but not probed."""


class TrialRunner:
    """Runs the jobs of one study in worker processes, each under the study's limits of time and memory.

    Args:
        source: how a worker finds the workload (:func:`trimtab.execution.workload_transfer.workload_source`).
        folder: the run folder.
        common: entries of every job of the study.
        baseline: the recipe of the workload as written.
        trial_s: time limit of a job, in seconds.
        memory_mb: memory limit of a worker and its processes, in megabytes.
        interrupted: polled; if it returns ``True``, workers are ended.
        workers: forks workers; without it every worker is a new interpreter.
        server_tells_costs: whether the baseline's server reports its cold start and peak memory, so that no job measures these.
    """

    def __init__(
        self,
        source: Mapping[str, Any],
        folder: pathlib.Path,
        common: Mapping[str, Any],
        *,
        baseline: Recipe,
        objective: Objective,
        trial_s: float,
        memory_mb: float,
        interrupted: Callable[[], bool],
        workers: Workers | None = None,
        server_tells_costs: bool = False,
    ) -> None:
        self.folder, self.baseline, self.workers, self.interrupted = folder, baseline, workers, interrupted
        self.trial_s, self.memory_mb = trial_s, memory_mb
        self.startup_s = 0.0
        """Seconds of the dry run without reading the workload, which later processes do not repeat."""
        self.load_s = 0.0
        """Seconds that a forked process takes to load the workload; before the first one, those of the dry run."""
        self._server_tells_costs = server_tells_costs
        self._weights: Any = None
        self._costs: Mapping[str, float | None] | None = None
        here = folder.absolute()  # because a workload may change the working folder
        self._common = {
            "workload": source,
            "reference": str(here / REFERENCE),
            "scratch": str(here / SCRATCH),
            "prepared": str(here / PREPARED),
            "objective": objective,
            **common,
        }
        for left in (folder / SCRATCH).glob(".*"):  # left by workers that were killed
            shutil.rmtree(left, ignore_errors=True)
        for left in (folder / SCRATCH).glob("*/.*.part"):
            left.unlink(missing_ok=True)

    def limit_threads(self, threads: int | None) -> None:
        """From the next worker on, compute and time with at most ``threads`` threads; ``None`` stands for no limit."""
        self._common["thread_limit"] = threads

    def job(self) -> dict[str, Any]:
        """The entries that all jobs of the study share."""
        return dict(self._common)

    def files(self, trial: Trial) -> pathlib.Path:
        """The folder with the files that ``trial`` built."""
        return self.folder.absolute() / TRIALS / trial.recipe.hash

    def over(self, deadline: float | None) -> bool:
        """Whether the study has to end: it was interrupted, or ``deadline``, of ``time.monotonic``, has passed."""
        return self.interrupted() or (deadline is not None and time.monotonic() > deadline)

    def servers(self, folder: str) -> BaselineServers:
        """Servers of recipes, with their files in ``folder`` of the run folder."""
        return BaselineServers(self.job(), self.folder / folder, self.workers)

    def run_job(
        self,
        job: Mapping[str, Any],
        folder: pathlib.Path,
        *,
        deadline: float | None = None,
        limit_s: float | None = None,
        final: bool = False,
        warm: bool = True,
    ) -> Outcome:
        """Run a job in a worker, for at most ``limit_s`` seconds and the study's limit; returns how the worker ended.

        The first Ctrl-C, which asks for a clean end, does not cut off a ``final`` job. Without ``warm`` the worker has none of
        the workload's imports.
        """
        with self.worker(job, folder, warm=warm) as worker:
            return self.wait_for(worker, deadline=deadline, limit_s=limit_s, final=final)

    @contextlib.contextmanager
    def worker(self, job: Mapping[str, Any], folder: pathlib.Path, *, warm: bool = True) -> Iterator[WorkerProcess]:
        """A worker that has begun a job, as in :meth:`run_job`; the worker ends with the block."""
        (self.folder / SCRATCH).mkdir(exist_ok=True)
        worker = WorkerProcess(job, folder, self.workers, warm=warm)
        try:
            yield worker
        finally:
            worker.kill()

    def wait_for(
        self, worker: WorkerProcess, *, deadline: float | None = None, limit_s: float | None = None, final: bool = False
    ) -> Outcome:
        """Wait for the end of a worker, as in :meth:`run_job`."""
        return worker.wait(
            seconds=self.trial_s if limit_s is None else min(self.trial_s, limit_s),
            memory_mb=self.memory_mb,
            interrupted=lambda: not final and self.over(deadline),
        )

    def prepare(self, *, deadline: float | None = None) -> Any:
        """The result of the dry run. Later workers start with the workload's imports.

        Raises:
            KeyboardInterrupt: the study had to end.
            WorkloadError: the workload failed.
        """
        began = time.monotonic()
        job = self.job() | {"kind": "prepare", "recipe": self.baseline.to_json()}
        outcome = self.run_job(job, self.folder / PREPARE, deadline=deadline)
        took = time.monotonic() - began
        if outcome.cut_off:
            raise KeyboardInterrupt
        if outcome.error is not None:
            raise getattr(errors, outcome.error)(outcome.reason)
        if outcome.result is None:
            log = self.folder / PREPARE / LOG
            raise WorkloadError(f"The workload failed in its dry run, before the first trial. {outcome.reason} Log: {log}")
        self._weights, reading_s = outcome.result.get("weights"), outcome.result.pop("reading_s", 0.0)
        if self.workers is not None and (self.folder / PREPARE / IMPORTED).exists():
            threads, source = outcome.result["threads"], self._common["workload"]
            preload = write_preload(self.folder / PREPARE, source, threads, self._weights or {})
            (preload.with_name(PRELOADED)).unlink(missing_ok=True)
            self.workers.warm(preload, seconds=READ_LIMIT * took)
        self.startup_s = self.load_s = max(1.0, took - reading_s)
        return outcome.result

    def rereading_note(self) -> str | None:
        """A note if every process of the study reads the workload again, and that takes long."""
        path = self.folder / PREPARE / PRELOADED
        if not path.exists():
            return None
        facts = json.loads(path.read_text(encoding="utf-8"))
        if facts["reason"] is None or facts["seconds"] < SLOW_READING_S:
            return None
        return (
            f"Every process of the study reads the workload again, which takes {facts['seconds']:.0f} s, because "
            f"{facts['reason']}. Put what takes long into functions: Evaluation(data=read) is called once, "
            "Workload(model=build) twice."
        )

    def trial(
        self,
        recipe: Recipe,
        plan: Plan,
        servers: BaselineServers,
        deadline: float | None,
        *,
        limit_s: float | None = None,
        again: bool = False,
    ) -> Trial | None:
        """Evaluate ``recipe`` in a worker beside the baseline's server, for at most ``limit_s`` seconds and the study's limit;
        ``None`` if the study had to end. A time that ends while its saved files are probed leaves those figures unmeasured.

        Raises:
            MeasurementError: the baseline cannot be served.
            WorkloadError: the workload itself fails, so that every other recipe would fail too.
        """
        try:
            if not servers.alive("as_written"):
                facts = servers.ensure(
                    "as_written", self.baseline, fresh=False, seconds=self.trial_s, interrupted=self.interrupted
                )
                self.load_s = facts.get("load_s", self.load_s)
        except MeasurementError:
            if self.interrupted():
                return None
            raise
        begun = time.monotonic()
        folder = self.folder / TRIALS / recipe.hash
        shutil.rmtree(folder, ignore_errors=True)
        job = self.job() | {
            "kind": "trial",
            "recipe": recipe.to_json(),
            "plan": to_json(plan),
            "address": servers.addresses["as_written"],
        }
        outcome = self.run_job(job, folder, deadline=deadline, limit_s=limit_s)
        if outcome.cut_off:
            return None
        if recipe == self.baseline and outcome.error == WorkloadError.__name__:
            raise WorkloadError(str(outcome.reason))
        if not servers.alive("as_written") and not again:
            # the baseline's server died, not this recipe
            return self.trial(recipe, plan, servers, deadline, limit_s=limit_s, again=True)
        until = deadline if limit_s is None else begun + limit_s
        found = self._trial_from(recipe, outcome, folder, servers, plan, until)
        log = str((folder / LOG).relative_to(self.folder))
        return None if found is None else dataclasses.replace(found, log=log, seconds=time.monotonic() - begun)

    def _trial_from(
        self, recipe: Recipe, outcome: Outcome, folder: pathlib.Path, servers: BaselineServers, plan: Plan, until: float | None
    ) -> Trial | None:
        """The trial from a worker's ``outcome``, probed by ``until``; ``None`` as for :meth:`_probed`."""
        unsaved = folder / UNSAVED
        if outcome.result is not None:
            return self._probed(from_json(Trial, outcome.result), folder, servers, plan, until)
        if not unsaved.exists():
            how = {name: getattr(outcome, name) for name in ("reason", "traceback", "ended_by", "limit")}
            return Trial(recipe=recipe, state=State.FAILED, **how)
        trial = from_json(Trial, json.loads(unsaved.read_text(encoding="utf-8")))
        reason = f"It cannot ship, because writing it failed. {outcome.reason}"
        trial = dataclasses.replace(trial, reason=reason, ended_by=outcome.ended_by, limit=outcome.limit)
        return self._probed(trial, folder, servers, plan, until) or trial

    def _probed(
        self, trial: Trial, folder: pathlib.Path, servers: BaselineServers, plan: Plan, until: float | None
    ) -> Trial | None:
        """``trial`` with its cold start and peak memory as in a deployment: a fresh process loads its saved files from
        ``folder``. ``None`` if the study was interrupted, or had to end before those of the baseline were known.

        The cold start of the model as written is that of the user's own code. Its peak memory is that of its saved form, like
        that of all others, unless it has none. If the study ends, or ``until`` (``time.monotonic``) passes, before the process
        has, the trial stands without them; where memory decides, it is stopped, and the next run tries it again.
        """
        if trial.recipe == self.baseline:
            one = Interval(1.0, 1.0, 1.0)  # by definition; its measured ratio to itself is noise, and stays in the comparison
            costs = self._baseline_costs(servers)
            if costs is None:
                return None
            trial = dataclasses.replace(trial, speedup=one, cold_s=costs.get("cold_s"), peak_mb=costs.get("peak_mb"))
        if trial.state is not State.COMPLETE or trial.size_mb is None:
            return trial
        outcome = self._probe(trial, folder, folder / "probe", deadline=until)
        if outcome.cut_off and self.interrupted():
            return None
        if outcome.cut_off:  # the worker's own start includes the building
            cold = trial.cold_s if trial.recipe == self.baseline else None
            trial = dataclasses.replace(trial, cold_s=cold, peak_mb=None)
        if outcome.cut_off and (plan.objective == "memory" or plan.limits.memory_mb is not None):
            reason = f"{UNPROBED} The same command tries it again."
            return dataclasses.replace(trial, state=State.STOPPED, reason=reason, ended_by="time", limit=outcome.seconds)
        if outcome.cut_off:
            return dataclasses.replace(trial, notes=(*trial.notes, UNPROBED))
        if outcome.result is None:
            reason = f"What it saved cannot be used in a fresh process: {outcome.reason}"
            how = {name: getattr(outcome, name) for name in ("traceback", "ended_by", "limit")}
            return dataclasses.replace(trial, state=State.FAILED, reason=reason, **how)
        cold = trial.cold_s if trial.recipe == self.baseline else outcome.result["cold_s"]
        return dataclasses.replace(trial, cold_s=cold, peak_mb=outcome.result["peak_mb"])

    def costs(self, trial: Trial, place: pathlib.Path) -> tuple[float | None, float | None]:
        """``cold_s`` and ``peak_mb`` of ``trial``, measured again by a fresh process; those of the trial if its files are gone.
        The worker's own files are in ``place``."""
        files = self.files(trial)
        outcome = self._probe(trial, files, place, final=True) if (files / BUILT).exists() else None
        if outcome is None or outcome.result is None:
            return trial.cold_s, trial.peak_mb
        return trial.cold_s if trial.recipe == self.baseline else outcome.result["cold_s"], outcome.result["peak_mb"]

    def _probe(
        self,
        trial: Trial,
        files: pathlib.Path,
        place: pathlib.Path,
        *,
        deadline: float | None = None,
        final: bool = False,
    ) -> Outcome:
        inputs = str(self.folder.absolute() / REFERENCE / EXAMPLE)
        job = {"kind": "probe", "recipe": trial.recipe.to_json(), "files": str(files), "inputs": inputs}
        return self.run_job(job, place, deadline=deadline, final=final, warm=False)

    def _baseline_costs(self, servers: BaselineServers) -> Mapping[str, float | None] | None:
        """``cold_s`` and ``peak_mb`` of the baseline as its user starts it; ``None`` if the study had to end.

        Raises:
            WorkloadError: its weights differ from process to process.
        """
        if self._server_tells_costs:
            return servers.ready("as_written", seconds=60)
        if self._costs is None:
            self.check_baseline()
        return self._costs

    def check_baseline(self) -> None:
        """Build and call the model as written in another process, as its user does, and keep its costs for the first trial.

        Raises:
            WorkloadError: its weights or inputs are not those of the dry run.
        """
        job = self.job() | {"kind": "baseline", "weights": self._weights}
        outcome = self.run_job(job, self.folder / PREPARE / "baseline")
        if outcome.error == WorkloadError.__name__:
            raise WorkloadError(str(outcome.reason))
        self._costs = None if outcome.cut_off else outcome.result or {}
