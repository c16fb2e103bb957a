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


class _Setter:
    """A function of torch that sets a state of the process. While another state is held, it keeps what the script asks for."""

    def __init__(self, name: str, now: Callable[[], tuple[Any, ...]]) -> None:
        self.held: tuple[Any, ...] | None = None
        self.asked: tuple[Any, ...] = ()
        self._name, self._now, self._pid = name, now, os.getpid()
        self._set: Callable[..., None] | None = None

    def switch(self, held: tuple[Any, ...] | None) -> None:
        if self._set is None:
            if held is None:
                return
            self._set, self.asked, self._pid = getattr(torch, self._name), self._now(), os.getpid()
            setattr(torch, self._name, self._requested)
        if held != self.held:
            self.held = held
            self._set(*(self.asked if held is None else held))

    def _requested(self, *asked: Any, **named: Any) -> None:
        assert self._set is not None
        if self.held is None or os.getpid() != self._pid:  # forked workers of a loader ask for one thread
            self._set(*asked, **named)
        self.asked = (*asked, *named.values())


_threads = _Setter("set_num_threads", lambda: (torch.get_num_threads(),))
_anomaly = _Setter("set_anomaly_enabled", lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()))
"""Every way of turning anomaly mode on calls it."""
_kept = False


def threads() -> int:
    """torch's threads within an operator, as the script has them."""
    return torch.get_num_threads() if _threads.held is None else int(_threads.asked[0])


def switch(settings: Mapping[str, Any]) -> None:
    """Apply ``threads``, ``debug_off`` and ``keep_freed``."""
    if multiprocessing.parent_process() is None:  # a worker of a loader keeps its one thread
        _threads.switch((settings["threads"],) if settings.get("threads") else None)
    _anomaly.switch((False, True) if settings.get("debug_off") else None)
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
