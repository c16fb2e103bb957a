"""Choose between the loop, foreach and fused kernels of an optimizer, and place its state on the right device."""

from __future__ import annotations

from typing import Literal

import torch
from torch.optim import Optimizer

from trimtab.errors import UsageError
from trimtab.train.data.device_prefetch import mover
from trimtab.train.optim.optimizer_dict import members

ON_HOST = ("step", "mu_product")
"""Entries of torch's optimizer state that stay on the CPU: each update reads them, which would wait for a device."""


def use_kernels(optimizer: Optimizer, kernels: Literal["loop", "foreach", "fused"]) -> None:
    """Run the updates of ``optimizer``, or of each of several, with ``kernels`` from the next update on.

    Raises:
        UsageError: the optimizer has no such kernels, or they do not support its parameters.
    """
    if reason := why_not(optimizer, kernels):
        raise UsageError(f"{reason} Leave OptimizerSettings(implementation=...) out.")
    for each in members(optimizer):
        for group in each.param_groups:
            group |= {name: kernels == name for name in ("foreach", "fused") if name in each.defaults}
        if hasattr(each, "_step_supports_amp_scaling"):  # set by fused=True: only fused kernels take the scale of float16
            each._step_supports_amp_scaling = kernels == "fused"
        for parameter, state in each.state.items():  # fused kernels count steps on the device, the others on the CPU
            if isinstance(step := state.get("step"), torch.Tensor) and not each.defaults.get("capturable"):
                state["step"] = step.to(parameter.device if kernels == "fused" else "cpu")


def move_state(optimizer: Optimizer) -> None:
    """Move the state of ``optimizer`` to the devices of its parameters, which may have moved since its last update.

    Entries in :data:`ON_HOST` stay on the CPU, unless the kernels of their group count on the device.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state, move = optimizer.state.get(parameter, {}), mover(parameter.device)
            counts = group.get("capturable") or group.get("fused")  # kernels that keep their counters on the device
            state.update({name: move(value) for name, value in state.items() if counts or name not in ON_HOST})


def why_not(optimizer: Optimizer, kernels: str) -> str | None:
    """Why ``optimizer``, or one of several, cannot run with ``kernels``, as a sentence; ``None`` if it can."""
    return next(filter(None, (_why_not(each, kernels) for each in members(optimizer))), None)


def _why_not(optimizer: Optimizer, kernels: str) -> str | None:
    name = type(optimizer).__name__
    if kernels != "loop" and kernels not in optimizer.defaults:
        return f"{name} has no {kernels} implementation."
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if kernels == "fused" and not all(torch.is_floating_point(parameter) for parameter in parameters):
        return f"The fused implementation of {name} takes floating-point parameters only, and some are not."
    if kernels == "fused" and optimizer.defaults.get("differentiable"):
        return f"{name} is differentiable, which its fused implementation is not."
    return None
