"""Trainings of a study: each runs once, in a job of its own, and its seconds count against the budget for training."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from trimtab._internal.serialization import from_json, to_json
from trimtab._internal.text import counted
from trimtab.core.recipe import Recipe
from trimtab.core.trained import Trained
from trimtab.core.trial import State, Trial
from trimtab.execution.jobs import compression
from trimtab.execution.process import LOG, Outcome
from trimtab.execution.trial_runner import SCRATCH, TrialRunner
from trimtab.passes.common.trained_weights import FOLDER, read_progress
from trimtab.study import ranking
from trimtab.study.options import Options
from trimtab.study.progress import Progress
from trimtab.study.storage import Storage

TRAININGS, ORDER = "trainings", "trainings"
"""Folder in the run folder with the logs of trainings; key in the storage: the hashes of all trainings, in order."""
FIGURES = ("update", "updates", "examples", "labels", "before", "after", "losses", "held_out")
"""Figures that the progress file and the result of a training have in common."""
PACE_UPDATES = 20
"""Updates from which on the pace of a training is known."""
PACE_S = 3.0
"""Seconds between its first and its latest report from which on the pace of a running training is known."""
POLL_S = 1.0
"""Seconds between two readings of the progress of a training."""
TOO_SLOW = 1.25
"""A training ends early once it needs so many times the time that is left: the pace is an estimate."""


class Trainings:
    """The trainings of one study, kept in its storage; their weights are in the run folder."""

    def __init__(self, runner: TrialRunner, storage: Storage, options: Options, progress: Progress) -> None:
        self._runner, self._storage, self._options, self._progress = runner, storage, options, progress
        known = [storage.get(_key(name)) for name in storage.get(ORDER) or ()]
        self._known = {found.recipe.hash: found for each in known if each for found in [from_json(Trained, each)]}
        self._polled_at, self._time_used_up, self._why_too_slow = 0.0, False, ""

    @property
    def all(self) -> tuple[Trained, ...]:
        """All trainings, in the order in which they first began."""
        return tuple(self._known.values())

    @property
    def spent_s(self) -> float:
        """Seconds of all trainings, those of earlier runs of the study included."""
        return sum(each.seconds for each in self._known.values())

    @property
    def limit_s(self) -> float:
        """Time limit of a training in seconds: the budget of all trainings, else the limit of a trial."""
        return self._options.trial_s if self._options.train_s is None else self._options.train_s

    def why_not(self, recipe: Recipe) -> str | None:
        """Why the training that ``recipe`` needs does not begin; ``None`` if it may, is done, or is not needed."""
        whole, part = self._options.train_s, recipe.training
        if whole is None or part is None or self._is_final(part):
            return None
        left, likely = max(0.0, whole - self.spent_s), self.likely_s(recipe)
        if left > 0 and likely <= left:
            return None
        needs = f"this would take about {likely:.0f} s" if left > 0 else "nothing is left for this one"
        return (
            f"Of {whole:.4g} s for training {min(self.spent_s, whole):.4g} s are used, and {needs}: give more with "
            "--train-budget (in Python, train_budget=...); the same command then goes on."
        )

    def likely_s(self, recipe: Recipe) -> float:
        """Expected seconds of the training that ``recipe`` needs: 0 if it is done, not needed, or nothing was trained yet."""
        part = recipe.training
        if part is None or self._is_final(part):
            return 0.0
        paces = [each.pace_s or each.seconds / each.update for each in self._known.values() if each.update >= PACE_UPDATES]
        begun = self._known.get(part.hash)
        asked = max(getattr(step, "updates", 0) for step in part.passes)
        return max(paces, default=0.0) * max(0, asked - (0 if begun is None else begun.update))

    def ensure(self, recipe: Recipe, deadline: float | None) -> Trial | bool | None:
        """Train what ``recipe`` needs, unless it was trained before.

        Returns:
            ``True`` if there is nothing in the way of the trial, the trial if the training failed, was stopped by its limit or
            cannot end within the budget of the study, and ``None`` if the study had to end.
        """
        part = recipe.training
        if part is None:
            return True
        found = self._known[part.hash] if self._is_final(part) else self._run(part, deadline)
        if found is None:
            return None
        if found.state is State.COMPLETE:
            return True
        if self.is_postponed(recipe):
            return Trial(recipe=recipe, state=State.SKIPPED, reason=found.reason)
        how = {name: getattr(found, name) for name in ("reason", "traceback", "ended_by", "limit", "log")}
        return Trial(recipe=recipe, state=found.state, **how)

    def is_postponed(self, recipe: Recipe) -> bool:
        """Whether the training that ``recipe`` needs was stopped because the search would have ended before it."""
        found = None if recipe.training is None else self._known.get(recipe.training.hash)
        return found is not None and found.state is State.STOPPED and found.ended_by is None

    def _is_final(self, part: Recipe) -> bool:
        """Whether the training is done and its files are there, or has failed for good."""
        found = self._known.get(part.hash)
        if found is None or found.state is State.STOPPED:
            return False
        if found.ended_by == "memory":
            return self._runner.memory_mb <= ranking.LEAST_GROWTH * (found.limit or 0.0)
        return all((self._weights / name).exists() for name in found.files)

    @property
    def _weights(self) -> pathlib.Path:
        return self._runner.folder / SCRATCH / FOLDER

    def _run(self, part: Recipe, deadline: float | None) -> Trained | None:
        folder, runner = self._runner.folder / TRAININGS / part.hash, self._runner
        before = self._known.get(part.hash)
        earlier_s = 0.0 if before is None else before.seconds
        others_s = 0.0 if self._options.train_s is None else self.spent_s - earlier_s
        self._time_used_up, self._why_too_slow = False, ""
        running = RunningTraining(self._weights)

        def poll() -> bool:
            """Look for a new report every :data:`POLL_S` seconds. Returns whether to stop the training."""
            if time.monotonic() - self._polled_at >= POLL_S:
                self._polled_at = time.monotonic()
                if progress := running.new_report():
                    spent = others_s + progress["seconds"]
                    self._progress.training(progress["update"], progress["updates"], spent, self._options.train_s)
                    self._time_used_up = spent > self.limit_s
                    self._judge_pace(running, spent, deadline)
            return self._time_used_up or bool(self._why_too_slow) or runner.over(deadline)

        job = runner.job() | {"jobs": compression.__name__, "kind": "train", "recipe": part.to_json()}
        most = max(0.0, self.limit_s - others_s) + runner.startup_s  # also if it never reports its progress
        with runner.worker(job, folder) as worker:
            outcome = worker.wait(seconds=most, memory_mb=runner.memory_mb, interrupted=poll)
        if self._time_used_up:
            outcome = dataclasses.replace(outcome, cut_off=False, ended_by="time")
        elif self._why_too_slow:
            outcome = dataclasses.replace(outcome, cut_off=False)
        running.new_report()
        earlier = {} if before is None else to_json(before)
        trained = self._trained(part, outcome, earlier_s, running.progress or earlier)
        log = str((folder / LOG).relative_to(runner.folder))
        found = dataclasses.replace(trained, log=log, pace_s=running.pace_s or earlier.get("pace_s"))
        self._known[part.hash] = found
        self._storage.put(_key(part.hash), to_json(found))
        self._storage.put(ORDER, list(self._known))
        return None if outcome.cut_off else found

    def _judge_pace(self, running: RunningTraining, spent: float, deadline: float | None) -> None:
        """Stop a training that at its pace needs far more time than is left: of the limit of time, of which trainings took
        ``spent`` seconds, or of the search, which ends at ``deadline``."""
        limit_s = max(0.0, self.limit_s - spent)
        search_s = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
        left, needed_s = min(limit_s, search_s), running.needed_s
        if needed_s is None or needed_s <= TOO_SLOW * left:
            return
        self._time_used_up = limit_s <= search_s
        limit = f"its limit of {self.limit_s:.4g} s" if self._options.train_s is None else "the time for training"
        of = limit if self._time_used_up else "the search"
        self._why_too_slow = f"because at its pace it needs {needed_s:.0f} s more and {left:.0f} s of {of} are left"

    def _trained(self, part: Recipe, outcome: Outcome, earlier_s: float, progress: Mapping[str, Any]) -> Trained:
        result: Mapping[str, Any] = outcome.result or {}
        known: dict[str, Any] = {"recipe": part.to_json()}
        if result.get("trained"):
            facts = [dict(each) for each in result["trained"]]
            known |= {name: facts[-1][name] for name in FIGURES}
            known["seconds"] = sum(each["seconds"] for each in facts)
            known |= {"state": str(State.COMPLETE), "files": [each["file"] for each in facts]}
            return from_json(Trained, known)
        if result:
            known |= {"state": str(State.SKIPPED), "reason": result.get("skipped", "Its passes train nothing.")}
            return from_json(Trained, known)
        known |= {name: progress[name] for name in FIGURES if name in progress}
        known["seconds"] = max(earlier_s, float(progress.get("seconds", 0.0)))
        if outcome.cut_off or self._why_too_slow or outcome.ended_by == "time":
            limit = {"ended_by": "time", "limit": self.limit_s} if outcome.ended_by == "time" else {}
            known |= {"state": str(State.STOPPED), "reason": self._stopped(progress, outcome), **limit}
            return from_json(Trained, known)
        known |= {name: getattr(outcome, name) for name in ("reason", "traceback", "ended_by", "limit")}
        return from_json(Trained, known | {"state": str(State.FAILED)})

    def _stopped(self, progress: Mapping[str, Any], outcome: Outcome) -> str:
        reached = f" after {progress['update']} of {counted(progress['updates'], 'update')}" if progress.get("update") else ""
        if outcome.cut_off:
            return f"The training was stopped{reached}, because the study had to end; the same command goes on with it."
        why = self._why_too_slow or f"at its limit of {self.limit_s:.4g} s"
        if outcome.ended_by != "time":
            return f"The training was stopped{reached}, {why}. The same command goes on with it."
        option = "--trial-time (in Python, trial_seconds=...)"
        if self._options.train_s is not None:
            option = "--train-budget (in Python, train_budget=...)"
        return f"The training was stopped{reached}, {why}. Give more with {option}; the same command then goes on with it."


class RunningTraining:
    """The reports of one training, made before it begins.

    Args:
        weights: folder with the progress files of all trainings. That of the running one is the one that changes.
    """

    def __init__(self, weights: pathlib.Path) -> None:
        self._weights = weights
        self._earlier = {path: read_progress(path) for path in weights.glob("*.json")}
        self._first: Mapping[str, Any] = {}
        self.progress: Mapping[str, Any] = {}
        """Its latest report; empty before the first one."""

    def new_report(self) -> Mapping[str, Any]:
        """The latest report if there is a new one; otherwise empty."""
        for path in self._weights.glob("*.json"):
            found = read_progress(path)
            if found and found != self._earlier.get(path):
                self._earlier[path] = found
                self._first, self.progress = self._first or found, found
                return found
        return {}

    @property
    def pace_s(self) -> float | None:
        """Seconds per update since the first report; ``None`` before :data:`PACE_UPDATES` and :data:`PACE_S`."""
        if not self.progress:
            return None
        made, took_s = (self.progress[name] - self._first[name] for name in ("update", "seconds"))
        return float(took_s / made) if made >= PACE_UPDATES and took_s >= PACE_S else None

    @property
    def needed_s(self) -> float | None:
        """Seconds that the other updates need at this pace; ``None`` before it is known."""
        pace = self.pace_s
        return None if pace is None else pace * (self.progress["updates"] - self.progress["update"])


def _key(name: str) -> str:
    return f"training {name}"
