"""PowerSGD, the low-rank compression of gradients: torch's hook, made safe for gloo."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future


class PowerSgd:
    """Sends each matrix of gradients as ``p @ q.T`` of rank ``rank``, found by one step of power iteration.

    The error of the product is added to the next gradient. The first two updates are sent whole. PowerSGD pays on slow networks
    and for wide layers. It costs two products with each gradient, and the backward pass waits for each bucket: torch's hook
    sends from callbacks of futures, whose order differs between processes, so that gloo would hang with two buckets at once.

    Source: Vogels et al. 2019, https://arxiv.org/abs/1905.13727
    """

    def __init__(self, rank: int = 4) -> None:
        self.rank = rank
        self.reset()

    def reset(self) -> None:
        """Drop the errors of earlier gradients. All processes must call it together."""
        self._state = PowerSGDState(None, matrix_approximation_rank=self.rank, start_powerSGD_iter=2)

    def __call__(self, bucket: Any) -> tuple[Future[torch.Tensor], int]:
        """The mean of ``bucket`` over all processes, and the bytes that this process has reduced for it."""
        state, flat, index = self._state, bucket.buffer(), bucket.index()
        whole, before = state.iter < state.start_powerSGD_iter, state.total_numel_after_compression
        draws = flat.is_cuda and not whole and index not in state.p_memory_dict
        with torch.random.fork_rng(
            devices=[flat.device] if draws else []
        ):  # torch's hook forks too, but changes the seed of GPUs
            future = powerSGD_hook(state, bucket)
            future.wait()
        if whole:
            return future, flat.nbytes
        # A gradient that is nan spoils this update in all processes, but no later one.
        state.error_dict[index].nan_to_num_(0.0, 0.0, 0.0)
        if not state.q_memory_dict[index].isfinite().all():
            del state.p_memory_dict[index], state.q_memory_dict[index]
        return future, (state.total_numel_after_compression - before) * flat.element_size()
