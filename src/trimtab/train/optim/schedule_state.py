"""Save and restore learning rate schedulers, and fit them to the number of updates of a resumed run."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from trimtab.errors import UsageError
from trimtab.train.checkpoint.resume_conflicts import difference, equal
from trimtab.train.optim import learning_rates
from trimtab.train.optim.optimizer_dict import plateaus
from trimtab.train.optim.schedules import advance, build, extend_to_new_groups, inner_schedulers, refuse_foreign
from trimtab.train.run_context import RunContext

_PLACE = ("last_epoch", "_step_count", "base_lrs", "_last_lr")
"""Entries of a scheduler's state that say how far it is, or that follow the options of the optimizer."""


def state_of(scheduler: LRScheduler | None) -> dict[str, Any] | None:
    """The state of ``scheduler`` without functions, which the script makes again."""
    return None if scheduler is None else _without_functions(scheduler.state_dict())


def kind_of(scheduler: LRScheduler | None) -> str:
    """The class of ``scheduler``, with those of the schedulers that it is made of."""
    if scheduler is None:
        return "no schedule"
    inner = ", ".join(map(kind_of, inner_schedulers(scheduler)))
    return f"{type(scheduler).__qualname__}({inner})" if inner else type(scheduler).__qualname__


def scheduler_for(context: RunContext, updates: int | None) -> LRScheduler | None:
    """The scheduler for a run of ``updates`` in all; in a resumed run, the one that the script makes."""
    schedule, before = context.schedule, context.scheduler
    if isinstance(schedule, LRScheduler):
        refuse_foreign(schedule, context.optimizer)
        context.schedule_begun = context.schedule_begun or copy.deepcopy(state_of(schedule))
        return schedule
    if schedule is None:
        return None
    if updates is None:
        raise UsageError("The schedule needs the number of updates, and the loader has no length. Give fit(steps=...).")
    if before is None or context.resuming is not None:
        return _make_scheduler(context, updates)
    return before if context.scheduled == updates else refit(context, before, updates)


def restore(context: RunContext, state: Mapping[str, Any]) -> list[str]:
    """Load the schedule of the checkpoint ``state``, its options included; returns the options that differ in the script.

    A run of another number of updates gets the script's schedule for that number, and a note.

    Raises:
        UsageError: the checkpoint has another kind of scheduler.
    """
    scheduler, planned = context.scheduler, context.fit.planned
    if (now := kind_of(scheduler)) != (was := state["schedule_kind"]):
        raise UsageError(f"The run began with {was}, and this is {now}. Give the schedule that it began with.")
    if scheduler is None:
        return []
    follows = isinstance(context.schedule, LRScheduler) or _follow_validation(scheduler)
    if planned is not None and planned != state["planned"] and not follows:
        context.scheduler = refit(context, scheduler, planned)
        text = f"The run has {planned} updates now, and had {state['planned']}"
        context.note_once(f"{text}: its schedule is the script's for {planned} updates.")
        return []
    scheduler.load_state_dict(copy.deepcopy(state["scheduler"]))  # torch takes entries out of it
    extend_to_new_groups(scheduler)
    script, context.schedule_begun = context.schedule_begun or {}, state["schedule_begun"]
    return list(_differences(state["schedule_begun"], script))


def refit(context: RunContext, before: LRScheduler, updates: int) -> LRScheduler:
    """A scheduler for a run of ``updates`` in place of ``before``, with its rates, advanced by the updates that are made."""
    if _follow_validation(before):
        return before
    learning_rates.scale(context.optimizer, None, 1.0)
    had = [float(group[learning_rates.chosen_key(group)]) for group in context.optimizer.param_groups]
    made = _make_scheduler(context, updates)
    learning_rates.multiply(context.optimizer, made, list(map(learning_rates.factor, context.optimizer.param_groups, had)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of steps without updates
        for _ in range(context.position.update - context.position.skipped):
            advance(made)
    return made


def _make_scheduler(context: RunContext, updates: int) -> LRScheduler:
    """A new scheduler for ``updates``, from the rates that the optimizer had before the last one."""
    schedule, groups = context.schedule, context.optimizer.param_groups
    assert schedule is not None
    assert not isinstance(schedule, LRScheduler)
    learning_rates.scale(context.optimizer, None, 1.0)  # a schedule may set rates of its own, which are unscaled
    if context.scheduler is not None:
        learning_rates.set_rates(groups, [float(group.pop("initial_lr", group["lr"])) for group in groups])
    made = build(schedule, context.optimizer, updates)
    context.scheduled, context.schedule_begun = updates, copy.deepcopy(state_of(made))  # it writes into its lists
    return made


def _without_functions(state: Mapping[str, Any]) -> dict[str, Any]:
    """A scheduler's ``state`` without functions, in the form that ``load_state_dict()`` takes."""
    found = {name: value for name, value in state.items() if not callable(value)}
    if "lr_lambdas" in found:
        found["lr_lambdas"] = [None] * len(found["lr_lambdas"])
    if "_schedulers" in found:
        found["_schedulers"] = [_without_functions(inner) for inner in found["_schedulers"]]
    return found


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """The options that differ between two states, inner schedulers included."""
    for inner in zip(before.get("_schedulers", ()), now.get("_schedulers", ()), strict=False):
        yield from _differences(*inner)
    for name in sorted(before.keys() & now.keys() - {"_schedulers", *_PLACE}):
        if not equal(before[name], now[name]):
            yield difference(f"schedule.{name.strip('_')}", before[name], now[name])


def _follow_validation(scheduler: LRScheduler) -> bool:
    """Whether nothing in ``scheduler`` goes by the number of updates."""
    return len(plateaus(scheduler)) == len(inner_schedulers(scheduler) or [scheduler])
