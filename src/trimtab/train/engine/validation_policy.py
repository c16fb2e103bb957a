"""When the run validates: after each epoch, or every so many updates."""

from __future__ import annotations

from trimtab._internal.text import counted
from trimtab.train.run_context import RunContext


def due(context: RunContext) -> bool:
    """Whether ``validate_every`` asks for a validation after the last update, which it has not had yet."""
    every, position = context.validate_every, context.position
    return bool(every and position.update and position.update % every == 0 and position.validated != position.update)


def last(context: RunContext) -> bool:
    """Whether the last update of a run that validates by updates has had no validation."""
    position = context.position
    return context.validate_every is not None and position.update > 0 and position.validated != position.update


def remark(context: RunContext, each: int | None, to_come: int | None) -> str | None:
    """A sentence, before the run, if no validation will happen in it, or perhaps none.

    Args:
        each: updates per epoch, if known.
        to_come: updates that are left of the run, if known.
    """
    fix = "Give Trainer(validate_every=...), a number of updates."
    if context.validate_every is not None or to_come == 0:
        return None
    if each is None:
        return f"The run validates after each epoch, and nothing tells how long an epoch of the loader is. {fix}"
    position, accumulate = context.position, context.settings.data.accumulate
    left = each - -(-position.batch // accumulate)
    if to_come is None or to_come >= left or position.due:
        return None
    return (
        f"Nothing will be validated: the run has {counted(to_come, 'update')} to come, and its epoch ends after {left}. {fix}"
    )
