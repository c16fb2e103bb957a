"""A clock with a stack of phases. Time counts for the innermost phase only, so that the phases add up to the elapsed time.

Only the watched thread may call it. What the probe itself does is a phase of its own, ``probe``.
"""

from __future__ import annotations

import typing
from collections import deque
from collections.abc import Callable
from time import perf_counter_ns

from trimtab.core.evidence import Phase

PHASES: tuple[str, ...] = (*typing.get_args(Phase), "probe")
FORWARD, BACKWARD, OPTIMIZER, ZERO_GRAD, DATA, COPY, SYNC, COMMUNICATION, LOGGING, SAVING, OTHER, PROBE = range(len(PHASES))

spans: deque[tuple[int, int, int, int]] = deque(maxlen=60_000)
"""(phase, start, end in ns, depth) of the last phases that ended while ``keep_spans(True)`` was in effect."""


def _clock() -> tuple[
    Callable[[int], int],
    Callable[..., int],
    Callable[..., int],
    Callable[[], tuple[int, tuple[int, ...]]],
    Callable[[], int],
    Callable[[bool], None],
]:
    totals = [0] * len(PHASES)
    stack = [OTHER]
    starts = [perf_counter_ns()]
    last = starts[0]
    keeping = False

    def enter(phase: int) -> int:
        nonlocal last
        now = perf_counter_ns()
        totals[stack[-1]] += now - last
        last = now
        stack.append(phase)
        starts.append(now)
        return len(stack)

    def leave(depth: int = 0) -> int:
        nonlocal last
        now = perf_counter_ns()
        while True:
            phase, start = stack.pop(), starts.pop()
            totals[phase] += now - last
            last = now
            if keeping and phase != PROBE:
                spans.append((phase, start, now, len(stack)))
            if not depth or len(stack) < depth:
                return now - start

    def switch(phase: int, depth: int = 0) -> int:
        nonlocal last
        while depth and len(stack) > depth:
            leave()
        now = perf_counter_ns()
        ended, start = stack[-1], starts[-1]
        totals[ended] += now - last
        last = now
        if keeping and ended != PROBE:
            spans.append((ended, start, now, len(stack) - 1))
        stack[-1] = phase
        starts[-1] = now
        return now - start

    def reading() -> tuple[int, tuple[int, ...]]:
        nonlocal last
        now = perf_counter_ns()
        totals[stack[-1]] += now - last
        last = now
        return now, tuple(totals)

    def current() -> int:
        return stack[-1]

    def keep(on: bool) -> None:
        nonlocal keeping
        keeping = on

    return enter, leave, switch, reading, current, keep


enter, leave, switch, reading, current, keep_spans = _clock()
"""``depth = enter(phase)`` and ``leave(depth)`` enclose a phase. ``leave`` returns its duration in ns. It also ends phases that
an exception left open. ``switch(phase, depth)`` ends a phase likewise and begins another. ``reading()`` gives the time in ns
and the ns of every phase; the differences of two readings add up to the time between them."""

tally: dict[tuple[object, ...], list[int]] = {}
"""Key -> [calls, ns] since the last :func:`take_tally`. A key is a tuple that begins with what is counted."""


def add(key: tuple[object, ...], ns: int) -> None:
    """Count a call of ``key`` that took ``ns``."""
    entry = tally.get(key)
    if entry is None:
        tally[key] = [1, ns]
    else:
        entry[0] += 1
        entry[1] += ns


def take_tally() -> dict[tuple[object, ...], list[int]]:
    """The tally since the last call of this function, which is reset."""
    found = tally.copy()
    tally.clear()
    return found
