"""Compare tensors: sorted integer inputs, near-ties of integers, values of masks, largest errors.

A sorted row of integers may be the offsets of an ``EmbeddingBag`` or segment numbers. Unsorted, it is no valid input of such a
model, whose outputs then prove nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def is_sorted(leaf: torch.Tensor) -> bool:
    """True for a 1-D tensor of non-decreasing integers that are not all equal."""
    if leaf.dim() != 1 or len(leaf) < 2 or not is_discrete(leaf.dtype) or leaf.dtype == torch.bool:
        return False
    return bool((leaf[1:] >= leaf[:-1]).all() and leaf[0] < leaf[-1])


def resize_sorted(leaf: torch.Tensor, size: int) -> torch.Tensor:
    """The first ``size`` values of an :func:`is_sorted` tensor; the last value is repeated if there are fewer."""
    return leaf[torch.arange(size, device=leaf.device).clamp(max=len(leaf) - 1)]


def repeat_sorted(leaf: torch.Tensor) -> torch.Tensor:
    """A sorted tensor of the same length: the first half of ``leaf``, each value twice."""
    return leaf[torch.arange(len(leaf), device=leaf.device) // 2]


def resample_sorted(leaf: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """A sorted tensor: the first value of ``leaf``, then its values at ``index``, sorted."""
    return torch.cat([leaf[:1], leaf[index].sort().values[1:]])


NEAR_TIES = 0.005
"""Share of an output's integers (or booleans) that may differ between runtimes whose floats agree: an arg-max, a threshold or a
bin changes if two values are closer than rounding."""
NEAR_TIES_ALONE = 0.001
"""As :data:`NEAR_TIES`, for a model without float outputs, with which near-ties could be distinguished from errors."""


def is_discrete(dtype: torch.dtype) -> bool:
    """True for integers and booleans, whose differences have no size."""
    return not (dtype.is_floating_point or dtype.is_complex)


def too_many_differ(want: torch.Tensor, got: torch.Tensor, allowed: float = NEAR_TIES) -> str | None:
    """A clause about the share of elements that differ, if it is above ``allowed``; else ``None``."""
    share = float((want != got).double().mean()) if want.numel() else 0.0
    return f"{share:.2%} of its values differ, where {allowed:.2%} may" if share > allowed else None


MASK_LEAST, MASK_RATIO, MASK_SPREAD = 1e3, 100.0, 4.0
"""Values of a mask (such as -1e9) are at least ``MASK_LEAST``, ``MASK_RATIO`` times the largest other value, and within the
factor ``MASK_SPREAD`` of each other. Large values that a model computes, such as powers of a spectrum, are not."""


def mask_bound(outputs: Sequence[torch.Tensor]) -> float:
    """The size from which on values of an output, given batch by batch, belong to a mask; infinite without a mask."""
    given = [] if outputs[0].is_complex() else [output.detach() for output in outputs if output.numel()]
    sizes = [(output if output.element_size() >= 4 else output.float()).abs() for output in given]
    bound = math.inf
    while (top := _largest(sizes, bound)) >= MASK_LEAST:
        least = min(float(torch.where(size > top / MASK_SPREAD, size, top).min()) for size in sizes)
        if not 0 < _largest(sizes, least) <= least / MASK_RATIO:
            break
        bound = least
    return bound


def masked(values: torch.Tensor, bound: float) -> torch.Tensor:
    """True for finite ``values`` of at least the size ``bound``."""
    return (values.abs() >= bound) & values.isfinite()


def errors(want: torch.Tensor, got: torch.Tensor) -> list[tuple[float, float]] | None:
    """Pairs of absolute error and value: the largest error and largest value of ``want``; and for values of a mask, those of
    the largest relative error. ``None`` if NaN or infinities are at different places."""
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


def difference(
    name: str, want: torch.Tensor, got: torch.Tensor, limit: float, *, floor: float = 1e-6, near_ties: float = NEAR_TIES
) -> str | None:
    """A clause about ``name`` if ``got`` differs from ``want``; ``None`` if it does not. Errors may reach ``limit`` times
    the largest value, and ``floor`` besides; of integers a share of ``near_ties`` may differ."""
    if want.shape != got.shape or want.dtype != got.dtype:
        return f"{name} is {got.dtype} {list(got.shape)} instead of {want.dtype} {list(want.shape)}"
    if is_discrete(want.dtype):
        differing = too_many_differ(want, got, near_ties)
        return differing and f"{name} is wrong: {differing}"
    if math.isinf(limit):
        return None
    if (found := errors(want, got)) is None:
        return f"{name} has NaN or infinity in other places"
    wrong = next(((error, size) for error, size in found if not error <= limit * size + floor), None)
    return None if wrong is None else f"{name} is off by {wrong[0]:.3g} where the largest value is {wrong[1]:.3g}"


def _largest(sizes: Sequence[torch.Tensor], bound: float) -> float:
    """The largest value below ``bound``."""
    return max((float(torch.where(size < bound, size, 0.0).max()) for size in sizes), default=0.0)
