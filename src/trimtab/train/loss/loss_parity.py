"""Loss parity: compare the losses of a run with those of the script as written, from equal parameters and data."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from trimtab.core.measurement import Drop, Parity
from trimtab.core.settings import Settings
from trimtab.measure.quantiles import t_quantile

ROUNDING = 1e-4
"""Relative difference of two losses that rounding explains in any model, as of a sum in another order."""
MARGIN = 10.0
"""An exact run may differ from the baseline by this many times the difference of the perturbed runs."""
PERTURBATION = 1e-6
"""Size of the perturbation of parameters, relative to each value: some units in the last place of a float32."""
LATE = 4
"""A lossy run is judged by the last ``1 / LATE`` of its updates."""
LOSSY = 0.05
"""Largest relative difference of the loss of one update in reduced precision; and largest rounding error of targets, relative
to their standard deviation."""
GRADIENT = 0.02
"""Relative difference of a parameter's gradient that rounding explains whatever the model."""
FLOOR = 0.01
"""A parameter's gradient is compared relative to its own norm, or to this share of the norm of all gradients if that is larger:
a gradient that is zero but for rounding, as of a bias before a normalisation, then counts for little."""
Gradients = Sequence[torch.Tensor | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaselineLosses:
    """The losses of the baseline, which is the script as written."""

    losses: tuple[float, ...]
    """Of each update."""
    tolerance: tuple[float, ...]
    """Largest difference that an exact run may have from it, at each update; infinite where rounding decides what is finite.

    Training amplifies rounding: with a small learning rate hardly, with a large one by orders of magnitude. So the differences
    are measured on runs from parameters that were perturbed by a few units in the last place."""
    draws: bool = False
    """True if the training draws random numbers, as dropout does."""
    still: BaselineLosses | None = None
    """The baseline with dropout and the like off; ``None`` if it draws nothing, cannot be kept from it, or was not run.

    In another memory format, in micro-batches or compiled, dropout hits other values, so that every loss differs although
    training is as good."""

    @classmethod
    def of(cls, losses: Sequence[float], perturbed: Sequence[Sequence[float]]) -> BaselineLosses:
        """From the losses as written, and those of runs whose parameters were ``perturbed``."""
        gaps = [max((_difference(other[i], loss) for other in perturbed), default=0.0) for i, loss in enumerate(losses)]
        reach = itertools.accumulate(gaps, max)
        sizes = [abs(loss) if math.isfinite(loss) else 0.0 for loss in losses]
        return cls(
            losses=tuple(losses),
            tolerance=tuple(ROUNDING * size + MARGIN * far for size, far in zip(sizes, reach, strict=True)),
        )

    @property
    def final(self) -> float:
        """The mean loss over the last fourth of the updates."""
        return final(self.losses)


def final(losses: Sequence[float]) -> float:
    """The mean over the last fourth of the updates, without losses that are not finite, which settings may allow."""
    return statistics.fmean(filter(math.isfinite, late(losses)))


def late(losses: Sequence[float]) -> Sequence[float]:
    """The last fourth, at least two."""
    return losses[-max(2, len(losses) // LATE) :]


def parity(written: BaselineLosses, losses: Sequence[float], *, exact: bool, still: bool = False) -> Parity:
    """Compare ``losses`` with the baseline's: an ``exact`` run may differ by rounding only, any other by any finite number.

    Args:
        still: both runs had dropout and the like off.
    """
    pairs = list(zip(losses, written.losses, strict=True))
    gaps = [_difference(ours, theirs) for ours, theirs in pairs]
    far = [i for i, (gap, allowed) in enumerate(zip(gaps, written.tolerance, strict=True)) if gap > allowed]
    broken = next((i for i, (ours, theirs) in enumerate(pairs) if math.isfinite(theirs) and not math.isfinite(ours)), None)
    reason = None
    if broken is not None:
        reason = f"The loss of update {broken + 1} is {losses[broken]}, where it is {written.losses[broken]:.6g} as written."
    elif exact and far:
        i = far[0]
        reason = (
            f"The loss of update {i + 1} is {losses[i]:.6g}, where it is {written.losses[i]:.6g} as written; rounding explains "
            f"a difference of {written.tolerance[i]:.2g}. It trains something else, as where BatchNorm "
            f"{'sees' if still else 'or dropout see'} other batches."
        )
    if still and reason is not None:
        reason = f"With dropout and the like off: {reason}"
    known = [(abs(ours - theirs), abs(ours - theirs) / max(abs(theirs), 1e-12)) for ours, theirs in _finite(pairs)]
    return Parity(
        ok=reason is None,
        reason=reason,
        n=len(losses),
        max_abs=max((gap for gap, _ in known), default=None),
        max_relative=max((ratio for _, ratio in known), default=None),
        relative_to="size",
        still=still,
    )


def too_coarse(outputs: Any, targets: Any, dtype: torch.dtype, limit: float) -> str | None:
    """A sentence if ``dtype``, which ``outputs`` are computed in, is too coarse for ``targets``; else ``None``.

    Targets may be large beside their standard deviation, as temperatures in kelvins are. The first updates learn their mean,
    so that no loss there shows the rounding.

    Args:
        limit: largest root mean square error of targets in ``dtype``, relative to their standard deviation over the examples.
    """
    both = (outputs, targets)
    if not all(isinstance(each, torch.Tensor) and each.is_floating_point() and each.dim() for each in both):
        return None
    if outputs.shape != targets.shape or not torch.equal(outputs.to(dtype).to(outputs.dtype), outputs):
        return None
    exact = targets.double()
    varies = float((exact - exact.mean(0)).square().mean().sqrt())
    error = float((targets.to(dtype).double() - exact).square().mean().sqrt())
    if not varies or error <= limit * varies:
        return None
    return (
        f"Its outputs are in steps of {str(dtype).removeprefix('torch.')}, in which the targets are off by "
        f"{error / varies:.2g} of what they vary by over the examples, and {limit:g} is allowed. Train on targets without "
        "their mean."
    )


def gradient_distance(want: Gradients, got: Gradients) -> float:
    """The largest relative difference of a parameter's gradient; 0 if one side has none at all.

    ``None`` counts as zeros, which compiled code has in its place.
    """
    pairs = list(zip(want, got, strict=True)) if want and got else []
    sizes = [0.0 if one is None else _norm(one) for one, _ in pairs]
    floor = FLOOR * sum(size**2 for size in sizes) ** 0.5
    return max((_distance(*pair) / (max(size, floor) or 1.0) for pair, size in zip(pairs, sizes, strict=True)), default=0.0)


def gradients_differ(want: Gradients, noisy: Gradients, got: Gradients, least: float = GRADIENT) -> str | None:
    """Why the gradients ``got`` are not ``want`` up to rounding, in a sentence; ``noisy`` are from parameters with noise.

    A relative difference of ``least`` is allowed at any rate.
    """
    difference, bound = gradient_distance(want, got), max(least, MARGIN * gradient_distance(want, noisy))
    return (
        None if difference <= bound else f"Its gradient differs by {difference:.2g} of what it was, and {bound:.2g} is allowed."
    )


def increase(written: BaselineLosses, losses: Sequence[float], limit: float) -> Drop:
    """The mean increase of the loss over the last fourth of the updates, with its 95% interval, against ``limit``.

    Both runs saw the same batches, so that the losses of an update are a pair.
    """
    differences = [ours - theirs for ours, theirs in _finite(zip(late(losses), late(written.losses), strict=True))]
    n, value = len(differences), statistics.fmean(differences)
    half = t_quantile(0.975, n - 1) * statistics.stdev(differences) / math.sqrt(n)
    decided = True if value + half <= limit else False if value - half > limit else None
    return Drop(value=value, low=value - half, upper=value + half, n=n, limit=limit, decided=decided, of="loss")


def rounding(model: nn.Module, settings: Settings) -> float:
    """The largest machine epsilon of the types that ``model`` computes in under ``settings``."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()} | {torch.float32}
    if settings.precision.autocast is not None:
        kinds.add(getattr(torch, settings.precision.autocast))
    if torch.device(settings.device).type != "cpu" or settings.precision.tf32:
        kinds.add(torch.float16)  # TF32 has the epsilon of float16
    return max(torch.finfo(kind).eps for kind in kinds)


@torch.no_grad()
def perturb(model: nn.Module, seed: int, size: float = PERTURBATION) -> None:
    """Perturb the trained parameters of ``model`` in place, by normal noise of ``size`` relative to each value."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.mul_(1 + size * noise.to(parameter.device, parameter.dtype))


def _difference(one: float, other: float) -> float:
    """The absolute difference of two losses: 0 if neither is finite, infinite if one is not."""
    if math.isfinite(one) and math.isfinite(other):
        return abs(one - other)
    return math.inf if math.isfinite(one) or math.isfinite(other) else 0.0


def _finite(pairs: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The pairs of finite numbers."""
    return [pair for pair in pairs if all(map(math.isfinite, pair))]


def _distance(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    if one is None or other is None:
        there = other if one is None else one
        return 0.0 if there is None else _norm(there)
    if one.layout != other.layout:
        one, other = one.to_dense(), other.to_dense()
    return _norm(one - other)


def _norm(tensor: torch.Tensor) -> float:
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return float(torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32)))
