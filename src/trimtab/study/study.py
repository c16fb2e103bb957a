"""A study: the trials of one workload for one objective and its limits."""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import os
import pathlib
import shutil
import time
from collections.abc import Callable
from typing import Any

from trimtab._internal.serialization import ESCAPED, dumps, from_json, to_json
from trimtab.core import search_space
from trimtab.core.backend import BACKENDS
from trimtab.core.recipe import Recipe
from trimtab.core.trial import State, Trial
from trimtab.core.workload import Workload
from trimtab.errors import UsageError
from trimtab.evaluation.confirm import Confirmation
from trimtab.evaluation.evaluate import BUILT, MODEL, Plan
from trimtab.execution.baseline_servers import BaselineServers
from trimtab.execution.fork_pool import Workers
from trimtab.execution.trial_runner import RIVALS, TrialRunner
from trimtab.execution.workload_transfer import workload_source
from trimtab.hardware.environment import Environment
from trimtab.hardware.system import free_mb
from trimtab.measure.host import other_load
from trimtab.passes.student import Student
from trimtab.study import ranking
from trimtab.study.options import Options
from trimtab.study.progress import Progress
from trimtab.study.record import Prepared, Record, claim
from trimtab.study.samplers.sampler import LONG, MORE_TRAININGS, MOST_TRAININGS, UPDATES, Ask, SearchState
from trimtab.study.samplers.tpe import Tpe
from trimtab.study.storage import Storage, sqlite_url
from trimtab.study.task import InferenceTask, Task
from trimtab.study.trainings import Trainings

THREAD_LIMIT = "thread limit"
"""Key in the storage: the number of threads of the study, and the load by other processes when it began."""
SECOND_TIMING = 4.0
"""Maximum duration of the second timing of a training, in multiples of the first: its interval is half as wide."""
COMPILATION_S = 40.0
"""Expected seconds of the first compilation of a training, beside those of another trial."""
SLOW_ORIGINAL = 0.25
"""Share of the time that is left. Where a trial of the original takes more, other runtimes come before its tuned form."""
LENT = 0.5
"""Share of the time kept for the confirmation that the first form of a runtime may take."""


