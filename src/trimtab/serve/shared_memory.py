"""Bodies of large frames in memory that two processes share, so that they are not copied through a socket.

Each direction has memory of its own. An instance holds one batch at a time, so that a body is read before the next is written.
Measured on two cores, there and back: 0.1 MB 0.07 instead of 0.16 ms, 1 MB 0.2 instead of 0.8 ms, 20 MB 9 instead of 21 ms.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from typing import Self

from trimtab.serve.frames import Bytes, aligned

SHARED_BYTES = 128 * 1024
"""Bodies from this size on are shared."""


class SharedMemory:
    """Memory behind a file descriptor, which is inherited. It grows with the largest body, and never shrinks."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None

    @classmethod
    def create(cls) -> Self | None:
        """New memory; ``None`` on a system that has no anonymous files."""
        if not hasattr(os, "memfd_create"):
            return None
        return cls(os.memfd_create("trimtab"))

    def write(self, parts: Sequence[Sequence[Bytes]]) -> int:
        """Write a body: one sequence of buffers for each tensor. Returns its size."""
        total = sum(aligned(sum(map(len, buffers))) for buffers in parts)
        view, offset = self._mapped(total, grow=True), 0
        for buffers in parts:
            start = offset
            for buffer in buffers:
                view[offset : offset + len(buffer)] = buffer
                offset += len(buffer)
            offset = start + aligned(offset - start)
        return total

    def view(self, size: int) -> memoryview:
        """The body of ``size`` bytes that the other process has written.

        Raises:
            ValueError: there is less.
        """
        return self._mapped(size, grow=False)[:size]

    def _mapped(self, size: int, *, grow: bool) -> memoryview:
        if self._map is None or len(self._map) < size:
            there = os.fstat(self.descriptor).st_size
            if there < size:
                if not grow:
                    raise ValueError(f"A body of {size} bytes is said to be in {there} bytes of shared memory.")
                there = 1 << size.bit_length()
                os.ftruncate(self.descriptor, there)
            self._map = mmap.mmap(self.descriptor, there)  # an old one is freed when nothing refers to it
        return memoryview(self._map)

    def close(self) -> None:
        """Give up the memory."""
        self._map = None
        with contextlib.suppress(OSError):
            os.close(self.descriptor)
