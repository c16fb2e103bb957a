"""TorchScript within a model of Python's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Beside(nn.Module):
    """Holds a script beside a module's registers: exporters would trip over parameters that are no ``nn.Parameter``."""

    def __init__(self, script: torch.jit.ScriptModule) -> None:
        super().__init__()
        self.__dict__["script"] = script.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the script."""
        return self.script(*args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        """Put the script into the same mode."""
        self.__dict__["script"].train(mode)
        return super().train(mode)

    def __getattr__(self, name: str) -> Any:
        """What else the script has, for the module around it may ask for a weight or another method."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            script = self.__dict__.get("script")
            if script is None:  # while it is copied
                raise
            return getattr(script, name)


def beside(model: nn.Module) -> nn.Module:
    """``model`` with every script that is registered within it, or is it, held beside the registers instead; in place."""
    if isinstance(model, torch.jit.ScriptModule):
        return Beside(model)
    made = dict[torch.jit.ScriptModule, Beside]()  # a part may stand in several places
    for module in list(model.modules()):
        if isinstance(module, torch.jit.ScriptModule):
            continue
        for name, child in module._modules.items():
            if isinstance(child, torch.jit.ScriptModule):
                module._modules[name] = made.setdefault(child, Beside(child))
    return model
