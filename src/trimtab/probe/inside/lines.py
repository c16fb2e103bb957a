"""A sampling thread: every few milliseconds it records the current line of the watched thread. It also ends the run in time."""

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
"""Seconds between two samples, and the largest factor on it when the machine is busy."""

SWITCH_S = 0.0005
"""Switch interval of Python in seconds. With the default of 5 ms most samples fall on calls that release the GIL."""
PACE_EVERY = 8
"""Samples between two updates of the sampling interval."""

paused = False
"""Whether sampling is paused, as while Python traces lines."""
samples: list[tuple[int, tuple[Place, ...], int, int, int]] = []
"""(ns, lines, phase, resident bytes, growth in bytes since the sample before). The lines are the call stack of the script, the
innermost first."""
try:
    _statm = os.open("/proc/self/statm", os.O_RDONLY)
except OSError:
    _statm = -1
_PAGE = resource.getpagesize()


def resident() -> int:
    """Resident bytes of this process; their peak if the system does not give the current value."""
    if _statm >= 0:
        return int(os.pread(_statm, 64, 0).split()[1]) * _PAGE
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def shorten_switch_interval() -> None:
    """Set the switch interval to :data:`SWITCH_S`, unless it is shorter."""
    sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))


class _SamplingInterval:
    """The time until the next sample. It grows while the watched thread waits for a core, so that a busy machine also gives one
    sample per :data:`EVERY_S` of CPU time, and not one per time slice of another process."""

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
        """Seconds until the next sample."""
        self._samples += 1
        if self._samples % PACE_EVERY == 0:
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
        before, pace = None, _SamplingInterval()
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

    shorten_switch_interval()
    threading.Thread(target=sample, name="trimtab", daemon=True).start()
