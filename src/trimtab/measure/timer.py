"""Time calls in blocks, and warm up until their times are steady."""

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

from trimtab.measure.host import waited_ns, waits

BLOCK_S = 0.075
"""Duration of a block of calls in seconds: long against a scheduler's time slice, short against the drift of a machine."""
MAX_CALLS = 5_000
"""Maximum calls in one block; limits what a block sends and stores if a call takes microseconds."""
PACE_LOOPS = 3_000
"""Rounds of the loop that measures a core's pace: a fifth of a millisecond."""
PARALLEL_GRAIN, MOST_PARALLEL, PARALLEL_CALLS = 32_768, 4, 20
"""Elements of a tensor per thread from which torch divides an addition among threads; the maximum number of threads, and the
calls, that :func:`fork_join` measures."""
STEADY = 0.05
"""Blocks are steady when the medians of the last three lie within this share of each other."""


@runtime_checkable
class Runner(Protocol):
    """Something that can be timed, in this process or in another."""

    pid: int
    """The process that makes the calls."""

    def block(self, calls: int) -> list[int]:
        """Make ``calls`` calls in a row; returns the nanoseconds of each."""

    def pace(self) -> int:
        """:func:`pace` in the process that makes the calls."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A few consecutive calls."""

    ns: float
    """Nanoseconds per call."""
    waited: float
    """Share of that time in which threads of the process waited for a core, summed over the threads; 0 if unknown."""


@runtime_checkable
class SampledRunner(Runner, Protocol):
    """A runner that can tell how long its threads waited for a core."""

    threads: int | None
    """Threads that compute a call; ``None`` if unknown."""

    def samples(self, count: int, calls: int) -> list[Sample]:
        """``count`` samples of ``calls`` calls each."""


@runtime_checkable
class ParallelRunner(Runner, Protocol):
    """A runner that can tell how long its threads take to begin and end a parallel operation."""

    def fork_join(self) -> int | None:
        """:func:`fork_join` in the process that makes the calls; ``None`` if that does not tell of these calls."""


class LocalRunner:
    """Times ``call`` in this process, by the wall clock. ``threads`` is the number of threads that compute a call, if known.
    ``parallel`` says that these are torch's own threads, so that :meth:`fork_join` is about them.

    ``synchronize`` runs after every call and before the clock is read, because a device may work in the background. The
    garbage collector is off within a block. A few calls before the recorded ones (an eighth of them, at least one from four on)
    are not recorded, because the other process of a pair has changed caches and clock frequency. ``before`` runs ahead of every
    call and is not timed.
    """

    def __init__(
        self,
        call: Callable[[], object],
        synchronize: Callable[[], None] | None = None,
        before: Callable[[], object] | None = None,
        *,
        threads: int | None = None,
        parallel: bool = False,
    ) -> None:
        self.pid = os.getpid()
        self._parallel = parallel
        # a system that does not count waiting cannot tell which samples were disturbed
        self.threads = threads if waits(self.pid) else None
        self._call = call
        self._synchronize = synchronize
        self._before = before

    def block(self, calls: int) -> list[int]:
        """Nanoseconds of each of ``calls`` calls."""
        with gc_disabled():
            self._run(unrecorded_calls(calls))
            return self._run(calls)

    def samples(self, count: int, calls: int) -> list[Sample]:
        """``count`` samples of ``calls`` calls each."""
        found = []
        with gc_disabled():
            for _ in range(count):
                before = waits(self.pid)
                times = self._run(calls)
                ns = max(1, sum(times))
                found.append(Sample(ns / calls, min(1.0, waited_ns(before, waits(self.pid)) / ns)))
        return found

    def pace(self) -> int:
        """Nanoseconds of the fixed piece of work on this core."""
        return pace()

    def fork_join(self) -> int | None:
        """:func:`fork_join`; ``None`` unless several of torch's threads compute the calls, and spin until the next operation.

        Threads that sleep are woken by the kernel, which takes longer, and by another time in each operation.
        """
        several = self._parallel and torch.get_num_threads() > 1
        return fork_join() if several and os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive" else None

    def _run(self, calls: int) -> list[int]:
        call, synchronize, clock = self._call, self._synchronize, time.perf_counter_ns
        if synchronize is None and self._before is None:
            return [_timed(call, clock) for _ in range(calls)]
        wait, before = synchronize or _no_wait, self._before
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
    """The result of a warm-up."""

    calls_per_block: int
    """Calls in a block of the requested duration; at least 1."""
    steady: bool
    """Whether block times had become steady; ``False`` if the time was up first."""
    seconds: float
    call_s: float
    """Wall-clock seconds of one call, all overheads included."""


