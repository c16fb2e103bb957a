"""Repeat the measurement of phases during a long run, and report on standard error when their shares shift."""

from __future__ import annotations

import itertools
import statistics
import sys
import time

from trimtab.probe.inside import calls, clock, hooks, steps
from trimtab.probe.inside.plan import PLAN, rank

WARM_UP, STEPS = 6, 20
"""Steps before the first measurement, and of each measurement."""
TIMES = 2
"""Measurements in a row that must show a shift. A single one may be a pause of the machine."""
SHARE, SLOWER = 0.1, 1.25
"""A shift is reported if the share of a phase changes by ``SHARE``, or the time of a step by the factor ``SLOWER``."""

Split = tuple[float, dict[str, float]]
"""ms of a step, and the share of each phase."""

_reference: Split | None = None
_shifted = 0
_next_s = 0.0
_readings: list[tuple[int, tuple[int, ...]]] = []


def start() -> None:
    """Measure from now on."""
    calls.watch()
    hooks.watch_gradients()
    steps.on_step_end(_step)


def _step(number: int) -> None:
    global _next_s
    if number <= WARM_UP or (not _readings and time.monotonic() < _next_s):
        return
    _readings.append(clock.reading())
    if len(_readings) > STEPS:
        _compare(number, _split())
        _readings.clear()
        clock.take_tally()
        _next_s = time.monotonic() + float(PLAN["watch"])


def _split() -> Split:
    """The split of the steps that take up to twice the median, which leaves out evaluations and checkpoints."""
    pairs = itertools.pairwise(_readings)
    each = [(now[0] - before[0], [b - a for a, b in zip(before[1], now[1], strict=True)]) for before, now in pairs]
    most = 2 * statistics.median(ns for ns, _ in each)
    usual = [phases for ns, phases in each if ns <= most]
    spent = {name: sum(found) for name, found in zip(clock.PHASES, zip(*usual, strict=True), strict=True) if name != "probe"}
    total = max(sum(spent.values()), 1)
    return total / len(usual) / 1e6, {name: ns / total for name, ns in spent.items()}


def _compare(number: int, split: Split) -> None:
    global _reference, _shifted
    if _reference is None:
        _reference = split
        return
    (was_ms, was), (ms, now) = _reference, split
    name = max(now, key=lambda phase: abs(now[phase] - was[phase]))
    slower = ms > SLOWER * was_ms
    _shifted = _shifted + 1 if slower or abs(now[name] - was[name]) >= SHARE else 0
    if _shifted < TIMES:
        return
    _reference, _shifted = split, 0
    if rank() == 0:
        sys.stderr.write(
            f"trimtab: the split of a step has shifted by step {number}: {name} takes {now[name]:.0%}, before "
            f"{was[name]:.0%}; a step takes {ms:.3g} ms, before {was_ms:.3g} ms. trimtab doctor says why.\n"
        )
        sys.stderr.flush()
