"""Errors of an output in each slice along its axes.

One tensor may hold boxes in pixels beside probabilities. Relative to the variation of the whole tensor every error of a
probability is small, even if all of them become zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import torch

MAX_SLICES = 1024
"""Axes with more slices than this are skipped: they are usually positions or words, and not quantities of different kinds."""
MIN_VALUES = 8
"""Minimum values of a slice for a known variation; of fewer, some are close to each other by chance."""
FLOOR = 1e-5
"""Variation below this share of the output's size counts as float32's rounding."""
MAX_USELESS = 0.1
"""Share of useless slices, among those that vary, from which a lossy recipe is refused. It decides about slices of few values,
and about those that are mostly 0: one of the others that is lost altogether is enough."""
CONSTANT, FAR_OFF, MANY_VALUES = 0.01, 2.0, 32
"""A slice is lost altogether if its output varies by less than :data:`CONSTANT` of the reference's variation, or if its error
reaches that variation. The variation of fewer than :data:`MANY_VALUES` values may be small by chance: their error must reach
:data:`FAR_OFF` times the variation. One lost slice refuses a recipe."""
MOSTLY_ZERO = 0.5
"""A slice with more than this share of exact zeros in the reference, as after a ReLU, never counts as lost altogether: eight
bits round its few small values to 0."""
REACHED = 0.99
"""Share of a slice's variation from which its error counts as reaching it; a constant's error is 1 but for rounding."""

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Slices:
    """The slices along one axis, over all examples, that have enough values. Figures are relative to the output's size."""

    axis: int
    spread: Tensor
    """Variation of the values of each slice in the reference, over examples and within them."""
    error: Tensor
    """Root mean square error of each slice."""
    output_spread: Tensor
    """Variation of the values of each slice in the output."""
    zeros: Tensor
    """Share of the reference's values that are exactly 0."""
    count: Tensor
    """Number of values of each slice."""


def axes_of(shapes: Iterable[Sequence[int]]) -> list[int]:
    """The axes of an output whose slices are compared: all but the first, which counts examples."""
    first, *others = list(shapes)
    if any(len(shape) != len(first) for shape in others):
        return []
    return [i for i in range(1, len(first)) if 1 < first[i] <= MAX_SLICES and all(shape[i] == first[i] for shape in others)]


def slices_along(values: Iterable[tuple[Tensor, Tensor]], axes: Sequence[int]) -> Iterator[Slices]:
    """The slices along each of ``axes``, from the double-precision reference and output of every batch. Values that are not
    finite in the reference are skipped."""
    totals: dict[int, Tensor] = {}
    for reference, output in values:
        known, off, usable = reference, output - reference, reference.isfinite()
        if not usable.all():
            known, off = torch.where(usable, known, 0.0), torch.where(usable, off, 0.0)
        # over the examples first, which shares most of the work between axes
        given = known + off
        zeros = ((known == 0) & usable).sum(0).double()
        sums = torch.stack([usable.sum(0), known.sum(0), _squares(known), _squares(off), given.sum(0), _squares(given), zeros])
        for axis in axes:
            part = sums.movedim(axis, 1).unsqueeze(2).flatten(2).sum(2)
            totals[axis] = totals[axis] + part if axis in totals else part
    for axis, sums in totals.items():
        count, total, squares, errors, given, given_squares, zeros = sums[:, sums[0] >= MIN_VALUES]
        size = (sums[2].sum() / sums[0].sum().clamp(min=1)).sqrt().clamp(min=torch.finfo(torch.float64).tiny)
        spread, output_spread = _deviation(count, total, squares) / size, _deviation(count, given, given_squares) / size
        yield Slices(axis, spread, (errors / count).sqrt() / size, output_spread, zeros / count, count)


def _deviation(count: Tensor, total: Tensor, squares: Tensor) -> Tensor:
    """The standard deviation, from the number of values, their sum and the sum of their squares."""
    return (squares / count - (total / count).square()).clamp(min=0).sqrt()


def _squares(values: Tensor) -> Tensor:
    """The sum of squares over the first axis, without a copy of the tensor."""
    norms: Tensor = torch.linalg.vector_norm(values, dim=0)
    return norms.square()


def inexact_slices(found: Slices, limit: float, rounding: float) -> tuple[int, float]:
    """The number of slices whose error exceeds ``limit``, relative to their variation, and ``rounding``, relative to the
    output's size; and the largest of these errors, relative to the variation of its slice."""
    bad = (found.error > limit * found.spread) & (found.error > max(rounding, FLOOR))
    worst = (found.error / found.spread.clamp(min=FLOOR))[bad]
    return int(bad.sum()), float(worst.max()) if len(worst) else 0.0


def useless_slices(found: Slices) -> tuple[int, int]:
    """The number of slices for which a constant would have as small an error, and the number of slices that vary."""
    vary = found.spread > FLOOR
    return int((vary & (found.error >= REACHED * found.spread)).sum()), int(vary.sum())


def destroyed_slices(found: Slices) -> int:
    """The number of slices that vary in the reference and are lost altogether: constant in the output, or off by as much as
    they vary."""
    vary = (found.spread > FLOOR) & (found.zeros <= MOSTLY_ZERO)
    constant = found.output_spread < CONSTANT * found.spread
    most = torch.where(found.count >= MANY_VALUES, REACHED, FAR_OFF) * found.spread
    return int((vary & (constant | (found.error >= most))).sum())
