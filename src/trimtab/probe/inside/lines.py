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
from trimtab.probe.inside.sites import Place, stack

EVERY_S, MOST_S = 0.005, 0.1
"""Least and most seconds between two samples."""
SHARE = 0.005
"""Largest share of a core that the sampling thread uses. A sample took 100 to 200 us of CPU time in a virtual machine, where
waking a core takes long. The watched thread waits for the GIL meanwhile, which takes about as long again."""

SWITCH_S = 0.0005
"""Switch interval of Python in seconds. With the default of 5 ms most samples fall on calls that release the GIL."""
PACE_EVERY = 8
"""Samples between two updates of the sampling interval."""

sampling = threading.Event()
"""Cleared while sampling is paused, as while Python traces lines."""
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
    sample per interval of CPU time, and not one per time slice of another process."""

    def __init__(self) -> None:
        try:
            self._file = os.open(f"/proc/self/task/{MAIN_NATIVE}/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1
        self._ran, self._waited = self._read()
        self._used_s = time.thread_time()
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
        before_used, self._used_s = self._used_s, time.thread_time()
        least = max(EVERY_S, (self._used_s - before_used) / PACE_EVERY / SHARE)
        return min(MOST_S, least * (1 + waited / max(ran, 1_000_000)))


def watch(deadline: float, out_of_time: Callable[[], None]) -> None:
    """Sample from now on; call ``out_of_time`` in the sampling thread when ``time.monotonic()`` passes ``deadline``."""

    def sample() -> None:
        before, pace = None, _SamplingInterval()
        while time.monotonic() < deadline:
            time.sleep(pace.seconds())
            if not sampling.wait(max(0.0, deadline - time.monotonic())):
                break
            phase = clock.current()
            here = sys._current_frames().get(MAIN)
            if phase == clock.PROBE:
                before = None
                continue
            now, places = time.perf_counter_ns(), stack(here)
            held = resident()
            grown, before = 0 if before is None else held - before, held
            samples.append((now, places, phase, held, grown))
        out_of_time()

    shorten_switch_interval()
    sampling.set()
    threading.Thread(target=sample, name="trimtab", daemon=True).start()
