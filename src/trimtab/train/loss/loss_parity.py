"""Whether a run learns what the run as written learns: their losses, update by update, from the same parameters and data."""

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
"""Relative difference of two losses that rounding explains whatever the model, such as that of a sum in another order."""
MARGIN = 10.0
"""How many times as far as the runs that were shaken an exact run may be from the run as written."""
SHAKE = 1e-6
"""How far those are shaken, relative to each value: some units in the last place of a float32."""
LATE = 4
"""The last fourth of the updates is what a lossy run is judged by."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaselineLosses:
    """What a run as written showed."""

    losses: tuple[float, ...]
    """Of each update."""
    tolerance: tuple[float, ...]
    """How far the loss of an exact run may be from it, at each update; no number where rounding decides what is finite.

    Training amplifies rounding, by how much is the workload's own affair: a small learning rate does not, a large one does by
    orders of magnitude. So it is measured, on runs from parameters that were shaken by a few units in the last place."""
    draws: bool = False
    """Whether random numbers were drawn for them, as by dropout."""
    still: BaselineLosses | None = None
    """The same for a training that is kept from that; ``None`` where it draws none, cannot be kept from it, or was not asked.

    In another layout, in other parts or compiled, the random numbers of dropout fall on other values, and every loss is another
    although the same is learnt."""

    @classmethod
    def of(cls, losses: Sequence[float], shaken: Sequence[Sequence[float]]) -> BaselineLosses:
        """``losses`` as written, and those of runs whose parameters were shaken."""
        apart = [max((_gap(other[i], loss) for other in shaken), default=0.0) for i, loss in enumerate(losses)]
        reach = itertools.accumulate(apart, max)
        sizes = [abs(loss) if math.isfinite(loss) else 0.0 for loss in losses]
        return cls(
            losses=tuple(losses),
            tolerance=tuple(ROUNDING * size + MARGIN * far for size, far in zip(sizes, reach, strict=True)),
        )

    @property
    def final(self) -> float:
        """The loss at the end: the mean over the last fourth of the updates."""
        return final(self.losses)


def final(losses: Sequence[float]) -> float:
    """The mean over the last fourth of the updates, but for those whose loss is not finite: the settings may allow such."""
    return statistics.fmean(filter(math.isfinite, late(losses)))


def late(losses: Sequence[float]) -> Sequence[float]:
    """The last fourth, two at least."""
    return losses[-max(2, len(losses) // LATE) :]


def parity(written: BaselineLosses, losses: Sequence[float], *, exact: bool, still: bool = False) -> Parity:
    """How far ``losses`` are from those as written; an ``exact`` run is held to what rounding explains.

    ``still`` says that both are of trainings that draw nothing at random.
    """
    pairs = list(zip(losses, written.losses, strict=True))
    apart = [_gap(ours, theirs) for ours, theirs in pairs]
    far = [i for i, (gap, allowed) in enumerate(zip(apart, written.tolerance, strict=True)) if gap > allowed]
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
    """Why ``outputs``, computed in ``dtype``, cannot come close to ``targets``, in a sentence; ``None`` where nothing says so.

    What is learnt in the end is as large as the targets and differs as they do. Where these are large beside what they vary by,
    as temperatures in kelvins are, the losses of the first updates are those of their mean, in which no rounding shows.

    Args:
        limit: largest root mean square error of targets in ``dtype``, relative to what they vary by over the examples.
    """
    both = (outputs, targets)
    if not all(isinstance(each, torch.Tensor) and each.is_floating_point() and each.dim() for each in both):
        return None
    if outputs.shape != targets.shape or not torch.equal(outputs.to(dtype).to(outputs.dtype), outputs):  # which is finer
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


def increase(written: BaselineLosses, losses: Sequence[float], limit: float) -> Drop:
    """How much higher the loss is at the end, with a 95% interval over the updates there, against ``limit``.

    Both runs saw the same batches, so that each update is a pair.
    """
    apart = [ours - theirs for ours, theirs in _finite(zip(late(losses), late(written.losses), strict=True))]
    n, value = len(apart), statistics.fmean(apart)
    half = t_quantile(0.975, n - 1) * statistics.stdev(apart) / math.sqrt(n)
    decided = True if value + half <= limit else False if value - half > limit else None
    return Drop(value=value, low=value - half, upper=value + half, n=n, limit=limit, decided=decided, of="loss")


def rounding(model: nn.Module, settings: Settings) -> float:
    """How far the coarsest of the numbers that ``model`` computes with are rounded under ``settings``, relative to them."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()} | {torch.float32}
    if settings.precision.autocast is not None:
        kinds.add(getattr(torch, settings.precision.autocast))
    if torch.device(settings.device).type != "cpu" or settings.precision.tf32:
        kinds.add(torch.float16)  # TF32 has as many digits
    return max(torch.finfo(kind).eps for kind in kinds)


@torch.no_grad()
def shaken(model: nn.Module, seed: int, size: float = SHAKE) -> None:
    """Move every trained value of ``model``, by ``size`` relative to it or thereabouts."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.mul_(1 + size * noise.to(parameter.device, parameter.dtype))


def _gap(one: float, other: float) -> float:
    """How far two losses are apart; those that are not finite are all alike, and infinitely far from those that are."""
    if math.isfinite(one) and math.isfinite(other):
        return abs(one - other)
    return math.inf if math.isfinite(one) or math.isfinite(other) else 0.0


def _finite(pairs: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The pairs of which both are finite."""
    return [pair for pair in pairs if all(map(math.isfinite, pair))]