class Study:
    """One search, stored in a run folder. A study with the same workload and folder resumes it.

    Args:
        workload: a :class:`Workload`, or a reference such as ``"model.py:workload"``, which every worker loads itself.
        workers: forks processes that need no interpreter of their own; without it every process is a new interpreter.

    Raises:
        UsageError: the workload or an option is wrong, or the folder has another study.
        WorkloadError: the workload fails in the dry run.
        StorageError: the storage cannot be opened, or the disk is full.
    """

    def __init__(
        self,
        workload: Workload | str,
        folder: pathlib.Path,
        options: Options,
        *,
        task: Task | None = None,
        progress: Progress | None = None,
        interrupted: Callable[[], bool] = lambda: False,
        command: str = "",
        workers: Workers | None = None,
    ) -> None:
        self.folder = folder
        self.task = task or InferenceTask(options.compress)
        self.command = command
        """The command that repeats this study, for its record."""
        self.options = options
        self.progress = progress or Progress()
        self.interrupted = interrupted
        self.notes: list[str] = []
        self.refused: list[Confirmation] = []
        """Confirmations that failed."""
        self._began, self._started = time.monotonic(), dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        folder.mkdir(parents=True, exist_ok=True)
        self.runner = TrialRunner(
            workload_source(workload, folder),
            folder,
            self.task.job(folder),
            baseline=self.baseline,
            objective=options.objective,
            trial_s=options.trial_s,
            memory_mb=options.worker_mb or 0.8 * free_mb(),
            interrupted=interrupted,
            workers=workers,
            server_tells_costs=self.task.mode == "train",
        )
        """Runs the processes of the study."""
        self.environment = Environment.capture()
        self.other_load = other_load()
        """Share of the CPUs that other processes used when last measured; ``None`` if unknown."""
        busy = self.other_load is not None and self.other_load.busy
        self.thread_limit = 1 if busy and self.task.mode == "infer" else None
        """Number of threads with which everything is computed and timed, because other processes use the machine."""
        self.runner.limit_threads(self.thread_limit)
        if busy:
            several = self.task.mode == "train" and os.environ.get("OMP_NUM_THREADS") != "1"
            wide = "figures will be wide" + (" unless OMP_NUM_THREADS=1" if several else "")
            how = wide if self.thread_limit is None else "everything is timed with one thread"
            self.progress.remark(f"Busy machine: {self.other_load}, so {how}.")
        self.progress.stage("checking the workload with a dry run")
        self.prepared = self._prepare()
        known = self.prepared
        self.notes += ranking.limit_warnings(options.limits, known.score, known.share, known.least)
        if "distill" in options.compress and (why := known.why_not(Recipe(passes=(Student(),), backend=BACKENDS["eager"]()))):
            self.notes.append(f"Nothing is distilled: {why}")
        for remark in dict.fromkeys((*self.prepared.notes, *self.notes)):
            self.progress.remark(remark)
        claim(folder, self.prepared, self.environment, self._identity())
        url = options.storage or sqlite_url(folder / "study.db")
        self.storage = Storage(url, self.stored_as, identity=self._identity(), fresh=options.fresh)
        self._keep_thread_limit()
        self.trainings = Trainings(self.runner, self.storage, options, self.progress)
        finished = self.storage.trials()
        self._repeated = [trial for trial in finished if self._should_repeat(trial)]
        """Finished trials of earlier runs that are tried again."""
        self._trials = [trial for trial in finished if trial not in self._repeated]
        self.notes += self.storage.notes
        self._end: float | None = None
        self._left_out: list[Trial] = []
        """Recipes that the budget left no time for. The next run asks for them again."""
        self.sampler = self.task.sampler(self.storage, options)
        self.progress.opened(self.record())

    @property
    def baseline(self) -> Recipe:
        """The workload as written, which everything is measured against."""
        return self.task.baseline

    @property
    def stored_as(self) -> str:
        """Name of the study in its storage; in a shared storage the name includes the identity of the study."""
        if self.options.storage is None:
            return f"{self.prepared.name}{self.task.suffix}"
        digest = hashlib.blake2b(dumps(self._identity(), indent=None).encode(errors=ESCAPED), digest_size=4).hexdigest()
        return f"{self.prepared.name}-{digest}{self.task.suffix}"

    @property
    def to_beat(self) -> Trial | None:
        """The trial that a winner must beat; ``None`` if it was not measured."""
        return self.task.to_beat(self._trials, self.options)

    @property
    def leader(self) -> Trial | None:
        """The best finished trial that keeps the limits; ``None`` if there is none."""
        return next(iter(ranking.ranked(self._trials, self.options.limits, self.options.objective)), None)

    @property
    def trials(self) -> list[Trial]:
        """All finished trials."""
        return list(self._trials)

    def ask(self) -> Ask | None:
        """The next recipe to try; ``None`` at the end of the search."""
        return self.sampler.ask([*self._trials, *self._left_out], self._search_state())

    def tell(self, trial: Trial) -> Trial:
        """Store a finished trial. It is on disk on return."""
        value = ranking.value(trial, self.options.objective)
        usable = value if ranking.feasible(trial, self.options.limits) else None
        if isinstance(self.sampler, Tpe) and self.sampler.pending is not None:
            trial = self.storage.finish(self.sampler.pending, trial, usable)
        else:  # optuna's sampler learns from what keeps the limits only
            trial = self.storage.add(trial, usable if isinstance(self.sampler, Tpe) else value)
        self._trials.append(trial)
        self._delete_unneeded_files()
        self.record().write(self.folder)
        return trial

    def search(self, *, deadline: float | None = None, reserve: Callable[[], float] = float, most: int | None = None) -> None:
        """Ask, evaluate and tell until the search ends, until ``deadline`` (``time.monotonic``), or for ``most`` new trials.

        Once a trial beats the original, the last ``reserve()`` seconds are kept for its confirmation. The first form without
        loss of a runtime may take the share :data:`LENT` of them: it may be several times as fast. Where other runtimes or the
        confirmation need time, it ends after half of what is left.
        """
        new, self._end, self._left_out = 0, deadline, []
        if self.task.mode == "infer" and all(trial.recipe != self.baseline for trial in self._trials):
            self.runner.check_baseline()  # before anything is timed
        with self.runner.servers(RIVALS) as rivals:
            while most is None or new < most:
                confirm_s = reserve()
                kept = confirm_s * self._has_candidate()
                latest = None if deadline is None else deadline - (1 - LENT) * kept
                lost = self.task.baseline_failed(self._trials, self.to_beat)
                if lost or self.interrupted() or (self._trials and self.runner.over(latest)):
                    break
                self.progress.stage("searching")
                ask = self.ask()
                if ask is None:
                    break
                first = self._first_form(ask)
                end = latest if latest is None or first else latest - LENT * kept
                limit_s = self._first_form_s(ask, end, (1 - LENT) * (confirm_s - kept)) if first and end is not None else None
                if not self._affordable(ask, end):
                    skipped = Trial(recipe=ask.recipe, state=State.SKIPPED, reason="The budget is too short.")
                    if self._leave_out(skipped):
                        break
                    continue  # later recipes may be cheaper
                # the baseline is measured however short the time: without it there is no result
                trial = self._try(ask, rivals, None if ask.recipe == self.baseline else end, limit_s)
                if trial is None:
                    self.sampler.declined(0)
                    self.notes.append(f"{ask.recipe} was cut off when the study ended; the same command tries it again.")
                    break
                if self.trainings.is_postponed(trial.recipe):
                    self.progress.ended(trial, self.record())
                    if self._leave_out(trial):
                        break
                    continue
                self.progress.ended(self.tell(trial), self.record())
                new += trial.state is not State.SKIPPED
        if self._left_out:
            self.notes.append(ranking.too_short(self._left_out))
        if (note := self.runner.rereading_note()) is not None:
            self.notes.append(note)

    def report_load_change(self) -> None:
        """Tell the user if other processes made the machine busy since the last measurement, or no longer do."""
        now = other_load()
        if now is None or self.other_load is None or now.busy == self.other_load.busy:
            return
        self.other_load = now
        self.progress.remark(f"Busy machine now: {now}, so figures will be wide." if now.busy else f"Now {now}.")

    def besides_baseline(self, trials: int | None) -> int | None:
        """The number of new trials that tries ``trials`` recipes besides the baseline, which a first run has to time too."""
        return None if trials is None else trials + all(trial.recipe != self.baseline for trial in self._trials)

    def record(self) -> Record:
        """The record of the study so far."""
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
            mode=self.task.mode,
            trainings=self.trainings.all,
            compress=self.options.compress,
            train_s=self.options.train_s,
            untried=tuple(str(trial.recipe) for trial in self._left_out),
        )

    def _leave_out(self, trial: Trial) -> bool:
        """Leave out ``trial``, for lack of time; the next run asks for it again. Returns whether to end the search."""
        self._left_out.append(trial)
        return self.sampler.declined(len(self._left_out))

    def _try(self, ask: Ask, rivals: BaselineServers, deadline: float | None, limit_s: float | None) -> Trial | None:
        """The trial of what the sampler asked for; ``None`` if the study was ended meanwhile. With ``limit_s``, the trial ends
        after so many seconds and not at ``deadline``."""
        if reason := self._why_not(ask.recipe):
            return Trial(recipe=ask.recipe, state=State.SKIPPED, reason=reason, stage=ask.stage)
        self.progress.began(ask, len(self._trials))
        ready = self.trainings.ensure(ask.recipe, deadline)
        if not isinstance(ready, bool):
            return None if ready is None else dataclasses.replace(ready, stage=ask.stage)
        plan = self._plan_for(ask)
        trial = self.runner.trial(ask.recipe, plan, rivals, deadline if limit_s is None else None, limit_s=limit_s)
        if trial is None:
            return None
        if limit_s is not None and trial.ended_by == "time" and trial.limit == limit_s:
            trial = dataclasses.replace(trial, state=State.STOPPED, reason=ranking.share_used_up(limit_s))
        return dataclasses.replace(trial, stage=ask.stage)

    def _why_not(self, recipe: Recipe) -> str | None:
        """Why ``recipe`` is not tried; ``None`` if it can be."""
        if self.thread_limit is not None and any("threads" in step.sets for step in recipe.passes):
            return "Other processes use this machine, where several threads cannot be timed."
        return self.prepared.why_not(recipe) or self.trainings.why_not(recipe)

    def plan(self, *, seconds: float, **more: Any) -> Plan:
        """The plan of a trial with ``seconds`` of timing; ``more`` are other fields of the plan."""
        return Plan(objective=self.options.objective, limits=self.options.limits, quick_s=seconds / 4, seconds=seconds, **more)

    def _keep_thread_limit(self) -> None:
        """Time with as many threads as the run that began this study: ratios of other numbers of threads cannot be compared."""
        known = self.storage.get(THREAD_LIMIT)
        if known is None:
            known = {"threads": self.thread_limit, "others": None if self.other_load is None else str(self.other_load)}
            self.storage.put(THREAD_LIMIT, known)
        self.thread_limit = known["threads"]
        self.runner.limit_threads(self.thread_limit)
        if self.thread_limit is not None:
            self.notes.append(
                f"As this study began, {known['others']}: all of it is timed with one thread, and only while that thread did "
                "not wait for a CPU. When the machine is quiet, --fresh (in Python, fresh=True) tries several threads."
            )

    def _should_repeat(self, trial: Trial) -> bool:
        """Whether to repeat a finished trial, because the package, time or memory that it lacked is now available."""
        if trial.state is State.SKIPPED:
            return not self._why_not(trial.recipe)
        trains = trial.state is State.STOPPED and trial.recipe.training is not None
        return ranking.limit_was_raised(
            trial, seconds=self.trainings.limit_s if trains else self.options.trial_s, memory_mb=self.runner.memory_mb
        )

    def _plan_for(self, ask: Ask) -> Plan:
        """The plan for the trial of ``ask``. All but the model as written get thresholds for their first timing.

        Within a budget the form of every runtime without loss is timed briefly, before others are timed at length. A training
        whose gain is left open is timed a second time.
        """
        timing_s, end = self.options.timing_s, self._end
        early = self.task.mode == "infer" and ask.stage in ("as_written", "tuned", "lossless")
        seconds = ranking.in_time(timing_s, end, ranking.EARLY if early else ranking.TIMED)
        reach = ranking.speed_thresholds(ask.recipe, self._trials, self.options.limits, self.options.objective)
        plan = self.plan(seconds=seconds, **({} if ask.stage in ("as_written", "tuned") else reach))
        if self.task.mode == "train":
            return dataclasses.replace(plan, over=ask.over, again_s=ranking.in_time(SECOND_TIMING * timing_s, end))
        brief = early and seconds < timing_s
        return dataclasses.replace(plan, brief=brief, quick_s=seconds / 2) if brief else plan

    def _search_state(self) -> SearchState:
        more = self.options.train_s is not None  # trainings, and longer ones
        written_s = next((trial.seconds for trial in self._trials if trial.recipe == self.baseline), 0.0)
        return SearchState(
            throughput=self.options.objective == "throughput",
            convolves=self.prepared.convolves,
            small=self.options.objective == "size" or self.options.limits.size_mb is not None,
            slow_original=self._end is not None and written_s > SLOW_ORIGINAL * (self._end - time.monotonic()),
            compress=self.options.compress,
            updates=(*UPDATES, LONG) if more else UPDATES,
            trainings=MORE_TRAININGS if more else MOST_TRAININGS,
            feasible=lambda trial: ranking.feasible(trial, self.options.limits),
            value=lambda trial: ranking.value(trial, self.options.objective),
        )

    def _first_form(self, ask: Ask) -> bool:
        """Whether ``ask`` is the first form without loss of its runtime."""
        name = ask.recipe.backend.name
        return ask.stage == "lossless" and all(trial.recipe.backend.name != name for trial in self._trials)

    def _first_form_s(self, ask: Ask, end: float, confirm_s: float) -> float | None:
        """The most seconds that ``ask``, the first form of a runtime, may take until ``end``: other runtimes that compile in
        seconds are to be tried too, and then the best form to be confirmed, for which ``confirm_s`` are not kept yet. ``None``
        if no other is left."""
        tried = {ask.recipe.backend.name, *(trial.recipe.backend.name for trial in (*self._trials, *self._left_out))}
        others = [Recipe(backend=each) for each in search_space.backends() if each.cost == "seconds" and each.name not in tried]
        needed = [self._likely_s(each) for each in others if not self._why_not(each)]
        if not needed:
            return None
        return ranking.share_s(end - time.monotonic(), [*needed, confirm_s] if confirm_s else needed)

    def _affordable(self, ask: Ask, deadline: float | None) -> bool:
        """Whether a trial of ``ask`` is expected to end before ``deadline``; true as long as nothing beats the original."""
        if deadline is None or not self._has_candidate() or self._why_not(ask.recipe):
            return True
        return time.monotonic() + self._likely_s(ask.recipe) + self.trainings.likely_s(ask.recipe) <= deadline

    def _likely_s(self, recipe: Recipe) -> float:
        """Expected duration in seconds of a trial of ``recipe``, from those of the trials that compile if it does."""
        last = {trial.recipe.hash: trial for trial in (*self._repeated, *self._trials)}
        alike = [trial for trial in last.values() if _compiles(trial.recipe) == _compiles(recipe)]
        likely = ranking.likely_s(recipe.backend, alike, self.baseline, self.runner.startup_s)
        return likely if alike or not _compiles(recipe) else likely + COMPILATION_S

    def _has_candidate(self) -> bool:
        """Whether a trial other than the original may be confirmed: of a training also one whose gain is not sure."""
        limits, objective, original = self.options.limits, self.options.objective, self.to_beat
        if self.task.mode == "train":
            return original is not None and bool(ranking.ahead(self._trials, limits, objective, original, tuned=False))
        return self.leader is not None and self.leader is not original

    def _delete_unneeded_files(self) -> None:
        """Delete the built files of trials that can no longer become the artifact."""
        ranked = ranking.ranked(self._trials, self.options.limits, self.options.objective)
        contenders = (*ranking.possibly_faster(ranked), *ranking.with_fewer_threads(ranked))
        keep = {trial.recipe.hash for trial in (*ranking.to_confirm(ranked), *contenders)}
        if (eager := self.to_beat) is not None:
            keep.add(eager.recipe.hash)
        for trial in self._trials:
            if trial.recipe.hash not in keep:
                (self.runner.files(trial) / BUILT).unlink(missing_ok=True)
                shutil.rmtree(self.runner.files(trial) / MODEL, ignore_errors=True)

    def _prepare(self) -> Prepared:
        try:
            return from_json(Prepared, self.runner.prepare(deadline=self.task.prepare_by))
        except KeyboardInterrupt:
            if self.interrupted() or self.task.overdue is None:
                raise
            raise UsageError(self.task.overdue) from None

    def _identity(self) -> dict[str, Any]:
        return {
            "workload": self.prepared.fingerprint,
            "code": dict(self.prepared.code),
            "number of threads": self.prepared.threads,
            "objective": self.options.objective,
            "machine or version of a runtime": self.environment.fingerprint,
            "limits": to_json(self.options.limits),  # they decided early stops
            **self.task.identity(),
        }


def _compiles(recipe: Recipe) -> bool:
    """Whether a training is compiled, which takes several times as long as the other trials of a study."""
    return any("compile" in step.sets for step in recipe.passes)
