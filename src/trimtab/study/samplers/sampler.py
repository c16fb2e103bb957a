"""The protocol of a sampler: it reads the finished trials and asks for one more recipe, or for none."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from trimtab.core.recipe import Recipe
from trimtab.core.trial import Trial

UPDATES = (200, 800)
"""Updates of a training, and of a second one where the first missed the accuracy limit by little, or kept it by little."""
LONG = 3200
"""Updates of one more training within a budget for training that the user gave."""
MOST_TRAININGS, MORE_TRAININGS = 3, 9
"""Most trainings of networks that one pass has made smaller, and those within such a budget."""


@dataclasses.dataclass(frozen=True)
class Ask:
    """A recipe to try, and the stage of the search that asks for it."""

    stage: str
    recipe: Recipe
    over: float = 1.0
    """The speed-up that it must surely exceed to be of use, in training."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchState:
    """The state of a study that samplers read."""

    throughput: bool
    """Whether the objective is throughput, which batch size and overlapping requests affect."""
    feasible: Callable[[Trial], bool]
    """Whether a finished trial keeps every limit."""
    value: Callable[[Trial], float | None]
    """The objective of a finished trial, higher is better; ``None`` if unmeasured."""
    convolves: bool = False
    """Whether most weights belong to convolutions, which gain from 8 bits only with calibration."""
    compress: tuple[str, ...] = ()
    """How smaller networks are made, as in :class:`~trimtab.study.options.Options`."""
    updates: tuple[int, ...] = UPDATES
    """Updates of a training, and of longer ones where the limit is missed or kept by little."""
    trainings: int = MOST_TRAININGS
    """Most trainings of networks that one pass has made smaller."""
    small: bool = False
    """Whether the size of the files is the objective, or has a limit."""

    slow_original: bool = False
    """Whether a trial of the original takes a large share of the time that is left."""

    def tries(self, way: str) -> bool:
        """Whether smaller networks are made in the ``way``, such as ``prune``."""
        return way in self.compress or "auto" in self.compress


class Sampler(abc.ABC):
    """Asks for recipes, never for one among the finished trials."""

    def ask(self, trials: Sequence[Trial], facts: SearchState) -> Ask | None:
        """The next recipe to try, given all finished trials; ``None`` at the end of the search."""
        done = {trial.recipe.hash: trial for trial in trials}
        return next((ask for ask in self.walk(done, facts) if ask.recipe.hash not in done), None)

    @abc.abstractmethod
    def walk(self, done: Mapping[str, Trial], facts: SearchState) -> Iterator[Ask]:
        """The steps of the search. Each depends on the finished trials and on ``facts`` only, so that a killed study goes on
        from its finished trials."""

    def declined(self, count: int) -> bool:
        """The last recipe was not tried for lack of time, the ``count``-th so far. Returns whether to end the search."""
        return False
