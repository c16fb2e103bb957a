"""Where a schedule stands, and how a later run has it: as it was, over as many updates as that run has."""

from __future__ import annotations

import copy
import reprlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trimtab.errors import UsageError
from trimtab.train.checkpoint.resume_conflicts import same, told
from trimtab.train.optim import learning_rates
from trimtab.train.optim.schedules import Schedule, advance, inside, refuse_foreign, take_in
from trimtab.train.optim.schedules import made as made_by
from trimtab.train.run_context import RunContext

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


def scheduler_for(context: RunContext, updates: int | None) -> LRScheduler | None:
    """The schedule of a run of ``updates`` in all; of one that goes on from a checkpoint, as the script has it."""
    schedule, before, state = context.schedule, context.scheduler, context.resuming
    if schedule is None or isinstance(schedule, LRScheduler):
        if schedule is not None:
            refuse_foreign(schedule, context.optimizer)
            begun(schedule)
        return schedule
    if updates is None:
        raise UsageError("The schedule needs the number of updates, and the loader has no length. Give fit(steps=...).")
    last, now = context.scheduled, (schedule, updates)
    kept = last is not None and last[0] is schedule
    if state is not None:  # to compare it with what it was, it is made for the run that it was
        found = _made(context, schedule, state["planned"] or updates, anew=before is not None)
    elif before is None:
        found = _made(context, schedule, updates)
    else:
        found = before if kept and last == now else fitted(context, schedule, before, updates, kept=kept)
    context.scheduled = now
    return found


def _made(context: RunContext, schedule: Schedule, updates: int, *, anew: bool = False) -> LRScheduler:
    """What ``schedule`` makes for a run of ``updates``, if ``anew`` of the rates with which the optimizer began."""
    groups = context.optimizer.param_groups
    learning_rates.scale(
        context.optimizer, None, 1.0
    )  # some schedules state their rates themselves: those that are made have one scale
    if anew:
        learning_rates.put(groups, [float(group.pop("initial_lr", group["lr"])) for group in groups])
    made = made_by(schedule, context.optimizer, updates)
    begun(made)
    return made


def fitted(context: RunContext, schedule: Schedule, before: LRScheduler, updates: int, *, kept: bool = True) -> LRScheduler:
    """In place of ``before`` what ``schedule`` makes for a run of ``updates``, stepped through those that are made.

    Args:
        kept: whether it has made ``before`` too. Rates that it states itself then have the size that they have by now.
    """
    if kept and isinstance(before, ReduceLROnPlateau):  # it goes by the validation, and has no length
        return before
    learning_rates.scale(context.optimizer, None, 1.0)
    had = [float(group[learning_rates.chosen(group)]) for group in context.optimizer.param_groups]
    made = _made(context, schedule, updates, anew=True)
    refuse_other(made, begun(before))
    if kept:
        learning_rates.multiply(context.optimizer, made, list(map(learning_rates.factor, context.optimizer.param_groups, had)))
    if not isinstance(made, ReduceLROnPlateau):
        catch_up(made, context.position.update - context.position.skipped)
    return made


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
