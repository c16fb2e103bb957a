"""Clipping of gradients by value."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def clip_values(grads: Sequence[torch.Tensor], bound: float | None) -> None:
    """Bring every element of the gradients between ``-bound`` and ``bound``, in place; of shards each its own part."""
    if bound is None or not grads:
        return
    parts = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    torch._foreach_clamp_min_(parts, -bound)
    torch._foreach_clamp_max_(parts, bound)
