"""What to try next on a training."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator, Mapping, Sequence

from trimtab.core import search_space
from trimtab.core.backend import BACKENDS
from trimtab.core.recipe import Recipe
from trimtab.core.technique import Pass
from trimtab.core.trial import Trial
from trimtab.study.samplers.ladder import Ask, Sampler, SearchState


def trained_as_written() -> Recipe:
    """The training as its script says it."""
    return Recipe(backend=BACKENDS["eager"]())


class GreedySampler(Sampler):
    """One technique at a time, then those that pay together: exact ones first, then those that may change what is learnt.

    Techniques of training seldom hinder each other, so adding them up one by one, the best first, comes close to the best
    combination for the price of a few trials. Like the ladder for inference it is a straight line through what is finished, so
    that a study that was killed goes on where it stopped.
    """

    name = "climb"

    def ask(self, trials: Sequence[Trial], facts: SearchState) -> Ask | None:
        """The first step of the walk that has no finished trial yet."""
        done = {trial.recipe.hash: trial for trial in trials}
        return next((ask for ask in self._walk(done, facts) if ask.recipe.hash not in done), None)

    def _walk(self, done: Mapping[str, Trial], facts: SearchState) -> Iterator[Ask]:
        yield Ask("as_written", trained_as_written())
        steps = sorted(search_space.training(), key=lambda step: "compile" in step.sets)  # which costs most, and so comes last
        best = yield from _added("lossless", [step for step in steps if step.exact], trained_as_written(), done, facts)
        yield from _added("precision", [step for step in steps if not step.exact], best, done, facts)


def _added(
    stage: str, steps: Sequence[Pass], base: Recipe, done: Mapping[str, Trial], facts: SearchState
) -> Generator[Ask, None, Recipe]:
    """Each of ``steps`` on ``base``; then, on the best of these, the others that paid, the best first. Gives the best of all.

    Of many that do nothing some always come out a little ahead. So what is sure of a gain must be above what it is added to.
    """
    alone = [_with(base, step) for step in steps]
    for recipe in alone:
        yield Ask(stage, recipe)
    floor = _measured(base, done, facts)
    paying = sorted((r for r in alone if _speed(r, done, facts) > floor), key=lambda r: -_speed(r, done, facts))
    together = paying[0] if paying else base
    for recipe in paying[1:]:
        step = recipe.passes[-1]
        if any(step.sets & taken.sets for taken in together.passes):
            continue
        more = _with(together, step)
        yield Ask(stage, more)
        if _speed(more, done, facts) > _measured(together, done, facts):
            together = more
    return together


def _with(recipe: Recipe, step: Pass) -> Recipe:
    return dataclasses.replace(recipe, passes=(*(p for p in recipe.passes if p.name != step.name), step))


def _speed(recipe: Recipe, done: Mapping[str, Trial], facts: SearchState) -> float:
    """What is sure of the speed-up of a recipe that keeps the limits; 0 for any other."""
    trial = done.get(recipe.hash)
    return (facts.value(trial) or 0.0) if trial is not None and facts.feasible(trial) else 0.0


def _measured(recipe: Recipe, done: Mapping[str, Trial], facts: SearchState) -> float:
    """The speed-up of such a recipe as it was measured; that of the training as written is 1 by definition."""
    sure, trial = _speed(recipe, done, facts), done.get(recipe.hash)
    if recipe == trained_as_written():
        return 1.0 if sure else 0.0
    return trial.speedup.value if sure and trial is not None and trial.speedup is not None else sure
