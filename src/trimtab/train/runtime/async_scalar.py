"""A device scalar that is copied to pinned host memory asynchronously."""

from __future__ import annotations

import torch


class AsyncScalar:
    """The last scalar that was sent. Reading it does not wait for work that was queued on the device later.

    A scalar on a GPU is copied to pinned memory in stream order: ``tensor.item()`` would wait for everything in the stream.
    Read each scalar before the next is sent.

    Source: torch's notes on CUDA semantics, "Use pinned memory buffers" and "CUDA streams".
    """

    def __init__(self) -> None:
        self._number = torch.zeros(())
        self._copied: torch.cuda.Event | None = None

    def send(self, number: torch.Tensor) -> None:
        """Start copying ``number`` to the host."""
        if not number.is_cuda:
            self._number = number
            return
        if self._copied is None:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._number = torch.empty((), dtype=torch.float64, pin_memory=True)
        self._number.copy_(number.double(), non_blocking=True)
        self._copied.record(torch.cuda.current_stream(number.device))

    def read(self) -> float:
        """The scalar that was sent last; waits for its copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._number)
