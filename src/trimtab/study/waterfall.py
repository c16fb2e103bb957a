"""Gain of each step of the recipe that ships, from the trials that the search has measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from trimtab.core.backend import Backend
from trimtab.core.measurement import LEAST_GAIN, Interval
from trimtab.core.recipe import Recipe
from trimtab.core.trial import Trial
from trimtab.errors import UsageError
from trimtab.evaluation.evaluate import Objective


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One step from the workload as written to the recipe that ships. Figures that the search has not measured are ``None``."""

    schema: ClassVar[int] = 1

    name: str
    """``as written``, ``tuned eager``, ``runtime``, ``eager defaults``, ``rewrites``, ``precision``, ``knobs`` or
    ``setting``."""
    recipe: str
    """The recipe up to and including this step."""
    added: str = ""
    """What this step adds to the step before."""
    speedup: Interval | None = None
    """Against the workload as written, in the search; ``None`` if no trial has this recipe."""
    gain: float | None = None
    """Ratio to the last measured step before, in the study's objective: above 1 is better. ``None`` too if an interval is too
    wide for one number."""
    sure: bool = False
    """Whether the intervals of the two steps do not meet. Size and memory have no interval."""
    score: float | None = None
    size_mb: float | None = None
    peak_mb: float | None = None


def steps(
    trials: Sequence[Trial], best: Recipe | None, *, baseline: Recipe, tuned: Recipe | None, objective: Objective
) -> tuple[Step, ...]:
    """The chain of recipes from ``baseline`` to ``best``; empty if ``best`` is the baseline or ``None``.

    The order is that of the search: tuned eager, the runtime without loss of precision, precision, knobs such as the number of
    threads. Nothing is measured here: a step whose recipe no trial has is kept without figures.

    Args:
        tuned: the tuned original, the fastest exact form in eager PyTorch; ``None`` for a training.
    """
    if best is None or best == baseline:
        return ()
    known = {trial.recipe.hash: trial for trial in trials if trial.speedup is not None}
    found: list[Step] = []
    last: Trial | None = None
    before: Recipe | None = None
    for name, recipe in _chain(best, baseline, tuned):
        trial = known.get(recipe.hash)
        found.append(_step(name, recipe, before, trial, last, objective))
        last, before = trial or last, recipe
    return tuple(found)


def _chain(best: Recipe, baseline: Recipe, tuned: Recipe | None) -> Iterator[tuple[str, Recipe]]:
    """The names and recipes of the steps, without steps that change nothing."""
    if tuned is None:  # a training: the search adds one change of the settings at a time
        yield "as written", baseline
        for count in range(1, len(best.passes) + 1):
            yield "setting", Recipe(passes=best.passes[:count], backend=best.backend)
        return
    backend, plain = best.backend, type(best.backend)()
    lossless = tuple(step for step in best.passes if step.exact and not step.choices())
    precise = tuple(step for step in best.passes if not step.exact or not step.choices())
    eager = backend.name == "eager"
    chain = [("as written", baseline)]
    if not eager:
        chain.append(("tuned eager", tuned))
    start = baseline.backend if backend == baseline.backend else plain
    chain += [
        ("eager defaults" if eager else "runtime", Recipe(backend=start)),
        ("rewrites", Recipe(passes=lossless, backend=start)),
        ("precision", Recipe(passes=precise, backend=_precision(backend, start))),
        ("knobs", best),
    ]
    seen: set[str] = set()
    for name, recipe in chain:
        if recipe.hash not in seen:
            seen.add(recipe.hash)
            yield name, recipe


def _precision(backend: Backend, plain: Backend) -> Backend:
    """``plain`` with those fields of ``backend`` that decide its precision."""
    fields = {f.name: getattr(backend, f.name) for f in dataclasses.fields(backend)}
    alone = {name: _replaced(plain, {name: value}) for name, value in fields.items()}
    lossy = {name: fields[name] for name, one in alone.items() if name == "precision" or (one is not None and not one.exact)}
    return _replaced(plain, lossy) or backend


def _replaced(plain: Backend, fields: Mapping[str, Any]) -> Backend | None:
    """``plain`` with other ``fields``; ``None`` if the backend refuses the combination."""
    try:
        return dataclasses.replace(plain, **fields)
    except UsageError:
        return None


def _step(
    name: str, recipe: Recipe, before: Recipe | None, trial: Trial | None, last: Trial | None, objective: Objective
) -> Step:
    had = set() if before is None else {str(step) for step in (*before.passes, before.backend)}
    added = ", ".join(step.describe() for step in (recipe.backend, *recipe.passes) if str(step) not in had)
    found = Step(name=name, recipe=str(recipe), added=added)
    if trial is None:
        return found
    gain, sure = (None, False) if last is None else _gain(trial, last, objective)
    figures = {key: getattr(trial, key) for key in ("speedup", "score", "size_mb", "peak_mb")}
    return dataclasses.replace(found, gain=gain, sure=sure, **figures)


def _gain(trial: Trial, last: Trial, objective: Objective) -> tuple[float | None, bool]:
    """The ratio of ``trial`` to ``last`` in the objective, above 1 if better, and whether it exceeds the uncertainty."""
    if objective in ("memory", "size"):
        now, before = (getattr(each, "peak_mb" if objective == "memory" else "size_mb") for each in (trial, last))
        gain = before / now if now and before else None
        return gain, gain is not None and abs(gain - 1) > LEAST_GAIN
    one, other = trial.speedup, last.speedup
    if one is None or other is None or not other.value > 0:
        return None, False
    gain = None if one.vague or other.vague else one.value / other.value
    return gain, one.low > other.high or one.high < other.low
