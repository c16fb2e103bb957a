"""``Trainer.validate``: loss and metrics on other data, such as a test set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from trimtab.errors import UsageError
from trimtab.train.autotune import auto_settings
from trimtab.train.data.micro_batches import check_loader
from trimtab.train.engine import setup, validation
from trimtab.train.engine.step import Step
from trimtab.train.loss.adapter import Batch
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.step_clock import HostClock
from trimtab.train.runtime.torch_settings import running


def figures(context: RunContext, batches: Iterable[Batch]) -> dict[str, float]:
    """The mean loss and the metrics of the current model over ``batches``; all processes must call it together.

    Settings that are ``"auto"`` and undecided count as off.

    Raises:
        UsageError: ``batches`` is no loader, or lacks what the metrics need; or a callback calls this in one of several
            processes.
        WorkloadError: the model, the loss, a metric or the loader failed.
    """
    check_loader(batches, "validate")
    if context.fit.callbacks_running and context.world.processes > 1:
        raise UsageError(
            "A callback asks for validate(), and of several processes only the first calls callbacks: it would wait for the "
            "others without end. Call it in every process, between the updates of trainer.updates(...)."
        )
    settings, world = context.settings, context.world
    settings = settings.replaced({name: auto_settings.OFF[name] for name in auto_settings.undecided(settings)})
    shared = validation.checked(context, world.share(batches, "validate"))
    assert shared is not None
    step = Step(context.model, context.objective, context.optimizer, settings, world, HostClock())
    move = setup.apply_memory_format(context.model, settings, context.device)
    resumed = context.resuming is not None  # then the model holds the last update's parameters, not the average
    with running(settings), context.eval_weights.applied() if resumed else contextlib.nullcontext():
        found = validation.validate(context, shared, step, move, lambda: False)
    assert found is not None
    return found
