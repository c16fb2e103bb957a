"""When checkpoints are written, the lock of the checkpoint folder, and the checkpoint that an error between updates causes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trimtab._internal.user_code import explaining, in_worker
from trimtab.errors import NonFiniteError, UsageError
from trimtab.train.checkpoint.checkpoints import Checkpoints
from trimtab.train.distributed.consistency import emit_together
from trimtab.train.engine import epoch, setup
from trimtab.train.run_context import RunContext
from trimtab.train.telemetry.events import Saved

if TYPE_CHECKING:
    from trimtab.train.engine.setup import Ready


@contextlib.contextmanager
def locked(context: RunContext) -> Iterator[None]:
    """A block that holds the lock of the checkpoint folder, if there is a folder: one writing run at a time.

    Raises:
        UsageError: another run holds it, or it has a checkpoint that this run neither resumed from nor wrote.
        StorageError: the folder cannot be created or written to.
    """
    if (checkpoints := context.checkpoints) is None:
        yield
        return
    with context.world.on_rank_0(checkpoints.lock) or contextlib.nullcontext():
        _check_folder(context, checkpoints)
        yield


@contextlib.contextmanager
def disabled(context: RunContext) -> Iterator[None]:
    """A block in which no checkpoint is written."""
    kept, context.checkpoints = context.checkpoints, None
    try:
        yield
    finally:
        context.checkpoints = kept


def _check_folder(context: RunContext, checkpoints: Checkpoints) -> None:
    """Refuse to start a new run in a folder with checkpoints."""
    if context.resuming is not None or context.position.update:
        return
    if newest := checkpoints.newest():
        fix = "Go on from it with trainer.resume() before fit(), or give another folder."
        if in_worker():
            fix = (
                "A worker process of trimtab has read this file anew, and trains again. Train under if __name__ == "
                '"__main__", save the weights there, and let the model of the workload load them.'
            )
        raise UsageError(f"{checkpoints.folder} holds {newest.name} of an earlier run. {fix}")


def save(context: RunContext, ready: Ready) -> None:
    """Write a checkpoint, unless the last update was not finite."""
    if context.checkpoints is None:
        return
    ready.clock.enter("other")
    ready.step.check()
    setup.average_buffers(context)
    state, checkpoints = setup.state_of(context, ready), context.checkpoints
    update, figure = context.figure or (None, None)
    if update != context.position.update:  # the validation was of other parameters
        figure = None
    path = context.world.on_rank_0(lambda: checkpoints.save(context.position.update, state, figure))
    emit_together(context, Saved(update=context.position.update, epoch=context.position.epoch, path=str(path)))


def keep_best(context: RunContext, ready: Ready) -> None:
    """Write a checkpoint after a validation that is among the ``keep_best`` best, whenever the next one is due."""
    checkpoints = context.checkpoints
    if checkpoints is None or not checkpoints.keep_best or context.figure is None:
        return
    figure, kept = context.figure[1], list(checkpoints.figures().values())
    better = figure.better(kept[checkpoints.keep_best - 1] if len(kept) >= checkpoints.keep_best else None)
    if context.world.any(better and context.world.leads):  # the first process has the checkpoints
        save(context, ready)
        context.fit.saved_best = context.position.update


def remark(context: RunContext, ready: Ready, steps: int | None) -> str | None:
    """A sentence if the interval between checkpoints is unknown, because the loader has no length."""
    if context.checkpoints is None or context.checkpoint_every is not None or steps is None or ready.feed.length() is not None:
        return None
    return (
        "Nothing tells how long an epoch of the loader is, and a checkpoint is written when one ends, or the run. Give "
        "checkpoint_every=1000, or another number of updates, for one in between."
    )


class SaveOnError(explaining):
    """A block between two updates: if it fails, a checkpoint is written first, unless a process cannot take part.

    A process that trains alone also writes one if its generator of updates is closed in the block, or if an update fails before
    it changes parameters. A loss that is not finite causes no checkpoint, so that earlier checkpoints are kept.
    """

    def __init__(self, context: RunContext, ready: Ready, *, updating: bool = False) -> None:
        self.context, self.ready, self.updating = context, ready, updating

    def explain(self, error: BaseException) -> None:
        """Write a checkpoint, if ``error`` is to cause one."""
        context = self.context
        alone = context.world.processes == 1
        if not isinstance(error, (Exception, GeneratorExit) if alone else Exception):
            return
        if self.updating and not (alone and self.ready.step.intact and not isinstance(error, NonFiniteError)):
            return
        made = context.position.update
        unsaved = context.checkpoints is not None and made and context.checkpoints.update() != made
        if context.world.known_to_all(error) and context.world.any(bool(unsaved)):
            epoch.restore_random(context, self.ready.feed)
            save(context, self.ready)
