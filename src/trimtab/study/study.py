"""A study: the trials of one workload under one objective and its limits. Verbs: ask, tell, optimize."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import hashlib
import json
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trimtab import errors
from trimtab._internal.serialization import ESCAPED, dumps, from_json, to_json
from trimtab.core.backend import BACKENDS
from trimtab.core.recipe import Recipe
from trimtab.core.trial import State, Trial
from trimtab.core.workload import Workload
from trimtab.errors import MeasurementError, WorkloadError
from trimtab.evaluation.confirm import Confirmation
from trimtab.evaluation.evaluate import BUILT, MODEL, UNSAVED, Plan
from trimtab.execution.baseline_servers import BaselineServers
from trimtab.execution.fork_pool import Workers
from trimtab.execution.preloaded_imports import IMPORTED
from trimtab.execution.process import LOG, Outcome, WorkerProcess
from trimtab.execution.trial_runner import probed
from trimtab.execution.workload_transfer import handed
from trimtab.hardware.environment import Environment
from trimtab.hardware.system import free_mb
from trimtab.study import ranking
from trimtab.study.options import Options
from trimtab.study.progress import Progress
from trimtab.study.record import Prepared, Record, claim
from trimtab.study.samplers.ladder import Ask, Ladder, Sampler, SearchState, Tpe, as_written
from trimtab.study.storage import Storage, in_file

TRIALS, RIVALS, REFERENCE, SCRATCH, PREPARE = "trials", "rivals", "reference", "scratch", "prepare"
KEEP = 3
"""Trials whose files are kept on disk: the best few, so that the next one can ship if the first does not hold."""


class Study:
    """One search. It lives in a run folder, and goes on from there when it is made again with the same workload.

    ``workload`` is a :class:`Workload`, or a reference such as ``"model.py:workload"`` that every worker loads for itself.
    ``workers`` forks what need not be an interpreter of its own; without them everything is one.

    Raises:
        UsageError: the workload or an option is wrong, or the folder holds a study of something else.
        WorkloadError: the workload itself fails in a dry run.
        StorageError: the storage cannot be opened, or the disk is full.
    """

    def __init__(
        self,
        workload: Workload | str,
        folder: pathlib.Path,
        options: Options,
        *,
        progress: Progress | None = None,
        interrupted: Callable[[], bool] = lambda: False,
        command: str = "",
        workers: Workers | None = None,
    ) -> None:
        self.folder = folder
        self.workers = workers
        self.command = command
        """What makes this study again; for its record."""
        self.options = options
        self.progress = progress or Progress()
        self.interrupted = interrupted
        self.notes: list[str] = []
        self.refused: list[Confirmation] = []
        """What did not hold when it was measured again."""
        self._began, self._started = time.monotonic(), dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        folder.mkdir(parents=True, exist_ok=True)
        self.memory_mb = options.worker_mb or 0.8 * free_mb()
        self._source = handed(workload, folder)
        for left in (folder / SCRATCH).glob(".*"):  # by workers that were killed, or ended at once
            shutil.rmtree(left, ignore_errors=True)
        self.environment = Environment.capture()
        self.progress.stage("checking the workload with a dry run")
        self.load_s = 0.0
        """Seconds in which a forked process has the workload ready; those of the dry run, until one did."""
        self.prepared = self._prepare()
        self.startup_s = time.monotonic() - self._began
        """Seconds of the dry run, with the start of its interpreter."""
        known = self.prepared
        self.notes += ranking.doubts(options.limits, known.score, known.share, known.least)
        for remark in dict.fromkeys((*self.prepared.notes, *self.notes)):
            self.progress.remark(remark)
        claim(folder, self.prepared, self.environment, self._identity())
        self.storage = Storage(
            options.storage or in_file(folder / "study.db"),
            self.stored_as,
            direction="maximize",
            identity=self._identity(),
            fresh=options.fresh,
        )
        self._trials = [trial for trial in self.storage.trials() if not self._deserves_another(trial)]
        self.notes += self.storage.notes
        self._end: float | None = None
        self._left_out: list[Trial] = []
        """Recipes that the time left was too short for; they are not finished, and the next run asks for them again."""
        self.sampler = self.make_sampler()
        self.progress.opened(self)

    @property
    def original(self) -> Recipe:
        """What everything is measured against: the workload as written."""
        return as_written()

    @property
    def stored_as(self) -> str:
        """The study's name in its storage. In one that others share it tells what the study is about, lest two meet."""
        if self.options.storage is None:
            return self.prepared.name
        digest = hashlib.blake2b(dumps(self._identity(), indent=None).encode(errors=ESCAPED), digest_size=4).hexdigest()
        return f"{self.prepared.name}-{digest}"

    @property
    def ships(self) -> bool:
        """Whether a winner leaves an artifact."""
        return True

    @property
    def to_beat(self) -> Trial | None:
        """What a winner has to beat: the original, tuned as far as the limits allow."""
        return ranking.best_eager(self._trials, self.options.limits, self.options.objective)

    @property
    def lost(self) -> bool:
        """Whether the original was tried in vain, as written and in eager's own form: without it nothing can win."""
        plain = {self.original.hash, Recipe(backend=BACKENDS["eager"]()).hash}
        return self.to_beat is None and plain <= {trial.recipe.hash for trial in self._trials}

    def make_sampler(self) -> Sampler:
        """What asks for recipes."""
        return Ladder() if self.options.sampler == "ladder" else Tpe(self.storage, self.options.seed)

    @property
    def leader(self) -> Trial | None:
        """The best finished trial that keeps the limits, as far as the search can tell."""
        return next(iter(ranking.ranked(self._trials, self.options.limits, self.options.objective)), None)

    @property
    def trials(self) -> list[Trial]:
        """The finished trials."""
        return list(self._trials)

    def ask(self) -> Ask | None:
        """The next recipe to try; ``None`` when there is nothing left."""
        return self.sampler.ask([*self._trials, *self._left_out], self._facts())

    def tell(self, trial: Trial) -> Trial:
        """Keep a finished trial. It is on disk when this returns."""
        value = ranking.value(trial, self.options.objective)
        usable = value if ranking.feasible(trial, self.options.limits) else None
        if isinstance(self.sampler, Tpe) and self.sampler.pending is not None:
            trial = self.storage.finish(self.sampler.pending, trial, usable)
        else:
            trial = self.storage.add(trial, value)
        self._trials.append(trial)
        self._sweep()
        self.record().write(self.folder)
        return trial

    def search(self, *, deadline: float | None = None, reserve: Callable[[], float] = float, most: int | None = None) -> None:
        """Ask, evaluate and tell until nothing is left, ``deadline`` (of ``time.monotonic``) or ``most`` new trials.

        As soon as something beats the original, the last ``reserve()`` seconds are kept for its confirmation.
        """
        new, self._end, self._left_out = 0, deadline, []
        with BaselineServers(self.job(), self.folder / RIVALS, self.workers) as rivals:
            while most is None or new < most:
                end = None if deadline is None else deadline - reserve() * self._found_something()
                if self.lost or self.interrupted() or (self._trials and self._over(end)):
                    break
                self.progress.stage("searching")
                ask = self.ask()
                if ask is None:
                    break
                if not self._affordable(ask, end):
                    self._left_out.append(Trial(recipe=ask.recipe, state=State.SKIPPED, reason="The budget is too short."))
                    if self.sampler.declined(len(self._left_out)):
                        break
                    continue  # what comes after it may be cheaper
                # without the model as written there would be no answer at all, however short the time
                trial = self._try(ask, rivals, None if ask.recipe == self.original else end)
                if trial is None:
                    self.sampler.declined(0)
                    self.notes.append(f"{ask.recipe} was cut off when the study ended; the same command tries it again.")
                    break
                self.progress.ended(self.tell(trial), self)
                new += trial.state is not State.SKIPPED
        if self._left_out:
            self.notes.append(ranking.too_short(self._left_out))

    def record(self) -> Record:
        """What is known so far."""
        return Record(
            workload=self.prepared.name,
            command=self.command,
            started=self._started,
            seconds=time.monotonic() - self._began,
            objective=self.options.objective,
            sampler=self.options.sampler,
            limits=self.options.limits,
            prepared=self.prepared,
            environment=self.environment,
            trials=tuple(self._trials),
            notes=tuple(self.notes),
            refused=tuple(self.refused),
        )

    def job(self) -> dict[str, Any]:
        """What every job of this study has in common. Paths are absolute, for a workload may change the working folder."""
        return {
            "workload": self._source,
            "reference": str(self.folder.absolute() / REFERENCE),
            "scratch": str(self.folder.absolute() / SCRATCH),
            "objective": self.options.objective,
        }

    def files(self, trial: Trial) -> pathlib.Path:
        """The folder that holds what ``trial`` built."""
        return self.folder.absolute() / TRIALS / trial.recipe.hash

    def run_job(
        self,
        job: Mapping[str, Any],
        folder: pathlib.Path,
        *,
        deadline: float | None = None,
        final: bool = False,
        anew: bool = False,
        warm: bool = True,
    ) -> Outcome:
        """Run a job in a worker; gives how it ended.

        A ``final`` job is not cut off by the first Ctrl-C, which asks for a clean end and not for none. One that runs ``anew``
        has an interpreter of its own, whose memory is laid out by chance once more. One that is not ``warm`` has imported
        nothing of the workload's.
        """
        with self.worker(job, folder, anew=anew, warm=warm) as worker:
            return self.wait_for(worker, deadline=deadline, final=final)

    @contextlib.contextmanager
    def worker(self, job: Mapping[str, Any], folder: pathlib.Path, *, anew: bool, warm: bool) -> Iterator[WorkerProcess]:
        """A worker that has begun a job, as in :meth:`run_job`; it ends with the block."""
        (self.folder / SCRATCH).mkdir(exist_ok=True)
        worker = WorkerProcess(job, folder, None if anew else self.workers, warm=warm)
        try:
            yield worker
        finally:
            worker.kill()

    def wait_for(self, worker: WorkerProcess, *, deadline: float | None = None, final: bool = False) -> Outcome:
        """Wait for a worker to end, as in :meth:`run_job`."""
        return worker.wait(
            seconds=self.options.trial_s,
            memory_mb=self.memory_mb,
            interrupted=lambda: not final and self._over(deadline),
        )

    def _try(self, ask: Ask, rivals: BaselineServers, deadline: float | None, *, again: bool = False) -> Trial | None:
        if reason := self.prepared.why_not(ask.recipe):
            return Trial(recipe=ask.recipe, state=State.SKIPPED, reason=reason, stage=ask.stage)
        self.progress.began(ask, len(self._trials))
        try:
            if not rivals.alive("as_written"):
                told = rivals.assure(
                    "as_written", self.original, fresh=False, seconds=self.options.trial_s, interrupted=self.interrupted
                )
                self.load_s = told.get("load_s", self.load_s)
        except MeasurementError:
            if self.interrupted():
                return None
            raise
        folder = self.folder / TRIALS / ask.recipe.hash
        shutil.rmtree(folder, ignore_errors=True)
        job = self.job() | {
            "kind": "trial",
            "recipe": ask.recipe.to_json(),
            "plan": to_json(self.plan(**self._to_reach(ask))),
            "address": rivals.addresses["as_written"],
        }
        outcome = self.run_job(job, folder, deadline=deadline)
        if outcome.cut_off:
            return None
        if ask.recipe == self.original and outcome.error == WorkloadError.__name__:
            raise WorkloadError(str(outcome.reason))  # which no other recipe could mend
        if not rivals.alive("as_written") and not again:
            return self._try(ask, rivals, deadline, again=True)  # it was the rival that broke, not this recipe
        log = str((folder / LOG).relative_to(self.folder))
        unsaved = folder / UNSAVED
        if outcome.result is None and unsaved.exists():
            trial = from_json(Trial, json.loads(unsaved.read_text(encoding="utf-8")))
            reason = f"It cannot ship, because writing it failed. {outcome.reason}"
            trial = dataclasses.replace(trial, reason=reason, ended_by=outcome.ended_by, limit=outcome.limit)
            trial = probed(self, trial, folder, rivals) or trial
        elif outcome.result is None:
            how = {name: getattr(outcome, name) for name in ("reason", "traceback", "ended_by", "limit")}
            trial = Trial(recipe=ask.recipe, state=State.FAILED, **how)
        else:
            known = probed(self, from_json(Trial, outcome.result), folder, rivals)
            if known is None:
                return None
            trial = known
        return dataclasses.replace(trial, stage=ask.stage, log=log, seconds=outcome.seconds)

    def costs_as_written(self, rivals: BaselineServers) -> dict[str, float | None] | None:
        """``cold_s`` and ``peak_mb`` of the original as its user starts it; ``None`` if the study had to end meanwhile.

        Raises:
            WorkloadError: it has other weights each time.
        """
        job = self.job() | {"kind": "original", "weights": self.prepared.weights}
        outcome = self.run_job(job, self.folder / PREPARE / "original", anew=True, warm=False)
        if outcome.error == WorkloadError.__name__:
            raise WorkloadError(str(outcome.reason))
        return None if outcome.cut_off else outcome.result or {}

    def plan(self, *, seconds: float | None = None, width: float = 0.03, **reach: float) -> Plan:
        """How trials are judged and measured; ``reach`` is what a first timing is held against."""
        options, timing = self.options, seconds or self.options.timing_s
        times = {"quick_s": timing / 4, "seconds": timing, "width": width}
        return Plan(objective=options.objective, limits=options.limits, **times, **reach)

    def _deserves_another(self, trial: Trial) -> bool:
        """Whether a finished trial is to be forgotten: what it lacked then, a package or time or memory, is there now."""
        if trial.state is State.SKIPPED:
            return not self.prepared.why_not(trial.recipe)
        return ranking.has_more(trial, seconds=self.options.trial_s, memory_mb=self.memory_mb)

    def _to_reach(self, ask: Ask) -> dict[str, float]:
        """What a first timing is held against: nothing where the figure is that of a rung, which is timed in full, as far as
        the budget allows."""
        if ask.stage in ("as_written", "tuned"):
            return {"seconds": ranking.in_time(self.options.timing_s, self._end)} if ask.recipe == self.original else {}
        return ranking.to_reach(ask.recipe, self._trials, self.options.limits, self.options.objective)

    def _facts(self) -> SearchState:
        return SearchState(
            throughput=self.options.objective == "throughput",
            convolves=self.prepared.convolves,
            feasible=lambda trial: ranking.feasible(trial, self.options.limits),
            value=lambda trial: ranking.value(trial, self.options.objective),
        )

    def _affordable(self, ask: Ask, deadline: float | None) -> bool:
        """Whether a trial of ``ask`` is likely to end in time. As long as nothing has won there is nothing to lose by one that
        is cut off."""
        if deadline is None or not self._found_something() or self.prepared.why_not(ask.recipe):
            return True
        likely = ranking.likely_s(ask.recipe.backend, self._trials, self.original, self.startup_s)
        return time.monotonic() + likely <= deadline

    def _over(self, deadline: float | None) -> bool:
        return self.interrupted() or (deadline is not None and time.monotonic() > deadline)

    def _found_something(self) -> bool:
        """Whether there is anything to confirm but the original."""
        return self.leader is not None and self.leader is not self.to_beat

    def _sweep(self) -> None:
        """Delete the built files of every trial that cannot become the artifact any more."""
        ranked = ranking.ranked(self._trials, self.options.limits, self.options.objective)
        exact = [trial for trial in ranked if trial.recipe.exact]
        keep = {trial.recipe.hash for trial in (*ranked[:KEEP], *exact[:1], *ranking.unsettled(ranked))}
        if (eager := self.to_beat) is not None:
            keep.add(eager.recipe.hash)
        for trial in self._trials:
            if trial.recipe.hash not in keep:
                (self.files(trial) / BUILT).unlink(missing_ok=True)
                shutil.rmtree(self.files(trial) / MODEL, ignore_errors=True)

    def _prepare(self) -> Prepared:
        job = self.job() | {"kind": "prepare", "recipe": self.original.to_json()}
        outcome = self.run_job(job, self.folder / PREPARE)
        self.load_s = outcome.seconds
        if outcome.cut_off:
            raise KeyboardInterrupt
        if outcome.error is not None:
            raise getattr(errors, outcome.error)(outcome.reason)
        if outcome.result is None:
            log = self.folder / PREPARE / LOG
            raise WorkloadError(f"The workload failed in its dry run, before the first trial. {outcome.reason} Log: {log}")
        if self.workers is not None:
            self.workers.warm(self.folder / PREPARE / IMPORTED)
        return from_json(Prepared, outcome.result)

    def _identity(self) -> dict[str, Any]:
        return {
            "workload": self.prepared.fingerprint,
            "code": dict(self.prepared.code),
            "number of threads": self.prepared.threads,
            "objective": self.options.objective,
            "machine or version of a runtime": self.environment.fingerprint,
            "limits": to_json(self.options.limits),  # early stops were decided by them
        }
