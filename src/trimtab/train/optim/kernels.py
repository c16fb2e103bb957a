"""Which of torch's implementations carries out an optimizer, and where its state lies."""

from __future__ import annotations

from typing import Literal

import torch
from torch.optim import Optimizer

from trimtab.errors import UsageError
from trimtab.train.data.device_prefetch import mover

ON_HOST = ("step", "mu_product")
"""What torch's optimizers, NAdam among them, count up there: each update reads it, and would wait for a device."""


def use_kernels(optimizer: Optimizer, kernels: Literal["loop", "foreach", "fused"]) -> None:
    """Have ``optimizer`` run its updates with ``kernels`` from the next one on, whatever ran those before.

    Raises:
        UsageError: it has no such implementation, or none for these parameters.
    """
    if reason := why_not(optimizer, kernels):
        raise UsageError(f"{reason} Leave OptimizerSettings(implementation=...) out.")
    for group in optimizer.param_groups:
        group |= {name: kernels == name for name in ("foreach", "fused") if name in optimizer.defaults}
    if hasattr(optimizer, "_step_supports_amp_scaling"):  # of one made with fused=True: only those kernels take float16's scale
        optimizer._step_supports_amp_scaling = kernels == "fused"
    for parameter, state in optimizer.state.items():  # fused kernels count steps on the device, the others on the host
        if isinstance(step := state.get("step"), torch.Tensor) and not optimizer.defaults.get("capturable"):
            state["step"] = step.to(parameter.device if kernels == "fused" else "cpu")


def bring_state(optimizer: Optimizer) -> None:
    """Put the state of ``optimizer`` where its parameters are, which may have come to a GPU after its last update.

    What is :data:`ON_HOST` stays there, unless the kernels are such as count on the device.
    """
    for group in optimizer.param_groups:
        counts = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            state, move = optimizer.state.get(parameter, {}), mover(parameter.device)
            state.update({name: move(value) for name, value in state.items() if name not in ON_HOST or counts})


def why_not(optimizer: Optimizer, kernels: str) -> str | None:
    """Why ``optimizer`` cannot run with ``kernels``, in a sentence."""
    name = type(optimizer).__name__
    if kernels != "loop" and kernels not in optimizer.defaults:
        return f"{name} has no {kernels} implementation."
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if kernels == "fused" and not all(torch.is_floating_point(parameter) for parameter in parameters):
        return f"The fused implementation of {name} takes floating-point parameters only, and some are not."
    if kernels == "fused" and optimizer.defaults.get("differentiable"):
        return f"{name} is differentiable, which its fused implementation is not."
    return None
