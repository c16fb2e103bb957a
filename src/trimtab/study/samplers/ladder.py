"""Samplers for inference. A sampler reads the finished trials and asks for one more recipe, or for none."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

from trimtab.core import search_space
from trimtab.core.backend import BACKENDS, Backend
from trimtab.core.recipe import Recipe
from trimtab.core.technique import PASSES, Pass, technique_from_json
from trimtab.core.trial import State, Trial
from trimtab.passes.student import Student
from trimtab.study.samplers.quantization import (
    PAYS,
    TRAINER,
    UPDATES,
    bisect_float_layers,
    holds,
    loses_accuracy,
    other_int8_forms,
    trained_int8,
    training,
    with_float_layers,
)
from trimtab.study.samplers.quantization import speed as _speed

MOST_DECLINED = 10
"""Suggestions of optuna beyond the remaining budget after which the search ends."""
QUICK_MS = 5.0
"""Calls above this latency in ms are seldom faster with fewer threads."""
MOST_RUNTIMES = 2
"""Most runtimes on which smaller networks are tried."""
CLOSE = 0.5
"""Share of the accuracy limit. A trained network whose drop may be larger keeps the limit by little."""
MOST_TRAININGS, MORE_TRAININGS = 3, 9
"""Most trainings of networks that one pass has made smaller, and those within a budget for training that the user gave."""
LONG = 3200
"""Updates of one more training within such a budget."""
AUTO_ONLY = frozenset({"drop_layers"})
"""Passes that ``compress="prune"`` does not try."""
SHRINKING = ("prune_channels", "prune_units", "drop_layers")
"""The passes that make a network smaller, in the order in which they are tried. Without convolutions channels come last: in a
transformer units and layers gain more."""
PROMISING = 0.5
"""Least share of the best lossless speed at which a backend is tried with less precision."""
FOUR_BITS_PAY = 1.3
"""Least gain of 8-bit weights at which 4-bit weights are tried. 8 bits save three quarters of the bytes of the weights, and 4
bits one eighth more, a sixth of that: where 8 bits gain less than this factor, 4 bits gain about 5% on top, or less."""


@functools.cache
def as_written() -> Recipe:
    """The recipe of the model as written: eager, without gradients, all defaults."""
    return Recipe(backend=technique_from_json(BACKENDS, {"name": "eager", "grad_mode": "no_grad"}))


@dataclasses.dataclass(frozen=True)
class Ask:
    """A recipe to try, and the stage of the search that asks for it."""

    stage: str
    recipe: Recipe
    over: float = 1.0
    """The speed-up that it must surely exceed to be of use, in training."""


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
    """Updates of a training, and of longer ones where the limit is not kept, or by little."""
    trainings: int = MOST_TRAININGS
    """Most trainings of networks that one pass has made smaller."""
    small: bool = False
    """Whether the size of the files is the objective, or has a limit."""

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
        """The steps of the search. Each depends on finished trials only, so that a killed study resumes where it stopped."""

    def declined(self, count: int) -> bool:
        """The last recipe was not tried for lack of time, the ``count``-th so far. Returns whether to end the search."""
        return False


class Ladder(Sampler):
    """Try in order: as written, tuned eager, each runtime lossless, with less precision where promising, smaller networks if
    asked for, then knobs and compilers."""

    def walk(self, done: Mapping[str, Trial], facts: SearchState) -> Iterator[Ask]:
        plain, quick = _eager(), _quick_runtimes()
        runtimes, relatives = [b for b in quick if b.own_graph], [b for b in quick if not b.own_graph]
        slow = [backend for backend in search_space.backends() if backend.cost != "seconds"]
        threads = [knob for knob in search_space.knobs() if "threads" in knob.sets]
        yield from first_asks()
        if _is_quick(_best(done, facts, exact_only=True)):  # several may be fast in some minutes only
            yield from _with_each(_best(done, facts, exact_only=True), threads[:1])
        yield from _less_precision(runtimes, plain, done, facts)
        yield from _compressed(done, facts)  # before what gains a few percent, so that a short budget reaches it
        yield from _finer_precision(runtimes, plain, done)
        for exact_only in (False, True):  # the best may be best by noise
            if _is_quick(_best(done, facts, exact_only=exact_only)):
                yield from _with_each(_best(done, facts, exact_only=exact_only), threads)
        yield from _fields(_best(done, facts, exact_only=False), facts)
        yield from _tuned(plain, done)
        tuned = _best_eager(done)
        yield from _lossless(relatives, tuned)
        yield from _precision(relatives, tuned, done, facts)
        yield from _compressed(done, facts)
        yield from _knobs(done, facts)
        yield from _precision([tuned.backend], tuned, done, facts, all_backends=True)
        yield from _lossless(slow, tuned)
        yield from _four_bits([*runtimes, *relatives, *slow], tuned, done, facts)
        yield from _precision(slow, tuned, done, facts)
        yield from _compressed(done, facts)
        yield from _knobs(done, facts)


def _tuned(eager: Recipe, done: Mapping[str, Trial]) -> Iterator[Ask]:
    """Ask for rewrites one by one, for those that gain together, then for thread counts."""
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
    backends: Sequence[Backend], tuned: Recipe, done: Mapping[str, Trial], facts: SearchState, *, all_backends: bool = False
) -> Iterator[Ask]:
    """Ask for all forms of less precision."""
    yield from _less_precision(backends, tuned, done, facts, all_backends=all_backends)
    yield from _finer_precision(backends, tuned, done)


def _most_promising(backends: Sequence[Backend], tuned: Recipe, done: Mapping[str, Trial]) -> list[Recipe]:
    """The lossless recipe of each backend, the fastest first."""
    lossless = [Recipe(passes=_inherited(tuned, backend), backend=backend) for backend in backends]
    return sorted(lossless, key=lambda recipe: -_speed(done.get(recipe.hash)))


def _less_precision(
    backends: Sequence[Backend], tuned: Recipe, done: Mapping[str, Trial], facts: SearchState, *, all_backends: bool = False
) -> Iterator[Ask]:
    """Ask for lossy variants of each backend and lossy passes before it, most promising backend first."""
    top = max((_speed(trial) for trial in done.values() if trial.recipe.exact), default=0.0)
    for recipe in _most_promising(backends, tuned, done):
        if not all_backends and _speed(done.get(recipe.hash)) < PROMISING * top:
            continue
        for backend in _lossy(recipe.backend, facts):
            yield Ask("precision", dataclasses.replace(recipe, backend=backend))
        for step in () if recipe.backend.own_graph else _honoured(search_space.passes(exact=False), recipe.backend):
            for variant in (step, *search_space.variants(step)):
                yield Ask("precision", dataclasses.replace(recipe, passes=(*recipe.passes, variant)))


def _finer_precision(backends: Sequence[Backend], tuned: Recipe, done: Mapping[str, Trial]) -> Iterator[Ask]:
    """Ask for other forms of the lossy variants that are close to the best, and for layers back in float."""
    for recipe in _most_promising(backends, tuned, done):
        for backend in search_space.variants(recipe.backend):
            over = max(map(_speed, done.values()), default=0.0)
            forms = other_int8_forms(dataclasses.replace(recipe, backend=backend), over, done)
            yield from (Ask("precision", each) for each in forms)
        yield from _float_layers(recipe, done)


def _float_layers(recipe: Recipe, done: Mapping[str, Trial]) -> Iterator[Ask]:
    """Ask for int8 forms of ``recipe`` that missed the accuracy limit with their most sensitive layers in float, if they are
    faster than everything that keeps it."""
    for backend in search_space.variants(recipe.backend):
        trial, variant = done.get(dataclasses.replace(recipe, backend=backend).hash), with_float_layers(recipe, backend)
        if trial is not None and variant is not None:
            over = max((_speed(t) for t in done.values() if t.state is State.COMPLETE and not loses_accuracy(t)), default=0)
            yield from (Ask("precision", each) for each in bisect_float_layers(trial, over, done, variant))


def _four_bits(backends: Sequence[Backend], tuned: Recipe, done: Mapping[str, Trial], facts: SearchState) -> Iterator[Ask]:
    """Ask for 4-bit weights on each backend where 8-bit weights keep the accuracy limit and gain :data:`FOUR_BITS_PAY`."""
    for backend in backends:
        recipe = Recipe(passes=_inherited(tuned, backend), backend=backend)
        forms = [dataclasses.replace(recipe, backend=form) for form in search_space.variants(backend) if form.quantizes]
        eight = [form for form in forms if not form.backend.needs and not _is_four_bits(form.backend)]
        known, plain = next((done[form.hash] for form in eight if form.hash in done), None), done.get(recipe.hash)
        if known is None or plain is None or not holds(known) or not _is_worthwhile(known, plain, facts, least=FOUR_BITS_PAY):
            continue
        yield from (Ask("precision", form) for form in forms if _is_four_bits(form.backend))


def _lossy(backend: Backend, facts: SearchState) -> list[Backend]:
    """The lossy variants of ``backend``, most promising first; 4-bit weights only if small files are asked for."""
    found = [each for each in search_space.variants(backend) if not each.exact and (facts.small or not _is_four_bits(each))]
    return sorted(found, key=lambda each: _lossy_order(each, facts))


def _is_four_bits(backend: Backend) -> bool:
    return str(getattr(backend, "precision", "")).startswith("int4")


def _lossy_order(backend: Backend, facts: SearchState) -> tuple[bool, ...]:
    """Sort key for lossy backends, most promising first, because the budget may end in between."""
    calibrated, eight_bits = "calibration" in backend.needs, str(getattr(backend, "precision", "")).startswith("int8")
    return (not calibrated,) if facts.convolves else (not eight_bits, calibrated)


def _compressed(done: Mapping[str, Trial], facts: SearchState) -> Iterator[Ask]:
    """Ask for smaller networks on the fastest runtimes: ratios untrained, trained where they pay, then with less precision.

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
    for fastest in _fastest(done):
        for base in (fastest, plain.get(fastest.recipe.backend.name, fastest)):
            best, trained.missed = base, False
            for step in (each for each in steps if not each.trained_only):  # what costs no training comes first
                best = yield from _ratios(best, step, None, done, facts)
            for step in steps:
                best = yield from _ratios(best, step, trained, done, facts)
            if facts.tries("distill"):
                own = yield from _ratios(base, Student(), trained, done, facts)
                best = max(best, own, key=_speed)
            if best is not base or not trained.missed:
                break  # else in float, because rounding and smaller networks may lose too much together
        if best is not base:
            yield from _less_precise(base, best, done, facts)
            if facts.tries("quantize") and best.recipe.backend.exact:
                yield from (Ask("compressed", recipe) for recipe in trained_int8(best, done, facts.updates))
    for base in _fastest(done, exact=True) if facts.tries("quantize") else ():
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
    """Ask for ``step`` on top of ``start`` at the middle one of its ratios, then at harder ones while the limit holds and at
    milder ones where it does not, again from their middle. Returns the fastest trial that keeps the limit.

    Each ratio is timed untrained, and trained if it pays and does not keep the limit so. Starting from the middle, a budget for
    one training goes to a ratio that gains much. A network that keeps the limit by little, or needed a longer training, lets
    harder ratios begin with the longer one. If none of them keeps the limit, it is itself trained for longer, because on other
    data it may well miss the limit. Without ``trained`` nothing is trained, and the first ratio that misses the limit ends it.
    """
    ratios, best, longer, failures = _by_share_kept(step), start, 0, 0
    before = tuple(part for part in start.recipe.parts if part.name != step.name)
    low, high = 1 + max((ratios.index(part) for part in start.recipe.parts if part in ratios), default=-1), len(ratios)
    while low < high:
        middle, held = (low + high - 1) // 2, None
        parts = (*before, ratios[middle])
        if not step.trained_only:
            yield Ask("compressed", untrained := _with_parts(start.recipe, parts))
            timed = done[untrained.hash]
            failures += timed.state is State.FAILED
            if timed.state is State.SKIPPED or failures == 2:
                break
            if timed.state is State.FAILED:  # it may remove more than can be removed
                high = middle
                continue
            if not _is_worthwhile(timed, best, facts):
                low = middle + 1
                continue
            held = timed if holds(timed) else None
        if trained is None and held is None:
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
        if held is None:
            high, longer = middle, 0
        elif step.trained_only and not _is_worthwhile(held, best, facts):
            break
        else:
            best, low, longer = held, middle + 1, min(longer, len(facts.updates) - 1)
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
    for backend in _lossy(best.recipe.backend, facts):
        known = done.get(dataclasses.replace(base.recipe, backend=backend).hash)
        if known is None and _same_precision(backend, best.recipe.backend):
            continue
        if known is not None and known.speedup is not None and _speed(known) <= _speed(base):
            continue
        recipe = dataclasses.replace(best.recipe, backend=backend)
        yield Ask("compressed", recipe)
        if (variant := with_float_layers(best.recipe, backend)) is not None:
            yield from (Ask("compressed", each) for each in bisect_float_layers(done[recipe.hash], _speed(best), done, variant))


