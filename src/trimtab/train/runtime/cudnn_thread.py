"""A thread in which convolutions on a GPU are chosen anew.

torch keeps what cuDNN chose for a shape, per thread, and does not look again there, whatever its flag says later. So two ways
to choose can be compared only in two threads, and the thread of the run must not have chosen before.

Source: ``benchmark_cache`` in https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cudnn/Conv_v8.cpp
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

T = TypeVar("T")
LOOK_S = 0.1
"""A thread that waits hears of an interrupt only so often: the work may itself wait for one of these."""


class Here:
    """Runs work where it is called."""

    def __call__(self, work: Callable[[], T]) -> T:
        """What ``work`` gives, or raises."""
        return work()


class OwnPlans(Here):
    """Runs work for ``device`` in a thread of its own, backward passes too; the caller waits for it.

    There, too, are the stream and the device for new tensors that the caller has, which torch keeps per thread. An interrupt
    ends the work as if it had come there: nothing goes on once the caller does.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trimtab-plans")
        self._name = self._thread.submit(threading.get_ident).result()

    def __call__(self, work: Callable[[], T]) -> T:
        """What ``work`` gives, or raises."""
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        done = self._thread.submit(contextvars.copy_context().run, self._here, work, stream, torch.get_default_device())
        try:
            while not wait([done], LOOK_S).done:
                pass
            return done.result()
        finally:
            if not done.done():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._name), ctypes.py_object(KeyboardInterrupt))
                wait([done])
            del done  # which an exception would refer to, by this frame, and it to the exception

    def _here(self, work: Callable[[], T], stream: torch.cuda.Stream | None, new: torch.device) -> T:
        on_gpu = contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)  # its device becomes the current one
        made = contextlib.nullcontext() if new.type == "cpu" else new
        with on_gpu, made, torch.autograd.set_multithreading_enabled(False):  # else one thread goes backward for all others
            return work()


def thread_for(device: torch.device, wanted: bool = True) -> Here:
    """Where work for ``device`` leaves no choice of cuDNN's behind, if that is ``wanted``: on a GPU, a thread of its own."""
    return OwnPlans(device) if wanted and device.type == "cuda" else Here()
