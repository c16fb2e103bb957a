"""Average the gradients of a bucket over all processes with torch's communication hooks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

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
        flat: (n,), the gradients of ``parameters`` as in :func:`views`; it becomes their mean.
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
        return [
            part.view(p.shape[max(range(p.dim()), key=p.stride)], -1) if p.dim() > 1 else part  # rows: outermost in memory
            for p, part in parts
            if part.numel()
        ]

    def index(self) -> int:
        """Its number."""
        return self.number

    def is_last(self) -> bool:
        """True for the last bucket of the update."""
        return self.last


class Exchange:
    """Averages one bucket after the other over all processes, in one order, through a hook of torch.

    PowerSGD sends each matrix of gradients as ``p @ q.T`` of rank 4, found by one step of power iteration. The error of the
    product is added to the next gradient. The first two updates are sent whole. It pays on slow networks and for wide layers.
    It costs two products with each gradient, and the backward pass waits for each bucket.

    Source: Vogels et al. 2019, https://arxiv.org/abs/1905.13727

    Args:
        kind: ``distributed.communication``. Complex gradients are not compressed, because that would drop their imaginary part.
    """

    def __init__(self, kind: str | None) -> None:
        self.kind = kind
        self.reset()

    def reset(self) -> None:
        """Drop the errors of earlier compressed gradients. All processes must call it together."""
        self.power = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)

    def begin(self, bucket: Bucket) -> Future[torch.Tensor]:
        """Begin to average ``bucket``."""
        if self.kind == "powersgd" and bucket.flat.dtype in (torch.float32, torch.float64):
            return self._low_rank(bucket)
        return _HOOKS[self.kind if self.kind in _HOOKS and not bucket.flat.is_complex() else None](None, bucket)

    def _low_rank(self, bucket: Any) -> Future[torch.Tensor]:
        """The mean of ``bucket`` by PowerSGD."""
        state, index, device = self.power, bucket.number, bucket.flat.device
        whole = state.iter < state.start_powerSGD_iter
        draws = device.type == "cuda" and not whole and index not in state.p_memory_dict
        # torch's hook forks generators too, but changes the seed of GPUs. It sends from callbacks of futures, whose order
        # differs between processes, so that gloo would hang with two buckets at once.
        with torch.random.fork_rng(devices=[device] if draws else []):
            future = powerSGD_hook(state, bucket)
            future.wait()
        if not whole:  # a gradient that is nan spoils this update in all processes, but no later one
            state.error_dict[index].nan_to_num_(0.0, 0.0, 0.0)
            if not state.q_memory_dict[index].isfinite().all():
                del state.p_memory_dict[index], state.q_memory_dict[index]
        return future


def views(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A view of ``flat``, (n,) or longer, for each parameter, one after the other, in the memory order of the parameter."""
    sizes = [parameter.numel() for parameter in parameters]
    dense = [torch.empty_like(parameter, device="meta") for parameter in parameters]  # a parameter may have gaps in memory
    parts = zip(torch.split(flat[: sum(sizes)], sizes), dense, strict=True)
    return [part.as_strided(like.shape, like.stride()) for part, like in parts]
