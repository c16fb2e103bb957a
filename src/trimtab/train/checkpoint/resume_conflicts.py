"""What a run that goes on has from its checkpoint, and what the script says otherwise by now.

The checkpoint wins. What is another in the script is told of in a note, with how to have it: ``resume(override=...)``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trimtab._internal.text import of_type
from trimtab.core.settings import Settings
from trimtab.errors import UsageError
from trimtab.train.early_stopping import EarlyStopping
from trimtab.train.optim import learning_rates
from trimtab.train.optim.optimizer_state import groups_of
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.world import World

Options = list[dict[str, Any]]
"""Of each group of an optimizer, by name."""
_HOW = frozenset({"params", "param_names", learning_rates.SCALE, "foreach", "fused", "capturable", "differentiable"})
"""What is in a group and changes no result."""
_OWN = frozenset({*learning_rates.RATES, "base_momentum", "max_momentum"} - {"lr"})
"""What a schedule keeps there."""


def check_kinds(settings: object, early_stopping: object, metrics: object, ema: object, world: object) -> None:
    """Refuse what is of another kind than its argument takes, and settings of inference.

    Raises:
        UsageError: one is.
    """
    for name, value, kinds, fix in (
        ("settings", settings, Settings, "trimtab.Settings, such as Settings(threads=2)"),
        ("early_stopping", early_stopping, EarlyStopping | None, "trimtab.train.EarlyStopping, or leave it out"),
        ("metrics", metrics, Mapping | None, "functions by name, such as {'accuracy': accuracy}"),
        ("ema", ema, int | float | None, "a number, such as 0.999"),
        ("world", world, World | None, "what trimtab.train.distributed.launch.join() returns, or leave it out"),
    ):
        if not isinstance(value, kinds):
            raise UsageError(f"{name} is {of_type(value)}; give {fix}.")
    if isinstance(settings, Settings) and settings.data.batch is not None:
        raise UsageError(
            f"Settings data.batch is {settings.data.batch}, which is for inference. Training takes examples per micro-batch: "
            f"DataSettings(micro_batch={settings.data.batch})."
        )


def state_of(context: RunContext) -> dict[str, Any]:
    """What a checkpoint keeps to compare a later script with."""
    return {
        "trained": {name: parameter.requires_grad for name, parameter in _parameters(context)},
        "given": context.options,
        "names": _names(context),
        "watched": _watched(context.early_stopping),
    }


def missing_groups(context: RunContext, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups that came to the optimizer in the run that goes on, of this trainer's parameters.

    None where the groups before those are of others.
    """
    kept, now, parameters = state.get("names", []), _names(context), dict(_parameters(context))
    added, groups = kept[len(now) :], groups_of(state["optimizer"])
    if groups is None or kept[: len(now)] != now or any(name not in parameters for names in added for name in names):
        return []
    found = [copy.deepcopy(group) for group in groups[len(now) :]]
    return [{**group, "params": [parameters[name] for name in names]} for group, names in zip(found, added, strict=True)]


def restore_flags(context: RunContext, state: Mapping[str, Any]) -> None:
    """Freeze and thaw what the run had frozen and thawed by then, with a note for what is not so in the script."""
    changed: dict[bool, list[str]] = {True: [], False: []}
    for name, parameter in _parameters(context):
        flag = state["trained"].get(name, parameter.requires_grad)
        if flag != parameter.requires_grad:
            parameter.requires_grad_(flag)
            changed[flag].append(name.partition(".")[2])
    for flag, names in changed.items():
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            context.note(
                f"requires_grad is {flag} for {shown}, as the run before left it. To change it, set it after resume()."
            )


def restore_best(context: RunContext, state: Mapping[str, Any]) -> None:
    """Begin early stopping anew where what was the best so far is that of another figure, or its parameters were not kept."""
    stopping, position, was = context.early_stopping, context.position, state.get("watched")
    now, text = _watched(stopping), None
    puts_back = stopping is not None and stopping.restore_best
    if was is not None and tuple(was) != now and (position.best is not None or position.stale):
        text = f"The run before had {_said(*was)}, and this one has {_said(*now)}: the best validation is looked for anew."
    elif puts_back and context.best_parameters is None and position.best is not None:
        text = "The run before kept no parameters of its best validation: the best is looked for anew."
    if text is not None:
        position.best, position.stale, context.best_parameters = None, 0, None
        context.note(text)
    if not puts_back:
        context.best_parameters = None


def watches_another(context: RunContext, state: Mapping[str, Any]) -> bool:
    """Whether the figure of the validation that the run goes by is another one now, or better the other way."""
    return tuple(state["watched"])[:2] != _watched(context.early_stopping)[:2]


def options_of(optimizer: Optimizer) -> Options:
    """What ``optimizer`` was given, and what a schedule has made of it for the first update."""
    groups = optimizer.param_groups
    return [{name: copy.deepcopy(value) for name, value in group.items() if name not in _HOW} for group in groups]


