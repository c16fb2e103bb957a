"""A few steps with a setting, and as many without it, after all that is measured: evidence of what a cause costs.

How much a remedy brings is measured later, in turns and with its losses; see :mod:`trimtab.probe.counterfactuals`.
"""

from __future__ import annotations

import statistics
from typing import Any

from trimtab.probe.inside import facts, remedies
from trimtab.probe.inside.plan import PLAN

SETTING = "debug_off"
"""What is tried: it changes neither the layout of a tensor nor what is compiled. Ranks of a distributed run try nothing:
each would decide alone."""
TURNS = (True, False, False, True)
"""Whether the setting is on."""
STEPS = 4
"""Of a turn. The first one is not counted: its backward pass may be that of a graph from before."""
MOST = 0.1
"""Share of the time limit of the run from which on a glimpse would take too long."""

found: dict[str, float] = {}
"""Setting -> the share of a step that it saved; negative if steps took longer."""
_times: dict[bool, list[float]] = {}
_count = 0


def start(step_ms: float) -> bool:
    """Begin, if the setting is on in the script and the steps are quick enough; else ``False``."""
    if step_ms * STEPS * len(TURNS) > 1000 * MOST * float(PLAN.get("seconds") or 60.0):
        return False
    if facts.ranks() > 1 or "anomaly mode" not in facts.flags():
        return False
    _times.update({True: [], False: []})
    _switch(TURNS[0])
    return True


def _switch(on: bool) -> None:
    given: dict[str, Any] = PLAN.get("settings") or {}
    remedies.apply({**given, SETTING: True} if on else given)


def ended_step(ms: float, mixed: bool) -> bool:
    """Take what a step cost; return whether all was seen. A ``mixed`` step is not counted."""
    global _count
    turn, place = divmod(_count, STEPS)
    _count += 1
    if place and not mixed:
        _times[TURNS[turn]].append(ms)
    if _count == STEPS * len(TURNS):
        _switch(False)
        if all(_times.values()):
            on, off = statistics.median(_times[True]), statistics.median(_times[False])
            found[SETTING] = 1 - on / max(off, 1e-6)
        return True
    if _count % STEPS == 0:
        _switch(TURNS[_count // STEPS])
    return False
