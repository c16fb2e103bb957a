"""The values of an output that are compared, and their variation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from trimtab.core.measurement import Relative
from trimtab.tensors.comparison import mask_bound, masked

HUGE = 1e30
"""Values beyond this count as infinite: a mask's -3.4e38 stands for minus infinity, and would dominate all figures."""
MOST_ROUNDING = 2**-6
"""A variation below this share of an output's size may be rounding; 64 rounding errors of its dtype if that is less (for
bfloat16 it is half of the size)."""

Tensor = torch.Tensor


def as_double(tensor: Tensor) -> Tensor:
    """``tensor`` on the CPU in double precision; a complex one with its parts in a last dimension of two."""
    tensor = tensor.detach().cpu().resolve_conj()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def all_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or beyond :data:`HUGE`. The check saves several passes over an output without any."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    tensor = tensor.detach().resolve_conj()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    low, high = map(float, torch.aminmax(tensor if tensor.element_size() > 1 else tensor.float()))  # torch has none for 8 bits
    return low >= -HUGE and high <= HUGE


def signed_infinities(tensor: Tensor) -> Tensor:
    """``tensor`` with values beyond :data:`HUGE` as infinite."""
    return tensor if all_finite(tensor) else torch.where(tensor.abs() > HUGE, tensor.sign() * math.inf, tensor)


def without_masks(reference: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """``reference`` with mask values (:func:`~trimtab.tensors.comparison.mask_bound`) as infinite, and the largest relative
    error of these values in ``outputs``."""
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
    """The values that are finite in the reference, flattened."""
    x, y = as_double(a), as_double(b)
    if all_finite(a):
        return x.flatten(), y.flatten()
    usable = signed_infinities(x).isfinite()
    return x[usable], y[usable]


def scale_of(reference: Sequence[Tensor]) -> tuple[float, Relative, float, float]:
    """The variation of the reference, what it is taken over, its root mean square, and its largest value. One batch at a time
    is held in double precision."""
    count, total, squares, peak = 0, 0.0, 0.0, 0.0
    for x in map(_finite, reference):
        count, total, squares = count + len(x), total + float(x.sum()), squares + float(x.dot(x))
        peak = max(peak, float(x.abs().max()) if len(x) else 0.0)
    count = max(1, count)
    mean, size = total / count, math.sqrt(squares / count)
    dtype = reference[0].dtype
    eps = torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 1e-12
    least = min(64 * eps, MOST_ROUNDING) * size
    over_examples = _spread_over_examples(reference)
    if over_examples > least:
        return over_examples, "examples", size, peak
    within = math.sqrt(sum(float((x - mean).square().sum()) for x in map(_finite, reference)) / count)
    if within > least:
        return within, "output", size, peak
    return (size, "size", size, peak) if size else (1.0, "one", size, peak)


def _finite(tensor: Tensor) -> Tensor:
    """The finite values, flattened."""
    x = as_double(tensor)
    return x.flatten() if all_finite(tensor) else x[signed_infinities(x).isfinite()]


def _spread_over_examples(reference: Sequence[Tensor]) -> float:
    """Root mean square, over the elements of an example, of their standard deviation over the examples; 0 if unknown.

    Examples of different shapes, such as sentences of different length, have no common elements, which gives 0 too.
    """
    rows = [a if a.dim() else a[None] for a in reference]
    if len({a.shape[1:] for a in rows}) > 1 or sum(len(a) for a in rows) < 2:
        return 0.0
    counts, total, squares = torch.zeros((), dtype=torch.long), torch.zeros((), dtype=torch.float64), 0.0
    for x, usable in map(_usable, rows):
        counts, total = counts + usable.sum(0), total + torch.where(usable, x, 0.0).sum(0)
    mean = total / counts.clamp(min=1)
    for x, usable in map(_usable, rows):
        squares += float(torch.where(usable, x - mean, 0.0).square().sum())
    return math.sqrt(squares / max(1, int(counts.sum())))


def _usable(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The values, and a mask of the finite ones."""
    x = as_double(tensor)
    return x, torch.tensor(True).expand(x.shape) if all_finite(tensor) else signed_infinities(x).isfinite()


def count_unrelated(reference: Tensor, output: Tensor, scale: float) -> int:
    """The number of examples with a root mean square error of at least ``scale``."""
    x, y = signed_infinities(as_double(reference)), as_double(output)
    if not reference.dim():
        x, y = x[None], y[None]
    usable = x.isfinite()
    squares = torch.where(usable, y - x, 0.0).square().unsqueeze(-1).flatten(1).sum(1)
    return int((squares >= scale**2 * usable.unsqueeze(-1).flatten(1).sum(1).clamp(min=1)).sum())
