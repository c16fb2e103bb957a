"""Time calls in blocks, and find out how long it takes until their times are steady."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import torch

BLOCK_S = 0.075
"""What a block of calls should take: long against a scheduler's time slice, short against the drift of a machine."""
MAX_CALLS = 5_000
"""Most calls in one block; keeps what a block sends and stores small where a call takes microseconds."""
SPINS = 3_000
"""Rounds of the loop that tells a core's pace: a fifth of a millisecond."""
STEADY = 0.05
"""Blocks are steady when the medians of the last three lie within this share of each other."""


@runtime_checkable
class Runner(Protocol):
    """Something that can be timed, in this process or in another."""

    pid: int
    """The process that does the work."""

    def block(self, calls: int) -> list[int]:
        """Call it ``calls`` times in a row and give the nanoseconds of each."""

    def pace(self) -> int:
        """What :func:`pace` says in the process that does the work."""


class LocalRunner:
    """Times ``call`` in this process, by the wall clock.

    Every call is waited for with ``synchronize`` before the clock is read, so that a device that works in the background is not
    timed by how fast it takes orders. The garbage collector is off within a block. Before the recorded calls come a few that
    are not (an eighth of them, at least one from four on): they find the caches and the clock frequency as the other
    process of a pair left them. ``before`` is run ahead of every call and not timed.
    """

    def __init__(
        self,
        call: Callable[[], object],
        synchronize: Callable[[], None] | None = None,
        before: Callable[[], object] | None = None,
    ) -> None:
        self.pid = os.getpid()
        self._call = call
        self._synchronize = synchronize
        self._before = before

    def block(self, calls: int) -> list[int]:
        """Nanoseconds of each of ``calls`` calls."""
        with uncollected():
            self._run(unrecorded(calls))
            return self._run(calls)

    def pace(self) -> int:
        """How fast the core is now."""
        return pace()

    def _run(self, calls: int) -> list[int]:
        call, synchronize, clock = self._call, self._synchronize, time.perf_counter_ns
        if synchronize is None and self._before is None:
            return [_timed(call, clock) for _ in range(calls)]
        wait, before = synchronize or _nothing, self._before
        wait()
        times = []
        for _ in range(calls):
            if before is not None:
                before()
                wait()
            begun = clock()
            call()
            wait()
            times.append(clock() - begun)
        return times


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """How a warm-up ended."""

    calls_per_block: int
    """Calls that make a block of the length asked for; at least 1."""
    steady: bool
    """Whether block times had stopped changing, rather than the time being up."""
    seconds: float
    call_s: float
    """Wall-clock time of one call, all overheads included."""


def warm_up(runner: Runner, *, seconds: float = 2.0, block_s: float = BLOCK_S) -> WarmUp:
    """Run blocks until the last three medians are within :data:`STEADY` of each other, or ``seconds`` are up.

    Block lengths come from the wall clock and not from what the runner reports, which may be scaled. At least
    three calls are made, unless they take more than four times ``seconds``, because runtimes optimize during the first two.
    """
    begun = time.perf_counter()
    calls, made = 1, 0
    medians: list[float] = []
    while True:
        started = time.perf_counter()
        times = runner.block(calls)
        now = time.perf_counter()
        call_s = (now - started) / (calls + unrecorded(calls))
        made += calls
        wanted = calls_for(block_s, call_s)
        grown = wanted <= 2 * calls  # until then calls were too few to say how long one takes
        medians = [*medians[-2:], statistics.median(times)] if grown else []
        settled = len(medians) == 3 and max(medians) <= (1 + STEADY) * min(medians)
        calls = wanted
        late = now - begun + block_s > seconds and (made >= 3 or now - begun > 4 * seconds)
        if settled or late:
            return WarmUp(calls, settled, now - begun, call_s)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """A block without the garbage collector, whose turn would come in one block and not in another."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def pace() -> int:
    """Nanoseconds that a fixed piece of work takes, which needs a core and nothing else; the quickest of three times.

    It tells what no counter of the system does: that the core itself is slower for a while, as where another machine has the
    other half of it.
    """
    return min(_timed(_spin, time.perf_counter_ns) for _ in range(3))


def _spin() -> None:
    total = 0
    for i in range(SPINS):
        total += i * i


def calls_for(block_s: float, call_s: float) -> int:
    """How many recorded calls of ``call_s`` seconds make a block of about ``block_s`` seconds; at least 1."""
    return max(1, min(MAX_CALLS, round(block_s / max(call_s, 1e-9))))


def unrecorded(calls: int) -> int:
    """How many calls run before the recorded ones of a block."""
    return max(1, calls // 8) if calls >= 4 else 0


def synchronizer(device: torch.device | str) -> Callable[[], None]:
    """What waits for ``device``; nothing has to for the CPU, where a call that returns is done."""
    device = torch.device(device)
    if device.type == "cpu":
        return _nothing
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: torch.accelerator.synchronize(device)


def _nothing() -> None:
    """Waits for nothing: on the CPU a call that returns is done."""


def _timed(call: Callable[[], object], clock: Callable[[], int]) -> int:
    begun = clock()
    call()
    return clock() - begun
