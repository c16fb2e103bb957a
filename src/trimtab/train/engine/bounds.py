"""Further bounds of a run than epochs and steps: time, batches per epoch and validation, and a trial of the script."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import Any

from trimtab._internal.text import counted
from trimtab._internal.units import seconds
from trimtab._internal.validation import length_of
from trimtab.errors import UsageError
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.world import World


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """The bounds that :meth:`~trimtab.train.trainer.Trainer.fit` takes in addition to ``epochs`` and ``steps``.

    Raises:
        UsageError: a value makes no sense.
    """

    max_time: str | float | None = None
    limit_train: int | float | None = None
    limit_validate: int | float | None = None
    fast_dev_run: bool | int = False

    def __post_init__(self) -> None:
        if self.max_time is not None:
            seconds(self.max_time, "max_time")
        for name in ("limit_train", "limit_validate"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if value is not None and not whole and not (isinstance(value, float) and 0 < value <= 1):
                raise UsageError(
                    f"{name} is {value!r}; it is a number of batches, such as 100, or a share of them, such as 0.1."
                )
        if self.fast_dev_run is not False and (not isinstance(self.fast_dev_run, int) or self.fast_dev_run < 1):
            raise UsageError(f"fast_dev_run is {self.fast_dev_run!r}; it can be True, or a number of updates.")

    def begin(self, context: RunContext, train: Iterable[Any], validate: Iterable[Any] | None) -> None:
        """Set the bounds of the call of ``fit`` that begins; ``train`` and ``validate`` are this process's parts."""
        run = context.fit
        if self.max_time is not None:
            limit = seconds(self.max_time, "max_time")
            run.until = (time.monotonic() + limit, f"Its time is over: max_time is {self.max_time}{_unit(self.max_time)}.")
        run.limit_train = _batches("limit_train", self.limit_train, train, context.world)
        if validate is not None:
            run.limit_validate = _batches("limit_validate", self.limit_validate, validate, context.world)
        if self.fast_dev_run:
            count = int(self.fast_dev_run)
            run.limit_train = context.position.batch + count * context.settings.data.accumulate
            run.limit_validate = count
            found = "" if validate is None else f", and {counted(count, 'batch')} of the validation"
            context.note(f"fast_dev_run: {counted(count, 'update')} at most{found}. No checkpoint is written.")


def stop_if_over_time(context: RunContext) -> None:
    """Stop the run if its time is over."""
    if context.fit.until is not None and time.monotonic() >= context.fit.until[0] and not context.ending:
        context.stop(context.fit.until[1])


def _batches(name: str, limit: float | None, loader: Iterable[Any], world: World) -> int | None:
    """``limit`` as a number of batches of this process; at least 1."""
    if not isinstance(limit, float):
        return limit
    if (length := length_of(loader)) is None:
        raise UsageError(f"{name} is {limit}, a share of the batches, and the loader has no len(). Give a number.")
    return max(1, round(max(world.gathered(length)) * limit))


def _unit(value: str | float) -> str:
    return "" if isinstance(value, str) else " s"
