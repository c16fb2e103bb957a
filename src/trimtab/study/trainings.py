"""Trainings of a study: each runs once, in a job of its own, and its seconds count against the budget for training."""

from __future__ import annotations

import dataclasses
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
"""Updates from which on the pace of a training is known; the first ones are slow."""
POLL_S = 1.0
"""Seconds between two readings of the progress of a training."""


class Trainings:
    """The trainings of one study, kept in its storage; their weights are in the run folder."""

    def __init__(self, runner: TrialRunner, storage: Storage, options: Options, progress: Progress) -> None:
        self._runner, self._storage, self._options, self._progress = runner, storage, options, progress
        known = [storage.get(_key(name)) for name in storage.get(ORDER) or ()]
        self._known = {found.recipe.hash: found for each in known if each for found in [from_json(Trained, each)]}
        self._polled_at, self._time_used_up = 0.0, False

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
        paces = [each.seconds / each.update for each in self._known.values() if each.update >= PACE_UPDATES]
        begun = self._known.get(part.hash)
        asked = max(getattr(step, "updates", 0) for step in part.passes)
        return max(paces, default=0.0) * max(0, asked - (0 if begun is None else begun.update))

    def ensure(self, recipe: Recipe, deadline: float | None) -> Trial | bool | None:
        """Train what ``recipe`` needs, unless it was trained before.

        Returns:
            ``True`` if there is nothing in the way of the trial, the trial if the training failed or was stopped by its limit,
            and ``None`` if the study had to end.
        """
        part = recipe.training
        if part is None:
            return True
        found = self._known[part.hash] if self._is_final(part) else self._run(part, deadline)
        if found is None:
            return None
        if found.state is State.COMPLETE:
            return True
        how = {name: getattr(found, name) for name in ("reason", "traceback", "ended_by", "limit", "log", "seconds")}
        return Trial(recipe=recipe, state=found.state, **how)

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
        self._time_used_up = False

        def poll() -> bool:
            """Report the progress every :data:`POLL_S` seconds. Returns whether the time for training is used up."""
            if time.monotonic() - self._polled_at >= POLL_S and (progress := self._progress_file()):
                self._polled_at, spent = time.monotonic(), others_s + progress["seconds"]
                self._progress.training(progress["update"], progress["updates"], spent, self._options.train_s)
                self._time_used_up = spent > self.limit_s
            return self._time_used_up or runner.over(deadline)

        job = runner.job() | {"jobs": compression.__name__, "kind": "train", "recipe": part.to_json()}
        most = max(0.0, self.limit_s - others_s) + runner.startup_s  # also if it never reports its progress
        with runner.worker(job, folder) as worker:
            outcome = worker.wait(seconds=most, memory_mb=runner.memory_mb, interrupted=poll)
        if self._time_used_up:
            outcome = dataclasses.replace(outcome, cut_off=False, ended_by="time")
        found = dataclasses.replace(self._trained(part, outcome, earlier_s), log=str((folder / LOG).relative_to(runner.folder)))
        self._known[part.hash] = found
        self._storage.put(_key(part.hash), to_json(found))
        self._storage.put(ORDER, list(self._known))
        return None if outcome.cut_off else found

    def _trained(self, part: Recipe, outcome: Outcome, earlier_s: float) -> Trained:
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
        progress = self._progress_file()
        known |= {name: progress[name] for name in FIGURES if name in progress}
        known["seconds"] = max(earlier_s, float(progress.get("seconds", 0.0)))
        if outcome.cut_off or outcome.ended_by == "time":
            limit = {} if outcome.cut_off else {"ended_by": "time", "limit": self.limit_s}
            known |= {"state": str(State.STOPPED), "reason": self._stopped(progress, outcome), **limit}
            return from_json(Trained, known)
        known |= {name: getattr(outcome, name) for name in ("reason", "traceback", "ended_by", "limit")}
        return from_json(Trained, known | {"state": str(State.FAILED)})

    def _stopped(self, progress: Mapping[str, Any], outcome: Outcome) -> str:
        reached = f" after {progress['update']} of {counted(progress['updates'], 'update')}" if progress else ""
        if outcome.cut_off:
            return f"The training was stopped{reached}, because the study had to end; the same command goes on with it."
        option = "--trial-time (in Python, trial_seconds=...)"
        if self._options.train_s is not None:
            option = "--train-budget (in Python, train_budget=...)"
        return (
            f"The training was stopped{reached}, at its limit of {self.limit_s:.4g} s. Give more with {option}; the same "
            "command then goes on from its last checkpoint."
        )

    def _progress_file(self) -> dict[str, Any]:
        """The latest progress file: that of the running training, or of the one that was stopped last. Empty without one."""
        paths = sorted(self._weights.glob("*.json"), key=lambda path: path.stat().st_mtime if path.exists() else 0.0)
        return read_progress(paths[-1]) if paths else {}


def _key(name: str) -> str:
    return f"training {name}"
