"""Where a schedule stands, and how a run that goes on has it where the script's schedule is another by now.

As with what else the script gives (see :mod:`trimtab.train.given`), what the run itself has changed goes on as it was, and what
was changed in the script since the run began goes before it: how long the schedule lasts, by how much it multiplies.
"""

from __future__ import annotations

import bisect
import copy
import math
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
)

from trimtab.errors import UsageError
from trimtab.train import rates
from trimtab.train.schedule import inside, take_in

_LENGTHS = (
    *("total_steps", "_schedule_phases", "T_max", "total_iters", "_milestones"),
    *("step_size", "milestones", "total_size", "step_ratio"),
)
"""What torch's schedulers call how long they last, which follows from how long the run is."""
_DERIVED = ("T_i", "mode_worse", "default_min_lr")
"""What they make of other options, which are told of."""
_PLACE = ("last_epoch", "_step_count", "_schedulers", "kind", *rates.KEPT)
"""What says where a scheduler stands, or is compared otherwise."""
_BEGUN: WeakKeyDictionary[LRScheduler, dict[str, Any]] = WeakKeyDictionary()
"""Of each scheduler how the script made it."""


def state_of(scheduler: LRScheduler | None) -> dict[str, Any] | None:
    """The state of ``scheduler`` without the functions in it, which are made again from the same arguments."""
    if scheduler is None:
        return None
    state = {name: value for name, value in scheduler.state_dict().items() if not callable(value) and name != "lr_lambdas"}
    if "_schedulers" in state:
        state["_schedulers"] = [state_of(inner) for inner in inside(scheduler)]
    return {**state, "kind": type(scheduler).__qualname__}


def begun(scheduler: LRScheduler | None) -> dict[str, Any] | None:
    """The state in which this was first asked for, which has to be before the first update and before :func:`load`."""
    if scheduler is None:
        return None
    if scheduler not in _BEGUN:
        _BEGUN[scheduler] = copy.deepcopy(state_of(scheduler) or {})  # which may be lists that it writes in
    return _BEGUN[scheduler]


def load(scheduler: LRScheduler | None, state: Mapping[str, Any] | None, before: Mapping[str, Any] | None) -> list[str]:
    """Put ``scheduler``, made for the run as it is now, where the one stood that ``state`` is of.

    The optimizer has its state already: where the schedule has another shape now, its rate is that of the shape.

    Args:
        before: how that one had :func:`begun`.

    Returns:
        A sentence for each option that is another in the script by now; not for lengths, which follow the run.

    Raises:
        UsageError: they are of different kinds, or made of different schedulers.
    """
    _refuse_other(scheduler, state)
    now = begun(scheduler)
    if scheduler is None or state is None or before is None or now is None:
        return []
    scheduler.load_state_dict(_loadable(scheduler, state, now, before))
    take_in(scheduler)
    _reshape(scheduler, now, before)
    silent = (*_LENGTHS, *_DERIVED)
    return [
        f"The {kind}'s {name.strip('_')} in the script was {reprlib.repr(was)} when the run began. It goes on with what is "
        f"there now: {reprlib.repr(value)}."
        for kind, name, was, value in _differences(now, before)
        if name not in silent
    ]


def _refuse_other(scheduler: LRScheduler | None, state: Mapping[str, Any] | None) -> None:
    now = "no schedule" if scheduler is None else type(scheduler).__qualname__
    was = "no schedule" if state is None else state["kind"]
    if now != was:
        raise UsageError(f"The run began with {was}, and this is {now}. Give the schedule that it began with.")


def _loadable(
    scheduler: LRScheduler, state: Mapping[str, Any], now: Mapping[str, Any], before: Mapping[str, Any]
) -> dict[str, Any]:
    """``state`` with what torch expects in place of functions, and with what the script has changed since ``before``."""
    found = {name: value for name, value in state.items() if name != "kind"} | _changed(now, before)
    if (factors := _peaks(now, before)) and "max_lrs" in found:
        found["max_lrs"] = [rate * factor for rate, factor in zip(found["max_lrs"], factors, strict=False)]
    if (functions := getattr(scheduler, "lr_lambdas", None)) is not None:
        found["lr_lambdas"] = [None] * len(functions)
    inner, kept = inside(scheduler), state.get("_schedulers", ())
    if len(inner) != len(kept):
        raise UsageError(
            f"This {type(scheduler).__name__} is made of {len(inner)} schedulers, and that of the run was of {len(kept)}. Give "
            "the schedule that the run began with."
        )
    if inner:
        for pair in zip(inner, kept, strict=True):
            _refuse_other(*pair)
        parts = zip(inner, kept, now["_schedulers"], before["_schedulers"], strict=True)
        found["_schedulers"] = [_loadable(*part) for part in parts]
    return found


