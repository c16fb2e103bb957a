"""What anomaly mode costs: a few steps without it and as many with it, in turns, after all that is measured.

The share is evidence. The gain of the remedy is measured by :mod:`trimtab.probe.counterfactuals`.
"""

from __future__ import annotations

import statistics
from typing import Any

from trimtab.probe.inside import facts, remedies
from trimtab.probe.inside.plan import PLAN

OFF = (True, False, False, True)
"""Whether anomaly mode is off, turn by turn."""
STEPS = 4
"""Of a turn. The first step is not counted: its backward pass may be that of a graph from before."""
MOST = 0.1
"""The largest share of the run's time limit that the turns may take."""

_times: dict[bool, list[float]] = {}
_count = 0


def start(step_ms: float) -> bool:
    """Begin, if the script has anomaly mode on and its steps are quick enough; else ``False``.

    Ranks of a distributed run never begin: each would decide alone.
    """
    if step_ms * STEPS * len(OFF) > 1000 * MOST * float(PLAN.get("seconds") or 60.0):
        return False
    if facts.ranks() > 1 or "anomaly mode" not in facts.flags():
        return False
    _times.update({True: [], False: []})
    _switch(OFF[0])
    return True


def _switch(off: bool) -> None:
    given: dict[str, Any] = PLAN.get("settings") or {}
    remedies.apply({**given, "debug_off": True} if off else given)


def ended_step(ms: float, mixed: bool) -> bool:
    """Record the cost of a step, unless it is ``mixed``; return whether all turns are done."""
    global _count
    turn, place = divmod(_count, STEPS)
    _count += 1
    if place and not mixed:
        _times[OFF[turn]].append(ms)
    done = _count == STEPS * len(OFF)
    if done or _count % STEPS == 0:
        _switch(not done and OFF[_count // STEPS])
    return done


def share() -> float | None:
    """The share of a step's cost that steps without anomaly mode save, negative if they cost more; ``None`` if not all turns
    were done."""
    if _count < STEPS * len(OFF) or not all(_times.values()):
        return None
    return 1 - statistics.median(_times[True]) / max(statistics.median(_times[False]), 1e-6)
