"""A clock with a stack of phases: each instant counts for the innermost phase only, so that the phases add up to the whole.

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
"""(phase, start, end in ns, depth) of what ended last; filled while ``keep_spans`` is called with true."""


def _clock() -> tuple[
    Callable[[int], None],
    Callable[[], int],
    Callable[[int], None],
    Callable[[int], None],
    Callable[[], tuple[int, tuple[int, ...]]],
    Callable[[], int],
    Callable[[], int],
    Callable[[bool], None],
]:
    totals = [0] * len(PHASES)
    stack = [OTHER]
    starts = [perf_counter_ns()]
    last = starts[0]
    keeping = False

    def enter(phase: int) -> None:
        nonlocal last
        now = perf_counter_ns()
        totals[stack[-1]] += now - last
        last = now
        stack.append(phase)
        starts.append(now)

    def leave() -> int:
        nonlocal last
        now = perf_counter_ns()
        phase, start = stack.pop(), starts.pop()
        totals[phase] += now - last
        last = now
        if keeping and phase != PROBE:
            spans.append((phase, start, now, len(stack)))
        return now - start

    def switch(phase: int) -> None:
        nonlocal last
        now = perf_counter_ns()
        totals[stack[-1]] += now - last
        last = now
        stack[-1] = phase
        starts[-1] = now

    def back(depth: int) -> None:
        while len(stack) > max(depth, 1):
            leave()

    def reading() -> tuple[int, tuple[int, ...]]:
        nonlocal last
        now = perf_counter_ns()
        totals[stack[-1]] += now - last
        last = now
        return now, tuple(totals)

    def depth() -> int:
        return len(stack)

    def current() -> int:
        return stack[-1]

    def keep(on: bool) -> None:
        nonlocal keeping
        keeping = on

    return enter, leave, switch, back, reading, depth, current, keep


enter, leave, switch, back, reading, depth, current, keep_spans = _clock()
"""``enter(phase)`` and ``leave()`` enclose a phase, whose duration in ns ``leave`` returns; ``switch(phase)`` puts another
phase in the place of the innermost; ``back(depth)`` leaves what an exception left open; ``reading()``: the
time in ns, and the ns of every phase until that time, so that two readings differ by what the phases between them add up to."""

tally: dict[tuple[object, ...], list[int]] = {}
"""(what, ...) -> [calls, ns] since the last cut."""


def add(key: tuple[object, ...], ns: int) -> None:
    """Count a call of ``key`` that took ``ns``."""
    entry = tally.get(key)
    if entry is None:
        tally[key] = [1, ns]
    else:
        entry[0] += 1
        entry[1] += ns


def cut() -> dict[tuple[object, ...], list[int]]:
    """What was counted since the last cut."""
    found = tally.copy()
    tally.clear()
    return found
