"""Gradients of parameters: as tensors that can be changed in place, left out, clipped by value, or freed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from trimtab.train.loss.adapter import Weight


def known_to_be_nothing(weight: Weight) -> bool:
    """Whether a loss is a mean over nothing, as far as is known without waiting for a GPU."""
    return (not isinstance(weight, torch.Tensor) or weight.device.type == "cpu") and not weight


@contextlib.contextmanager
def left_out(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """A block whose backward pass adds nothing to gradients; it runs because other processes may wait for its exchange.

    The gradients of a mean over nothing are NaN, even if the mean is multiplied by 0.
    """
    hooks = [p.register_hook(torch.zeros_like) for p in parameters if p.requires_grad]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """The gradients, in memory that can be changed in place: of a sparse gradient, as of an embedding, its values."""
    found = []
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            if grad.is_sparse:
                grad = parameter.grad = grad.coalesce()  # each row once
            found.append(grad._values() if grad.is_sparse else grad)
    return found


def discard(parameters: Iterable[nn.Parameter]) -> None:
    """Free the gradients."""
    for parameter in parameters:
        parameter.grad = None


def clip_values(grads: Sequence[torch.Tensor], bound: float | None) -> None:
    """Bring every element of the gradients between ``-bound`` and ``bound``, in place; of shards each its own part."""
    if bound is None or not grads:
        return
    parts = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    torch._foreach_clamp_min_(parts, -bound)
    torch._foreach_clamp_max_(parts, bound)
