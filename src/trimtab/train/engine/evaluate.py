"""How good the model of a trainer is on other data, such as a test set."""

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
    """The loss and the metrics of the model as it is now, over ``batches``; all processes must ask for them together.

    What is ``"auto"`` in the settings and was not decided by a run yet is off.

    Raises:
        UsageError: ``batches`` is no loader, or has not what the metrics need; or a callback asks, where there are others who
            do not hear of it.
        WorkloadError: the model, the loss, a metric or the loader failed.
    """
    check_loader(batches, "validate")
    if context.fit.calling and context.world.processes > 1:
        raise UsageError(
            "A callback asks for validate(), and of several processes only the first calls callbacks: it would wait for the "
            "others without end. Call it in every process, between the updates of trainer.updates(...)."
        )
    settings, world = context.settings, context.world
    settings = settings.replaced({name: auto_settings.OFF[name] for name in auto_settings.undecided(settings)})
    shared = validation.checked(context, world.share(batches, "validate"))
    assert shared is not None
    step = Step(context.model, context.objective, context.optimizer, settings, world, HostClock())
    move = setup.laid_out(context.model, settings, context.device)
    taken_up = context.resuming is not None  # the model has the last update's parameters, though an average is what counts
    with running(settings), context.shown.during() if taken_up else contextlib.nullcontext():
        found = validation.validate(context, shared, step, move, lambda: False)
    assert found is not None
    return found
