"""What a study is about: inference or a training, with its baseline, its sampler and the jobs of its workers.

Another kind of search brings a :class:`Task` of its own and hands it to :class:`~trimtab.study.study.Study`.
"""

from __future__ import annotations

import abc
import pathlib
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from trimtab.core.backend import BACKENDS
from trimtab.core.recipe import Recipe
from trimtab.core.trial import Trial
from trimtab.execution.jobs import inference, training
from trimtab.execution.trial_runner import PREPARE
from trimtab.study import ranking
from trimtab.study.options import Options
from trimtab.study.samplers.greedy import GreedySampler, trained_as_written
from trimtab.study.samplers.ladder import Ladder, Sampler, as_written
from trimtab.study.samplers.tpe import Tpe
from trimtab.study.storage import Storage


class Task(abc.ABC):
    """What a study is about."""

    mode: ClassVar[Literal["infer", "train"]]
    jobs: ClassVar[str]
    """The module with the table ``JOBS`` of what the workers can be asked to do."""
    ships: ClassVar[bool]
    """Whether a winner leaves an artifact; else its settings are the answer."""
    suffix: ClassVar[str] = ""
    """What the study's name in its storage ends with: one workload may be optimized and trained."""
    server_tells_costs: ClassVar[bool] = False
    """Whether the server of the baseline tells its cold start and peak memory, and no job of its own does."""
    prepare_by: float | None = None
    """When, of ``time.monotonic``, the dry run has to be over."""
    overdue: str | None = None
    """What is said where it is not."""

    @property
    @abc.abstractmethod
    def baseline(self) -> Recipe:
        """What everything is measured against: the workload as written."""

    @abc.abstractmethod
    def sampler(self, storage: Storage, options: Options) -> Sampler:
        """What asks for recipes."""

    @abc.abstractmethod
    def to_beat(self, trials: Sequence[Trial], options: Options) -> Trial | None:
        """What a winner has to beat; ``None`` where it was not measured."""

    @abc.abstractmethod
    def lost(self, trials: Sequence[Trial], to_beat: Trial | None) -> bool:
        """Whether the baseline was tried in vain: without it nothing can win."""

    def job(self, folder: pathlib.Path) -> dict[str, Any]:
        """What every job of a study in run folder ``folder`` has besides the workload."""
        return {"jobs": self.jobs}

    def identity(self) -> dict[str, Any]:
        """What else makes two studies of one workload different."""
        return {}


class InferenceTask(Task):
    """The fastest form of a model: what wins ships as an artifact."""

    mode, ships, jobs = "infer", True, inference.__name__

    @property
    def baseline(self) -> Recipe:
        """The model as written."""
        return as_written()

    def sampler(self, storage: Storage, options: Options) -> Sampler:
        """The ladder, or optuna's estimator where that is asked for."""
        return Ladder() if options.sampler == "ladder" else Tpe(storage, options.seed)

    def to_beat(self, trials: Sequence[Trial], options: Options) -> Trial | None:
        """The original, tuned as far as the limits allow."""
        return ranking.best_eager(trials, options.limits, options.objective)

    def lost(self, trials: Sequence[Trial], to_beat: Trial | None) -> bool:
        """Whether it was tried as written and in eager's own form."""
        plain = {self.baseline.hash, Recipe(backend=BACKENDS["eager"]()).hash}
        return to_beat is None and plain <= {trial.recipe.hash for trial in trials}


class TrainingTask(Task):
    """The settings under which a training is fastest: the objective is its updates per second, the guard its losses.

    Args:
        updates: over how many updates the losses are compared.
        prepare_by: when, of ``time.monotonic``, the dry run has to be over.
    """

    mode, ships, jobs, suffix, server_tells_costs = "train", False, training.__name__, "-tune", True

    def __init__(self, updates: int = 24, prepare_by: float | None = None) -> None:
        self.updates, self.prepare_by = updates, prepare_by
        self.overdue = (
            f"The budget was over before the dry run was, which makes {updates} updates as written three times, and as often "
            "without dropout where there is any. Give a longer budget, or compare fewer losses, with updates=8."
        )

    @property
    def baseline(self) -> Recipe:
        """The training as written."""
        return trained_as_written()

    def sampler(self, storage: Storage, options: Options) -> Sampler:
        """One change of the settings at a time, the best kept."""
        return GreedySampler()

    def to_beat(self, trials: Sequence[Trial], options: Options) -> Trial | None:
        """The training as written: there is no other original."""
        return next((trial for trial in trials if trial.recipe == self.baseline), None)

    def lost(self, trials: Sequence[Trial], to_beat: Trial | None) -> bool:
        """Whether it could not be timed."""
        return to_beat is not None and to_beat.comparison is None

    def job(self, folder: pathlib.Path) -> dict[str, Any]:
        """The updates, and where the losses as written lie."""
        losses = str(folder.absolute() / PREPARE / training.LOSSES)
        return super().job(folder) | {"updates": self.updates, "losses": losses}

    def identity(self) -> dict[str, Any]:
        """The number of updates."""
        return {"number of updates": self.updates}
