"""Resolve differences between the arguments of a resumed script and those stored in its checkpoint.

The checkpoint wins. One note lists the differences; ``resume(override=...)`` gives numbers of the optimizer precedence.
"""

from __future__ import annotations

import copy
import math
import reprlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trimtab._internal.text import listed, of_type
from trimtab.core.settings import Settings
from trimtab.errors import UsageError
from trimtab.train.early_stopping import EarlyStopping
from trimtab.train.optim import learning_rates
from trimtab.train.optim.optimizer_state import groups_of
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.world import World

Options = list[dict[str, Any]]
"""The options of each parameter group, by name."""
_IGNORED = frozenset({"params", "param_names", learning_rates.SCALE, "foreach", "fused", "capturable", "differentiable"})
"""Entries of a parameter group that change no result."""
SCHEDULED_ENTRIES = frozenset({*learning_rates.RATES, "base_momentum", "max_momentum"} - {"lr"})
"""Entries of a parameter group that a scheduler writes."""


def check_types(settings: object, early_stopping: object, metrics: object, ema: object, world: object) -> None:
    """Check the types of the arguments of ``Trainer``, and that ``settings`` has none for inference only.

    Raises:
        UsageError: an argument has a wrong type, or a setting is for inference only.
    """
    for name, value, kinds, fix in (
        ("settings", settings, Settings, "trimtab.Settings, such as Settings(threads=2)"),
        ("early_stopping", early_stopping, EarlyStopping | None, "trimtab.train.EarlyStopping, or leave it out"),
        ("metrics", metrics, Mapping | None, "functions by name, such as {'accuracy': accuracy}"),
        ("ema", ema, int | float | Mapping | None, "a number, such as 0.999"),
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
    """The part of a checkpoint that a later script is compared with."""
    return {
        "trained": {name: parameter.requires_grad for name, parameter in _parameters(context)},
        "given": context.options,
        "names": _names(context),
        "watched": _watched(context),
    }


def missing_groups(context: RunContext, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parameter groups that a callback added in the checkpointed run, with the parameters of this model.

    Empty if the groups before those hold other parameters.
    """
    kept, now, parameters = state.get("names", []), _names(context), dict(_parameters(context))
    added, groups = kept[len(now) :], groups_of(state["optimizer"])
    if groups is None or kept[: len(now)] != now or any(name not in parameters for names in added for name in names):
        return []
    found = [copy.deepcopy(group) for group in groups[len(now) :]]
    return [{**group, "params": [parameters[name] for name in names]} for group, names in zip(found, added, strict=True)]


def restore_flags(context: RunContext, state: Mapping[str, Any]) -> None:
    """Set ``requires_grad`` as in the checkpoint, and note the parameters where the script differs."""
    for flag in (True, False):
        changed = [one for one in _parameters(context) if one[1].requires_grad != flag and state["trained"].get(one[0]) is flag]
        for _, parameter in changed:
            parameter.requires_grad_(flag)
        if changed:
            shown = listed([name.partition(".")[2] for name, _ in changed])
            context.note(
                f"requires_grad is {flag} for {shown}, as the run before left it. To change it, set it after resume()."
            )


def restore_best(context: RunContext, state: Mapping[str, Any]) -> None:
    """Reset the best validation if it is of another metric, or if its parameters are needed and were not saved."""
    stopping, position, text = context.early_stopping, context.position, None
    puts_back = stopping is not None and stopping.restore_best
    if watches_other_metric(context, state) and (position.best is not None or position.stale):
        (was, was_mode), (now, mode) = state["watched"], _watched(context)
        text = f"The run before watched {was!r} (mode={was_mode!r}), and this one watches {now!r} (mode={mode!r})"
    elif puts_back and context.best_parameters is None and position.best is not None:
        text = "The run before kept no parameters of its best validation"
    if text is not None:
        position.best, position.stale, context.best_parameters = None, 0, None
        context.note(f"{text}: the best is looked for anew.")
    if not puts_back:
        context.best_parameters = None


def watches_other_metric(context: RunContext, state: Mapping[str, Any]) -> bool:
    """Whether the watched metric, or the direction in which it improves, differs from the checkpoint's."""
    return tuple(state["watched"]) != _watched(context)


def options_of(optimizer: Optimizer) -> Options:
    """A copy of the options of ``optimizer``, with the rates that a scheduler set for the first update."""
    groups = optimizer.param_groups
    return [{name: copy.deepcopy(value) for name, value in group.items() if name not in _IGNORED} for group in groups]


def difference(name: str, checkpoint: object, script: object) -> str:
    """Words for an option with one value in the checkpoint and another in the script."""
    return f"{name}={reprlib.repr(checkpoint)} (script: {reprlib.repr(script)})"


def differences(before: Options, now: Options, skipped: Collection[str]) -> Iterator[str]:
    """The options of the optimizer that differ ``before`` (checkpoint) and ``now`` (script), but for those ``skipped``.

    Rates that a scheduler derives from the chosen rate are compared by their ratio to it.
    """
    for place, (was, has) in enumerate(zip(before, now, strict=False)):
        rate, prefix = learning_rates.chosen_key(has), f"param_groups[{place}]." if len(now) > 1 else ""
        factor = float(has[rate]) / float(was[rate]) if was.get(rate) and has.get(rate) else 1.0
        for name in sorted(was.keys() & has.keys() - ({"lr"} - {rate})):  # a scheduler changes lr in each update
            option, one, other = "lr" if name == rate else name, was[name], has[name]
            derived = name != rate and name in learning_rates.RATES and math.isclose(other, one * factor)
            if not (derived or option in skipped or equal(one, other)):
                yield difference(prefix + option, one, other)


def equal(one: Any, other: Any) -> bool:
    """Whether two options are equal, which may be arrays."""
    try:
        return bool(one == other)
    except (ValueError, RuntimeError, TypeError):  # the comparison gives an array
        return bool(np.array_equal(one, other))


def checked_override(optimizer: Optimizer, override: object) -> dict[str, Any]:
    """``override`` as a dict.

    Raises:
        UsageError: ``optimizer`` has no such option, or the value has another form.
    """
    if not isinstance(override, Mapping):
        raise UsageError(f"override is {of_type(override)}; give values by name, such as {{'lr': 3e-4}}.")
    group = optimizer.param_groups[0]
    known = {name: group[name] for name in sorted(group.keys() - SCHEDULED_ENTRIES - _IGNORED) if _numbers(group[name])}
    for name, value in override.items():
        form, found = _numbers(known.get(name)), _numbers(value)
        if not form or len(found) != len(form) or not all(0 <= number < math.inf for number in found):
            kind, options = type(optimizer).__name__, ", ".join(f"{one}={number!r}" for one, number in known.items())
            raise UsageError(f"override has {name}={value!r}. {kind} takes numbers of at least 0 for: {options}.")
    return dict(override)


def apply_override(context: RunContext, scheduler: LRScheduler | None) -> None:
    """Write the overridden options into every parameter group.

    Rates that ``scheduler`` derives from the overridden rate are scaled by the same factor; a rate of 0 stays 0.

    Raises:
        UsageError: the scheduler writes the option in each update.
    """
    groups, context.options = context.optimizer.param_groups, copy.deepcopy(context.options or [])
    for name, value in context.override.items():
        if name in ("momentum", "betas") and "base_momentum" in groups[0]:
            raise UsageError(f"override has {name}, which {type(scheduler).__name__} sets in each update. Leave it out.")
        was = groups[0][name]
        if name == "lr":
            learning_rates.scale(context.optimizer, scheduler, 1.0)  # scale_to_batches() scales them again
            rate = learning_rates.chosen_key(groups[0])
            was = float(groups[0][rate])
            learning_rates.multiply(context.optimizer, scheduler, [learning_rates.factor(group, value) for group in groups])
            if scheduler is None or rate == "lr":
                learning_rates.set_rates(groups, [value] * len(groups))  # exactly, without rounding of the factor
            for each in context.options:
                each |= learning_rates.multiplied(each, learning_rates.factor(each, value)) | {rate: value}
        else:
            for each in (*groups, *context.options):
                each[name] = copy.deepcopy(value)
        if not equal(value, was):
            context.note_once(f"{name} is {value} from here on, by resume(override=...), and was {was}.")


def _parameters(context: RunContext) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters of the model and the loss, with unique names."""
    yield from ((f"model.{name}", parameter) for name, parameter in context.model.named_parameters())
    if (loss := context.objective.module) is not None:
        yield from ((f"loss.{name}", parameter) for name, parameter in loss.named_parameters())


def _names(context: RunContext) -> list[list[str | None]]:
    """The parameter names of each group; ``None`` for a parameter of neither the model nor the loss."""
    names = {id(parameter): name for name, parameter in _parameters(context)}
    return [[names.get(id(parameter)) for parameter in group["params"]] for group in context.optimizer.param_groups]


def _watched(context: RunContext) -> tuple[str, str]:
    """The watched metric, and the direction in which it improves."""
    return context.watched.metric, context.watched.mode or "min"


def _numbers(value: Any) -> list[float]:
    """The numbers in an option: one, or those of a sequence; empty if there is anything else."""
    found = value if isinstance(value, (tuple, list)) else [value]
    one = all(isinstance(item, (int, float)) or (isinstance(item, torch.Tensor) and item.numel() == 1) for item in found)
    return list(map(float, found)) if one and not any(isinstance(item, bool) for item in found) else []
