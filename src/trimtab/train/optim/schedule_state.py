"""Save and restore learning rate schedulers, and fit them to the number of updates of a resumed run."""

from __future__ import annotations

import copy
import reprlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.lr_scheduler import LRScheduler

from trimtab.errors import UsageError
from trimtab.train.checkpoint.resume_conflicts import Difference, equal
from trimtab.train.optim import learning_rates
from trimtab.train.optim.optimizer_dict import plateaus
from trimtab.train.optim.schedules import Schedule, advance, build, extend_to_new_groups, inner_schedulers, refuse_foreign
from trimtab.train.run_context import RunContext

_PLACE = ("last_epoch", "_step_count", "_last_lr", "base_lrs", "_schedulers", "kind")
"""Entries of a scheduler's state that say how far it is, or that are compared elsewhere."""
_DERIVED = ("T_i", "mode_worse", "default_min_lr")
"""Entries that torch's schedulers derive from other options."""
_INITIAL: WeakKeyDictionary[LRScheduler, Mapping[str, Any]] = WeakKeyDictionary()
"""The state of each scheduler before its first update; of a restored one, that of the scheduler in the checkpoint."""


def state_of(scheduler: LRScheduler | None) -> dict[str, Any] | None:
    """The state of ``scheduler`` with its class name, without functions, which the script makes again."""
    if scheduler is None:
        return None
    state = {name: value for name, value in scheduler.state_dict().items() if not callable(value) and name != "lr_lambdas"}
    if "_schedulers" in state:
        state["_schedulers"] = [state_of(inner) for inner in inner_schedulers(scheduler)]
    return {**state, "kind": type(scheduler).__qualname__}


def initial_state(scheduler: LRScheduler | None) -> Mapping[str, Any] | None:
    """The state of ``scheduler`` at the first call, which must come before the first update and before :func:`load`."""
    if scheduler is None:
        return None
    if scheduler not in _INITIAL:
        _INITIAL[scheduler] = copy.deepcopy(state_of(scheduler) or {})  # the scheduler writes into its lists
    return _INITIAL[scheduler]


def load(scheduler: LRScheduler | None, state: Mapping[str, Any] | None, before: Mapping[str, Any] | None) -> list[Difference]:
    """Load ``state``, the options included, into ``scheduler``.

    Args:
        before: what :func:`initial_state` gave for the scheduler that ``state`` is of.

    Returns:
        The options that differ in the script.

    Raises:
        UsageError: ``state`` is of another kind of scheduler, or of one made of others.
    """
    refuse_other(scheduler, before)
    now = initial_state(scheduler)
    if scheduler is None or state is None or before is None or now is None:
        return []
    scheduler.load_state_dict(_loadable(scheduler, state))
    extend_to_new_groups(scheduler)
    _INITIAL[scheduler] = before
    return list(_differences(now, before))


def scheduler_for(context: RunContext, updates: int | None) -> LRScheduler | None:
    """The scheduler for a run of ``updates`` in all; in a resumed run, the one that the script makes."""
    schedule, before, state = context.schedule, context.scheduler, context.resuming
    if schedule is None or isinstance(schedule, LRScheduler):
        if schedule is not None:
            refuse_foreign(schedule, context.optimizer)
            initial_state(schedule)
        return schedule
    if updates is None:
        raise UsageError("The schedule needs the number of updates, and the loader has no length. Give fit(steps=...).")
    last, now = context.scheduled, (schedule, updates)
    kept = last is not None and last[0] is schedule
    if state is not None:  # made for the old number of updates, to compare the options
        found = _made(context, schedule, state["planned"] or updates, anew=before is not None)
    elif before is None:
        found = _made(context, schedule, updates)
    else:
        found = before if kept and last == now else fitted(context, schedule, before, updates, kept=kept)
    context.scheduled = now
    return found


def _made(context: RunContext, schedule: Schedule, updates: int, *, anew: bool = False) -> LRScheduler:
    """The scheduler for ``updates``; with ``anew`` from the rates that the optimizer had at first."""
    groups = context.optimizer.param_groups
    learning_rates.scale(context.optimizer, None, 1.0)  # a schedule may set rates of its own, which are unscaled
    if anew:
        learning_rates.put(groups, [float(group.pop("initial_lr", group["lr"])) for group in groups])
    made = build(schedule, context.optimizer, updates)
    initial_state(made)
    return made


def fitted(context: RunContext, schedule: Schedule, before: LRScheduler, updates: int, *, kept: bool = True) -> LRScheduler:
    """A new scheduler for a run of ``updates`` in place of ``before``, advanced by the updates that are made.

    Args:
        kept: whether ``schedule`` made ``before`` too. The scheduler then keeps the present rates.
    """
    if kept and _follow_validation(before):  # follows the validation, and has no length
        return before
    learning_rates.scale(context.optimizer, None, 1.0)
    had = [float(group[learning_rates.chosen(group)]) for group in context.optimizer.param_groups]
    made = _made(context, schedule, updates, anew=True)
    refuse_other(made, initial_state(before))
    if kept:
        learning_rates.multiply(context.optimizer, made, list(map(learning_rates.factor, context.optimizer.param_groups, had)))
    if not _follow_validation(made):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of steps without updates
            for _ in range(context.position.update - context.position.skipped):
                advance(made)
    return made


def refuse_other(scheduler: LRScheduler | None, before: Mapping[str, Any] | None) -> None:
    """Refuse a scheduler of another class than in the state ``before``, or with other inner schedulers.

    Raises:
        UsageError: the classes differ.
    """
    if (now := _kind(initial_state(scheduler))) != (was := _kind(before)):
        raise UsageError(f"The run began with {was}, and this is {now}. Give the schedule that it began with.")


def _follow_validation(scheduler: LRScheduler) -> bool:
    """Whether nothing in ``scheduler`` goes by the number of updates."""
    return len(plateaus(scheduler)) == len(inner_schedulers(scheduler) or [scheduler])


def _kind(state: Mapping[str, Any] | None) -> str:
    if state is None:
        return "no schedule"
    inner = ", ".join(map(_kind, state.get("_schedulers", ())))
    return f"{state['kind']}({inner})" if inner else str(state["kind"])


def _loadable(scheduler: LRScheduler, state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` in the form that ``load_state_dict()`` expects, with ``None`` for functions."""
    found = {name: value for name, value in state.items() if name != "kind"}
    if (functions := getattr(scheduler, "lr_lambdas", None)) is not None:
        found["lr_lambdas"] = [None] * len(functions)
    if inner := inner_schedulers(scheduler):
        found["_schedulers"] = [_loadable(*pair) for pair in zip(inner, state["_schedulers"], strict=True)]
    return found


def _differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[Difference]:
    """The options that differ between two states, inner schedulers included."""
    for name in sorted(now.keys() & before.keys() - {*_PLACE, *_DERIVED}):
        if not equal(now[name], before[name]):
            values = reprlib.repr(before[name]), reprlib.repr(now[name])
            yield Difference(f"{now['kind']}.{name.strip('_')}", *values, of_schedule=True)
    for inner in zip(now.get("_schedulers", ()), before.get("_schedulers", ()), strict=False):
        yield from _differences(*inner)
