"""How the gradients of one bucket become their mean over all processes, and what that costs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook
from torch.futures import Future

from trimtab.train.distributed.powersgd import PowerSgd

_HOOKS: dict[str | None, Callable[[Any, Any], Future[torch.Tensor]]] = {
    None: allreduce_hook,
    "float16": fp16_compress_hook,
    "bfloat16": bf16_compress_hook,
}
"""torch's communication hooks for what ``distributed.communication`` asks for."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Gradients that cross together, with what torch's hooks ask of a bucket of DDP's.

    Args:
        number: of the bucket; from 0, in the order in which they cross.
        flat: the gradients of ``parameters`` as :func:`in_a_row`, one after the other; it becomes their mean.
        last: whether no other bucket of the update follows.
    """

    number: int
    parameters: Sequence[torch.Tensor]
    flat: torch.Tensor
    last: bool

    def buffer(self) -> torch.Tensor:
        """All the gradients."""
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        """Views of them: matrices, (rows, columns), where the parameter has two dimensions or more; none of empty ones."""
        parts = zip(self.parameters, torch.split(self.flat, [p.numel() for p in self.parameters]), strict=True)
        return [part.view(p.shape[_order(p)[0]], -1) if p.dim() > 1 else part for p, part in parts if part.numel()]

    def index(self) -> int:
        """Its number."""
        return self.number

    def is_last(self) -> bool:
        """Whether no other bucket of the update follows."""
        return self.last


class Exchange:
    """The mean of one bucket after the other, in the same order in all processes, through a hook of torch's.

    Args:
        kind: ``distributed.communication``. Complex gradients cross whole, because compressed ones would lose a part.
    """

    def __init__(self, kind: str | None) -> None:
        self.kind, self.size = kind, dist.get_world_size()
        self._power = PowerSgd()
        self.updates = 0
        self.bytes = self.waited_s = 0.0
        """What this process has sent, as a ring sends it; and how long the backward passes stood still for it (on a CPU)."""

    def begin(self, bucket: Bucket) -> Future[torch.Tensor]:
        """Begin to bring ``bucket`` to all."""
        began, flat = time.perf_counter(), bucket.flat
        if self.kind == "powersgd" and flat.dtype in (torch.float32, torch.float64):
            future, count = self._power(bucket)
        else:
            kind = self.kind if self.kind in _HOOKS and not flat.is_complex() else None
            future, count = _HOOKS[kind](None, bucket), flat.nbytes if kind is None else 2 * flat.numel()
        self.bytes += 2 * (self.size - 1) * count / self.size
        self.waited_s += time.perf_counter() - began
        return future

    def land(self, futures: Iterable[Future[torch.Tensor]]) -> None:
        """Wait for the buckets of an update; on a GPU its stream waits for them, and this process does not."""
        began = time.perf_counter()
        for future in futures:
            future.wait()
        self.waited_s += time.perf_counter() - began
        self.updates += 1

    def reset(self) -> None:
        """Forget what was left out of earlier gradients. All processes do it at once."""
        self._power.reset()


def in_a_row(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The numbers of ``value``, (n,), in the order in which ``like``, of the same shape, lies in memory."""
    return value.permute(_order(like)).reshape(-1)


def shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`in_a_row`; a view."""
    order = _order(like)
    return flat.view([like.shape[dim] for dim in order]).permute([order.index(dim) for dim in range(like.dim())])


def _order(tensor: torch.Tensor) -> list[int]:
    """The dimensions of ``tensor``, the one with the longest stride first; as they are where it has gaps in memory."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return order if tensor.permute(order).is_contiguous() else list(range(tensor.dim()))
