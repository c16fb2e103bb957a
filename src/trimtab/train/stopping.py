"""When to stop before the end, and which parameters to keep."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import torch
from torch import nn

from trimtab.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Ends a run whose validation has stopped getting better."""

    metric: str = "loss"
    """The figure of the validation that is watched."""
    patience: int = 3
    """Validations in a row without an improvement before the run ends."""
    min_delta: float = 0.0
    """What counts as an improvement, in units of the metric."""
    mode: Literal["min", "max"] = "min"
    restore_best: bool = True
    """Whether the parameters of the best validation are put back at the end."""

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise UsageError(f"EarlyStopping patience is {self.patience}; it must be at least 1.")
        if self.mode not in ("min", "max"):
            raise UsageError(f"EarlyStopping mode is {self.mode!r}; it can be 'min' or 'max'.")

    def better(self, value: float, best: float | None) -> bool:
        """Whether ``value`` improves on ``best``; what is no number never does."""
        if math.isnan(value):
            return False
        if best is None:
            return True
        return value < best - self.min_delta if self.mode == "min" else value > best + self.min_delta


class Ema:
    """A running average of the parameters, which often generalises better than the last of them.

    Source: Polyak & Juditsky 1992; Tarvainen & Valpola 2017, https://arxiv.org/abs/1703.01780
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 < decay < 1:
            raise UsageError(f"ema is {decay}; the decay of the average lies between 0 and 1, such as 0.999.")
        self.decay = decay
        self.shadow = {name: value.detach().clone() for name, value in self._values(model).items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take the parameters as they are now into the average; buffers that are no floating point are copied."""
        values = self._values(model)
        floats = [name for name, value in values.items() if value.is_floating_point()]
        torch._foreach_lerp_([self.shadow[n] for n in floats], [values[n] for n in floats], 1 - self.decay)
        for name in values.keys() - set(floats):
            self.shadow[name].copy_(values[name])

    @torch.no_grad()
    def exchange(self, model: nn.Module) -> None:
        """Put the average into the model and the model's own values into the average; twice is as it was."""
        for name, value in self._values(model).items():
            kept = value.detach().clone()
            value.copy_(self.shadow[name])
            self.shadow[name].copy_(kept)

    @staticmethod
    def _values(model: nn.Module) -> dict[str, torch.Tensor]:
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}
