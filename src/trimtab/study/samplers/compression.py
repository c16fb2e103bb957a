"""Smaller networks: passes that remove parts, at which ratio, and which of them are trained.

The generators yield what to ask for, and read its trial from the finished ones when they go on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator, Mapping

from trimtab.core import search_space
from trimtab.core.recipe import Recipe
from trimtab.core.technique import PASSES, Pass
from trimtab.core.trial import State, Trial
from trimtab.passes.student import Student
from trimtab.study.samplers.finished_trials import holds, is_worthwhile, speed
from trimtab.study.samplers.quantization import (
    PROMISING,
    TRAINER,
    bisect_float_layers,
    lossy,
    same_precision,
    trained_int8,
    training,
    with_float_layers,
)
from trimtab.study.samplers.sampler import Ask, SearchState

MOST_RUNTIMES = 2
"""Most runtimes on which smaller networks are tried."""
CLOSE = 0.5
"""Share of the accuracy limit. A trained network whose drop may be larger keeps the limit by little."""
AUTO_ONLY = frozenset({"drop_layers"})
"""Passes that ``compress="prune"`` does not try."""
SHRINKING = ("prune_channels", "prune_units", "drop_layers")
"""The passes that make a network smaller, in the order in which they are tried. Without convolutions channels come last: in a
transformer units and layers gain more."""


def compressed(done: Mapping[str, Trial], facts: SearchState, runtimes: int = MOST_RUNTIMES) -> Iterator[Ask]:
    """Ask for smaller networks on the ``runtimes`` fastest runtimes: ratios untrained, trained where they pay, then with less
    precision.

    An untrained network is as fast as a trained one, and its trial takes seconds. Each pass is tried on top of what the passes
    before it have brought.
    """
    if not facts.compress:
        return
    steps = [step for step in search_space.compressing() if "auto" in facts.compress or step.name not in AUTO_ONLY]
    order = SHRINKING if facts.convolves else (*SHRINKING[1:], SHRINKING[0])
    steps = sorted(steps, key=lambda step: (*order, step.name).index(step.name)) if facts.tries("prune") else []
    steps += [PASSES["swap_activations"]()] if "activations" in facts.compress else []
    trained = _AskedTrainings()
    plain = {trial.recipe.backend.name: trial for trial in _fastest(done, exact=True)}
    for fastest in _fastest(done)[:runtimes]:
        for base in (fastest, plain.get(fastest.recipe.backend.name, fastest)):
            best, trained.missed = base, False
            for step in (each for each in steps if not each.trained_only):  # what costs no training comes first
                best = yield from _ratios(best, step, None, done, facts)
            for step in steps:
                best = yield from _ratios(best, step, trained, done, facts)
            if facts.tries("distill"):
                own = yield from _ratios(base, Student(), trained, done, facts)
                best = max(best, own, key=speed)
            if best is not base or not trained.missed:
                break  # else in float, because rounding and smaller networks may lose too much together
        if best is not base:
            yield from _less_precise(base, best, done, facts)
            if facts.tries("quantize") and best.recipe.backend.exact:
                yield from (Ask("compressed", recipe) for recipe in trained_int8(best, done, facts.updates))
    for base in _fastest(done, exact=True)[:runtimes] if facts.tries("quantize") else ():
        yield from (Ask("compressed", recipe) for recipe in trained_int8(base, done, facts.updates))


@dataclasses.dataclass
class _AskedTrainings:
    """The trainings asked for."""

    passes: set[tuple[Pass, ...]] = dataclasses.field(default_factory=set)
    missed: bool = False
    """Whether a network on the present base missed the limit untrained."""

    def affords(self, passes: tuple[Pass, ...], facts: SearchState) -> bool:
        """Whether the training of ``passes`` is among the first of its kind; it then counts."""
        self.missed, names = True, [part.name for part in passes]
        if passes not in self.passes and sum(names == [part.name for part in each] for each in self.passes) >= facts.trainings:
            return False
        self.passes.add(passes)
        return True


def _ratios(
    start: Trial, step: Pass, trained: _AskedTrainings | None, done: Mapping[str, Trial], facts: SearchState
) -> Generator[Ask, None, Trial]:
    """Ask for ``step`` on top of ``start`` at its default ratio, or at the next harder one than ``start`` has; then at harder
    ones while the limit holds and at milder ones where it does not. Returns the fastest trial that keeps the limit.

    Each ratio is timed untrained, and trained if it pays and does not keep the limit so. A longer training follows where that
    misses the limit by little, or where there is no other ratio. The default keeps half, so that a budget for one training goes
    to a ratio that gains much. Where the limit is kept by far, or missed, the middle of the ratios that are left is next, so
    that few trainings reach the hardest one. Where a training keeps it by little, or was a longer one, the next harder ratio
    begins with the longer one; if no harder one keeps the limit, the network that keeps it by little is trained for longer,
    because on other data it may well miss the limit. Without ``trained`` nothing is trained, and the first miss ends the search
    unless a ratio has kept the limit.
    """
    ratios, best, longer, failures = _by_share_kept(step), start, 0, 0
    before = tuple(part for part in start.recipe.parts if part.name != step.name)
    low, high = 1 + max((ratios.index(part) for part in start.recipe.parts if part in ratios), default=-1), len(ratios)
    next_one = max(low, ratios.index(step))
    while low < high:
        place, held = next_one, None
        parts = (*before, ratios[place])
        if not step.trained_only:
            yield Ask("compressed", untrained := _with_parts(start.recipe, parts))
            timed = done[untrained.hash]
            failures += timed.state is State.FAILED
            if timed.state is State.SKIPPED or failures == 2:
                break
            if timed.state is State.FAILED:  # it may remove more than can be removed
                high, next_one = place, (low + place - 1) // 2
                continue
            if not is_worthwhile(timed, best, facts):
                low, next_one = place + 1, (place + high) // 2
                continue
            held = timed if holds(timed) else None
        if trained is None and held is None and best is start:
            break
        while trained is not None and held is None and longer < len(facts.updates):
            passes = (*parts, training(facts.updates[longer]))
            if not trained.affords(passes, facts):
                return best
            yield Ask("compressed", recipe := _with_parts(start.recipe, passes))
            trial = done[recipe.hash]
            if holds(trial):
                held = trial
            elif trial.state is State.SKIPPED and longer:
                break  # there is no time for the longer training
            elif trial.state in (State.FAILED, State.SKIPPED) or trial.ended_by is not None:
                return best
            if held is None or not _well_within_limit(trial):
                longer += 1
            if held is None and len(ratios) > 1:
                factor = facts.updates[min(longer, len(facts.updates) - 1)] / facts.updates[longer - 1]
                if best is not start and low < place:  # a milder ratio that gains too is left
                    factor /= 2
                if not _is_close(trial, factor):
                    break
        if held is None:
            high, next_one, longer = place, (low + place - 1) // 2, 0
        elif step.trained_only and not is_worthwhile(held, best, facts):
            break
        else:
            best, low = held, place + 1
            next_one = (low + high - 1) // 2 if not longer and _well_within_limit(held) else low
            longer = min(longer, len(facts.updates) - 1)
    made = next((step.updates for step in best.recipe.passes if step.name == TRAINER), None)  # type: ignore[attr-defined]
    more = next((updates for updates in facts.updates if made is not None and updates > made), None)
    passes = (*best.recipe.parts, training(more or 0)) if more is not None else ()
    if trained is None or best is start or not passes or _well_within_limit(best) or not trained.affords(passes, facts):
        return best
    yield Ask("compressed", recipe := _with_parts(start.recipe, passes))
    return max(best, done[recipe.hash], key=lambda trial: (holds(trial), -1.0 if trial.drop is None else -trial.drop.upper))


def _with_parts(recipe: Recipe, parts: tuple[Pass, ...]) -> Recipe:
    """``recipe`` with ``parts`` in the place of its passes that compress and train."""
    return dataclasses.replace(recipe, passes=(*parts, *(each for each in recipe.passes if not each.compresses)))


def _is_close(missed: Trial, factor: float) -> bool:
    """Whether the drop is at most ``factor`` times the limit. ``factor`` times the updates seldom leave less of the drop than
    its ``factor``-th part."""
    return missed.drop is None or missed.drop.limit is None or missed.drop.value <= factor * missed.drop.limit


def _well_within_limit(trial: Trial) -> bool:
    """Whether the drop is surely so small that other data will hardly show one beyond the limit."""
    return trial.drop is None or trial.drop.limit is None or trial.drop.upper <= CLOSE * trial.drop.limit


def _by_share_kept(step: Pass) -> list[Pass]:
    """``step`` at each share that it may keep, mildest first; ``step`` itself if it has no choice."""
    if "keep" not in step.choices():
        return [step]
    shares = sorted(search_space.options(type(step), "keep"), reverse=True)
    return [dataclasses.replace(step, keep=keep) for keep in shares]  # type: ignore[call-arg]


def _less_precise(base: Trial, best: Trial, done: Mapping[str, Trial], facts: SearchState) -> Iterator[Ask]:
    """Ask for lossy variants of the backend of ``best``, without those that slowed down ``base``, its full-sized form. Where
    one misses the limit, its most sensitive layers go back to float."""
    for backend in lossy(best.recipe.backend, facts):
        known = done.get(dataclasses.replace(base.recipe, backend=backend).hash)
        if known is None and same_precision(backend, best.recipe.backend):
            continue
        if known is not None and known.speedup is not None and speed(known) <= speed(base):
            continue
        recipe = dataclasses.replace(best.recipe, backend=backend)
        yield Ask("compressed", recipe)
        if (variant := with_float_layers(best.recipe, backend)) is not None:
            yield from (Ask("compressed", each) for each in bisect_float_layers(done[recipe.hash], speed(best), done, variant))


def _fastest(done: Mapping[str, Trial], *, exact: bool = False) -> list[Trial]:
    """The fastest full-sized trial, or ``exact`` one, of each of the fastest runtimes that keeps the accuracy limit, whether it
    keeps limits of time and size or not. Where that is an int8 form, smaller networks are timed and judged in int8: in float
    they would look slow."""
    found: dict[str, Trial] = {}
    for trial in done.values():
        keeps = trial.state is State.COMPLETE if trial.recipe.exact else holds(trial) and not exact
        whole = keeps and not trial.recipe.compresses and trial.speedup is not None
        if whole and (trial.size_mb is not None or trial.recipe.backend.name == "eager"):
            found[trial.recipe.backend.name] = max(found.get(trial.recipe.backend.name, trial), trial, key=speed)
    order = sorted(found.values(), key=speed, reverse=True)
    return [trial for trial in order if speed(trial) >= PROMISING * speed(order[0])][:MOST_RUNTIMES]
