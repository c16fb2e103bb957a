"""The validation's figure of a checkpoint, by which the best checkpoints are kept."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """What a validation found for the parameters of a checkpoint."""

    metric: str
    value: float
    mode: Literal["min", "max"]

    def better(self, other: Figure | None) -> bool:
        """Whether it is better than ``other``, which is of another metric, worse, or missing; NaN is never better."""
        if math.isnan(self.value):
            return False
        if other is None or math.isnan(other.value) or (other.metric, other.mode) != (self.metric, self.mode):
            return True
        return self.value > other.value if self.mode == "max" else self.value < other.value
