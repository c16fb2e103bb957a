"""What to try next. A sampler looks at the finished trials and asks for one more recipe, or for none."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

from trimtab.core import search_space
from trimtab.core.backend import BACKENDS, Backend
from trimtab.core.recipe import Recipe
from trimtab.core.technique import Pass, technique_from_json
from trimtab.core.trial import State, Trial

MOST_DECLINED = 10
"""Suggestions of optuna's that do not fit into the budget any more, after which no other is asked for."""
QUICK_MS = 5.0
"""Calls that take longer are seldom faster with fewer threads."""
PROMISING = 0.5
"""A backend whose lossless form reaches this share of the best lossless speed is worth the price of trying less precision."""


@functools.cache
def as_written() -> Recipe:
    """The model as people write it: eager, gradients off, every default."""
    return Recipe(backend=technique_from_json(BACKENDS, {"name": "eager", "grad_mode": "no_grad"}))


@dataclasses.dataclass(frozen=True)
class Ask:
    """A recipe to try, and the stage of the search that wants it."""

    stage: str
    recipe: Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchState:
    """What a sampler may know about the study."""

    throughput: bool
    """Whether the objective is examples per second, so that batch and overlapping requests matter."""
    feasible: Callable[[Trial], bool]
    """Whether a finished trial keeps every limit."""
    value: Callable[[Trial], float | None]
    """The objective of a finished trial, more is better; ``None`` if it was not measured."""
    convolves: bool = False
    """Whether most weights are kernels of convolutions, which gain by 8 bits only where these are calibrated."""


class Sampler(abc.ABC):
    """Asks for recipes. It must never ask for one that is among the finished trials."""

    name: str

    @abc.abstractmethod
    def ask(self, trials: Sequence[Trial], facts: SearchState) -> Ask | None:
        """The next recipe to try, given all finished trials; ``None`` when the search is done."""

    def declined(self, count: int) -> bool:
        """Told that what it asked for last was not tried, the ``count``-th so far; returns whether to ask no more."""
        return False


class Ladder(Sampler):
    """Climb rung by rung: as written, tuned eager, every backend lossless, less precision where it promises to pay, then knobs.

    Its walk is a straight line that reads the outcome of what it asked for before, so a study that was killed goes on where it
    stopped: walking again over the finished trials leads to the same place.
    """

    name = "ladder"

    def ask(self, trials: Sequence[Trial], facts: SearchState) -> Ask | None:
        """The first step of the walk that has no finished trial yet."""
        done = {trial.recipe.hash: trial for trial in trials}
        return next((ask for ask in self._walk(done, facts) if ask.recipe.hash not in done), None)

    def _walk(self, done: Mapping[str, Trial], facts: SearchState) -> Iterator[Ask]:
        plain = Recipe(backend=BACKENDS["eager"]())
        cheap = [backend for backend in search_space.backends() if backend.cost == "seconds" and backend.name != "eager"]
        slow = [backend for backend in search_space.backends() if backend.cost != "seconds"]
        runtimes, relatives = [b for b in cheap if b.own_graph], [b for b in cheap if not b.own_graph]
        yield Ask("as_written", as_written())
        yield Ask("tuned", plain)
        # runtimes with a graph of their own owe nothing to the tuning of eager, and bring most of what there is to gain
        yield from _lossless(runtimes, plain)
        yield from _precision(runtimes, plain, done, facts)
        threads = [knob for knob in search_space.knobs() if "threads" in knob.sets]
        for exact_only in (False, True):  # the best may owe its place to noise
            if _is_quick(_best(done, facts, exact_only=exact_only)):
                yield from _with_each(_best(done, facts, exact_only=exact_only), threads)
        yield from _fields(_best(done, facts, exact_only=False), facts)
        yield from _tuned(plain, done)
        tuned = _best_eager(done)
        yield from _lossless(relatives, tuned)
        yield from _precision(relatives, tuned, done, facts)
        yield from _knobs(done, facts)
        yield from _precision([tuned.backend], tuned, done, facts, everyone=True)
        yield from _lossless(slow, tuned)
        yield from _precision(slow, tuned, done, facts)
        yield from _knobs(done, facts)


def _tuned(eager: Recipe, done: Mapping[str, Trial]) -> Iterator[Ask]:
    """Rewrites one by one, those that help together, then threads."""
    everything = dataclasses.replace(eager, passes=_honoured(search_space.rewrites(), eager.backend))
    for step in everything.passes:
        yield Ask("tuned", dataclasses.replace(eager, passes=(step,)))
    working = tuple(
        step
        for step in everything.passes
        if _speed(done.get(dataclasses.replace(eager, passes=(step,)).hash)) > _speed(done.get(eager.hash))
    )
    if len(working) > 1:
        yield Ask("tuned", dataclasses.replace(eager, passes=working))
    best = _best_eager(done)
    for knob in (knob for knob in search_space.knobs() if "data.batch" not in knob.sets):
        yield Ask("tuned", dataclasses.replace(best, passes=(*best.passes, knob)))


