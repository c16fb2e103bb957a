"""Where a schedule stands, and how a later run has it: as it was, over as many updates as that run has."""

from __future__ import annotations

import copy
import reprlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.lr_scheduler import LRScheduler

from trimtab.errors import UsageError
from trimtab.train.given import same, told
from trimtab.train.schedule import advance, inside, take_in

_PLACE = ("last_epoch", "_step_count", "_last_lr", "base_lrs", "_schedulers", "kind")
"""What says where a scheduler stands, or is compared otherwise."""
_DERIVED = ("T_i", "mode_worse", "default_min_lr")
"""What torch's schedulers make of other options, which are told of."""
_BEGUN: WeakKeyDictionary[LRScheduler, Mapping[str, Any]] = WeakKeyDictionary()
"""Of each scheduler how the script made it, or that one which it goes on for."""


def state_of(scheduler: LRScheduler | None) -> dict[str, Any] | None:
    """The state of ``scheduler`` without the functions in it, which are made again from the same arguments."""
    if scheduler is None:
        return None
    state = {name: value for name, value in scheduler.state_dict().items() if not callable(value) and name != "lr_lambdas"}
    if "_schedulers" in state:
        state["_schedulers"] = [state_of(inner) for inner in inside(scheduler)]
    return {**state, "kind": type(scheduler).__qualname__}


def begun(scheduler: LRScheduler | None) -> Mapping[str, Any] | None:
    """The state in which this was first asked for, which has to be before the first update and before :func:`load`."""
    if scheduler is None:
        return None
    if scheduler not in _BEGUN:
        _BEGUN[scheduler] = copy.deepcopy(state_of(scheduler) or {})  # which may be lists that it writes in
    return _BEGUN[scheduler]


def load(scheduler: LRScheduler | None, state: Mapping[str, Any] | None, before: Mapping[str, Any] | None) -> list[str]:
    """Put ``scheduler`` where the one stood that ``state`` is of, with the options of that one.

    Args:
        before: how that one had :func:`begun`.

    Returns:
        A sentence for each option that is another in the script by now.

    Raises:
        UsageError: they are of different kinds, or made of different schedulers.
    """
    refuse_other(scheduler, before)
    now = begun(scheduler)
    if scheduler is None or state is None or before is None or now is None:
        return []
    scheduler.load_state_dict(_loadable(scheduler, state))
    take_in(scheduler)
    _BEGUN[scheduler] = before
    return [
        told(f"The {kind}'s {name.strip('_')}", reprlib.repr(one), reprlib.repr(other), None)
        for kind, name, one, other in _differences(now, before)
    ]


def catch_up(scheduler: LRScheduler, updates: int) -> None:
    """Step ``scheduler``, which was just made, as often as the run has made ``updates``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it takes these for updates that were left out
        for _ in range(updates):
            advance(scheduler)


def refuse_other(scheduler: LRScheduler | None, before: Mapping[str, Any] | None) -> None:
    """Refuse a schedule that is of another kind than the one that ``before`` is of, or made of others.

    Raises:
        UsageError: it is.
    """
    if (now := _kind(begun(scheduler))) != (was := _kind(before)):
        raise UsageError(f"The run began with {was}, and this is {now}. Give the schedule that it began with.")


def _kind(state: Mapping[str, Any] | None) -> str:
    if state is None:
        return "no schedule"
    inner = ", ".join(map(_kind, state.get("_schedulers", ())))
    return f"{state['kind']}({inner})" if inner else str(state["kind"])


def _loadable(scheduler: LRScheduler, state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` with what torch expects in place of functions."""
    found = {name: value for name, value in state.items() if name != "kind"}
    if (functions := getattr(scheduler, "lr_lambdas", None)) is not None:
        found["lr_lambdas"] = [None] * len(functions)
    if inner := inside(scheduler):
        found["_schedulers"] = [_loadable(*pair) for pair in zip(inner, state["_schedulers"], strict=True)]
    return found


def _differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    """The kind of scheduler, the option, what it was and what it is, in a scheduler and all that it is made of."""
    for name in now.keys() & before.keys() - {*_PLACE, *_DERIVED}:
        if not same(now[name], before[name]):
            yield now["kind"], name, before[name], now[name]
    for inner in zip(now.get("_schedulers", ()), before.get("_schedulers", ()), strict=False):
        yield from _differences(*inner)
