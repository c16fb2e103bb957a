"""The default sampler for inference: from what costs nothing to what costs accuracy or training."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

from trimtab.core import search_space
from trimtab.core.backend import BACKENDS, Backend
from trimtab.core.recipe import Recipe
from trimtab.core.technique import Pass, technique_from_json
from trimtab.core.trial import State, Trial
from trimtab.study.samplers.compression import compressed
from trimtab.study.samplers.finished_trials import holds, is_worthwhile, loses_accuracy, speed
from trimtab.study.samplers.quantization import (
    PROMISING,
    bisect_float_layers,
    is_four_bits,
    lossy,
    other_int8_forms,
    same_precision,
    with_float_layers,
)
from trimtab.study.samplers.sampler import Ask, Sampler, SearchState

QUICK_MS = 5.0
"""Calls above this latency in ms are seldom faster with fewer threads."""
FOUR_BITS_PAY = 1.3
"""Least gain of 8-bit weights at which 4-bit weights are tried. 8 bits save three quarters of the bytes of the weights, and 4
bits one eighth more, a sixth of that: where 8 bits gain less than this factor, 4 bits gain about 5% on top, or less."""


@functools.cache
def as_written() -> Recipe:
    """The recipe of the model as written: eager, without gradients, all defaults."""
    return Recipe(backend=technique_from_json(BACKENDS, {"name": "eager", "grad_mode": "no_grad"}))


def first_asks() -> list[Ask]:
    """The first recipes of every search: as written, eager mode, and without loss each runtime that compiles in seconds.

    The others compile for half a minute and more. They come late, because two of them would take a budget of two minutes, in
    which 8 bits and the number of threads bring more.
    """
    lossless = [Ask("lossless", Recipe(backend=backend)) for backend in _quick_runtimes()]
    return [Ask("as_written", as_written()), Ask("tuned", _eager()), *lossless]


def _eager() -> Recipe:
    return Recipe(backend=BACKENDS["eager"]())


def _quick_runtimes() -> list[Backend]:
    """Runtimes that compile in seconds. Those with a graph of their own come first, because they bring most of the gain."""
    quick = [backend for backend in search_space.backends() if backend.cost == "seconds" and backend.name != "eager"]
    return sorted(quick, key=lambda backend: not backend.own_graph)


class Ladder(Sampler):
    """Try in order: as written, tuned eager, each runtime lossless, with less precision where promising, smaller networks if
    asked for, then knobs and compilers. Where the original is slow, tuned eager comes after the runtimes."""

    def walk(self, done: Mapping[str, Trial], facts: SearchState) -> Iterator[Ask]:
        plain, quick = _eager(), _quick_runtimes()
        runtimes, relatives = [b for b in quick if b.own_graph], [b for b in quick if not b.own_graph]
        slow = [backend for backend in search_space.backends() if backend.cost != "seconds"]
        threads = [knob for knob in search_space.knobs() if "threads" in knob.sets]
        written, tuned_eager, *lossless = first_asks()
        yield from (written, *lossless, tuned_eager) if facts.slow_original else (written, tuned_eager, *lossless)
        if _is_quick(_best(done, facts, exact_only=True)):  # several may be fast in some minutes only
            yield from _with_each(_best(done, facts, exact_only=True), threads[:1])
        yield from _less_precision(runtimes, plain, done, facts)
        yield from compressed(done, facts, runtimes=1)  # before what gains a few percent, so that a short budget reaches it
        yield from _finer_precision(runtimes, plain, done)
        for exact_only in (False, True):  # the best may be best by noise
            if _is_quick(_best(done, facts, exact_only=exact_only)):
                yield from _with_each(_best(done, facts, exact_only=exact_only), threads)
        yield from _fields(_best(done, facts, exact_only=False), facts)
        yield from compressed(done, facts)
        yield from _tuned(plain, done)
        tuned = _best_eager(done)
        yield from _lossless(relatives, tuned)
        yield from _precision(relatives, tuned, done, facts)
        yield from compressed(done, facts)
        yield from _knobs(done, facts)
        yield from _precision([tuned.backend], tuned, done, facts, all_backends=True)
        yield from _lossless(slow, tuned)
        yield from _four_bits([*runtimes, *relatives, *slow], tuned, done, facts)
        yield from _precision(slow, tuned, done, facts)
        yield from compressed(done, facts)
        yield from _knobs(done, facts)


def _tuned(eager: Recipe, done: Mapping[str, Trial]) -> Iterator[Ask]:
    """Ask for rewrites one by one, for those that gain together, then for thread counts."""
    everything = dataclasses.replace(eager, passes=_honoured(search_space.rewrites(), eager.backend))
    for step in everything.passes:
        yield Ask("tuned", dataclasses.replace(eager, passes=(step,)))
    working = tuple(
        step
        for step in everything.passes
        if speed(done.get(dataclasses.replace(eager, passes=(step,)).hash)) > speed(done.get(eager.hash))
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
    backends: Sequence[Backend], tuned: Recipe, done: Mapping[str, Trial], facts: SearchState, *, all_backends: bool = False
) -> Iterator[Ask]:
    """Ask for all forms of less precision."""
    yield from _less_precision(backends, tuned, done, facts, all_backends=all_backends)
    yield from _finer_precision(backends, tuned, done)


def _most_promising(backends: Sequence[Backend], tuned: Recipe, done: Mapping[str, Trial]) -> list[Recipe]:
    """The lossless recipe of each backend, the fastest first."""
    lossless = [Recipe(passes=_inherited(tuned, backend), backend=backend) for backend in backends]
    return sorted(lossless, key=lambda recipe: -speed(done.get(recipe.hash)))


def _less_precision(
    backends: Sequence[Backend], tuned: Recipe, done: Mapping[str, Trial], facts: SearchState, *, all_backends: bool = False
) -> Iterator[Ask]:
    """Ask for lossy variants of each backend and lossy passes before it, most promising backend first."""
    top = max((speed(trial) for trial in done.values() if trial.recipe.exact), default=0.0)
    for recipe in _most_promising(backends, tuned, done):
        if not all_backends and speed(done.get(recipe.hash)) < PROMISING * top:
            continue
        for backend in lossy(recipe.backend, facts):
            yield Ask("precision", dataclasses.replace(recipe, backend=backend))
        for step in () if recipe.backend.own_graph else _honoured(search_space.passes(exact=False), recipe.backend):
            for variant in (step, *search_space.variants(step)):
                yield Ask("precision", dataclasses.replace(recipe, passes=(*recipe.passes, variant)))


def _finer_precision(backends: Sequence[Backend], tuned: Recipe, done: Mapping[str, Trial]) -> Iterator[Ask]:
    """Ask for other forms of the lossy variants that are close to the best, and for layers back in float."""
    for recipe in _most_promising(backends, tuned, done):
        for backend in search_space.variants(recipe.backend):
            over = max(map(speed, done.values()), default=0.0)
            forms = other_int8_forms(dataclasses.replace(recipe, backend=backend), over, done)
            yield from (Ask("precision", each) for each in forms)
        yield from _float_layers(recipe, done)


def _float_layers(recipe: Recipe, done: Mapping[str, Trial]) -> Iterator[Ask]:
    """Ask for int8 forms of ``recipe`` that missed the accuracy limit with their most sensitive layers in float, if they are
    faster than everything that keeps it."""
    for backend in search_space.variants(recipe.backend):
        trial, variant = done.get(dataclasses.replace(recipe, backend=backend).hash), with_float_layers(recipe, backend)
        if trial is not None and variant is not None:
            over = max((speed(t) for t in done.values() if t.state is State.COMPLETE and not loses_accuracy(t)), default=0)
            yield from (Ask("precision", each) for each in bisect_float_layers(trial, over, done, variant))


def _four_bits(backends: Sequence[Backend], tuned: Recipe, done: Mapping[str, Trial], facts: SearchState) -> Iterator[Ask]:
    """Ask for 4-bit weights on each backend where 8-bit weights keep the accuracy limit and gain :data:`FOUR_BITS_PAY`."""
    for backend in backends:
        recipe = Recipe(passes=_inherited(tuned, backend), backend=backend)
        forms = [dataclasses.replace(recipe, backend=form) for form in search_space.variants(backend) if form.quantizes]
        eight = [form for form in forms if not form.backend.needs and not is_four_bits(form.backend)]
        known, plain = next((done[form.hash] for form in eight if form.hash in done), None), done.get(recipe.hash)
        if known is None or plain is None or not holds(known) or not is_worthwhile(known, plain, facts, least=FOUR_BITS_PAY):
            continue
        yield from (Ask("precision", form) for form in forms if is_four_bits(form.backend))


def _knobs(done: Mapping[str, Trial], facts: SearchState) -> Iterator[Ask]:
    """Ask for lossless fields of the backend, then threads and, for throughput, batch sizes, on the best recipe."""
    for exact_only in (False, True):
        yield from _fields(_best(done, facts, exact_only=exact_only), facts)
        best = _best(done, facts, exact_only=exact_only)
        yield from _with_each(
            best, [knob for knob in search_space.knobs() if facts.throughput or "data.batch" not in knob.sets]
        )


def _is_quick(best: Trial | None) -> bool:
    """Whether calls are so short that fewer threads may be faster, because they synchronize less."""
    return best is not None and best.latency_ms is not None and best.latency_ms.median < QUICK_MS


def _fields(best: Trial | None, facts: SearchState) -> Iterator[Ask]:
    """Ask for the best recipe with each other value of its backend's lossless fields."""
    if best is None:
        return
    ignored = frozenset() if facts.throughput else best.recipe.backend.overlap
    for backend in search_space.variants(best.recipe.backend, without=ignored):
        if backend.exact == best.recipe.backend.exact and same_precision(backend, best.recipe.backend):
            yield Ask("knobs", dataclasses.replace(best.recipe, backend=backend))


