"""Less precision: which forms are tried, and what recovers accuracy: layers back in float, and training.

The generators yield recipes, and read their trials from the finished ones when they go on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

from trimtab.core import search_space
from trimtab.core.backend import Backend
from trimtab.core.recipe import Recipe
from trimtab.core.technique import PASSES, Pass
from trimtab.core.trial import State, Trial
from trimtab.hardware import environment
from trimtab.study.samplers.finished_trials import PAYS, holds, loses_accuracy, speed
from trimtab.study.samplers.sampler import UPDATES, SearchState

PROMISING = 0.5
"""Least share of the best lossless speed at which a backend is tried with less precision, or with a smaller network."""
QUANTIZER, TRAINER = "fake_quant", "recover"
CLOSE = 0.9
"""Least share of the best speed at which other forms of static int8 are tried on a CPU without VNNI."""
FORMS = ("form", "full_range", "ranges")
"""Fields of backends that change static int8 and not what is in int8, in the order in which they are tried."""


def bisect_float_layers(
    quantized: Trial, over: float, done: Mapping[str, Trial], variant: Callable[[int], Recipe]
) -> Generator[Recipe, None, None]:
    """Ask for ``variant(n)``, in which the ``n`` most sensitive layers are float, until the accuracy limit holds: double ``n``,
    then bisect for the smallest one. Ends where no gain is left, that is, where the speed is not above ``over``."""

    def failed(trial: Trial) -> bool:
        slow = trial.speedup is not None and speed(trial) <= over
        return trial.state in (State.FAILED, State.SKIPPED) or (slow and loses_accuracy(trial))

    if not loses_accuracy(quantized) or failed(quantized):
        return
    least, most = 0, 1
    while True:
        yield variant(most)
        trial = done[variant(most).hash]
        if failed(trial) or (trial.state is State.STOPPED and not loses_accuracy(trial)):
            return
        if not loses_accuracy(trial):
            break
        least, most = most, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        yield variant(middle)
        trial = done[variant(middle).hash]
        least, most = (least, middle) if trial.state is State.COMPLETE and not loses_accuracy(trial) else (middle, most)


def other_int8_forms(recipe: Recipe, over: float, done: Mapping[str, Trial]) -> Iterator[Recipe]:
    """Other forms of the static int8 ``recipe``, on a CPU without VNNI where it is close to the best speed ``over``: what is
    faster there depends on the network, and only a trial tells whether sums that saturate keep the accuracy limit."""
    backend = recipe.backend
    if environment.has_vnni() or "calibration" not in backend.needs or speed(done.get(recipe.hash)) < CLOSE * over:
        return
    for name in FORMS:
        for value in backend.choices().get(name, ()):
            if value != getattr(backend, name):
                yield dataclasses.replace(recipe, backend=dataclasses.replace(backend, **{name: value}))


def with_float_layers(recipe: Recipe, backend: Backend) -> Callable[[int], Recipe] | None:
    """A function of ``n``: ``recipe`` on int8 ``backend`` with ``n`` layers in float. ``None`` if it has no such field."""
    if not backend.quantizes or not hasattr(backend, "float_layers"):
        return None
    return lambda count: dataclasses.replace(recipe, backend=dataclasses.replace(backend, float_layers=count))  # type: ignore[call-arg]


def trained_int8(
    start: Trial, done: Mapping[str, Trial], trainings: Sequence[int] = UPDATES
) -> Generator[Recipe, None, Trial | None]:
    """Recipes in which the network of ``start``, whose backend is lossless, is quantized in the model: as it is, with its most
    sensitive layers in float, and then trained. Only where the runtime's own static int8 form is faster than ``start`` and
    misses the accuracy limit, or cannot be made. Returns the trial that keeps the limit.

    Layers in float cost speed but no training: without one in float it is trained only where that is surely worth it.
    """
    quantizer = PASSES[QUANTIZER]()
    backend, before = start.recipe.backend, start.recipe.passes
    if quantizer.pays_for is not None and backend.name not in quantizer.pays_for:
        return None
    forms = search_space.variants(backend)
    static = next((form for form in forms if form.quantizes and "calibration" in form.needs), None)
    if static is not None:
        own = dataclasses.replace(start.recipe, backend=static)
        yield own
        known = done[own.hash]
        if known.state not in (State.FAILED, State.SKIPPED) and (
            not loses_accuracy(known) or (known.speedup is not None and speed(known) <= speed(start))
        ):
            return None
    smaller, rest = start.recipe.parts, tuple(step for step in before if not step.compresses)
    trained_before = tuple(step for step in before if step.name == TRAINER)

    def form(*passes: Pass) -> Recipe:
        return dataclasses.replace(start.recipe, passes=(*smaller, *passes, *rest))

    def floating(count: int) -> Recipe:
        return form(*trained_before, dataclasses.replace(quantizer, float_layers=count))  # type: ignore[call-arg]

    yield (untrained := form(*trained_before, quantizer))
    trial = done[untrained.hash]
    if holds(trial):
        return trial
    if trial.state in (State.FAILED, State.SKIPPED) or (trial.speedup is not None and speed(trial) <= speed(start)):
        return None
    rescued: Trial | None = None
    for recipe in bisect_float_layers(trial, speed(start), done, floating):
        yield recipe
        found = done[recipe.hash]
        rescued = max(rescued or found, found, key=speed) if holds(found) else rescued
    if rescued is not None and trial.speedup is not None and speed(trial) < PAYS * speed(rescued):
        return rescued
    for updates in trainings:
        yield (recipe := form(quantizer, training(updates)))
        trial = done[recipe.hash]
        if holds(trial):
            return max(rescued or trial, trial, key=speed)
        if trial.state in (State.FAILED, State.SKIPPED) or (trial.speedup is not None and speed(trial) <= speed(start)):
            break
    return rescued


def training(updates: int) -> Pass:
    """The pass that trains what the passes before it made, with a number of updates."""
    return dataclasses.replace(PASSES[TRAINER](), updates=updates)  # type: ignore[call-arg]


def lossy(backend: Backend, facts: SearchState) -> list[Backend]:
    """The lossy variants of ``backend``, most promising first; 4-bit weights only if small files are asked for."""
    found = [each for each in search_space.variants(backend) if not each.exact and (facts.small or not is_four_bits(each))]
    return sorted(found, key=lambda each: _lossy_order(each, facts))


def is_four_bits(backend: Backend) -> bool:
    """Whether ``backend`` stores weights in 4 bits."""
    return str(getattr(backend, "precision", "")).startswith("int4")


def _lossy_order(backend: Backend, facts: SearchState) -> tuple[bool, ...]:
    """Sort key for lossy backends, most promising first, because the budget may end in between."""
    calibrated, eight_bits = "calibration" in backend.needs, str(getattr(backend, "precision", "")).startswith("int8")
    return (not calibrated,) if facts.convolves else (not eight_bits, calibrated)


def same_precision(one: Backend, other: Backend) -> bool:
    """Whether both compute in the same precision, or have no choice of it."""
    return getattr(one, "precision", None) == getattr(other, "precision", None)
