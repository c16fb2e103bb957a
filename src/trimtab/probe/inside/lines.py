"""A thread that notes every few milliseconds which line of the script the watched thread is in, and ends the run in time."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Callable

from trimtab.probe.inside import clock
from trimtab.probe.inside.plan import MAIN, MAIN_NATIVE
from trimtab.probe.inside.sites import Place, is_script, place_of

EVERY_S, MOST = 0.005, 10.0
"""Seconds between two samples, and how many times as long it may be on a busy machine."""

SWITCH_S = 0.0005
"""After how long a sample interrupts Python; its default of 5 ms lets most samples fall on calls that release its lock."""
READ = 8
"""Samples between two looks at how long the watched thread waited for a core."""

paused = False
"""Whether no samples are taken, as while Python traces lines."""
samples: list[tuple[int, tuple[Place, ...], int, int, int]] = []
"""(ns, lines, phase): the lines of the script that called each other, the innermost first; resident bytes, and by how much they
rose since the sample before."""
try:
    _statm = os.open("/proc/self/statm", os.O_RDONLY)
except OSError:
    _statm = -1
_PAGE = resource.getpagesize()


def resident() -> int:
    """Resident bytes of this process; where the system does not tell, the most that they were."""
    if _statm >= 0:
        return int(os.pread(_statm, 64, 0).split()[1]) * _PAGE
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def interrupts() -> None:
    """Let other threads of this process run within :data:`SWITCH_S`."""
    sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))


class _Pace:
    """How long to wait for the next sample: longer while the watched thread waits for a core, so that on a busy machine too
    there is a sample per :data:`EVERY_S` of its work, and not one per time slice of another process."""

    def __init__(self) -> None:
        try:
            self._file = os.open(f"/proc/self/task/{MAIN_NATIVE}/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1
        self._ran, self._waited = self._read()
        self._samples, self._paced_s = 0, EVERY_S

    def _read(self) -> tuple[int, int]:
        words = os.pread(self._file, 64, 0).split() if self._file >= 0 else ()
        return (int(words[0]), int(words[1])) if len(words) > 1 else (0, 0)

    def seconds(self) -> float:
        """Until the next sample."""
        self._samples += 1
        if self._samples % READ == 0:
            self._paced_s = self._paced()
        return self._paced_s

    def _paced(self) -> float:
        before_ran, before_waited = self._ran, self._waited
        self._ran, self._waited = self._read()
        ran, waited = self._ran - before_ran, self._waited - before_waited
        return EVERY_S * min(MOST, 1 + waited / max(ran, 1_000_000))


def watch(deadline: float, out_of_time: Callable[[], None]) -> None:
    """Sample from now on; call ``out_of_time`` in the sampling thread when ``time.monotonic()`` passes ``deadline``."""

    def sample() -> None:
        before, pace = None, _Pace()
        while time.monotonic() < deadline:
            time.sleep(pace.seconds())
            if paused:
                continue
            phase = clock.current()
            here = sys._current_frames().get(MAIN)
            if phase == clock.PROBE:
                before = None
                continue
            now, stack = time.perf_counter_ns(), []
            while here is not None:
                number: int | None = here.f_lineno  # none between two lines
                if number is not None and is_script(here.f_code):
                    stack.append(place_of(here.f_code, number))
                here = here.f_back
            held = resident()
            grown, before = 0 if before is None else held - before, held
            samples.append((now, tuple(stack), phase, held, grown))
        out_of_time()

    interrupts()
    threading.Thread(target=sample, name="trimtab", daemon=True).start()