def warm_up(runner: Runner, *, seconds: float = 2.0, block_s: float = BLOCK_S) -> WarmUp:
    """Run blocks until the last three medians are within :data:`STEADY` of each other, or ``seconds`` are up.

    Block lengths come from the wall clock, because the runner's times may be scaled. At least three calls are made, unless
    they take more than four times ``seconds``, because runtimes optimize during the first two.
    """
    begun = time.perf_counter()
    calls, made = 1, 0
    medians: list[float] = []
    while True:
        started = time.perf_counter()
        times = runner.block(calls)
        now = time.perf_counter()
        call_s = (now - started) / (calls + unrecorded_calls(calls))
        made += calls
        wanted = calls_for(block_s, call_s)
        grown = wanted <= 2 * calls  # fewer calls cannot tell how long one takes
        medians = [*medians[-2:], statistics.median(times)] if grown else []
        settled = len(medians) == 3 and max(medians) <= (1 + STEADY) * min(medians)
        calls = wanted
        late = now - begun + block_s > seconds and (made >= 3 or now - begun > 4 * seconds)
        if settled or late:
            return WarmUp(calls, settled, now - begun, call_s)


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable the garbage collector in a block, because it would run in one block and not in another."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def pace() -> int:
    """Nanoseconds of a fixed piece of work that needs nothing but a core; the fastest of three times.

    No counter of the system shows that a core itself is slower for a while, for instance because another machine has its other
    half.
    """
    return min(_timed(_pace_loop, time.perf_counter_ns) for _ in range(3))


def _pace_loop() -> None:
    total = 0
    for i in range(PACE_LOOPS):
        total += i * i


def fork_join() -> int:
    """Nanoseconds of a small addition that torch divides among its threads: mostly the time in which these begin and end it.

    No counter shows that two cores reach each other more slowly for a while. On a virtual machine with two cores it was 4.9 us
    in most minutes and 7.1 in some, at one pace of each core. A small network took 0.34 and 0.51 ms in them, and with one
    thread the same in all.
    """
    numbers = torch.zeros(PARALLEL_GRAIN * min(torch.get_num_threads(), MOST_PARALLEL) + 1)
    found = torch.empty_like(numbers)

    def add() -> None:
        torch.add(numbers, numbers, out=found)

    with torch.no_grad():
        return int(statistics.median(_timed(add, time.perf_counter_ns) for _ in range(PARALLEL_CALLS)))


def calls_for(block_s: float, call_s: float) -> int:
    """The number of recorded calls of ``call_s`` seconds in a block of about ``block_s`` seconds; at least 1."""
    return max(1, min(MAX_CALLS, round(block_s / max(call_s, 1e-9))))


def unrecorded_calls(calls: int) -> int:
    """The number of unrecorded calls before the recorded ones of a block."""
    return max(1, calls // 8) if calls >= 4 else 0


def synchronizer(device: torch.device | str) -> Callable[[], None]:
    """A function that waits for ``device``; for the CPU it does nothing, because a call that returns is done."""
    device = torch.device(device)
    if device.type == "cpu":
        return _no_wait
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: torch.accelerator.synchronize(device)


def _no_wait() -> None:
    """Wait for nothing: on the CPU a call that returns is done."""


def _timed(call: Callable[[], object], clock: Callable[[], int]) -> int:
    begun = clock()
    call()
    return clock() - begun
