"""Tasks of a study: inference or training, each with its baseline, its sampler and the jobs of its workers.

Another kind of search defines a :class:`Task` and passes it to :class:`~trimtab.study.study.Study`.
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
from trimtab.study.samplers.ladder import Ladder, as_written
from trimtab.study.samplers.sampler import Sampler
from trimtab.study.samplers.tpe import Tpe
from trimtab.study.storage import Storage


class Task(abc.ABC):
    """The task of a study."""

    mode: ClassVar[Literal["infer", "train"]]
    jobs: ClassVar[str]
    """The module with the table ``JOBS`` of the functions that workers run."""
    ships: ClassVar[bool]
    """Whether a winner is written as an artifact; else its settings are the result."""
    suffix: ClassVar[str] = ""
    """Suffix of the study's name in its storage, because one workload may have a study of each task."""
    prepare_by: float | None = None
    """Latest end of the dry run, of ``time.monotonic``."""
    overdue: str | None = None
    """The message if the dry run takes longer."""

    @property
    @abc.abstractmethod
    def baseline(self) -> Recipe:
        """The recipe that all others are measured against: the workload as written."""

    @abc.abstractmethod
    def sampler(self, storage: Storage, options: Options) -> Sampler:
        """The sampler, which asks for recipes."""

    @abc.abstractmethod
    def to_beat(self, trials: Sequence[Trial], options: Options) -> Trial | None:
        """The trial that a winner must beat; ``None`` if it was not measured."""

    @abc.abstractmethod
    def baseline_failed(self, trials: Sequence[Trial], to_beat: Trial | None) -> bool:
        """Whether the baseline failed: without it nothing can win."""

    def job(self, folder: pathlib.Path) -> dict[str, Any]:
        """Entries of every job of a study in run folder ``folder``, besides the workload."""
        return {"jobs": self.jobs}

    def identity(self) -> dict[str, Any]:
        """Entries that distinguish studies of one workload, besides options and limits."""
        return {}


class InferenceTask(Task):
    """Find the fastest form of a model; the winner ships as an artifact."""

    mode, ships, jobs = "infer", True, inference.__name__

    def __init__(self, compress: Sequence[str] = ()) -> None:
        self.compress = compress

    def job(self, folder: pathlib.Path) -> dict[str, Any]:
        """Whether the processes read data to train on."""
        return super().job(folder) | {"compress": list(self.compress)}

    @property
    def baseline(self) -> Recipe:
        """The model as written."""
        return as_written()

    def sampler(self, storage: Storage, options: Options) -> Sampler:
        """The ladder, or optuna's TPE if the options ask for it."""
        return Ladder() if options.sampler == "ladder" else Tpe(storage, options.seed)

    def to_beat(self, trials: Sequence[Trial], options: Options) -> Trial | None:
        """The tuned original."""
        return ranking.best_eager(trials, options.limits, options.objective)

    def baseline_failed(self, trials: Sequence[Trial], to_beat: Trial | None) -> bool:
        """Whether the model as written and the eager backend were both tried without a measurement."""
        plain = {self.baseline.hash, Recipe(backend=BACKENDS["eager"]()).hash}
        return to_beat is None and plain <= {trial.recipe.hash for trial in trials}


class TrainingTask(Task):
    """Find the settings with the most updates per second whose losses match those of the training as written.

    Args:
        updates: number of updates over which losses are compared.
        prepare_by: latest end of the dry run, of ``time.monotonic``.
    """

    mode, ships, jobs, suffix = "train", False, training.__name__, "-tune"

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
        """The greedy sampler: one change of the settings at a time, the best kept."""
        return GreedySampler()

    def to_beat(self, trials: Sequence[Trial], options: Options) -> Trial | None:
        """The trial of the training as written."""
        return next((trial for trial in trials if trial.recipe == self.baseline), None)

    def baseline_failed(self, trials: Sequence[Trial], to_beat: Trial | None) -> bool:
        """Whether the training as written could not be timed."""
        return to_beat is not None and to_beat.comparison is None

    def job(self, folder: pathlib.Path) -> dict[str, Any]:
        """The number of updates, and the file with the losses as written."""
        losses = str(folder.absolute() / PREPARE / training.LOSSES)
        return super().job(folder) | {"updates": self.updates, "losses": losses}

    def identity(self) -> dict[str, Any]:
        """The number of updates."""
        return {"number of updates": self.updates}