def _changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What a scheduler was made with ``now``, without those in it, where that is another than ``before``."""
    return {n: value for n, value in now.items() if n not in _PLACE and not (n in before and _same(value, before[n]))}


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (ValueError, RuntimeError, TypeError):  # rows of numbers, of which each is compared
        return bool(np.array_equal(one, other))


def _peaks(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[float] | None:
    """By how much the largest rate of each group has grown in the script, beyond what its smallest has."""
    if not (peaks := now.get("max_lrs")):
        return None
    bases = (after / base if base else 1.0 for after, base in zip(now["base_lrs"], before["base_lrs"], strict=False))
    grown = (after / peak if peak else 1.0 for after, peak in zip(peaks, before["max_lrs"], strict=False))
    found = [float(peak / base) if base else 1.0 for peak, base in zip(grown, bases, strict=False)]
    return None if all(math.isclose(factor, 1.0) for factor in found) else found


def _differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    """The kind of scheduler, the option, what it was and what it is, in a scheduler and all that it is made of."""
    for name, value in _changed(now, before).items():
        yield now["kind"], name, before.get(name), value
    if _peaks(now, before) and not _same(now["max_lrs"], before["max_lrs"]):
        yield now["kind"], "max_lrs", before["max_lrs"], now["max_lrs"]
    for inner in zip(now.get("_schedulers", ()), before.get("_schedulers", ()), strict=False):
        yield from _differences(*inner)


def _reshape(scheduler: LRScheduler, now: Mapping[str, Any], before: Mapping[str, Any], *, moved: bool = False) -> None:
    """Give the optimizer the rate of ``scheduler`` where it stands, if ``before`` it had another shape, or has ``moved``.

    Otherwise it has that rate: what most schedulers compute from the rate before differs from their formula in the last digits.

    Raises:
        UsageError: there is no telling what the rate would be.
    """
    changed = _changed(now, before)
    if isinstance(scheduler, ChainedScheduler):
        found = [f"the {kind} in it has {name}={value!r}, was {was!r}" for kind, name, was, value in _differences(now, before)]
        if moved or found:
            what = found[0] if found else "its place"
            raise UsageError(
                f"There is no telling the rate of a ChainedScheduler that has changed: {what}. Give what it had in the run so "
                "far, or schedule=cosine(...), which fits itself to the run."
            )
    elif isinstance(scheduler, SequentialLR):
        place = bisect.bisect_right(scheduler._milestones, scheduler.last_epoch)
        inner, moved = inside(scheduler)[place], moved or bool(changed)
        if moved:
            inner.last_epoch = scheduler.last_epoch - [0, *scheduler._milestones][place]
        _reshape(inner, now["_schedulers"][place], before["_schedulers"][place], moved=moved)
        scheduler._last_lr = inner.get_last_lr()
    elif isinstance(scheduler, ReduceLROnPlateau):  # which goes on from the rate that there is
        if "mode" in changed:
            scheduler._reset()
    elif scheduler.last_epoch > getattr(scheduler, "total_steps", math.inf):
        return  # the run is over already, and OneCycleLR has no rate for what comes after
    elif isinstance(scheduler, LambdaLR):  # whose shape is in its functions, and whose rates are its formula's
        scheduler._update_lr(scheduler.last_epoch)
    elif moved or changed or _peaks(now, before):
        if isinstance(scheduler, CosineAnnealingWarmRestarts):
            scheduler.step(scheduler.last_epoch)
        else:
            _to_formula(scheduler)


def _to_formula(scheduler: LRScheduler) -> None:
    """Give the optimizer the rate that ``scheduler`` has at its place, unless it makes every rate from the one before."""
    groups = scheduler.optimizer.param_groups
    kept, found = [float(group["lr"]) for group in groups], list[list[float]]()
    for other in (False, True):
        rates.put(groups, [2 * rate + 1 if other else rate for rate in kept])
        scheduler._update_lr(scheduler.last_epoch)
        found.append([float(group["lr"]) for group in groups])
    if found[0] != found[1]:
        rates.put(groups, kept)
        scheduler._last_lr = list(kept)
