"""The search space, derived from the fields of passes and backends."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trimtab.core.backend import BACKENDS, Backend
from trimtab.core.recipe import Recipe
from trimtab.core.technique import PASSES, Pass, Technique
from trimtab.errors import UsageError

if TYPE_CHECKING:
    from optuna.distributions import CategoricalDistribution

COSTS = ("seconds", "minute", "minutes")


def passes(*, exact: bool) -> list[Pass]:
    """A default instance of each inference pass whose ``exact`` has the given value, without those that compress."""
    found = [PASSES[name]() for name in PASSES if "infer" in PASSES[name].modes and not PASSES[name].compresses]
    return [step for step in found if step.exact == exact]


def rewrites() -> list[Pass]:
    """The exact passes without fields to choose."""
    return [step for step in passes(exact=True) if not step.choices()]


def knobs() -> list[Pass]:
    """Every variant of the exact passes with fields to choose, such as the number of threads, that this machine supports."""
    chosen = [variant for step in passes(exact=True) if step.choices() for variant in (step, *variants(step))]
    return [variant for variant in chosen if variant.exact and variant.blocked_here() is None]


def backends() -> list[Backend]:
    """A default instance of every backend, cheapest to compile first."""
    return sorted((BACKENDS[name]() for name in BACKENDS), key=lambda backend: (COSTS.index(backend.cost), backend.name))


def compressing() -> list[Pass]:
    """A default instance of each compression pass with a field ``keep``, the share of the network that stays."""
    return [PASSES[name]() for name in PASSES if PASSES[name].compresses and "keep" in PASSES[name].choices()]


def training() -> list[Pass]:
    """Every variant of the passes for training."""
    found = [PASSES[name]() for name in PASSES if "train" in PASSES[name].modes]
    return [variant for step in found for variant in (step, *variants(step))]


def variants(technique: Any, *, without: Collection[str] = ()) -> list[Any]:
    """Copies of ``technique`` in which one field has another value of its choices. Refused combinations are skipped."""
    found = []
    for field, values in technique.choices().items():
        if field in without:
            continue
        for value in values:
            if value != getattr(technique, field):
                with contextlib.suppress(UsageError):  # the technique refuses this combination
                    found.append(dataclasses.replace(technique, **{field: value}))
    return found


def techniques(*, compress: bool = False) -> Iterator[Technique]:
    """Every technique, in every variant, that the ladder may use; for looking up in advance why some cannot run."""
    for name in PASSES:
        if "infer" in PASSES[name].modes and (compress or not PASSES[name].compresses):
            step = PASSES[name]()
            yield from (step, *variants(step))
    for backend in backends():
        yield from (backend, *variants(backend))


def options(technique: type[Technique], field: str) -> tuple[Any, ...]:
    """All values of ``field`` in the search space: its choices and its default."""
    default = next(f.default for f in dataclasses.fields(technique) if f.name == field)
    values = technique.choices()[field]
    return values if default in values else (*values, default)


def parameters(recipe: Recipe) -> tuple[dict[str, Any], dict[str, CategoricalDistribution]]:
    """``recipe`` as optuna's parameters and distributions, for storage and its dashboard."""
    from optuna.distributions import CategoricalDistribution  # imported late: workers do not need it

    values: dict[str, Any] = {"backend": recipe.backend.name}
    spaces = {"backend": CategoricalDistribution(sorted(BACKENDS))}
    steps: Mapping[str, Technique] = {step.name: step for step in recipe.passes}
    for name in PASSES:
        if ("infer" in PASSES[name].modes and not PASSES[name].compresses) or name in steps:
            values[f"pass.{name}"] = name in steps
            spaces[f"pass.{name}"] = CategoricalDistribution([False, True])
    for technique in (*recipe.passes, recipe.backend):
        for field in technique.choices():
            allowed = options(type(technique), field)
            if getattr(technique, field) in allowed:
                values[f"{technique.name}.{field}"] = getattr(technique, field)
                spaces[f"{technique.name}.{field}"] = CategoricalDistribution(allowed)
    return values, spaces
