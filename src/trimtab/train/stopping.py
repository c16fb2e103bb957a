"""When to stop before the end, and which parameters to keep."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

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
        values = self.follow(model)
        kinds: dict[Any, list[str]] = {}  # what is sharded over other processes, or not at all, cannot be in one operation
        for name, value in values.items():
            if value.is_floating_point():
                kinds.setdefault(getattr(value, "device_mesh", None), []).append(name)
            else:
                self.shadow[name].copy_(value)
        for names in kinds.values():
            torch._foreach_lerp_([self.shadow[n] for n in names], [values[n] for n in names], 1 - self.decay)

    @torch.no_grad()
    def exchange(self, model: nn.Module) -> None:
        """Put the average into the model and the model's own values into the average; twice is as it was."""
        for name, value in self.follow(model).items():
            kept = value.detach().clone()
            value.copy_(self.shadow[name])
            self.shadow[name].copy_(kept)

    def buffers(self, model: nn.Module) -> list[torch.Tensor]:
        """What the average has for the buffers of ``model``."""
        followed = self.follow(model)
        return [self.shadow[name] for name, _ in model.named_buffers() if name in followed]

    def follow(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The values of ``model``; the average begins anew for what its forward pass has made, enlarged or taken away since."""
        values = self._values(model)
        self.shadow = {name: self._kept(name, value) for name, value in values.items()}
        return values

    def _kept(self, name: str, value: torch.Tensor) -> torch.Tensor:
        kept = self.shadow.get(name)
        same = kept is not None and (kept.shape, kept.dtype) == (value.shape, value.dtype)
        return kept if same and kept is not None else value.detach().clone()

    @staticmethod
    def _values(model: nn.Module) -> dict[str, torch.Tensor]:
        values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: value for name, value in values.items() if not is_lazy(value)}  # until a forward pass has made it


def copied_state(model: nn.Module) -> dict[str, Any]:
    """A copy of all that is in the state of ``model``; what a module adds there as its extra state need not be a tensor."""
    state = model.state_dict()
    return {n: v.detach().clone() if isinstance(v, torch.Tensor) else copy.deepcopy(v) for n, v in state.items()}
