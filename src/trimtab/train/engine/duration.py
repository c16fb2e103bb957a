"""The length of a run in epochs or updates, and the batch at which it begins."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trimtab._internal.text import counted
from trimtab._internal.validation import length_of
from trimtab.errors import UsageError
from trimtab.train.engine import epoch
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.world import World


def check_lengths(context: RunContext, epochs: int | None, steps: int | None) -> None:
    """Check ``epochs`` and ``steps``; a resumed run may be complete already.

    Raises:
        UsageError: neither or both are given, one is below 1, or the trainer has made as many before.
    """
    if (epochs is None) == (steps is None):
        raise UsageError(f"fit() takes epochs=... or steps=...; {'both' if epochs is not None else 'neither'} were given.")
    name, value = ("epochs", epochs) if epochs is not None else ("steps", steps)
    if not isinstance(value, int) or value < 1:
        raise UsageError(f"{name} is {value!r}; it must be a whole number of at least 1.")
    made = context.position.epoch if epochs is not None else context.position.update
    if made >= value and context.resuming is None and not context.position.due:
        raise UsageError(
            f"{name}={value} counts in all, and this trainer has made {made}. Give {name}={made + value} for {value} more, or "
            "make a new Trainer."
        )


def check_counts(**counts: int | None) -> None:
    """Check numbers of updates.

    Raises:
        UsageError: one is below 1 or no whole number.
    """
    for name, value in counts.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UsageError(f"{name} is {value!r}; it is a number of updates: a whole number of at least 1.")


def begin_other_data(context: RunContext, last: tuple[Any, Any] | None, given: Any) -> bool:
    """Start at the beginning of ``given`` if the last run had other data; returns whether it had.

    The last run may have ended in the middle of an epoch. Early stopping starts again with other data.
    """
    position = context.position
    if last is None or context.resuming is not None:
        return False
    if context.early_stopping is not None and position.stale >= context.early_stopping.patience:
        position.stale = 0  # early stopping ended the last run; a new call trains on
    before, dataset = last[0], getattr(given, "dataset", None)
    anew = dataset is not None and dataset is getattr(before, "dataset", None)
    if before is given or (anew and length_of(before) == length_of(given)):
        return False
    if position.batch:
        batch = position.batch
        context.note(f"The run before ended after batch {batch} of an epoch of other data; this data begins at its beginning.")
    position.batch, position.stale, position.best, context.best_parameters = 0, 0, None, None
    if context.step_state is not None:
        context.step_state["typical"] = None  # the weight of a batch; float16's scale belongs to the model and stays
    return True


def check_epoch(context: RunContext, train: Iterable[Any]) -> None:
    """Restart the epoch of a checkpoint if the loader had another length then.

    With several processes, one may have a batch more than another; such a difference does not count.
    """
    state, position, world = context.resuming, context.position, context.world
    if state is None:
        return
    now, before = total_batches(train, world), state["batches"]
    unequal = 0 if state["processes"] == world.size else max(state["processes"], world.size) - 1
    if position.batch and now is not None and before is not None and abs(now - before) > unequal:
        context.note(epoch.other_length(position.batch, f"{now} batches and not {before}"))
        position.batch = 0


def total_batches(train: Iterable[Any], world: World) -> int | None:
    """Batches per epoch, summed over all processes; ``None`` if a loader has no length."""
    found = world.gathered(length_of(train))  # includes processes with the same data, if layers are split
    return None if None in found else sum(filter(None, found)) * world.size // len(found)


def batches_per_update(context: RunContext, train: Iterable[Any]) -> int:
    """Batches of one process in a full update: ``accumulate``, or the batches of an epoch if there are fewer.

    Updates do not span epochs. All processes must call it together.
    """
    accumulate = context.settings.data.accumulate
    counts = context.world.gathered(_batches_per_epoch(context, train)) if accumulate > 1 else [1]
    if accumulate == 1 or None in counts:
        return accumulate
    most = max(filter(None, counts), default=1)
    if most < accumulate:
        context.note_once(
            f"data.accumulate is {accumulate}, and an epoch has {counted(most, 'batch')}: no update has more, because an "
            "update ends with its epoch. The gradient is the mean over the examples that it has."
        )
    elif most % accumulate and context.settings.optimizer.scale_lr is not None:
        context.note_once(
            f"The last update of an epoch has {counted(most % accumulate, 'batch')} and not {accumulate}: scale_lr gives it "
            "the learning rate of the others."
        )
    return min(accumulate, most)


def total_updates(context: RunContext, train: Iterable[Any], epochs: int | None, steps: int | None) -> int | None:
    """The number of updates at the end of the run, including those of earlier runs; ``None`` if a loader has no length.

    All processes must call it together.
    """
    if epochs is None:
        return steps
    position, accumulate = context.position, context.settings.data.accumulate
    counts = context.world.gathered(_batches_per_epoch(context, train))
    if None in counts:
        return None
    most = max(filter(None, counts), default=0)
    left, whole = max(most - position.batch, 0), epochs - position.epoch - 1
    return position.update + max(-(-left // accumulate) + whole * -(-most // accumulate), 0)


def reached_end(context: RunContext, epochs: int | None, steps: int | None) -> bool:
    """Whether the run has reached its length, and validated its last epoch."""
    position = context.position
    made = position.epoch >= epochs if epochs is not None else position.update >= (steps or 0)
    return made and not position.due


def _batches_per_epoch(context: RunContext, train: Iterable[Any]) -> int | None:
    """Batches of an epoch in this process, at most ``limit_train``; ``None`` if the loader has no length."""
    count, limit = length_of(train), context.fit.limit_train
    return count if count is None or limit is None else min(count, limit)