def _with_each(best: Trial | None, knobs: Sequence[Pass]) -> Iterator[Ask]:
    """Ask for the best recipe with each of ``knobs`` that its backend supports and the recipe lacks."""
    if best is None:
        return
    taken = {step.name for step in best.recipe.passes}
    for knob in knobs:
        if knob.name not in taken and knob.sets <= best.recipe.backend.honours:
            yield Ask("knobs", dataclasses.replace(best.recipe, passes=(*best.recipe.passes, knob)))


def _inherited(tuned: Recipe, backend: Backend) -> tuple[Pass, ...]:
    """The tuned passes that affect ``backend``: a runtime with its own graph folds and lays out itself."""
    return () if backend.own_graph else _honoured(tuned.passes, backend)


def _honoured(steps: Sequence[Pass], backend: Backend) -> tuple[Pass, ...]:
    return tuple(step for step in steps if step.sets <= backend.honours)


def _best_eager(done: Mapping[str, Trial]) -> Recipe:
    """The fastest exact eager recipe so far whose passes have no open choices."""
    found = [
        trial
        for trial in done.values()
        if trial.recipe.backend.name == "eager" and trial.recipe.exact and trial.state is State.COMPLETE
        if not any(step.choices() for step in trial.recipe.passes)
    ]
    return max(found, key=speed).recipe if found else _eager()


def _best(done: Mapping[str, Trial], facts: SearchState, *, exact_only: bool) -> Trial | None:
    found = [
        trial
        for trial in done.values()
        if trial.state is State.COMPLETE and facts.value(trial) is not None and facts.feasible(trial)
        if trial.recipe.exact or not exact_only
    ]
    return max(found, key=lambda trial: facts.value(trial) or 0.0, default=None)
