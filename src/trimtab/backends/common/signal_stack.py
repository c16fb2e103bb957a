"""The memory that this thread's signal handlers run on, kept whole while a library that replaces it is called."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator


class _Stack(ctypes.Structure):
    """``stack_t`` of ``signal.h``; its last two fields come in the other order on other systems, which never get here."""

    _fields_ = (("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


_DISABLED = 2
"""``SS_DISABLE``: handlers run on the thread's ordinary stack."""


@contextlib.contextmanager
def signal_stack_kept() -> Iterator[None]:
    """Give this thread the signal stack back that it had, or none.

    Each of OpenVINO's CPU plug-ins sets one, and puts back what it found when it ends. Two that do not end in the reverse of
    the order in which they began leave one that is freed, and the next signal that Python handles, such as Ctrl-C, ends the
    process with a segmentation fault. Source: ``SigAltStackSetup``, https://github.com/openvinotoolkit/openvino/pull/11894
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
        # A stack that was large enough can be too small by now: matrix tiles, once asked for, enlarge what a signal saves.
        if not known or sigaltstack(ctypes.byref(before), None) != 0:
            sigaltstack(ctypes.byref(_Stack(flags=_DISABLED)), None)
