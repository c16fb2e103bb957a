"""Functions that a run calls at fixed points of each update, in every process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trimtab._internal.text import of_type
from trimtab._internal.user_code import user_code
from trimtab._internal.validation import refuses
from trimtab.errors import UsageError

POINTS = {
    "epoch_start": "(trainer), before the first update of each epoch",
    "epoch_end": "(trainer), after the last update of each epoch, before its validation",
    "before_backward": "(trainer, loss), before the backward pass of each micro-batch",
    "after_backward": "(trainer), once per update, or per run.step of each optimizer: the mean's gradients, before clipping",
    "before_step": "(trainer), before the optimizer's step: gradients are clipped and checked, unless a closure makes them",
    "after_step": "(trainer), after it",
}
"""By the name of a hook: its arguments, and when it is called."""

Hook = Callable[..., None]


class Hooks:
    """The hooks of a run. Random numbers that they draw within an update are the run's.

    Args:
        given: functions by the names in :data:`POINTS`.
        trainer: returns what they get first.

    Raises:
        UsageError: a name is unknown, or a function cannot be called as it would be.
    """

    def __init__(self, given: Mapping[str, Hook] | None, trainer: Callable[[], Any]) -> None:
        listed = "; ".join(f"{name}{what}" for name, what in POINTS.items())
        if not isinstance(given, Mapping | None):
            raise UsageError(f"hooks is {of_type(given)}; give functions by name. {listed}.")
        for name, hook in (given or {}).items():
            if name not in POINTS:
                raise UsageError(f"hooks has {name!r}, which there is none of. {listed}.")
            arguments = (None, None) if name == "before_backward" else (None,)
            if not callable(hook) or (error := refuses(hook, *arguments)):
                reason = f": {error}" if callable(hook) else ""
                raise UsageError(f"The hook {name} cannot be called with {POINTS[name].partition(')')[0]}){reason}.")
        self._given, self._trainer = dict(given or {}), trainer

    def __bool__(self) -> bool:
        return bool(self._given)

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def call(self, name: str, *arguments: Any) -> None:
        """Call the hook ``name``, if there is one."""
        if (hook := self._given.get(name)) is not None:
            with user_code(f"The hook {name} raised"):
                hook(self._trainer(), *arguments)
