"""The end of a script that was seen for long enough."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from typing import NoReturn


def end_process() -> NoReturn:
    """End the process without its exit handlers, ``finally`` blocks and saving on exit."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(0)