def _lossless(backends: Sequence[Backend], tuned: Recipe) -> Iterator[Ask]:
    for backend in backends:
        yield Ask("lossless", Recipe(passes=_inherited(tuned, backend), backend=backend))


def _precision(
    backends: Sequence[Backend], tuned: Recipe, done: Mapping[str, Trial], facts: SearchState, *, everyone: bool = False
) -> Iterator[Ask]:
    """Inexact variants of each backend and inexact passes in front of it, most promising backend first."""
    lossless = [Recipe(passes=_inherited(tuned, backend), backend=backend) for backend in backends]
    top = max((_speed(trial) for trial in done.values() if trial.recipe.exact), default=0.0)
    lossless.sort(key=lambda recipe: -_speed(done.get(recipe.hash)))
    for recipe in lossless:
        if not everyone and _speed(done.get(recipe.hash)) < PROMISING * top:
            continue
        lossy = [backend for backend in search_space.variants(recipe.backend) if not backend.exact]
        for backend in sorted(lossy, key=lambda backend: _late(backend, facts)):
            yield Ask("precision", dataclasses.replace(recipe, backend=backend))
        for step in () if recipe.backend.own_graph else _honoured(search_space.passes(exact=False), recipe.backend):
            for variant in (step, *search_space.variants(step)):
                yield Ask("precision", dataclasses.replace(recipe, passes=(*recipe.passes, variant)))


def _late(backend: Backend, facts: SearchState) -> tuple[bool, ...]:
    """The order in which what has less precision is tried, the most promising first, for the budget may end in between."""
    calibrated, eight_bits = "calibration" in backend.needs, str(getattr(backend, "precision", "")).startswith("int8")
    return (not calibrated,) if facts.convolves else (not eight_bits, calibrated)


def _knobs(done: Mapping[str, Trial], facts: SearchState) -> Iterator[Ask]:
    """Fields of the backend that keep its precision, then threads and, where it counts, batch: on the best, exact or not."""
    for exact_only in (False, True):
        yield from _fields(_best(done, facts, exact_only=exact_only), facts)
        best = _best(done, facts, exact_only=exact_only)
        yield from _with_each(
            best, [knob for knob in search_space.knobs() if facts.throughput or "data.batch" not in knob.sets]
        )


def _is_quick(best: Trial | None) -> bool:
    """Whether calls are so short that fewer threads, which wait for each other less, may well be faster."""
    return best is not None and best.latency_ms is not None and best.latency_ms.median < QUICK_MS


def _fields(best: Trial | None, facts: SearchState) -> Iterator[Ask]:
    """The best recipe with each other value of the fields of its backend that keep its precision."""
    if best is None:
        return
    ignored = frozenset() if facts.throughput else best.recipe.backend.overlap
    for backend in search_space.variants(best.recipe.backend, without=ignored):
        if backend.exact == best.recipe.backend.exact and _same_precision(backend, best.recipe.backend):
            yield Ask("knobs", dataclasses.replace(best.recipe, backend=backend))


def _with_each(best: Trial | None, knobs: Sequence[Pass]) -> Iterator[Ask]:
    """The best recipe with each of ``knobs`` that its backend honours and that it has not chosen yet."""
    if best is None:
        return
    taken = {step.name for step in best.recipe.passes}
    for knob in knobs:
        if knob.name not in taken and knob.sets <= best.recipe.backend.honours:
            yield Ask("knobs", dataclasses.replace(best.recipe, passes=(*best.recipe.passes, knob)))


def _same_precision(one: Backend, other: Backend) -> bool:
    return getattr(one, "precision", None) == getattr(other, "precision", None)


def _inherited(tuned: Recipe, backend: Backend) -> tuple[Pass, ...]:
    """The tuned passes that matter to ``backend``: a runtime with a graph of its own folds and lays out by itself."""
    return () if backend.own_graph else _honoured(tuned.passes, backend)


def _honoured(steps: Sequence[Pass], backend: Backend) -> tuple[Pass, ...]:
    return tuple(step for step in steps if step.sets <= backend.honours)


def _best_eager(done: Mapping[str, Trial]) -> Recipe:
    """The fastest exact eager recipe so far whose passes leave nothing to choose."""
    found = [
        trial
        for trial in done.values()
        if trial.recipe.backend.name == "eager" and trial.recipe.exact and trial.state is State.COMPLETE
        if not any(step.choices() for step in trial.recipe.passes)
    ]
    return max(found, key=_speed).recipe if found else Recipe(backend=BACKENDS["eager"]())


def _best(done: Mapping[str, Trial], facts: SearchState, *, exact_only: bool) -> Trial | None:
    found = [
        trial
        for trial in done.values()
        if trial.state is State.COMPLETE and facts.value(trial) is not None and facts.feasible(trial)
        if trial.recipe.exact or not exact_only
    ]
    return max(found, key=lambda trial: facts.value(trial) or 0.0, default=None)


def _speed(trial: Trial | None) -> float:
    usable = trial is not None and trial.state in (State.COMPLETE, State.STOPPED) and trial.speedup is not None
    return trial.speedup.value if usable and trial is not None and trial.speedup is not None else 0.0
