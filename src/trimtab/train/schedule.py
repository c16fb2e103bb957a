"""Learning rates over a run, made from torch's own schedulers once the number of updates is known."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from trimtab.errors import UsageError

Schedule = Callable[[Optimizer, int], LRScheduler]
"""``schedule(optimizer, updates)`` -> a scheduler that the Trainer steps once per update of ``updates`` in all."""


def one_cycle(max_lr: float | list[float], *, warmup: float = 0.3) -> Schedule:
    """Up to ``max_lr`` in the first ``warmup`` share of the run, then down to next to nothing.

    Source: Smith & Topin 2017, https://arxiv.org/abs/1708.07120
    """
    _check_share(warmup)
    return lambda optimizer, updates: OneCycleLR(optimizer, max_lr, total_steps=max(updates, 1) + 1, pct_start=warmup)


def cosine(*, warmup: float = 0.05, floor: float = 0.0) -> Schedule:
    """From nothing to the optimizer's own rate in the first ``warmup`` share, then along a cosine to ``floor`` of it.

    Source: Loshchilov & Hutter 2016, https://arxiv.org/abs/1608.03983
    """
    return _shaped(warmup, floor, lambda done: (1 + math.cos(math.pi * done)) / 2)


def linear(*, warmup: float = 0.05, floor: float = 0.0) -> Schedule:
    """From nothing to the optimizer's own rate in the first ``warmup`` share, then straight to ``floor`` of it."""
    return _shaped(warmup, floor, lambda done: 1 - done)


def _shaped(warmup: float, floor: float, shape: Callable[[float], float]) -> Schedule:
    _check_share(warmup)

    def schedule(optimizer: Optimizer, updates: int) -> LRScheduler:
        rise = round(warmup * updates)

        def factor(update: int) -> float:
            if update < rise:
                return (update + 1) / (rise + 1)
            done = min((update - rise) / max(updates - rise, 1), 1.0)
            return floor + (1 - floor) * shape(done)

        return LambdaLR(optimizer, factor)

    return schedule


def _check_share(warmup: float) -> None:
    if not 0 <= warmup < 1:
        raise UsageError(f"warmup is {warmup}; it is a share of the run: at least 0, below 1.")
