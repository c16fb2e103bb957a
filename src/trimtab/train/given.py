"""What the script has given a run, and what a run that goes on makes of it where it is another by now.

A checkpoint goes before the script wherever the run itself has changed something since it began: a rate that a schedule has
lowered, a part that a callback has thawed. What was changed in the script goes before the checkpoint. To tell the two apart, a
checkpoint keeps what the script had given beside what became of it.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from trimtab._said import of_type
from trimtab.candidate import Settings
from trimtab.errors import UsageError
from trimtab.train import rates
from trimtab.train.optimizer_state import groups_of
from trimtab.train.stopping import EarlyStopping
from trimtab.train.world import World

if TYPE_CHECKING:
    from trimtab.train.trainer import Trainer

_OPTIONS: WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()
"""Of each optimizer as its first run found it: the next one finds what that has made of them."""


@dataclasses.dataclass
class Given:
    """What a trainer began with, before a checkpoint was put into it."""

    flags: dict[str, bool]
    """Which parameters are trained."""
    groups: int
    """Of the optimizer."""
    options: list[dict[str, Any]] | None = None
    """Of those groups, with what the schedule has made of them for the first update; ``None`` until there is one."""

    @classmethod
    def to(cls, trainer: Trainer) -> Given:
        """What ``trainer`` has now."""
        return cls(_flags(trainer), len(trainer.optimizer.param_groups))

    def take_options(self, optimizer: Optimizer) -> None:
        """Remember the options of ``optimizer``, once."""
        if self.options is None:
            groups, left = optimizer.param_groups[: self.groups], {"params", "param_names", rates.SCALE}
            now = [{name: copy.deepcopy(group[name]) for name in group.keys() - left} for group in groups]
            self.options = _OPTIONS.setdefault(optimizer, now)


def check_kinds(settings: object, early_stopping: object, metrics: object, ema: object, world: object) -> None:
    """Refuse what is of another kind than its argument takes.

    Raises:
        UsageError: one is.
    """
    for name, value, kinds, fix in (
        ("settings", settings, Settings, "trimtab.Settings, such as Settings(accumulate=2)"),
        ("early_stopping", early_stopping, EarlyStopping | None, "trimtab.train.EarlyStopping, or leave it out"),
        ("metrics", metrics, Mapping | None, "functions by name, such as {'accuracy': accuracy}"),
        ("ema", ema, int | float | None, "a number, such as 0.999"),
        ("world", world, World | None, "what trimtab.train.distributed.join() returns, or leave it out"),
    ):
        if not isinstance(value, kinds):
            raise UsageError(f"{name} is {of_type(value)}; give {fix}.")


def state_of(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint keeps to compare a later script with."""
    return {
        "trained": _flags(trainer),
        "given": {"trained": trainer.given.flags, "options": trainer.given.options},
        "names": _names(trainer),
        "watched": _watched(trainer.early_stopping),
    }


