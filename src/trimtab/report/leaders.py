"""The table of the best recipes beside the original, and the waterfall of the winner's steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from trimtab._internal.text import plain
from trimtab.core.measurement import Comparison, Interval
from trimtab.core.trial import Trial
from trimtab.report import formatting as words
from trimtab.report.trial_table import has_files, labelled
from trimtab.study import ranking
from trimtab.study.record import Record
from trimtab.study.waterfall import Step

SHOWN = 3
"""Number of recipes beside the original."""
NO_TRIAL = "no trial of its own"


@dataclasses.dataclass(frozen=True)
class LeaderTable:
    """The original and the best recipes as columns: headings, and rows of a name and one figure for each column."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


@dataclasses.dataclass(frozen=True)
class Bar:
    """One step of the waterfall. ``start`` and ``width`` are percentages of the chart; a step without figures has no bar."""

    name: str
    added: str
    value: str
    interval: str
    """The 95% interval of a speed-up; empty for memory and size, and for the baseline, which is not timed against itself."""
    gain: str
    score: str
    start: float
    width: float
    total: bool = False
    """Whether the bar begins at zero: the first step, and the figure that was measured again."""


def leader_table(record: Record) -> LeaderTable | None:
    """The original and the best three recipes within the limits, all with the figures of the search; ``None`` if there is no
    other recipe than the original."""
    first = next((trial for trial in record.trials if trial.speedup is not None), None)
    ranked = ranking.ranked(record.trials, record.limits, record.objective)
    ranked.sort(key=lambda trial: trial.recipe.hash != record.best)  # what ships stands first
    best = [trial for trial in ranked if first is not None and trial.recipe != first.recipe][:SHOWN]
    if first is None or not best:
        return None
    shown = (first, *best)
    heads = ("the original", *(f"{n}{', ships' * (each.recipe.hash == record.best)}" for n, each in enumerate(best, 1)))
    return LeaderTable(heads, tuple(_rows(shown, record)))


def _rows(shown: tuple[Trial, ...], record: Record) -> Iterator[tuple[str, tuple[str, ...]]]:
    terms = words.terms(record)
    yield "recipe", ("as written", *(plain(words.recipe(each.recipe, record)) for each in shown[1:]))
    yield "speed-up", ("1.00x", *(words.speed(each.speedup) for each in shown[1:]))
    if not words.single_call_latencies(record):  # of each pair of timings, so that the quotient fits the speed-up
        pairs = [None if each.comparison is None else _paired_latencies(each.comparison) for each in shown]
        yield f"{terms.measure}", (_latency(shown[0]), *(pair or words.UNKNOWN for pair in pairs[1:]))
    if labelled(record):
        yield terms.score, tuple(words.score(each.score, record) for each in shown)
        yield f"{terms.drop} (≤ bound)", ("–", *(words.drop(each.drop, record) for each in shown[1:]))
    errors = [None if each.parity is None else each.parity.centred_error for each in shown[1:]]
    yield f"error of the {terms.outputs}", ("–", *map(words.error, errors))
    if has_files(record):
        yield "size", tuple(words.all_megabytes([each.size_mb for each in shown]))
    yield "peak memory", tuple(words.all_megabytes([each.peak_mb for each in shown]))
    yield "cold start", tuple(words.duration(each.cold_s) for each in shown)


def _latency(trial: Trial) -> str:
    return words.milliseconds(trial.latency_ms.median if trial.latency_ms else None)


def _paired_latencies(found: Comparison) -> str:
    """``2.20 ms, the original 13.1 ms``: both medians of one comparison, in one unit."""
    now, before = words.all_milliseconds([found.candidate.median, found.rival.median])
    return f"{now}, the original {before}"


def waterfall(record: Record) -> list[Bar]:
    """A bar for each step of the recipe that ships, and one for the figure that was measured again."""
    found = [value for step in record.steps if (value := _value(step, record)) is not None]
    if not found:
        return []
    again = record.confirmation.speedup if record.confirmation is not None and record.confirmation.again else None
    timed = record.objective in ("latency", "throughput")
    top = max([*found, again.value] if again is not None and timed and _is_drawable(again) else found)
    return list(_bars(record, top, again if timed else None))


def _bars(record: Record, top: float, again: Interval | None) -> Iterator[Bar]:
    last: float | None = None
    for step in record.steps:
        now = _value(step, record)
        head = (step.name, plain(step.added), *_figures(step, now, record))
        if now is None:
            yield Bar(*head, 0.0, 0.0)
            continue
        start, end = (0.0, now) if last is None else sorted((last, now))
        yield Bar(*head, *_share(start, end, top), total=last is None)
        last = now
    found = record.confirmation
    if again is not None and found is not None:
        value = again.value if _is_drawable(again) else 0.0
        score = words.score(found.score, record) if labelled(record) else ""
        head = ("measured again", "in fresh processes", words.quoted(again), words.span(again), "", score)
        yield Bar(*head, *_share(0.0, value, top), total=True)


def _figures(step: Step, now: float | None, record: Record) -> tuple[str, str, str, str]:
    """The texts of a bar: figure, interval, gain and score."""
    if step.speedup is None:
        return NO_TRIAL, "", "", ""
    score = words.score(step.score, record) if labelled(record) else ""
    if record.objective in ("memory", "size"):
        return words.megabytes(now), "", _gain(step), score
    interval = words.span(step.speedup) if step.speedup.width else ""
    return words.quoted(step.speedup), interval, _gain(step), score


def _share(start: float, end: float, top: float) -> tuple[float, float]:
    return round(100 * start / top, 2), round(100 * (end - start) / top, 2)


def _is_drawable(found: Interval) -> bool:
    return words.known(found.value) is not None and not found.vague


def _value(step: Step, record: Record) -> float | None:
    """The figure of a step in the objective, if it is known well enough to be drawn."""
    if record.objective in ("memory", "size"):
        return words.known(step.peak_mb if record.objective == "memory" else step.size_mb)
    return None if step.speedup is None or not _is_drawable(step.speedup) else words.known(step.speedup.value)


def _gain(step: Step) -> str:
    """``2.10x``, or ``1.03x, not sure`` if the intervals of this step and the previous step overlap."""
    if step.gain is None:
        return ""
    return words.times(step.gain) + ("" if step.sure else ", not sure")
