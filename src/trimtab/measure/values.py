"""The values of an output that are compared, and what they vary by."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from trimtab._masks import mask_bound, masked
from trimtab.measurement import Relative

HUGE = 1e30
"""A mask's -3.4e38 stands for minus infinity; figures that include it would say nothing about the rest."""

Tensor = torch.Tensor


def real(tensor: Tensor) -> Tensor:
    """``tensor`` on the CPU in double precision; a complex one with its parts in a last dimension of two."""
    tensor = tensor.detach().cpu().resolve_conj()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def signed_infinities(tensor: Tensor) -> Tensor:
    """``tensor`` with what is beyond :data:`HUGE` as infinite."""
    return torch.where(tensor.abs() > HUGE, tensor.sign() * math.inf, tensor)


def without_masks(reference: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """``reference`` with the values of a mask (:func:`~trimtab._masks.mask_bound`) as infinite, and by what share of themselves
    those of ``outputs`` are off at most."""
    bound, found, worst = mask_bound(reference), [], 0.0
    if bound > HUGE:
        return list(reference), 0.0
    for a, b in zip(reference, outputs, strict=True):
        hidden = masked(a, bound)
        x, y = finite(a[hidden], b[hidden])
        worst = max(worst, float(((y - x) / x).abs().max()) if len(x) else 0.0)
        found.append(torch.where(hidden, a.sign() * math.inf, a))
    return found, worst


def finite(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The values that are finite in the reference, flat."""
    x, y = real(a), real(b)
    usable = signed_infinities(x).isfinite()
    return x[usable], y[usable]


def scale_of(reference: Sequence[Tensor]) -> tuple[float, Relative, float, float]:
    """What the reference varies by, over what, its root mean square, and its largest value."""
    flat = [finite(a, a)[0] for a in reference]
    count = max(1, sum(len(x) for x in flat))
    size = math.sqrt(sum(float(x.square().sum()) for x in flat) / count)
    peak = max((float(x.abs().max()) for x in flat if len(x)), default=0.0)
    dtype = reference[0].dtype
    eps = torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 1e-12
    least = 64 * eps * size  # less than that is rounding, and no variation
    over_examples = _spread_over_examples(reference)
    if over_examples > least:
        return over_examples, "examples", size, peak
    mean = sum(float(x.sum()) for x in flat) / count
    within = math.sqrt(sum(float((x - mean).square().sum()) for x in flat) / count)
    if within > least:
        return within, "output", size, peak
    return (size, "size", size, peak) if size else (1.0, "one", size, peak)


def _spread_over_examples(reference: Sequence[Tensor]) -> float:
    """Root mean square, over the elements of an example, of their standard deviation over the examples; 0 if unknown.

    Examples of different shapes, such as sentences of different length, have no elements in common: 0 as well.
    """
    rows = [real(a) if a.dim() else real(a)[None] for a in reference]
    if len({x.shape[1:] for x in rows}) > 1 or sum(len(x) for x in rows) < 2:
        return 0.0
    usable = [signed_infinities(x).isfinite() for x in rows]
    rows = [torch.where(ok, x, 0.0) for x, ok in zip(rows, usable, strict=True)]
    counts = torch.stack([ok.sum(0) for ok in usable]).sum(0)
    mean = torch.stack([x.sum(0) for x in rows]).sum(0) / counts.clamp(min=1)
    squares = sum(float(torch.where(ok, x - mean, 0.0).square().sum()) for x, ok in zip(rows, usable, strict=True))
    return math.sqrt(squares / max(1, int(counts.sum())))


def unrelated(reference: Tensor, output: Tensor, scale: float) -> int:
    """How many examples have a root mean square error of at least ``scale``."""
    x, y = signed_infinities(real(reference)), real(output)
    if not reference.dim():
        x, y = x[None], y[None]
    usable = x.isfinite()
    squares = torch.where(usable, y - x, 0.0).square().unsqueeze(-1).flatten(1).sum(1)
    return int((squares >= scale**2 * usable.unsqueeze(-1).flatten(1).sum(1).clamp(min=1)).sum())
