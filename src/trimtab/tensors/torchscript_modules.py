"""TorchScript within a model of Python's."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn


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


REFUSING = ("train", "eval")
"""Methods in whose place torch puts functions that refuse to be called."""


def allow_modes(model: nn.Module) -> None:
    """Let the exported parts of ``model`` be put into evaluation mode like any other, and be in it: by their graph they are."""
    found = [
        part for part in model.modules() if isinstance(part, fx.GraphModule) and not vars(part).keys().isdisjoint(REFUSING)
    ]
    for part in found:
        for name in REFUSING:
            vars(part).pop(name, None)
    for part in found:
        part.eval()
