"""Settings of the process: threads, anomaly mode, the allocator of the C library."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

_KEEP_FREED: Mapping[int, tuple[int, ...]] = {-1: (2**31 - 1,), -3: (2**30, 2**25)}
"""Options of mallopt, as in :func:`trimtab.hardware.system.keep_freed_memory`, whose imports are too slow for a script."""


class _Setter:
    """Override of a process-wide setting of torch. While it is on, calls of the script are recorded and applied afterwards."""

    def __init__(self, name: str, current: Callable[[], tuple[Any, ...]]) -> None:
        self.override: tuple[Any, ...] | None = None
        self.requested: tuple[Any, ...] = ()
        self._name, self._current, self._pid = name, current, os.getpid()
        self._set: Callable[..., None] | None = None

    def switch(self, override: tuple[Any, ...] | None) -> None:
        if self._set is None:
            if override is None:
                return
            self._set, self.requested, self._pid = getattr(torch, self._name), self._current(), os.getpid()
            setattr(torch, self._name, self._requested)
        if override != self.override:
            self.override = override
            self._set(*(self.requested if override is None else override))

    def _requested(self, *requested: Any, **named: Any) -> None:
        assert self._set is not None
        if self.override is None or os.getpid() != self._pid:  # forked loader workers set one thread
            self._set(*requested, **named)
        self.requested = (*requested, *named.values())


_threads = _Setter("set_num_threads", lambda: (torch.get_num_threads(),))
_anomaly = _Setter("set_anomaly_enabled", lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()))
"""All ways to turn anomaly mode on or off call this function."""
_keeps_freed = False


def threads() -> int:
    """The number of intra-operator threads that the script has set."""
    return torch.get_num_threads() if _threads.override is None else int(_threads.requested[0])


def switch(settings: Mapping[str, Any]) -> None:
    """Apply ``threads``, ``debug_off`` and ``keep_freed``."""
    if multiprocessing.parent_process() is None:  # loader workers keep one thread
        _threads.switch((settings["threads"],) if settings.get("threads") else None)
    _anomaly.switch((False, True) if settings.get("debug_off") else None)
    if settings.get("keep_freed"):
        _keep_freed()


def _keep_freed() -> None:
    global _keeps_freed
    if _keeps_freed:
        return
    _keeps_freed = True
    library = ctypes.CDLL(None)
    for option, values in _KEEP_FREED.items() if hasattr(library, "mallopt") else ():
        any(library.mallopt(option, value) for value in values)
