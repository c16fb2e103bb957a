"""Settings of the process: threads, anomaly mode, the allocator of the C library."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

_KEEP_FREED: Mapping[int, tuple[int, ...]] = {-1: (2**31 - 1,), -3: (2**30, 2**25)}
"""As in :func:`trimtab.hardware.system.keep_freed_memory`, which imports more than a script's process should."""


class _Threads:
    """``torch.set_num_threads`` that stores what the script asks for while other threads are set."""

    def __init__(self) -> None:
        self.given: int | None = None
        self.asked = torch.get_num_threads()
        self._set: Callable[[int], None] | None = None
        self._pid = os.getpid()

    def switch(self, threads: int | None) -> None:
        if self._set is None:
            if threads is None or multiprocessing.parent_process() is not None:  # a worker of a loader keeps its one thread
                return
            self._set, self.asked, self._pid = torch.set_num_threads, torch.get_num_threads(), os.getpid()
            torch.set_num_threads = self._requested  # type: ignore[assignment]
        if threads != self.given:
            self.given = threads
            self._set(self.asked if threads is None else threads)

    def _requested(self, threads: int) -> None:
        assert self._set is not None
        if self.given is None or os.getpid() != self._pid:  # forked workers of a loader ask for one thread
            self._set(threads)
        self.asked = int(threads)


class _Anomaly:
    """``torch.set_anomaly_enabled``, which every way of turning anomaly mode on calls, while the mode must stay off."""

    def __init__(self) -> None:
        self.off = False
        self.asked: tuple[bool, bool] = (False, True)
        self._set: Callable[..., None] | None = None

    def switch(self, off: bool) -> None:
        if self._set is None:
            if not off:
                return
            self.asked = (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
            self._set = torch.set_anomaly_enabled
            torch.set_anomaly_enabled = self._requested  # type: ignore[assignment]
        if off != self.off:
            self.off = off
            self._set(*((False, True) if off else self.asked))

    def _requested(self, mode: bool, check_nan: bool = True) -> None:
        assert self._set is not None
        self.asked = (bool(mode), bool(check_nan))
        if not self.off:
            self._set(mode, check_nan)


_threads, _anomaly = _Threads(), _Anomaly()
_kept = False


def threads() -> int:
    """torch's threads within an operator, as the script has them."""
    return torch.get_num_threads() if _threads.given is None else _threads.asked


def switch(settings: Mapping[str, Any]) -> None:
    """Apply ``threads``, ``debug_off`` and ``keep_freed``."""
    _threads.switch(settings.get("threads"))
    _anomaly.switch(bool(settings.get("debug_off")))
    if settings.get("keep_freed"):
        _keep_freed()


def _keep_freed() -> None:
    global _kept
    if _kept:
        return
    _kept = True
    library = ctypes.CDLL(None)
    for option, values in _KEEP_FREED.items() if hasattr(library, "mallopt") else ():
        any(library.mallopt(option, value) for value in values)
