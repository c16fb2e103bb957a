"""Modules that torch.export makes."""

from __future__ import annotations

from torch import fx, nn

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
