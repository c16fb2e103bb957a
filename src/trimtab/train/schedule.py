"""Learning rates over a run, made from torch's own schedulers once the number of updates is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

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


def state_of(scheduler: LRScheduler) -> dict[str, Any]:
    """The state of ``scheduler`` without the functions in it, which are made again from the same arguments."""
    return _plain(scheduler.state_dict())


def load(scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    """Put ``scheduler``, made for the run as it is now, where the one stood that ``state`` is of.

    Raises:
        UsageError: they are made of different numbers of schedulers.
    """
    scheduler.load_state_dict(_loadable(scheduler, state))


def check(scheduler: LRScheduler | None, to_come: int | None, *, validated: bool) -> None:
    """Refuse a schedule that cannot last for the updates ``to_come``, or has nothing to go by.

    Raises:
        UsageError: it would fail, or do nothing.
    """
    if isinstance(scheduler, OneCycleLR) and to_come is not None and scheduler.last_epoch + to_come > scheduler.total_steps:
        raise UsageError(
            f"The OneCycleLR has {scheduler.total_steps} steps, of which {scheduler.last_epoch} are made, and the run has "
            f"{to_come} updates to come. Give schedule=one_cycle(...), which fits itself to the run, or fewer epochs."
        )
    if isinstance(scheduler, ReduceLROnPlateau) and not validated:
        raise UsageError("ReduceLROnPlateau goes by the validation, and there is none. Give fit(train, validate, ...).")


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in state.items() if not callable(value) and name != "lr_lambdas"}
    if "_schedulers" in kept:
        kept["_schedulers"] = [_plain(inner) for inner in kept["_schedulers"]]
    return kept


def _loadable(scheduler: LRScheduler, state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` with what torch expects in place of functions; how long a cycle lasts stays as the run needs it now."""
    found = dict(state)
    if (functions := getattr(scheduler, "lr_lambdas", None)) is not None:
        found["lr_lambdas"] = [None] * len(functions)
    if isinstance(scheduler, OneCycleLR):
        found |= {name: vars(scheduler)[name] for name in ("total_steps", "_schedule_phases")}
    inner, kept = getattr(scheduler, "_schedulers", ()), state.get("_schedulers", ())
    if len(inner) != len(kept):
        raise UsageError(
            f"This {type(scheduler).__name__} is made of {len(inner)} schedulers, and that of the run was of {len(kept)}. Give "
            "the schedule that the run began with."
        )
    if inner:
        found["_schedulers"] = [_loadable(*pair) for pair in zip(inner, kept, strict=True)]
    return found


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
