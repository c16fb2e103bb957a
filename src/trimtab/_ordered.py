"""Rows of whole numbers that mean something in their order only: where each bag of an embedding begins, or to which segment a
row belongs. In another order they are no input of the model's, and what a model makes of them proves nothing."""

from __future__ import annotations

import torch

from trimtab._ties import is_discrete


def ordered(leaf: torch.Tensor) -> bool:
    """Whether ``leaf`` is a row of whole numbers that rise."""
    if leaf.dim() != 1 or len(leaf) < 2 or not is_discrete(leaf.dtype) or leaf.dtype == torch.bool:
        return False
    return bool((leaf[1:] >= leaf[:-1]).all() and leaf[0] < leaf[-1])


def stretched(leaf: torch.Tensor, size: int) -> torch.Tensor:
    """The first ``size`` values of an :func:`ordered` row, the last one repeated where there are fewer."""
    return leaf[torch.arange(size, device=leaf.device).clamp(max=len(leaf) - 1)]


def slower(leaf: torch.Tensor) -> torch.Tensor:
    """Another row of the same kind: the first half of an :func:`ordered` one, each value twice."""
    return leaf[torch.arange(len(leaf), device=leaf.device) // 2]


def redrawn(leaf: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Another row of the same kind: the values of an :func:`ordered` one at ``index`` in their order, after its first."""
    return torch.cat([leaf[:1], leaf[index].sort().values[1:]])
