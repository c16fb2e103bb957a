"""Optuna's tree-structured Parzen estimator over the whole search space."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import optuna
from optuna.trial import TrialState

from trimtab.core import search_space
from trimtab.core.backend import BACKENDS
from trimtab.core.recipe import Recipe
from trimtab.core.technique import PASSES, Pass
from trimtab.core.trial import Trial
from trimtab.errors import UsageError
from trimtab.study.samplers.ladder import first_asks
from trimtab.study.samplers.sampler import Ask, Sampler, SearchState
from trimtab.study.storage import Storage

MOST_DECLINED = 10
"""Suggestions of optuna beyond the remaining budget after which the search ends."""


class Tpe(Sampler):
    """Optuna's tree-structured Parzen estimator, for long budgets, after what every search begins with
    (:func:`~trimtab.study.samplers.ladder.first_asks`).

    Source: Bergstra et al., Algorithms for Hyper-Parameter Optimization, NeurIPS 2011.
    """

    attempts = 200
    """Suggestions in a row that repeat finished trials before the space counts as exhausted."""

    def __init__(self, storage: Storage, seed: int = 0) -> None:
        storage.study.sampler = optuna.samplers.TPESampler(seed=seed, multivariate=False)
        self._storage, self._study = storage, storage.study
        self.pending: optuna.Trial | None = None
        """The optuna trial of the last ask, which the storage finishes."""

    def walk(self, done: Mapping[str, Trial], facts: SearchState) -> Iterator[Ask]:
        return iter(first_asks())

    def ask(self, trials: Sequence[Trial], facts: SearchState) -> Ask | None:
        """The first steps, then a recipe that optuna suggests and that was not tried yet.

        Raises:
            StorageError: optuna's database cannot be used.
        """
        self.pending = None
        if (first := super().ask(trials, facts)) is not None:
            return first
        with self._storage.guard("written"):
            return self._suggested({trial.recipe.hash: trial for trial in trials}, facts)

    def _suggested(self, done: Mapping[str, Trial], facts: SearchState) -> Ask | None:
        for _ in range(self.attempts):
            asked = self._study.ask()
            try:
                recipe = _suggest(asked, facts)
            except UsageError:  # an invalid combination of fields
                self._study.tell(asked, state=TrialState.FAIL)
                continue
            except ValueError as error:  # optuna allows no other choices than at the start of the study
                self._study.tell(asked, state=TrialState.FAIL)
                raise UsageError(
                    "The techniques are not those that this study began with, and the sampler tpe cannot go on from it. Use "
                    "--sampler ladder, which can, another --out, or --fresh."
                ) from error
            known = done.get(recipe.hash)
            if known is None:
                self.pending = asked
                return Ask("tpe", recipe)
            if facts.feasible(known):
                self._study.tell(asked, facts.value(known))
            else:
                self._study.tell(asked, state=TrialState.PRUNED)
        return None

    def declined(self, count: int) -> bool:
        """End the search after :data:`MOST_DECLINED` suggestions: optuna always has another one."""
        if self.pending is not None:
            with self._storage.guard("written"):
                self._study.tell(self.pending, state=TrialState.FAIL)
            self.pending = None
        return count >= MOST_DECLINED


def _suggest(asked: optuna.Trial, facts: SearchState) -> Recipe:
    """A recipe of optuna's suggestions for the techniques that the suggested backend supports. A value that the backend refuses
    beside those before it, such as int8 ranges in float32, stays at its default."""
    backend_class = BACKENDS[asked.suggest_categorical("backend", sorted(BACKENDS))]
    backend = backend_class()
    for field in backend_class.choices():
        value = asked.suggest_categorical(f"{backend_class.name}.{field}", search_space.options(backend_class, field))
        with contextlib.suppress(UsageError):
            backend = dataclasses.replace(backend, **{field: value})
    steps: list[Pass] = []
    for name in PASSES:
        cls = PASSES[name]
        usable = (
            "infer" in cls.modes
            and not cls.compresses
            and cls.sets <= backend.honours
            and (facts.throughput or "data.batch" not in cls.sets)
        )
        if usable and asked.suggest_categorical(f"pass.{name}", [False, True]):
            fields = {f: asked.suggest_categorical(f"{name}.{f}", search_space.options(cls, f)) for f in cls.choices()}
            steps.append(cls(**fields))
    return Recipe(passes=tuple(steps), backend=backend)
