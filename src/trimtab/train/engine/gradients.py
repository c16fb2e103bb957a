"""Gradients of parameters: collect them as tensors, replace them with zeros, clip them by value, free them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from trimtab.train.loss.adapter import Weight


def has_zero_weight(weight: Weight) -> bool:
    """Whether a loss is a mean over nothing; ``False`` if reading ``weight`` would wait for a GPU."""
    return (not isinstance(weight, torch.Tensor) or weight.device.type == "cpu") and not weight


@contextlib.contextmanager
def zeroed_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """A block whose backward pass adds zeros to gradients; it runs because other processes may wait for its exchange.

    The gradients of a mean over nothing are NaN, even if the mean is multiplied by 0.
    """
    hooks = [p.register_hook(torch.zeros_like) for p in parameters if p.requires_grad]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """The gradients, in memory that can be changed in place; for a sparse gradient, as of an embedding, its values."""
    found = []
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            if grad.is_sparse:
                parameter.grad = grad.coalesce()  # each row once
                grad = parameter.grad._values()
            found.append(grad)
    return found


def discard(parameters: Iterable[nn.Parameter]) -> None:
    """Free the gradients."""
    for parameter in parameters:
        parameter.grad = None


def clip_values(grads: Sequence[torch.Tensor], bound: float | None) -> None:
    """Clamp every element of the gradients to ``-bound`` ... ``bound``, in place; with FSDP, of the local shards."""
    if bound is None or not grads:
        return
    parts = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    torch._foreach_clamp_min_(parts, -bound)
    torch._foreach_clamp_max_(parts, bound)
