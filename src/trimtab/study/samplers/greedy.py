"""The greedy sampler for training settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator, Mapping, Sequence

from trimtab.core import search_space
from trimtab.core.backend import BACKENDS
from trimtab.core.recipe import Recipe
from trimtab.core.technique import Pass
from trimtab.core.trial import Trial
from trimtab.study.samplers.sampler import Ask, Sampler, SearchState


def trained_as_written() -> Recipe:
    """The recipe of the training as written."""
    return Recipe(backend=BACKENDS["eager"]())


class GreedySampler(Sampler):
    """Try techniques one at a time, then combine those that gain: exact ones first, then compilation on top, then lossy ones.

    Training techniques seldom hinder each other, so that greedy addition, best first, comes close to the best combination with
    few trials.
    """

    def walk(self, done: Mapping[str, Trial], facts: SearchState) -> Iterator[Ask]:
        yield Ask("as_written", trained_as_written())
        steps = search_space.training()
        exact, lossy = ([step for step in steps if step.exact == kind] for kind in (True, False))
        cheap, compiled = ([step for step in exact if ("compile" in step.sets) == kind] for kind in (False, True))
        best = yield from _greedy_additions("lossless", cheap, trained_as_written(), done, facts)
        best = yield from _greedy_additions("lossless", compiled, best, done, facts)  # slow, so all else is added first
        yield from _greedy_additions("precision", lossy, best, done, facts)


def _greedy_additions(
    stage: str, steps: Sequence[Pass], base: Recipe, done: Mapping[str, Trial], facts: SearchState
) -> Generator[Ask, None, Recipe]:
    """Ask for each of ``steps`` on ``base``, then for the other gains on top of the best one. Returns the best recipe.

    Noise makes some useless steps look faster. So the lower end of a step's speed-up must exceed the speed-up of its base.
    """
    single, floor = [_with_step(base, step) for step in steps], _measured(base, done, facts)
    for recipe in single:
        yield Ask(stage, recipe, floor)
    paying = sorted((r for r in single if _speed(r, done, facts) > floor), key=lambda r: -_speed(r, done, facts))
    combined = paying[0] if paying else base
    for recipe in paying[1:]:
        step = recipe.passes[-1]
        if any(step.sets & taken.sets for taken in combined.passes):
            continue
        more, bar = _with_step(combined, step), _measured(combined, done, facts)
        yield Ask(stage, more, bar)
        if _speed(more, done, facts) > bar:
            combined = more
    return combined


def _with_step(recipe: Recipe, step: Pass) -> Recipe:
    return dataclasses.replace(recipe, passes=(*(p for p in recipe.passes if p.name != step.name), step))


def _speed(recipe: Recipe, done: Mapping[str, Trial], facts: SearchState) -> float:
    """Lower end of the speed-up of ``recipe``; 0 if it is unmeasured or misses a limit."""
    trial = done.get(recipe.hash)
    return (facts.value(trial) or 0.0) if trial is not None and facts.feasible(trial) else 0.0


def _measured(recipe: Recipe, done: Mapping[str, Trial], facts: SearchState) -> float:
    """Measured speed-up of ``recipe``; 1 for the training as written."""
    sure, trial = _speed(recipe, done, facts), done.get(recipe.hash)
    if recipe == trained_as_written():
        return 1.0 if sure else 0.0
    return trial.speedup.value if sure and trial is not None and trial.speedup is not None else sure
