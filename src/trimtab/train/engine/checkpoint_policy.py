"""When checkpoints are written, by which run, and how an error between two updates keeps the updates made so far."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trimtab._internal.user_code import in_worker
from trimtab.errors import UsageError
from trimtab.train.checkpoint.checkpoints import Checkpoints
from trimtab.train.checkpoint.folder_lock import let_go
from trimtab.train.distributed.consistency import tell
from trimtab.train.engine import epoch, setup
from trimtab.train.run_context import RunContext
from trimtab.train.telemetry.events import Saved

if TYPE_CHECKING:
    from trimtab.train.engine.setup import Ready


@contextlib.contextmanager
def folder_held(context: RunContext) -> Iterator[None]:
    """A block that holds the lock of the checkpoint folder, if there is a folder: one writing run at a time.

    Raises:
        UsageError: another run holds it, or it has a checkpoint that this run neither resumed from nor wrote.
        StorageError: the folder cannot be created or written to.
    """
    if (checkpoints := context.checkpoints) is None:
        yield
        return
    held = context.world.led(checkpoints.hold)
    try:
        _check_folder(context, checkpoints)
        yield
    finally:
        let_go(checkpoints.folder, held)


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
    setup.settle(context)
    state, checkpoints = setup.state_of(context, ready), context.checkpoints
    path = context.world.led(lambda: checkpoints.save(context.position.update, state))
    tell(context, Saved(update=context.position.update, epoch=context.position.epoch, path=str(path)))


def remark(context: RunContext, ready: Ready, steps: int | None) -> str | None:
    """A sentence if the interval between checkpoints is unknown, because the loader has no length."""
    if context.checkpoints is None or context.checkpoint_every is not None or steps is None or ready.feed.length() is not None:
        return None
    return (
        "Nothing tells how long an epoch of the loader is, and a checkpoint is written when one ends, or the run. Give "
        "checkpoint_every=1000, or another number of updates, for one in between."
    )


class Saving:
    """A block between two updates: if it fails, a checkpoint is written first, provided that all processes can take part."""

    def __init__(self, context: RunContext, ready: Ready) -> None:
        self.context, self.ready = context, ready

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception):
            return
        context = self.context
        made = context.position.update
        unsaved = context.checkpoints is not None and made and context.checkpoints.update() != made
        if context.world.heard(error) and context.world.any(bool(unsaved)):
            epoch.take_back(context, self.ready.feed)
            save(context, self.ready)
