"""Average the gradients of a bucket over all processes with torch's communication hooks, and count bytes and waiting time."""

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
"""torch's communication hook for each value of ``distributed.communication`` but PowerSGD."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Gradients that are sent together, with the methods of DDP's ``GradBucket`` that torch's hooks call.

    Args:
        number: of the bucket, from 0, in the order of sending.
        flat: (n,), the gradients of ``parameters`` as :func:`flattened`, one after the other; it becomes their mean.
        last: the last bucket of the update.
    """

    number: int
    parameters: Sequence[torch.Tensor]
    flat: torch.Tensor
    last: bool

    def buffer(self) -> torch.Tensor:
        """All gradients, (n,)."""
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        """A view per parameter that is not empty: (rows, columns) for those of two dimensions or more, else (n,)."""
        parts = zip(self.parameters, torch.split(self.flat, [p.numel() for p in self.parameters]), strict=True)
        return [part.view(p.shape[_memory_order(p)[0]], -1) if p.dim() > 1 else part for p, part in parts if part.numel()]

    def index(self) -> int:
        """Its number."""
        return self.number

    def is_last(self) -> bool:
        """True for the last bucket of the update."""
        return self.last


class Exchange:
    """Averages one bucket after the other over all processes, in one order, through a hook of torch.

    Args:
        kind: ``distributed.communication``. Complex gradients are not compressed, because that would drop their imaginary part.
    """

    def __init__(self, kind: str | None) -> None:
        self.kind, self.size = kind, dist.get_world_size()
        self._power = PowerSgd()
        self.updates = 0
        self.bytes = self.waited_s = 0.0
        """Bytes that this process has sent in a ring all-reduce, and seconds that backward passes on a CPU waited for it."""

    def begin(self, bucket: Bucket) -> Future[torch.Tensor]:
        """Begin to average ``bucket``."""
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
        """Wait for the buckets of an update. On a GPU, its stream waits and this process does not."""
        began = time.perf_counter()
        for future in futures:
            future.wait()
        self.waited_s += time.perf_counter() - began
        self.updates += 1

    def reset(self) -> None:
        """Drop the errors of earlier compressed gradients. All processes must call it together."""
        self._power.reset()


def flattened(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The elements of ``value``, (n,), in the memory order of ``like``, which has the same shape."""
    return value.permute(_memory_order(like)).reshape(-1)


def unflattened(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`flattened`: a view of ``flat`` with the shape of ``like``."""
    order = _memory_order(like)
    return flat.view([like.shape[dim] for dim in order]).permute([order.index(dim) for dim in range(like.dim())])


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """The dimensions of ``tensor`` by falling stride; in their own order if it has gaps in memory."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return order if tensor.permute(order).is_contiguous() else list(range(tensor.dim()))
