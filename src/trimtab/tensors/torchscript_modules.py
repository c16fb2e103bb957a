"""TorchScript and exported modules inside an ``nn.Module``."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn


class ScriptModuleWrapper(nn.Module):
    """Holds a TorchScript module as a plain attribute: exporters fail on registered parameters that are no ``nn.Parameter``."""

    def __init__(self, script: torch.jit.ScriptModule) -> None:
        super().__init__()
        self.__dict__["script"] = script.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the TorchScript module."""
        return self.script(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        """Set the mode of the TorchScript module too."""
        self.__dict__["script"].train(mode)
        return super().train(mode)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the TorchScript module, such as a weight or another method."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            script = self.__dict__.get("script")
            if script is None:  # during a copy
                raise
            return getattr(script, name)


def wrap_script_modules(model: nn.Module) -> nn.Module:
    """Wrap each TorchScript module in ``model``, in place; returns ``model``, or its wrapper if it is one itself."""
    if isinstance(model, torch.jit.ScriptModule):
        return ScriptModuleWrapper(model)
    made = dict[torch.jit.ScriptModule, ScriptModuleWrapper]()  # a module may be registered several times
    for module in list(model.modules()):
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for name, child in module._modules.items():
            if isinstance(child, torch.jit.ScriptModule):
                module._modules[name] = made.setdefault(child, ScriptModuleWrapper(child))
    return model


BLOCKED = ("train", "eval")
"""Methods that torch replaces with functions that raise on exported modules."""


def allow_modes(model: nn.Module) -> None:
    """Let ``train()`` and ``eval()`` work on exported modules in ``model``, and set evaluation mode, as in their graphs."""
    found = [part for part in model.modules() if isinstance(part, fx.GraphModule) and not vars(part).keys().isdisjoint(BLOCKED)]
    for part in found:
        for name in BLOCKED:
            vars(part).pop(name, None)
    for part in found:
        part.eval()
