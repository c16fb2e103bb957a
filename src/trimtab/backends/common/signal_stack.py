"""Restore this thread's signal stack after calls of a library that replaces it."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator


class _Stack(ctypes.Structure):
    """``stack_t`` of Linux's ``signal.h``. Other systems order the last two fields differently, but do not use it."""

    _fields_ = (("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


_DISABLED = 2
"""``SS_DISABLE``: signal handlers run on the thread's normal stack."""


@contextlib.contextmanager
def signal_stack_kept() -> Iterator[None]:
    """Restore the thread's signal stack after the block.

    Each CPU plug-in of OpenVINO sets a signal stack, and restores the previous one when it ends. If two plug-ins do not end in
    reverse order, a freed stack remains, and the next signal that Python handles, such as Ctrl-C, causes a segmentation fault.
    Source: ``SigAltStackSetup``, https://github.com/openvinotoolkit/openvino/pull/11894
    """
    if sys.platform != "linux":
        yield
        return
    sigaltstack = ctypes.CDLL(None, use_errno=True).sigaltstack
    before = _Stack()
    known = sigaltstack(None, ctypes.byref(before)) == 0
    try:
        yield
    finally:
        # the old stack may be too small by now: after matrix tiles (AMX) are enabled, a signal saves more state
        if not known or sigaltstack(ctypes.byref(before), None) != 0:
            sigaltstack(ctypes.byref(_Stack(flags=_DISABLED)), None)
