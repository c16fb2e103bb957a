"""How long a run is, and where in its data it begins."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trimtab.errors import UsageError
from trimtab.train.engine import epoch
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.world import World


def check_lengths(context: RunContext, epochs: int | None, steps: int | None) -> None:
    """Refuse a run of no stated length, or one that is over already; what a resumption finds done is done.

    Raises:
        UsageError: neither or both are given, one is below 1, or as many were made before.
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
    """Refuse a number of updates below 1.

    Raises:
        UsageError: one is.
    """
    for name, value in counts.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise UsageError(f"{name} is {value!r}; it is a number of updates: a whole number of at least 1.")


def begin_other(context: RunContext, last: tuple[Any, Any] | None, given: Any) -> bool:
    """Have data begin at its beginning if it is not that of the run before, which may have ended in mid-epoch.

    Early stopping, which went by what was learnt from the other, begins with it. Returns whether it is other data.
    """
    position = context.position
    if last is None or context.resuming is not None:
        return False
    if context.early_stopping is not None and position.stale >= context.early_stopping.patience:
        position.stale = 0  # it had ended the run before; who asks for more epochs all the same gets them
    before, dataset = last[0], getattr(given, "dataset", None)
    anew = dataset is not None and dataset is getattr(before, "dataset", None)
    if before is given or (anew and _batches_of(before) == _batches_of(given)):
        return False
    if position.batch:
        batch = position.batch
        context.note(f"The run before ended after batch {batch} of an epoch of other data; this data begins at its beginning.")
    position.batch, position.stale, position.best, context.best_parameters = 0, 0, None, None
    if context.step_state is not None:
        context.step_state["typical"] = None  # what a batch stands for; float16's scale goes with the model and stays
    return True


def check_epoch(context: RunContext, train: Iterable[Any]) -> None:
    """Have an epoch begin again that was begun, before a resumption, with a loader of another length.

    Of several processes each has a share, and one may have a batch more than another: that alone is no other length.
    """
    state, position, world = context.resuming, context.position, context.world
    if state is None:
        return
    now, before = batches_in_all(train, world), state["batches"]
    apart = 0 if state["processes"] == world.size else max(state["processes"], world.size) - 1
    if position.batch and now is not None and before is not None and abs(now - before) > apart:
        context.note(epoch.other_length(position.batch, f"{now} batches and not {before}"))
        position.batch = 0


def batches_in_all(train: Iterable[Any], world: World) -> int | None:
    """Batches per epoch of all processes; ``None`` where a loader cannot say."""
    found = world.gathered(_batches_of(train))  # of those that have the same data, where layers are split, too
    return None if None in found else sum(filter(None, found)) * world.size // len(found)


def updates_in_all(context: RunContext, train: Iterable[Any], epochs: int | None, steps: int | None) -> int | None:
    """How many updates there will be when the run has ended, with those made before it, from other data or other batches too.

    ``None`` where a loader cannot say how long it is. All processes must ask.
    """
    if epochs is None:
        return steps
    position, each = context.position, context.settings.data.accumulate
    counts = context.world.gathered(_batches_of(train))
    if None in counts:
        return None
    most = max(filter(None, counts), default=0)
    left, whole = max(most - position.batch, 0), epochs - position.epoch - 1
    return position.update + max(-(-left // each) + whole * -(-most // each), 0)


def over(context: RunContext, epochs: int | None, steps: int | None) -> bool:
    """Whether a run of such a length has made everything that belongs to it."""
    position = context.position
    made = position.epoch >= epochs if epochs is not None else position.update >= (steps or 0)
    return made and not position.due


def _batches_of(train: Iterable[Any]) -> int | None:
    try:
        return len(train)  # type: ignore[arg-type]
    except TypeError:
        return None
