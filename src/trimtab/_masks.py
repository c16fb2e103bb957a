"""Values that stand for none, as the -1e9 with which logits are masked: no error of any other value would count beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

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
