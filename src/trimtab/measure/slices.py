"""How far an output is from the reference in each slice along its axes.

One tensor may hold boxes in pixels beside probabilities. Relative to what the whole of it varies by, no error of a probability
is large, and all of them may be zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import torch

LARGEST = 1024
"""Axes with more slices than this are left alone: they are places and words, seldom things of another kind each."""
FEWEST = 8
"""Values that a slice needs for what it varies by to be known; of a few, some are close to each other by chance."""
FLOOR = 1e-5
"""What is less than this share of the output's size is float32's rounding, and no variation."""
LOST = 0.1
"""Share of the slices that vary from which on a recipe that may lose accuracy has lost too many: a few that hardly vary die in
eight bits."""
CONSTANT, BEYOND = 0.01, 2.0
"""A slice is gone where its output varies by less than this share of what the reference varies by, or where its error is more
than this many times that: one such slice is refused, whatever the others are like."""
MOSTLY_ZERO = 0.5
"""A slice of which more than this share is exactly 0 in the reference, as after a ReLU, is not called gone: rounding its few
small values to 0 is what eight bits do."""
REACHED = 0.99
"""Share of what a slice varies by at which its error has reached it; a constant's error is all of it, but for rounding."""

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Slices:
    """The slices along one axis, over all examples, that have enough values. Figures are relative to the output's size."""

    axis: int
    spread: Tensor
    """What the values of each slice vary by in the reference, over examples and within them."""
    error: Tensor
    """Root mean square error of each slice."""
    output_spread: Tensor
    """What the values of each slice vary by in the output that is judged."""
    zeros: Tensor
    """Share of the reference's values that are exactly 0."""


def axes_of(shapes: Iterable[Sequence[int]]) -> list[int]:
    """The axes of an output along which its slices are looked at; the first one is that of the examples."""
    first, *others = list(shapes)
    if any(len(shape) != len(first) for shape in others):
        return []
    return [i for i in range(1, len(first)) if 1 < first[i] <= LARGEST and all(shape[i] == first[i] for shape in others)]


def along(values: Iterable[tuple[Tensor, Tensor]], axes: Sequence[int]) -> Iterator[Slices]:
    """The slices along each of ``axes``, from the reference and the output of every batch in double precision; where the
    reference is not finite, nothing is compared."""
    totals: dict[int, Tensor] = {}
    for reference, output in values:
        known, off, usable = reference, output - reference, reference.isfinite()
        if not usable.all():
            known, off = torch.where(usable, known, 0.0), torch.where(usable, off, 0.0)
        # over the examples first, so that the axes share the largest part of the work
        given = known + off
        zeros = ((known == 0) & usable).sum(0).double()
        sums = torch.stack([usable.sum(0), known.sum(0), _squares(known), _squares(off), given.sum(0), _squares(given), zeros])
        for axis in axes:
            part = sums.movedim(axis, 1).unsqueeze(2).flatten(2).sum(2)
            totals[axis] = totals[axis] + part if axis in totals else part
    for axis, sums in totals.items():
        count, total, squares, errors, given, given_squares, zeros = sums[:, sums[0] >= FEWEST]
        size = (sums[2].sum() / sums[0].sum().clamp(min=1)).sqrt().clamp(min=torch.finfo(torch.float64).tiny)
        spread, output_spread = _deviation(count, total, squares) / size, _deviation(count, given, given_squares) / size
        yield Slices(axis, spread, (errors / count).sqrt() / size, output_spread, zeros / count)


def _deviation(count: Tensor, total: Tensor, squares: Tensor) -> Tensor:
    """The standard deviation, from the number of values, their sum and the sum of their squares."""
    return (squares / count - (total / count).square()).clamp(min=0).sqrt()


def _squares(values: Tensor) -> Tensor:
    """The sum of the squares over the first axis, without a copy of them all."""
    norms: Tensor = torch.linalg.vector_norm(values, dim=0)
    return norms.square()


def inexact(found: Slices, limit: float, rounding: float) -> tuple[int, float]:
    """How many slices have an error above ``limit``, relative to what they vary by, and above ``rounding``, relative to the
    output's size; and the largest of these errors, relative to what the slice varies by."""
    bad = (found.error > limit * found.spread) & (found.error > max(rounding, FLOOR))
    worst = (found.error / found.spread.clamp(min=FLOOR))[bad]
    return int(bad.sum()), float(worst.max()) if len(worst) else 0.0


def lost(found: Slices) -> tuple[int, int]:
    """How many slices a constant would tell as well, and of how many that vary."""
    vary = found.spread > FLOOR
    return int((vary & (found.error >= REACHED * found.spread)).sum()), int(vary.sum())


def gone(found: Slices) -> int:
    """How many slices vary in the reference of which nothing is left in the output: they are constant there, or far off."""
    vary = (found.spread > FLOOR) & (found.zeros <= MOSTLY_ZERO)
    return int((vary & ((found.output_spread < CONSTANT * found.spread) | (found.error > BEYOND * found.spread))).sum())