def differences(before: Options, now: Options, override: Collection[str]) -> Iterator[tuple[bool, str]]:
    """What is another in the script ``now`` and in no ``override``: whether it is the schedule's, and a sentence about it."""
    for place, (was, has) in enumerate(zip(before, now, strict=False)):
        rate, of = learning_rates.chosen(has), f" of the optimizer's group {place}" if len(now) > 1 else ""
        factor = float(has[rate]) / float(was[rate]) if was.get(rate) and has.get(rate) else 1.0
        for name in sorted(was.keys() & has.keys() - ({"lr"} - {rate})):  # under a schedule that is another in each update
            one, other, own = was[name], has[name], name in _OWN and name != rate
            follows = own and name in learning_rates.RATES and math.isclose(other, one * factor)
            option = "lr" if name == rate else name
            if not (same(one, other) or follows or option in override):
                said = option if name == "initial_lr" else name
                yield own, told(said + of, one, other, option if numbers(other) and not own else None)


def told(what: str, before: object, now: object, option: str | None) -> str:
    """A sentence about what is another in the script ``now``, and which ``option`` to override to have it."""
    fix = f"resume(override={{{option!r}: {now}}}) changes it." if option else "A new run can have it."
    return f"{what} is {now} in the script, and was {before} in the run so far: it stays so. {fix}"


def same(one: Any, other: Any) -> bool:
    """Whether two options are alike."""
    try:
        return bool(one == other)
    except (ValueError, RuntimeError, TypeError):  # rows of numbers, of which each is compared
        return bool(np.array_equal(one, other))


def checked_override(optimizer: Optimizer, override: object) -> dict[str, Any]:
    """What a run that goes on is to have another way than its checkpoint.

    Raises:
        UsageError: ``optimizer`` has no such option, or not of that form.
    """
    if not isinstance(override, Mapping):
        raise UsageError(f"override is {of_type(override)}; give values by name, such as {{'lr': 3e-4}}.")
    group, kind = optimizer.param_groups[0], type(optimizer).__name__
    known = sorted(name for name in group.keys() - _OWN - _HOW if numbers(group[name]))
    for name, value in override.items():
        if name not in known:
            raise UsageError(f"override has {name!r}, which is no number that {kind} takes. Those are {', '.join(known)}.")
        if len(found := numbers(value)) != len(numbers(group[name])) or not all(0 <= number < math.inf for number in found):
            raise UsageError(f"override has {name}={value!r}. Give what {group[name]!r} is, in numbers of at least 0.")
    return dict(override)


def put_override(context: RunContext, scheduler: LRScheduler | None) -> None:
    """Give every group of the optimizer what it was told to have in place of what the checkpoint has.

    All that a schedule makes of a rate is multiplied by as much, so that a rate of 0 stays under one.

    Raises:
        UsageError: the schedule would write over it.
    """
    groups, context.options = context.optimizer.param_groups, copy.deepcopy(context.options or [])
    for name, value in context.override.items():
        if name in ("momentum", "betas") and "base_momentum" in groups[0]:
            raise UsageError(f"override has {name}, which {type(scheduler).__name__} sets in each update. Leave it out.")
        was = groups[0][name]
        if name == "lr":
            was = float(groups[0][learning_rates.chosen(groups[0])]) / groups[0].get(learning_rates.SCALE, 1.0)
            scaled = [value * group.get(learning_rates.SCALE, 1.0) for group in groups]
            learning_rates.multiply(context.optimizer, scheduler, list(map(learning_rates.factor, groups, scaled)))
            if scheduler is None or learning_rates.chosen(groups[0]) == "lr":
                learning_rates.put(groups, scaled)  # to the last digit
            for each in context.options:
                each |= learning_rates.multiplied(each, learning_rates.factor(each, value)) | {
                    learning_rates.chosen(each): value
                }
        else:
            for each in (*groups, *context.options):
                each[name] = copy.deepcopy(value)
        if not same(value, was):
            context.note_once(f"{name} is {value} from here on, by resume(override=...), and was {was}.")


def _parameters(context: RunContext) -> Iterator[tuple[str, nn.Parameter]]:
    """All that may be trained, by a name that is the same in another process: the model's, then the loss's."""
    yield from ((f"model.{name}", parameter) for name, parameter in context.model.named_parameters())
    if (loss := context.objective.module) is not None:
        yield from ((f"loss.{name}", parameter) for name, parameter in loss.named_parameters())


def _names(context: RunContext) -> list[list[str | None]]:
    """Of the parameters in each group of the optimizer; ``None`` for one that is neither the model's nor the loss's."""
    names = {id(parameter): name for name, parameter in _parameters(context)}
    return [[names.get(id(parameter)) for parameter in group["params"]] for group in context.optimizer.param_groups]


def _watched(stopping: EarlyStopping | None) -> tuple[str, str, bool]:
    """The figure of the validation that a run goes by, which way it is better, and whether that may end the run."""
    found = stopping or EarlyStopping()
    return found.metric, found.mode or "min", stopping is not None


def _said(metric: str, mode: str, stops: bool) -> str:
    return f"early stopping by {metric!r} (mode={mode!r})" if stops else "no early stopping"


def numbers(value: Any) -> list[float]:
    """Those that an option is made of; none where it is something else."""
    found = value if isinstance(value, (tuple, list)) else [value]
    one = all(isinstance(item, (int, float)) or (isinstance(item, torch.Tensor) and item.numel() == 1) for item in found)
    return list(map(float, found)) if one and not any(isinstance(item, bool) for item in found) else []
