"""float16's loss scale, for gradients of which each process may hold a part."""

from __future__ import annotations

import types
from typing import Any

import torch

from trimtab.train.runtime.world import World

LEAST_SCALE = 2.0**-14
"""Of float16 losses: the smallest normal float16 number. A gradient that still overflows at this scale is not finite."""


class Scaler(torch.amp.GradScaler):
    """torch's scaler, for gradients of which each process may hold a part."""

    world = World()

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale the local part of each gradient; an overflow in one process counts in all."""
        if not self.world.shared:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        here: Any = types.SimpleNamespace(param_groups=[{"params": _parts(optimizer)}])
        found = super()._unscale_grads_(here, inv_scale, found_inf, allow_fp16)
        for value in found.values():
            self.world.overflow(value)
        return found


def _parts(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The local parts of parameters and gradients, in the same memory, for each parameter that has a gradient."""
    found = []
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if (grad := parameter.grad) is not None:
            part = (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach()
            part.grad = (grad.to_local() if hasattr(grad, "to_local") else grad).detach()
            found.append(part)
    return found
