"""The learning rate of updates that are made from more than one batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trimtab.errors import UsageError
from trimtab.train.run_context import RunContext

SCALE = "trimtab_lr_scale"
"""Where a group of an optimizer keeps by how much its rates were multiplied; checkpoints keep it with the group."""
RATES = ("initial_lr", "max_lr", "min_lr", "swa_lr", "lr")
"""What an optimizer and torch's schedulers call them in a group."""
KEPT = ("base_lrs", "max_lrs", "_last_lr")
"""What torch's schedulers call those that they keep for themselves, one for each group."""


def fit_batches(context: RunContext, scheduler: LRScheduler | None) -> None:
    """Give the optimizer, and what ``scheduler`` makes of its rates, the size that fits the batches of an update.

    The rates are taken to be chosen for updates from one batch of the loader. What a run that is gone on with has multiplied
    them by already counts, so that they are right with another number of processes too.

    Source: Goyal et al. 2017, https://arxiv.org/abs/1706.02677 (linear, for SGD); Krizhevsky 2014,
    https://arxiv.org/abs/1404.5997 (the square root); Malladi et al. 2022, https://arxiv.org/abs/2205.10287 (for Adam).

    Raises:
        UsageError: there is a rule, and no rate that it could be applied to.
    """
    batches, rule = context.settings.data.accumulate * context.world.size, context.settings.optimizer.scale_lr
    if rule is not None and all(group.get("lr") is None for group in context.optimizer.param_groups):
        raise UsageError(
            f"Settings optimizer.scale_lr is {rule!r}, but {type(context.optimizer).__name__} finds its own learning rate. "
            "Leave it out."
        )
    wanted = {None: 1.0, "linear": float(batches), "sqrt": math.sqrt(batches)}[rule]
    if scale(context.optimizer, scheduler, wanted):
        context.note_once(
            f"scale_lr={rule!r}: updates are from {batches} batches, with {wanted:.4g} times the learning rate given."
        )


def scale(optimizer: Optimizer, scheduler: LRScheduler | None, wanted: float) -> bool:
    """Make the rates ``wanted`` times those that were given, whatever they are multiplied by now; whether that changes any."""
    factors = [wanted / group.get(SCALE, 1.0) for group in optimizer.param_groups]
    if all(factor == 1.0 for factor in factors):
        return False
    multiply(optimizer, scheduler, factors)
    for group in optimizer.param_groups:
        group[SCALE] = wanted
    return True


@torch.no_grad()
def multiply(optimizer: Optimizer, scheduler: LRScheduler | None, factors: Sequence[float]) -> None:
    """Multiply the rates of each group, and those that ``scheduler`` keeps of it, by its factor."""
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        for name, rate in multiplied(group, factor).items():
            if name == "lr" and isinstance(group["lr"], torch.Tensor):
                group["lr"].copy_(rate)  # a compiled or captured update reads that very tensor
            else:
                group[name] = rate
    _scale_schedule(scheduler, factors)


@torch.no_grad()
def put(groups: Sequence[dict[str, Any]], rates: Sequence[float]) -> None:
    """Give each group of an optimizer its rate."""
    for group, rate in zip(groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)  # a compiled or captured update reads that very tensor
        else:
            group["lr"] = rate


def chosen(group: Mapping[str, Any]) -> str:
    """What a group calls the rate that was chosen for it, from which a schedule makes the others."""
    return next((name for name in ("max_lr", "initial_lr") if group.get(name) is not None), "lr")


def factor(group: Mapping[str, Any], rate: float) -> float:
    """By how much to multiply the rates of a group for the chosen one to be ``rate``; a rate of 0 stays."""
    base = float(group[chosen(group)])
    return rate / base if base else 1.0


def multiplied(group: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The rates of a group, ``factor`` times as large."""
    return {name: group[name] * factor for name in RATES if group.get(name) is not None}


def _scale_schedule(scheduler: Any, factors: Sequence[float]) -> None:
    """The rates that a scheduler, and those inside it, keep for themselves, one for each group."""
    for name in KEPT:
        if rates := getattr(scheduler, name, None):
            setattr(scheduler, name, [rate * factor for rate, factor in zip(rates, factors, strict=False)])
    for inner in getattr(scheduler, "_schedulers", ()):
        _scale_schedule(inner, factors)
