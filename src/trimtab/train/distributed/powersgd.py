"""Gradients cross as products of two thin matrices: torch's PowerSGD, so that gloo takes it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future


class PowerSgd:
    """Each matrix of gradients crosses as ``p @ q.T`` of rank ``rank``, found by one step of power iteration.

    What the product misses is added to the next gradient. The first two updates cross whole. Pays on slow networks and for wide
    layers; it costs two products with each gradient, and the backward pass waits for each bucket. torch's hook sends from
    the callbacks of its futures. With two buckets under way the order of those differs between processes, and gloo hangs. So
    each bucket has crossed before this returns.

    Source: Vogels et al. 2019, https://arxiv.org/abs/1905.13727
    """

    def __init__(self, rank: int = 4) -> None:
        self.rank = rank
        self.reset()

    def reset(self) -> None:
        """Begin anew, with nothing left out. All processes do it at once."""
        self._state = PowerSGDState(None, matrix_approximation_rank=self.rank, start_powerSGD_iter=2)

    def __call__(self, bucket: Any) -> tuple[Future[torch.Tensor], int]:
        """The mean of ``bucket`` over all processes, and the bytes that each put into a sum for it."""
        state, flat, index = self._state, bucket.buffer(), bucket.index()
        whole, before = state.iter < state.start_powerSGD_iter, state.total_numel_after_compression
        draws = flat.is_cuda and not whole and index not in state.p_memory_dict
        with torch.random.fork_rng(devices=[flat.device] if draws else []):  # torch's own fork leaves GPUs with another seed
            future = powerSGD_hook(state, bucket)
            future.wait()
        if whole:
            return future, flat.nbytes
        # A gradient that is no number spoils this update, in all processes, and none after it.
        state.error_dict[index].nan_to_num_(0.0, 0.0, 0.0)
        if not state.q_memory_dict[index].isfinite().all():
            del state.p_memory_dict[index], state.q_memory_dict[index]
        return future, (state.total_numel_after_compression - before) * flat.element_size()
