"""Error figures of one output against its reference, relative to the variation of the reference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from trimtab.core.measurement import Relative
from trimtab.measure.values import count_unrelated, finite, scale_of
from trimtab.tensors.comparison import is_discrete

Tensor = torch.Tensor
RELATIVE_FLOOR = 1e-3
"""Relative errors use values of at least this share of the reference's root mean square."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures of one output over all batches. Errors are relative to ``scale``."""

    name: str
    dtype: torch.dtype
    differing: float
    max_abs: float
    max_relative: float
    cosine: float
    sqnr_db: float
    centred: float
    tail: float
    relative_to: Relative
    noise: float
    """One rounding error at the output's size, relative to ``scale``."""
    peak_noise: float
    """One rounding error at its largest value, relative to ``scale``."""
    unrelated: int
    """Examples whose error reaches the scale."""

    @property
    def continuous(self) -> bool:
        """Whether its values are floating-point numbers, real or complex."""
        return not is_discrete(self.dtype)


def figures_of(name: str, reference: Sequence[Tensor], outputs: Sequence[Tensor]) -> Figures:
    """The figures of one output, in two passes over its batches, so that only one batch is held in double precision."""
    scale, relative_to, size, peak = scale_of(reference)
    floor = max(RELATIVE_FLOOR * size, 1e-30) if size else 1.0
    count = differing = 0
    max_abs = max_relative = 0.0
    error = dot = own = other = 0.0
    for a, b in zip(reference, outputs, strict=True):
        x, y = finite(a, b)
        difference = (y - x).abs()
        count += len(x)
        differing += int((difference > 0).sum())
        error += float(difference.dot(difference))
        dot, own, other = dot + float(x.dot(y)), own + float(x.dot(x)), other + float(y.dot(y))
        if difference.numel():
            max_abs = max(max_abs, float(difference.max()))
            relative = difference / x.abs().clamp(min=floor)
            max_relative = max(max_relative, float(relative.max()))
    dtype = reference[0].dtype
    rounding = torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0
    far = relative_to == "examples" and max_abs >= scale and not is_discrete(dtype)  # else no example can reach the scale
    return Figures(
        name=name,
        dtype=dtype,
        differing=differing / max(1, count),
        max_abs=max_abs,
        max_relative=max_relative,
        cosine=_cosine(dot, own, other),
        sqnr_db=math.inf if error == 0 else 10 * math.log10(own / error) if own else -math.inf,
        centred=math.sqrt(error / max(1, count)) / scale,
        tail=max_abs / scale,
        relative_to=relative_to,
        noise=rounding * size / scale,
        peak_noise=rounding * peak / scale,
        unrelated=sum(count_unrelated(a, b, scale) for a, b in zip(reference, outputs, strict=True)) if far else 0,
    )


def _cosine(dot: float, own: float, other: float) -> float:
    if own == 0 or other == 0:
        return float(own == other)
    return max(-1.0, min(1.0, dot / math.sqrt(own) / math.sqrt(other)))
