"""Operator times of the original and of the winner, messages of the runtime, and operators that it could not run natively."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from trimtab._internal.text import plain
from trimtab.core.measurement import OperatorTime
from trimtab.evaluation.evaluate import REQUESTS
from trimtab.evaluation.explain import Explanation
from trimtab.report import formatting as words
from trimtab.report.roofline_chart import SIDES
from trimtab.study.record import Record

SHOWN = 12
"""Operators shown by name; the rest are summed."""


@dataclasses.dataclass(frozen=True)
class Bar:
    """One operator. ``width`` is a percentage, on one scale for both models."""

    name: str
    time: str
    share: str
    calls: str
    width: float


@dataclasses.dataclass(frozen=True)
class Side:
    """The operators of one model."""

    title: str
    recipe: str
    source: str
    bars: tuple[Bar, ...]
    summary: str
    notes: tuple[str, ...]


def sides(record: Record) -> list[Side]:
    """The original and the winner, if they were profiled."""
    found = {name: record.explanations[name] for name in SIDES if name in record.explanations}
    longest = max((bar.self_ms for each in found.values() for bar in _shown(each)), default=0.0)
    return [
        Side(
            title=SIDES[name],
            recipe=plain(each.recipe),
            source=plain(each.source),
            bars=tuple(_bar(row, longest) for row in _shown(each)),
            summary=" ".join(_summary(each, several=words.single_call_latencies(record))),
            notes=tuple(words.limited(each.notes)),
        )
        for name, each in found.items()
    ]


def _shown(found: Explanation) -> list[OperatorTime]:
    """The slowest operators by name, and all others as one."""
    rows = [row for row in found.operators if words.known(row.self_ms) is not None and words.known(row.share) is not None]
    head, rest = (rows, []) if len(rows) <= SHOWN + 1 else (rows[:SHOWN], rows[SHOWN:])
    if not rest:
        return head
    name = f"{len(rest)} others"
    calls, time, part = (sum(getattr(row, field) for row in rest) for field in ("calls", "self_ms", "share"))
    return [*head, OperatorTime(name=name, calls=calls, self_ms=time, share=part)]


def _bar(found: OperatorTime, longest: float) -> Bar:
    return Bar(
        name=words.clipped(found.name, 90),
        time=_time(found.self_ms, longest),
        share=words.share(found.share),
        calls=f"{found.calls:.3g}",
        width=round(100 * found.self_ms / longest, 2) if longest else 0.0,
    )


def _time(ms: float, longest: float) -> str:
    """Milliseconds or microseconds, one unit for all operators, with aligned decimals."""
    if longest >= 1:
        return f"{ms:.3f} ms" if ms >= 0.0005 else "below 0.001 ms"
    return f"{1e3 * ms:.1f} µs" if ms >= 0.00005 else "below 0.1 µs"


def _summary(found: Explanation, *, several: bool) -> Iterator[str]:
    """Sum of the operators beside the time of a call; with ``several`` concurrent requests they need not agree."""
    total = sum(words.known(row.self_ms) or 0.0 for row in found.operators)
    seconds = words.known(found.seconds)
    if several:
        if seconds is not None:
            share = words.milliseconds(1e3 * seconds)
            yield f"With {REQUESTS} requests at once the inputs of one call are through every {share}."
        if total:
            yield f"In profiled calls, one at a time, the operators take {words.milliseconds(total)}."
        return
    if seconds is not None:
        yield f"One call takes {words.milliseconds(1e3 * seconds)}."
    if not total:
        return
    yield f"In profiled calls the operators take {words.milliseconds(total)}."
    if seconds is not None and total > 1.05e3 * seconds:
        yield (
            "That is more than an ordinary call takes, because watching costs time, more so on a busy machine: "
            "read the shares, not the sum."
        )
    elif seconds is not None and total < 0.95e3 * seconds:
        rest = 1e3 * seconds - total
        yield (
            f"About {words.milliseconds(rest)} ({words.share(rest / seconds / 1e3, 0)}) passes outside of them: "
            "calling, dispatching, waiting."
        )


def slowest(record: Record) -> str:
    """The operator with most of the remaining time, in a sentence; empty if unknown."""
    found = record.explanations.get("best") or record.explanations.get("as_written")
    rows = [] if found is None else [row for row in found.operators if words.known(row.share) is not None]
    if not rows:
        return ""
    whose = "of what ships" if "best" in record.explanations else "of the model as written"
    most = " and ".join(f"{words.clipped(row.name, 90)} ({words.share(row.share, 0)})" for row in rows[:2])
    return f"Most of the operators' time {whose} is left in {most}."


def roof_lines(record: Record) -> list[tuple[str, ...]]:
    """The roofline as a table: model, operations, bytes, intensity, achieved, attainable, share, bound."""
    return [_roof_line(SIDES[name], record.explanations[name]) for name in SIDES if name in record.explanations]


def _roof_line(name: str, found: Explanation) -> tuple[str, ...]:
    place, unknown = found.roofline, words.UNKNOWN
    least = "at least " if found.uncounted else ""
    flops = unknown if not found.flops else f"{least}{words.digits(found.flops / 1e6)} million"
    moved = unknown if found.bytes_moved is None else f"at least {words.megabytes(found.bytes_moved / 1e6)}"
    threads = "" if found.threads is None else f", {words.count(found.threads, 'thread')}"
    head = (name, f"{found.dtype}{threads}", flops, moved)
    if place is None:
        return (*head, unknown, unknown, unknown, unknown)
    reached = f"{words.digits(place.achieved)} of {words.digits(place.attainable)}"
    return (*head, words.digits(place.intensity), reached, words.share(place.share, 0), place.bound)


def runtime_notes(record: Record) -> list[str]:
    """Messages of the runtime about what ships: operators that it could not run natively, sizes that it could not keep."""
    return [] if record.winner is None else words.limited(record.winner.notes)


def no_notes(record: Record) -> str:
    """The meaning of no messages: only some runtimes report which operators they could not run natively."""
    if record.winner is None:
        return "Nothing ships yet, or nothing ships at all."
    if record.mode == "train":
        return "Nothing."
    if record.winner.recipe.backend.tells_fallbacks:
        return "Nothing: no operator that the runtime could not run natively, and no size that it could not keep."
    return "Nothing; but this runtime does not say which operators it could not run natively."


def uncounted(record: Record) -> str:
    """Operators without a formula for their operations, in a sentence."""
    names = sorted({name for found in record.explanations.values() for name in found.uncounted})
    if not names:
        return ""
    return f"No formula counts the operations of {words.clipped(', '.join(names), 300)}, so the totals are lower bounds."
