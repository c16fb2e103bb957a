"""Serves a busy loop of a known length to whoever connects: ``python _served.py ADDRESS MICROSECONDS [MODE]``."""

from __future__ import annotations

import os
import sys
import time

from trimtab.measure.remote import serve
from trimtab.measure.timer import LocalRunner

KEY = b"tests"


def spin(microseconds: float) -> None:
    end = time.perf_counter_ns() + int(microseconds * 1000)
    while time.perf_counter_ns() < end:
        pass


class Work:
    """A fixed amount of work, and what may go wrong with it."""

    def __init__(self, microseconds: float, mode: str) -> None:
        self.loops = int(microseconds * 20)
        self.mode = mode
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self.mode == "dies" and self.calls > 5:
            os._exit(3)
        if self.mode == "hangs" and self.calls > 5:
            time.sleep(3600)
        if self.mode == "raises":
            raise RuntimeError("the kernel is unhappy")
        return sum(range(self.loops))


if __name__ == "__main__":
    mode = sys.argv[3] if len(sys.argv) > 3 else "works"
    parallel = mode == "parallel"
    runner = LocalRunner(Work(float(sys.argv[2]), mode), threads=2 if parallel else None, parallel=parallel)
    serve(runner, sys.argv[1], KEY)
