"""What a model learned, wherever it keeps it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

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


def is_composed(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is made of other tensors and has no memory of its own, as the quantized weights of torchao are."""
    return is_traceable_wrapper_subclass(tensor)


def parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that ``tensor`` is made of: itself, or what stands inside of one that is composed."""
    if not is_composed(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from parts(getattr(tensor, name))


def tolerance(model: nn.Module, least: float) -> float:
    """What two right forms of ``model`` may differ by, relative to the largest value: ``least``, which is for float32, or what
    some roundings of its half-precision weights come to."""
    return max((ROUNDINGS * torch.finfo(w.dtype).eps for w in weights(model) if w.dtype in HALVES), default=least)
