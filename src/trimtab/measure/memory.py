"""Peak memory: how far this process rose above where it was."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import pathlib
import threading
from types import TracebackType
from typing import Self

import psutil
import torch

from trimtab.hardware.system import lifetime_mb

_STATUS = pathlib.Path("/proc/self/status")
_CLEAR = pathlib.Path("/proc/self/clear_refs")
_INTERVAL = 0.002
"""Seconds between two looks where the kernel keeps no mark that can be reset."""
_SLACK_MB = 8.0
"""The kernel keeps the mark and the present level in batches, so the two may differ by some MB right after a reset."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeakUse:
    """The highest memory use within a block, in MB (10**6 bytes)."""

    host_mb: float
    """Peak resident memory of the process above its level on entry, at least 0."""
    idle_mb: float
    """That level."""
    device_mb: float | None
    """Peak of torch's CUDA allocator above its level on entry, over all GPUs; ``None`` without one."""
    method: str
    """How the host's peak was found."""


class PeakMemory:
    """Measures the block it wraps: ``with PeakMemory() as memory: ...``, then ``memory.result``.

    Garbage is collected and free heap given back on entry, so that the block is not served from what an earlier one left;
    without ``collect`` it may be, and entering costs nothing.
    It sees the whole process with all its threads; two blocks at a time spoil each other, so they must not overlap.
    """

    def __init__(self, *, collect: bool = True) -> None:
        self._collect = collect
        self._result: PeakUse | None = None
        self._sampler: _Sampler | None = None
        self._idle = 0.0
        self._devices: list[int] = []

    @property
    def result(self) -> PeakUse:
        """What the block used.

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
        if _reset_mark():
            self._idle = _mark_mb()
        else:
            self._idle = rss_mb()
            self._sampler = _Sampler()
            self._sampler.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._sampler is None:
            peak, method = _mark_mb(), "kernel high-water mark"
        else:
            peak, method = self._sampler.finish()
        before = self._devices or [0] * len(_allocated())  # the block itself may have been the first to use CUDA
        rises = [torch.cuda.max_memory_allocated(index) - level for index, level in enumerate(before)]
        self._result = PeakUse(
            host_mb=round(max(peak - self._idle, 0.0), 3),
            idle_mb=round(self._idle, 3),
            device_mb=round(sum(rises) / 1e6, 3) if rises else None,
            method=method,
        )


def rss_mb() -> float:
    """Resident memory of this process now, in MB (10**6 bytes)."""
    return float(psutil.Process().memory_info().rss) / 1e6


class _Sampler(threading.Thread):
    """Looks at the resident memory every two milliseconds; the operating system's own mark helps where the block set it."""

    def __init__(self) -> None:
        super().__init__(name="trimtab-memory", daemon=True)
        self._done = threading.Event()
        self._mark = lifetime_mb()
        self._peak = rss_mb()

    def run(self) -> None:
        """Sample until :meth:`finish`."""
        while not self._done.wait(_INTERVAL):
            self._peak = max(self._peak, rss_mb())

    def finish(self) -> tuple[float, str]:
        """The peak in MB, and how it was found."""
        self._done.set()
        self.join()
        lifetime = lifetime_mb()
        if lifetime > max(self._mark, self._peak):
            return lifetime, "lifetime high-water mark, which rose in the block"
        return max(self._peak, rss_mb()), f"samples every {_INTERVAL * 1e3:.0f} ms"


def _allocated() -> list[int]:
    """Bytes that torch holds on each GPU; empty while CUDA was not used, so that measuring does not start it."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return [torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count())]


def _reset_mark() -> bool:
    """Bring the kernel's high-water mark down to now. Only Linux can; some containers forbid it, others just ignore it."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return 0 < _mark_mb() < rss_mb() + _SLACK_MB


def _mark_mb() -> float:
    """The kernel's high-water mark in MB; 0 where it keeps none. /proc writes kB for 1024 bytes."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("VmHWM:")), 0.0)


def _trim_heap() -> None:
    """Give free heap back to the system, where the C library can."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # not glibc; Windows cannot open itself this way
        return
    trim(0)