def _fastest(done: Mapping[str, Trial], *, exact: bool = False) -> list[Trial]:
    """The fastest full-sized trial, or ``exact`` one, of each of the fastest runtimes that keeps the accuracy limit, whether it
    keeps limits of time and size or not. Where that is an int8 form, smaller networks are timed and judged in int8: in float
    they would look slow."""
    found: dict[str, Trial] = {}
    for trial in done.values():
        keeps = trial.state is State.COMPLETE if trial.recipe.exact else holds(trial) and not exact
        whole = keeps and not trial.recipe.compresses and trial.speedup is not None
        if whole and (trial.size_mb is not None or trial.recipe.backend.name == "eager"):
            found[trial.recipe.backend.name] = max(found.get(trial.recipe.backend.name, trial), trial, key=_speed)
    order = sorted(found.values(), key=_speed, reverse=True)
    return [trial for trial in order if _speed(trial) >= PROMISING * _speed(order[0])][:MOST_RUNTIMES]


def _is_worthwhile(trial: Trial, over: Trial, facts: SearchState, least: float = PAYS) -> bool:
    """Whether ``trial`` is better than ``over`` in the objective by the factor ``least``, from which on it is worth a training,
    or one is unmeasured."""
    one, other = facts.value(trial), facts.value(over)
    if one is None or other is None:
        return True
    gain = other / one if one < 0 else _speed(trial) / max(_speed(over), 1e-9)  # memory and size are negated
    return gain >= least


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
        if backend.exact == best.recipe.backend.exact and _same_precision(backend, best.recipe.backend):
            yield Ask("knobs", dataclasses.replace(best.recipe, backend=backend))


def _with_each(best: Trial | None, knobs: Sequence[Pass]) -> Iterator[Ask]:
    """Ask for the best recipe with each of ``knobs`` that its backend supports and the recipe lacks."""
    if best is None:
        return
    taken = {step.name for step in best.recipe.passes}
    for knob in knobs:
        if knob.name not in taken and knob.sets <= best.recipe.backend.honours:
            yield Ask("knobs", dataclasses.replace(best.recipe, passes=(*best.recipe.passes, knob)))


def _same_precision(one: Backend, other: Backend) -> bool:
    return getattr(one, "precision", None) == getattr(other, "precision", None)


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
    return max(found, key=_speed).recipe if found else _eager()


def _best(done: Mapping[str, Trial], facts: SearchState, *, exact_only: bool) -> Trial | None:
    found = [
        trial
        for trial in done.values()
        if trial.state is State.COMPLETE and facts.value(trial) is not None and facts.feasible(trial)
        if trial.recipe.exact or not exact_only
    ]
    return max(found, key=lambda trial: facts.value(trial) or 0.0, default=None)