def missing_groups(trainer: Trainer, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups that came to the optimizer in the run that goes on, of this trainer's parameters.

    None where the groups before those are of others.
    """
    kept, now, parameters = state.get("names", []), _names(trainer), dict(_parameters(trainer))
    added, groups = kept[len(now) :], groups_of(state["optimizer"])
    if groups is None or kept[: len(now)] != now or any(name not in parameters for names in added for name in names):
        return []
    found = [copy.deepcopy(group) for group in groups[len(now) :]]
    return [{**group, "params": [parameters[name] for name in names]} for group, names in zip(found, added, strict=True)]


def restore_flags(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Freeze and thaw what the run had frozen and thawed by then; what is another in the script stays as it is there."""
    kept, before = state.get("trained", {}), state.get("given", {}).get("trained", {})
    changed: dict[bool, list[str]] = {True: [], False: []}
    for name, parameter in _parameters(trainer):
        flag = kept.get(name, parameter.requires_grad)
        if flag != parameter.requires_grad and before.get(name) == trainer.given.flags.get(name):
            parameter.requires_grad_(flag)
            changed[flag].append(name.partition(".")[2])
    for flag, names in changed.items():
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            trainer.note(f"requires_grad is {flag} for {shown}, as the run before left it.")


def restore_best(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Begin early stopping anew where what was the best so far is that of another figure, or its parameters were not kept."""
    stopping, position, was = trainer.early_stopping, trainer.position, state.get("watched")
    now, text = _watched(stopping), None
    puts_back = stopping is not None and stopping.restore_best
    if was is not None and tuple(was) != now and (position.best is not None or position.stale):
        text = f"The run before had {_said(*was)}, and this one has {_said(*now)}: the best validation is looked for anew."
    elif puts_back and trainer.best_parameters is None and position.best is not None:
        text = "The run before kept no parameters of its best validation: the best is looked for anew."
    if text is not None:
        position.best, position.stale, trainer.best_parameters = None, 0, None
        trainer.note(text)
    if not puts_back:
        trainer.best_parameters = None


def watches_another(trainer: Trainer, state: Mapping[str, Any]) -> bool:
    """Whether the figure of the validation that the run goes by is another one now, or better the other way."""
    return tuple(state["watched"])[:2] != _watched(trainer.early_stopping)[:2]


def over(trainer: Trainer, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """``state``, a checkpoint, with the options of the optimizer that are others in the script by now, each with a note.

    A learning rate is wherever a schedule has got to: all that is made of it is multiplied by as much as it has changed.
    """
    kept, now = state.get("given", {}).get("options") or [], trainer.given.options or []
    if (groups := groups_of(state["optimizer"])) is None:  # it is the optimizer's own affair
        return state
    groups, told = [dict(group) for group in groups], list[str]()
    factors = [1.0] * len(groups)
    for place, (before, after) in enumerate(zip(kept, now, strict=False)):
        rate = rates.chosen(before)
        if rate == rates.chosen(after) and _differ(before.get(rate), after.get(rate)) and float(before[rate]):
            factors[place] = float(after[rate]) / float(before[rate])
            groups[place] |= rates.multiplied(groups[place], factors[place])
            told.append(_told("learning rate", before[rate], after[rate]))
        for name in sorted({"initial_lr", "min_lr"} & before.keys() & after.keys() - {rate}):  # of one cycle
            wanted = float(before[name]) * factors[place]
            if wanted and not math.isclose(after[name], wanted):
                groups[place][name] *= after[name] / wanted
                told.append(_told(name, before[name], after[name]))
        for option in sorted((before.keys() & after.keys()) - set(rates.RATES)):
            if _differ(before[option], after[option]):
                groups[place][option] = copy.deepcopy(after[option])
                told.append(_told(option, before[option], after[option]))
    for text in told:
        trainer.note_once(text)
    optimizer = {**state["optimizer"], "param_groups": groups}
    return {**state, "optimizer": optimizer, "scheduler": _multiplied(state["scheduler"], factors)} if told else state


def _multiplied(schedule: Any, factors: Sequence[float]) -> Any:
    """The state of a schedule, and of those in it, with the rates that it keeps for each group so many times as large."""
    if schedule is None:
        return None
    found = dict(schedule)
    for name in rates.KEPT:
        if values := found.get(name):
            found[name] = [value * factor for value, factor in zip(values, factors, strict=False)]
    if "_schedulers" in found:
        found["_schedulers"] = [_multiplied(inner, factors) for inner in found["_schedulers"]]
    return found


def _parameters(trainer: Trainer) -> Iterator[tuple[str, nn.Parameter]]:
    """All that may be trained, by a name that is the same in another process: the model's, then the loss's."""
    yield from ((f"model.{name}", parameter) for name, parameter in trainer.model.named_parameters())
    if (loss := trainer.objective.module) is not None:
        yield from ((f"loss.{name}", parameter) for name, parameter in loss.named_parameters())


def _flags(trainer: Trainer) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in _parameters(trainer)}


def _names(trainer: Trainer) -> list[list[str | None]]:
    """Of the parameters in each group of the optimizer; ``None`` for one that is neither the model's nor the loss's."""
    names = {id(parameter): name for name, parameter in _parameters(trainer)}
    return [[names.get(id(parameter)) for parameter in group["params"]] for group in trainer.optimizer.param_groups]


def _watched(stopping: EarlyStopping | None) -> tuple[str, str, bool]:
    """The figure of the validation that a run goes by, which way it is better, and whether that may end the run."""
    found = stopping or EarlyStopping()
    return found.metric, found.mode or "min", stopping is not None


def _said(metric: str, mode: str, stops: bool) -> str:
    return f"early stopping by {metric!r} (mode={mode!r})" if stops else "no early stopping"


def _differ(before: Any, after: Any) -> bool:
    """Whether two options are numbers, or rows of them, and others; what else there is says how an optimizer is made."""
    a, b = _numbers(before), _numbers(after)
    return a is not None and b is not None and a != b


def _numbers(value: Any) -> list[float] | None:
    """The numbers that an option is made of; ``None`` where it is something else."""
    if isinstance(value, (tuple, list)):
        return [float(item) for item in value] if all(map(_is_number, value)) else None
    return [float(value)] if _is_number(value) else None


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _told(option: str, before: Any, after: Any) -> str:
    was, now = (", ".join(f"{number:g}" for number in _numbers(value) or ()) for value in (before, after))
    return f"The optimizer's {option} in the script was {was} when the run began. It goes on with what is there now: {now}."
