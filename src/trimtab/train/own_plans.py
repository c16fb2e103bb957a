"""A thread in which convolutions on a GPU are chosen anew.

torch keeps what cuDNN chose for a shape, per thread, and does not look again there, whatever its flag says later. So two ways
to choose can be compared only in two threads, and the thread of the run must not have chosen before.

Source: ``benchmark_cache`` in https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cudnn/Conv_v8.cpp
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class Here:
    """Runs work where it is called."""

    def __call__(self, work: Callable[[], T]) -> T:
        """What ``work`` gives, or raises."""
        return work()


class OwnPlans(Here):
    """Runs work for ``device`` in a thread of its own, backward passes too; the caller waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trimtab-plans")

    def __call__(self, work: Callable[[], T]) -> T:
        """What ``work`` gives, or raises."""
        return self._thread.submit(self._here, work).result()

    def _here(self, work: Callable[[], T]) -> T:
        on_gpu = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
        with on_gpu, torch.autograd.set_multithreading_enabled(False):  # else one thread goes backward for all others
            return work()


def apart(device: torch.device, wanted: bool = True) -> Here:
    """Where work for ``device`` leaves no choice of cuDNN's behind, if that is ``wanted``: on a GPU, a thread of its own."""
    return OwnPlans(device) if wanted and device.type == "cuda" else Here()
