"""Scale learning rates with the number of batches per update."""

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
"""Key in a parameter group: the factor that its rates were multiplied by. Checkpoints keep the key."""
RATES = ("initial_lr", "max_lr", "min_lr", "swa_lr", "lr")
"""Keys of learning rates that optimizers and torch's schedulers use in a parameter group."""
SCHEDULER_RATES = ("base_lrs", "max_lrs", "_last_lr")
"""Attributes of torch's schedulers that hold one learning rate per parameter group."""


def scale_to_batches(context: RunContext, scheduler: LRScheduler | None, accumulated: int) -> None:
    """Scale the learning rates of the optimizer and ``scheduler`` to the number of batches per update, by ``scale_lr``.

    ``accumulated`` is the number of batches of one process that an update really has.

    The given rates count as chosen for one batch per update. A factor from a checkpoint is taken into account: the rates stay
    right with another number of processes.

    Source: Goyal et al. 2017, https://arxiv.org/abs/1706.02677 (linear, for SGD); Krizhevsky 2014,
    https://arxiv.org/abs/1404.5997 (the square root); Malladi et al. 2022, https://arxiv.org/abs/2205.10287 (for Adam).

    Raises:
        UsageError: ``scale_lr`` is set, and the optimizer has no learning rate.
    """
    batches, rule = accumulated * context.world.size, context.settings.optimizer.scale_lr
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
    """Set the rates to ``wanted`` times the given ones. Returns whether a rate changes."""
    factors = [wanted / group.get(SCALE, 1.0) for group in optimizer.param_groups]
    if all(factor == 1.0 for factor in factors):
        return False
    multiply(optimizer, scheduler, factors)
    for group in optimizer.param_groups:
        group[SCALE] = wanted
    return True


@torch.no_grad()
def multiply(optimizer: Optimizer, scheduler: LRScheduler | None, factors: Sequence[float]) -> None:
    """Multiply the rates of each parameter group, and its rates in ``scheduler``, by the factor of the group."""
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        for name, rate in multiplied(group, factor).items():
            _write(group, name, rate)
    _scale_schedule(scheduler, dict(zip(map(id, optimizer.param_groups), factors, strict=True)))


@torch.no_grad()
def set_rates(groups: Sequence[dict[str, Any]], rates: Sequence[float]) -> None:
    """Set ``lr`` of each parameter group."""
    for group, rate in zip(groups, rates, strict=True):
        _write(group, "lr", rate)


def _write(group: dict[str, Any], name: str, rate: Any) -> None:
    if name == "lr" and isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)  # compiled and captured steps read this tensor
    else:
        group[name] = rate


def chosen_key(group: Mapping[str, Any]) -> str:
    """The key of the rate in a parameter group that the user chose; a scheduler derives the others from it."""
    return next((name for name in ("max_lr", "initial_lr") if group.get(name) is not None), "lr")


def factor(group: Mapping[str, Any], rate: float) -> float:
    """The factor by which the chosen rate of a parameter group becomes ``rate``; 1 if it is 0."""
    base = float(group[chosen_key(group)])
    return rate / base if base else 1.0


def multiplied(group: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The rates of a parameter group, multiplied by ``factor``."""
    return {name: group[name] * factor for name in RATES if group.get(name) is not None}


def _scale_schedule(scheduler: Any, factors: Mapping[int, float]) -> None:
    """Multiply the rates in ``scheduler`` and its inner schedulers by the factor of their group, given by its id."""
    for inner in getattr(scheduler, "_schedulers", ()):
        _scale_schedule(inner, factors)
    for name in SCHEDULER_RATES:
        if rates := getattr(scheduler, name, None):
            groups = scheduler.optimizer.param_groups
            setattr(scheduler, name, [rate * factors[id(group)] for rate, group in zip(rates, groups, strict=False)])
