"""Peak memory of this process above its level at entry."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import os
import pathlib
import threading
from types import TracebackType
from typing import Self

import psutil
import torch

from trimtab.hardware.system import peak_rss_mb

_STATUS = pathlib.Path("/proc/self/status")
_CLEAR = pathlib.Path("/proc/self/clear_refs")
_INTERVAL = 0.002
"""Seconds between two samples if the kernel has no peak that can be reset."""
_SLACK_MB = 8.0
"""Tolerance in MB: the kernel updates peak and present level in batches, so they may differ right after a reset."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeakUse:
    """The highest memory use within a block, in MB (10**6 bytes)."""

    host_mb: float
    """Peak resident memory of the process above its level on entry, at least 0."""
    idle_mb: float
    """Resident memory on entry."""
    device_mb: float | None
    """Peak of torch's CUDA allocator above its level on entry, over all GPUs; ``None`` without one."""
    method: str
    """How the host's peak was measured."""


class PeakMemory:
    """Measures the peak memory of a block: ``with PeakMemory() as memory: ...``, then ``memory.result``.

    On entry, garbage is collected and free heap returned to the system, so that the block does not use memory that an earlier
    one left. Without ``collect`` it may, and entering takes no time.
    The peak is that of the whole process with all threads, so two measured blocks must not overlap.
    """

    def __init__(self, *, collect: bool = True) -> None:
        self._collect = collect
        self._result: PeakUse | None = None
        self._sampler: _Sampler | None = None
        self._idle = 0.0
        self._devices: list[int] = []

    @property
    def result(self) -> PeakUse:
        """The peaks of the block.

        Raises:
            RuntimeError: the block has not ended.
        """
        if self._result is None:
            raise RuntimeError("The block of PeakMemory has not ended, so its peak is not known yet.")
        return self._result

    def __enter__(self) -> Self:
        if self._collect:
            gc.collect()
            _trim_heap()
        self._devices = _allocated()
        for index in range(len(self._devices)):
            torch.cuda.reset_peak_memory_stats(index)
        if _reset_peak():
            self._idle = _kernel_peak_mb()
        else:
            self._idle = rss_mb()
            self._sampler = _Sampler()
            self._sampler.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._sampler is None:
            peak, method = _kernel_peak_mb(), "kernel high-water mark"
        else:
            peak, method = self._sampler.finish()
        before = self._devices or [0] * len(_allocated())  # the block may have initialized CUDA
        rises = [torch.cuda.max_memory_allocated(index) - level for index, level in enumerate(before)]
        self._result = PeakUse(
            host_mb=round(max(peak - self._idle, 0.0), 3),
            idle_mb=round(self._idle, 3),
            device_mb=round(sum(rises) / 1e6, 3) if rises else None,
            method=method,
        )


def rss_mb() -> float:
    """Resident memory of this process now, in MB (10**6 bytes)."""
    return float(_process(os.getpid()).memory_info().rss) / 1e6


@functools.cache
def _process(pid: int) -> psutil.Process:
    """The process; making the object takes longer than asking it."""
    return psutil.Process(pid)


class _Sampler(threading.Thread):
    """Samples the resident memory every two milliseconds, and uses the kernel's peak if the block raised it."""

    def __init__(self) -> None:
        super().__init__(name="trimtab-memory", daemon=True)
        self._done = threading.Event()
        self._lifetime_before = peak_rss_mb()
        self._peak = rss_mb()

    def run(self) -> None:
        """Sample until :meth:`finish`."""
        while not self._done.wait(_INTERVAL):
            self._peak = max(self._peak, rss_mb())

    def finish(self) -> tuple[float, str]:
        """The peak in MB, and how it was measured."""
        self._done.set()
        self.join()
        lifetime = peak_rss_mb()
        if lifetime > max(self._lifetime_before, self._peak):
            return lifetime, "lifetime high-water mark, which rose in the block"
        return max(self._peak, rss_mb()), f"samples every {_INTERVAL * 1e3:.0f} ms"


def _allocated() -> list[int]:
    """Bytes that torch holds on each GPU; empty while CUDA is unused, so that measuring does not initialize it."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return [torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())]


def _reset_peak() -> bool:
    """Reset the kernel's peak to the present level. Works on Linux only; some containers forbid or ignore it."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return 0 < _kernel_peak_mb() < rss_mb() + _SLACK_MB


def _kernel_peak_mb() -> float:
    """The kernel's peak in MB; 0 if it keeps none. /proc writes kB for 1024 bytes."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM:")), 0.0)


def _trim_heap() -> None:
    """Return free heap to the system, if the C library can."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # not glibc; Windows cannot open itself this way
        return
    trim(0)
