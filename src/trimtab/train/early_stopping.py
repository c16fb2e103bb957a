"""Early stopping by a figure of the validation."""

from __future__ import annotations

import dataclasses
import math
from numbers import Real
from typing import Literal

from trimtab.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Ends a run whose validation no longer improves.

    Raises:
        UsageError: a number makes no sense, or ``mode`` is missing for a metric that is not the loss.
    """

    metric: str = "loss"
    """Name of the watched figure: ``"loss"`` or one of ``Trainer(metrics=...)``."""
    patience: int = 3
    """Validations in a row without an improvement before the run ends."""
    min_delta: float = 0.0
    """Smallest change that counts as an improvement, in units of the metric."""
    mode: Literal["min", "max"] | None = None
    """Whether the figure is to fall or to rise. The default is ``"min"`` for the loss; other metrics need it stated."""
    restore_best: bool = True
    """Whether the model gets the parameters of the best validation at the end."""

    def __post_init__(self) -> None:
        if not isinstance(self.patience, Real) or self.patience < 1:
            raise UsageError(f"EarlyStopping patience is {self.patience!r}; it must be a number of at least 1.")
        if not isinstance(self.min_delta, Real):
            raise UsageError(f"EarlyStopping min_delta is {self.min_delta!r}; it must be a number.")
        if self.mode not in ("min", "max", None):
            raise UsageError(f"EarlyStopping mode is {self.mode!r}; it can be 'min' or 'max'.")
        if self.mode is None and self.metric != "loss":
            raise UsageError(
                f"EarlyStopping watches {self.metric!r}, and nothing says whether more of it is better. Give mode='max', as "
                "for an accuracy, or mode='min'."
            )

    def better(self, value: float, best: float | None) -> bool:
        """Whether ``value`` improves on ``best``; NaN never does."""
        if math.isnan(value):
            return False
        if best is None:
            return True
        return value > best + self.min_delta if self.mode == "max" else value < best - self.min_delta
