"""Whether two runs go the same way: their gradients, as their optimizers get them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

FLOOR = 0.01
"""Share of the whole gradient's norm below which that of a single parameter is not looked at closely: rounding is all there is
of some, as of a bias that goes into a normalisation."""


@contextlib.contextmanager
def seen(optimizer: Optimizer) -> Iterator[list[torch.Tensor | None]]:
    """A block that gets a copy of each parameter's gradient, as ``optimizer`` has it in the first update there."""
    found: list[torch.Tensor | None] = []

    def see(*_: Any) -> None:
        if not found:
            given = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
            found.extend(None if grad is None else grad.detach().clone() for grad in given)

    handle = optimizer.register_step_pre_hook(see)
    try:
        yield found
    finally:
        handle.remove()


def apart(want: Sequence[torch.Tensor | None], got: Sequence[torch.Tensor | None]) -> float:
    """The largest difference of a parameter's gradient, relative to its norm; 0 where one of the two has made no update.

    One that is not there is nought: compiled code makes zeros of some.
    """
    pairs = list(zip(want, got, strict=True)) if want and got else []
    sizes = [0.0 if one is None else _norm(one) for one, _ in pairs]
    floor = FLOOR * sum(size**2 for size in sizes) ** 0.5
    return max((_difference(*pair) / (max(size, floor) or 1.0) for pair, size in zip(pairs, sizes, strict=True)), default=0.0)


def _difference(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    if one is None or other is None:
        there = other if one is None else one
        return 0.0 if there is None else _norm(there)
    if one.layout != other.layout:
        one, other = one.to_dense(), other.to_dense()
    return _norm(one - other)


def _norm(tensor: torch.Tensor) -> float:
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return float(torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32)))
