"""Rows of whole numbers that mean something in their order only: where each bag of an embedding begins, or to which segment a
row belongs. In another order they are no input of the model's, and what a model makes of them proves nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def ordered(leaf: torch.Tensor) -> bool:
    """Whether ``leaf`` is a row of whole numbers that rise."""
    if leaf.dim() != 1 or len(leaf) < 2 or not is_discrete(leaf.dtype) or leaf.dtype == torch.bool:
        return False
    return bool((leaf[1:] >= leaf[:-1]).all() and leaf[0] < leaf[-1])


def stretched(leaf: torch.Tensor, size: int) -> torch.Tensor:
    """The first ``size`` values of an :func:`ordered` row, the last one repeated where there are fewer."""
    return leaf[torch.arange(size, device=leaf.device).clamp(max=len(leaf) - 1)]


def slower(leaf: torch.Tensor) -> torch.Tensor:
    """Another row of the same kind: the first half of an :func:`ordered` one, each value twice."""
    return leaf[torch.arange(len(leaf), device=leaf.device) // 2]


def redrawn(leaf: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Another row of the same kind: the values of an :func:`ordered` one at ``index`` in their order, after its first."""
    return torch.cat([leaf[:1], leaf[index].sort().values[1:]])


NEAR_TIES = 0.005
"""Share of an output's integers (or booleans) that may differ between forms that agree on the floats behind them. An arg-max, a
threshold or a bin turns over where two values are closer than rounding, whichever runtime computes them."""
NEAR_TIES_ALONE = 0.001
"""The same where a model gives integers only, so that nothing beside them tells a near-tie from a wrong value."""


def is_discrete(dtype: torch.dtype) -> bool:
    """Whether values of ``dtype`` are integers or booleans, between which a distance means nothing."""
    return not (dtype.is_floating_point or dtype.is_complex)


def too_many_differ(want: torch.Tensor, got: torch.Tensor, allowed: float = NEAR_TIES) -> str | None:
    """The share of the elements of ``got`` that are not those of ``want``, in words, if it is more than ``allowed``."""
    share = float((want != got).double().mean()) if want.numel() else 0.0
    return f"{share:.2%} of its values differ, where {allowed:.2%} may" if share > allowed else None


LEAST, BEYOND, ALIKE = 1e3, 100.0, 4.0
"""A mask's values are at least so large, so many times the largest of the others, and within this factor of each other: large
values that a model computes, such as powers of a spectrum, go over into the small ones or differ among themselves."""


def mask_bound(outputs: Sequence[torch.Tensor]) -> float:
    """From which size on values of an output, given batch by batch, are a mask's; infinite where none are."""
    given = [] if outputs[0].is_complex() else [output.detach() for output in outputs if output.numel()]
    sizes = [(output if output.element_size() >= 4 else output.float()).abs() for output in given]
    bound = math.inf
    while (top := _largest(sizes, bound)) >= LEAST:
        least = min(float(torch.where(size > top / ALIKE, size, top).min()) for size in sizes)
        if not 0 < _largest(sizes, least) <= least / BEYOND:
            break
        bound = least
    return bound


def masked(values: torch.Tensor, bound: float) -> torch.Tensor:
    """Which of ``values`` are finite and of at least the size ``bound``."""
    return (values.abs() >= bound) & values.isfinite()


def errors(want: torch.Tensor, got: torch.Tensor) -> list[tuple[float, float]] | None:
    """How far ``got`` is off: the largest error and the largest value that there should be and, of a mask's values, the error
    and the value where they are off the most. ``None`` where values are NaN or infinite in other places."""
    wide = torch.complex128 if want.is_complex() else torch.float64
    a, b = want.detach().to(wide), got.detach().to(wide)
    known = a.isfinite()
    if not torch.equal(known, b.isfinite()):
        return None
    hidden = masked(a, mask_bound([a]))
    usual = known & ~hidden
    off, size = (a - b).abs(), a.abs()
    found = [(float(off[usual].max()), float(size[usual].max()))] if usual.any() else []
    if hidden.any():
        worst = (off[hidden] / size[hidden]).argmax()
        found.append((float(off[hidden][worst]), float(size[hidden][worst])))
    return found


def _largest(sizes: Sequence[torch.Tensor], bound: float) -> float:
    """The largest value below ``bound``."""
    return max((float(torch.where(size < bound, size, 0.0).max()) for size in sizes), default=0.0)
