"""The timeline of one step: as drawing, and as a trace in Chrome's format that Perfetto opens."""

from __future__ import annotations

import dataclasses
from typing import Any

from trimtab.core.evidence import ProbeRecord
from trimtab.report.doctor_words import PHASES

ROW = 26
"""Height of a row of the timeline, in units of a drawing that is 1000 wide."""
LABELLED = 55
"""Width from which on a span is labelled."""


def trace(record: ProbeRecord) -> dict[str, Any]:
    """One step in the Trace Event Format: complete events with microseconds, and a counter of the memory."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": 1, "name": "process_name", "args": {"name": " ".join(record.command)}},
        {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "one step of median length"}},
    ]
    for span in sorted(record.timeline, key=lambda span: (span.start_ms, span.depth)):
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": 1,
                "name": span.name or span.phase,
                "cat": span.phase,
                "ts": round(span.start_ms * 1e3, 3),
                "dur": round(span.ms * 1e3, 3),
            }
        )
    if record.memory is not None:
        for ms, megabytes in record.memory.curve:
            events.append({"ph": "C", "pid": 1, "name": "memory", "ts": round(ms * 1e3, 3), "args": {"MB": megabytes}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


@dataclasses.dataclass(frozen=True)
class Box:
    """A span in a drawing that is 1000 wide."""

    x: float
    y: float
    width: float
    colour: str
    label: str
    """Empty if the span is too narrow for it."""
    title: str


def colour(phase: str) -> str:
    """The style sheet's colour of ``phase``."""
    return f"var(--series-{PHASES.index(phase) % 8 if phase in PHASES else 7})"


def boxes(record: ProbeRecord) -> tuple[list[Box], float, float]:
    """The spans of the timeline, the height of the drawing, and the milliseconds that it shows."""
    end = max((span.start_ms + span.ms for span in record.timeline), default=0.0)
    if end <= 0:
        return [], 0.0, 0.0
    found = []
    for span in record.timeline:
        width = max(1000 * span.ms / end, 0.5)
        name = span.name or span.phase
        found.append(
            Box(
                x=round(1000 * span.start_ms / end, 2),
                y=span.depth * ROW,
                width=round(width, 2),
                colour=colour(span.phase),
                label=name[: int(width / 8)] if width >= LABELLED else "",
                title=f"{name} ({span.phase}): {span.ms:.3g} ms from {span.start_ms:.3g} ms on",
            )
        )
    return found, (1 + max(span.depth for span in record.timeline)) * ROW, end


def curve(points: tuple[tuple[float, float], ...], height: float = 120.0) -> str:
    """``points`` as the points of a polyline in a drawing 1000 wide: zero is the bottom, the maximum the top."""
    if len(points) < 2:
        return ""
    begin, end = points[0][0], points[-1][0]
    low, high = min(y for _, y in points), max(y for _, y in points)
    wide, tall = (end - begin) or 1.0, (high - low) or 1.0
    return " ".join(f"{1000 * (x - begin) / wide:.1f},{height - 4 - (height - 8) * (y - low) / tall:.1f}" for x, y in points)


def flame(record: ProbeRecord) -> tuple[list[Box], float]:
    """The sampled stacks as a flame graph that hangs from the top, and the height of the drawing. The width of a box is the
    share of a step in which its line ran or waited for a line below it."""
    found: list[Box] = []
    _add_boxes([(stack.calls, stack.share) for stack in record.stacks], 0, 0.0, found)
    return found, max((box.y + ROW for box in found), default=0.0)


def _add_boxes(stacks: list[tuple[tuple[str, ...], float]], depth: int, left: float, found: list[Box]) -> None:
    """Add the boxes of ``stacks``, which agree above ``depth``, from ``left`` on."""
    below: dict[str, list[tuple[tuple[str, ...], float]]] = {}
    for calls, share in stacks:
        if len(calls) > depth:
            below.setdefault(calls[depth], []).append((calls, share))
    for number, (name, inner) in enumerate(sorted(below.items(), key=lambda item: -sum(share for _, share in item[1]))):
        share = sum(each for _, each in inner)
        width = 1000 * share
        found.append(
            Box(
                x=round(1000 * left, 2),
                y=depth * ROW,
                width=round(width, 2),
                colour=f"var(--series-{(depth + number) % 8})",
                label=name[: int(width / 8)] if width >= LABELLED else "",
                title=f"{name}: {share:.1%}",
            )
        )
        _add_boxes(inner, depth + 1, left, found)
        left += share
