"""A number that a device is still computing, for a host that goes on meanwhile."""

from __future__ import annotations

import torch


class AsyncScalar:
    """Keeps the last number that was sent, to be read without waiting for what the device was given to do after it.

    From a GPU it is copied as soon as it is there, into page-locked memory: to ask the GPU for it later would mean to wait
    until everything is done that stands in the stream by then. One is read before the next is sent.

    Source: torch's notes on CUDA semantics, "Use pinned memory buffers" and "CUDA streams".
    """

    def __init__(self) -> None:
        self._number = torch.zeros(())
        self._copied: torch.cuda.Event | None = None

    def send(self, number: torch.Tensor) -> None:
        """Have ``number`` on its way to the host."""
        if not number.is_cuda:
            self._number = number
            return
        if self._copied is None:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._number = torch.empty((), dtype=torch.float64, pin_memory=True)
        self._number.copy_(number.double(), non_blocking=True)
        self._copied.record(torch.cuda.current_stream(number.device))

    def read(self) -> float:
        """What was sent last; waits until it is here."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._number)
