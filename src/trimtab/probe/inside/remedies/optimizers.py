"""Fused and foreach kernels of optimizers, and gradients that are freed instead of filled with zeros."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

FLAGS = ("foreach", "fused")


class _Kernels:
    """Sets the flags of every parameter group before each step, because a loaded checkpoint or an added group resets them."""

    def __init__(self) -> None:
        self.kernel: str | None = None
        self.hooked = False
        self.known: weakref.WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = weakref.WeakKeyDictionary()
        """Optimizer -> the flags that the script gave each group."""

    def switch(self, kernel: str | None) -> None:
        if kernel == self.kernel:
            return
        for optimizer, original in list(self.known.items()):
            self._restore(optimizer, original)
        self.known.clear()
        self.kernel = kernel
        if kernel is not None and not self.hooked:
            self.hooked = True
            register_optimizer_step_pre_hook(self._before)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.kernel is None or not _supports(optimizer, self.kernel):
            return
        wanted = {name: name == self.kernel for name in FLAGS if name in optimizer.defaults}
        groups = optimizer.param_groups
        if all(group.get(name) is value for group in groups for name, value in wanted.items()):
            return
        if optimizer not in self.known:
            self.known[optimizer] = []
            optimizer.register_state_dict_post_hook(self._restore_in_checkpoint)
        original = self.known[optimizer]
        for i, group in enumerate(groups):
            flags = {name: group.get(name) for name in wanted}
            if i == len(original):
                original.append(flags)
            elif flags != wanted:
                original[i] = flags
            group |= wanted
        _move_step_counts(optimizer, fused=self.kernel == "fused")

    def _restore(self, optimizer: Optimizer, original: list[dict[str, Any]]) -> None:
        for group, flags in zip(optimizer.param_groups, original, strict=False):
            group |= flags
        _move_step_counts(optimizer, fused=any(flags.get("fused") for flags in original))

    def _restore_in_checkpoint(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Write the flags of the script into a checkpoint."""
        for group, flags in zip(state["param_groups"], self.known.get(optimizer, ()), strict=False):
            group |= flags


def _supports(optimizer: Optimizer, kernel: str) -> bool:
    if kernel not in optimizer.defaults or optimizer.defaults.get("differentiable"):
        return False
    return kernel != "fused" or all(
        torch.is_floating_point(parameter) for group in optimizer.param_groups for parameter in group["params"]
    )


def _move_step_counts(optimizer: Optimizer, *, fused: bool) -> None:
    """Move step counts to where the kernel needs them: fused on the device, else on the CPU. Only fused takes a loss scale."""
    if hasattr(optimizer, "_step_supports_amp_scaling") or fused:
        optimizer._step_supports_amp_scaling = fused  # type: ignore[attr-defined]
    for parameter, state in optimizer.state.items():
        if isinstance(step := state.get("step"), torch.Tensor) and not optimizer.defaults.get("capturable"):
            device = parameter.device if fused else torch.device("cpu")
            state["step"] = step.to(device, torch.float32 if fused else step.dtype)


_kernels = _Kernels()
_frees = {"on": False, "installed": False}


def switch(settings: Mapping[str, Any]) -> None:
    """Apply ``optimizer`` and ``set_to_none``."""
    _kernels.switch(settings.get("optimizer"))
    _frees["on"] = bool(settings.get("set_to_none"))
    if _frees["on"] and not _frees["installed"]:
        _frees["installed"] = True
        for kind in (Optimizer, nn.Module):
            kind.zero_grad = _freeing(kind.zero_grad)  # type: ignore[method-assign]


def _freeing(zero_grad: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(zero_grad)
    def freeing(self: Any, set_to_none: bool = True) -> None:
        zero_grad(self, set_to_none=set_to_none or _frees["on"])

    return freeing
