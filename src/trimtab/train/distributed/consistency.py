"""Refuse arguments of a run, and changes by callbacks, that differ between processes."""

from __future__ import annotations

from typing import Any

import torch

from trimtab.errors import UsageError
from trimtab.train.run_context import RunContext
from trimtab.train.telemetry.events import Event

_PER_HOST = ("device", "threads", "memory.cuda_allocator", "memory.keep_freed")
"""Settings that may differ between hosts, because no process waits for another by them."""
_PLAIN = (bool, int, float, complex, str, tuple, list, torch.Tensor, type(None))
"""Types of optimizer options that are compared. The text of others, such as functions, differs between processes."""


def refuse_differences(context: RunContext, *, validated: bool, epochs: int | None, steps: int | None) -> None:
    """Refuse arguments that differ between processes, with which they would wait for each other forever.

    Raises:
        UsageError: an argument or a setting differs.
    """
    if context.world.processes == 1:
        return
    given: dict[str, Any] = {
        "validate": "given" if validated else None,
        "checkpoint": "given" if context.checkpoints is not None else None,
        "resume()": "called" if context.resuming is not None else "not called",
        "override": sorted(context.override.items()),
        "checkpoint_every": context.checkpoint_every,
        "validate_every": context.validate_every,
        "log_every": context.log_every,
        "early_stopping": context.early_stopping,
        "metrics": sorted(context.metrics),
        "ema": None if context.ema is None else context.ema.decay,
        "schedule": None if context.schedule is None else "given",
        "epochs": epochs,
        "steps": steps,
    }
    given |= _optimizer_options(context)
    settings = {name: context.settings.value(name) for name in context.settings.names()}
    given |= {f"Settings {name}": value for name, value in settings.items() if name not in (*_PER_HOST, *context.decided)}
    found = context.world.gathered({name: str(value) for name, value in given.items()})
    for name, value in found[0].items():
        for rank, other in enumerate(found):
            if other.get(name, value) != value:
                raise UsageError(
                    f"The processes were given different arguments: {name} is {value} for that of rank 0, and {other[name]} "
                    f"for that of rank {rank}. Give all of them the same: they go through a run together, and only the first "
                    "writes files, prints and calls callbacks anyway."
                )


def emit_together(context: RunContext, event: Event) -> None:
    """Emit ``event`` to the callbacks at a point that all processes reach; if a callback fails, all stop."""
    with context.world.together():
        context.emit(event)


def run_callbacks(context: RunContext, trainer: Any, event: Event) -> None:
    """Call the callbacks with ``trainer`` in the process of rank 0.

    Raises:
        UsageError: with several processes, a callback has changed an option of the optimizer or ``requires_grad``, which the
            other processes would not do.
    """
    if not context.world.leads or not context.callbacks:
        return
    before, run = _optimizer_options(context), context.fit
    within, run.callbacks_running = run.callbacks_running, True  # a callback that calls note() is called again, within itself
    try:
        for callback in context.callbacks:
            callback(trainer, event)
    finally:
        run.callbacks_running = within
    after = _optimizer_options(context)
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    if changed:
        raise UsageError(
            f"A callback has changed {changed[0]}. Of several processes only the first calls callbacks, and the models of the "
            "others would drift away from its own. Use schedule=... for what follows a plan, or make the change in every "
            "process, between the updates of trainer.updates(...)."
        )


def _optimizer_options(context: RunContext) -> dict[str, str]:
    """The options of the optimizer, and ``requires_grad`` of each parameter; empty in a single process."""
    if context.world.processes == 1:
        return {}
    found = {f"requires_grad of {name}": str(value.requires_grad) for name, value in context.model.named_parameters()}
    for place, group in enumerate(context.optimizer.param_groups):
        plain = {name: value for name, value in group.items() if name != "params" and isinstance(value, _PLAIN)}
        found |= {f"{name} of the optimizer's group {place}": str(value) for name, value in plain.items()}
    return found
