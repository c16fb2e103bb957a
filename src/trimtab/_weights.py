"""What a model learned, wherever it keeps it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

HALVES = (torch.float16, torch.bfloat16)
ROUNDINGS = 32
"""Times the machine epsilon of its weights that a right form of a half-precision model may be off by."""


def weights(model: nn.Module) -> Iterator[torch.Tensor]:
    """All parameters of ``model``, those of TorchScript that a module holds beside its registers too."""
    yield from model.parameters()
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.jit.ScriptModule):
                yield from value.parameters()


def tolerance(model: nn.Module, least: float) -> float:
    """What two right forms of ``model`` may differ by, relative to the largest value: ``least``, which is for float32, or what
    some roundings of its half-precision weights come to."""
    return max((ROUNDINGS * torch.finfo(w.dtype).eps for w in weights(model) if w.dtype in HALVES), default=least)
