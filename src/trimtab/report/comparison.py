"""Compare two studies side by side: two machines, two versions, two sets of limits."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterator
from typing import Any, ClassVar

from trimtab._internal.serialization import to_json
from trimtab._internal.text import plain
from trimtab.core.measurement import Interval
from trimtab.core.trial import Trial
from trimtab.report import formatting as words
from trimtab.report import headline, reliability
from trimtab.study.ranking import RUNGS
from trimtab.study.record import Record

NAME = 22
"""Terminal columns for names; the two studies share the rest."""
MAX_NAMED = 6
"""Maximum recipes that are named for one kind of difference."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One fact of both studies."""

    name: str
    left: str
    right: str

    @property
    def differs(self) -> bool:
        """Whether the two sides differ."""
        return self.left != self.right


@dataclasses.dataclass(frozen=True, kw_only=True)
class SideBySide:
    """Facts of two studies, and their differences in sentences; ``str()`` of it has 100 columns."""

    schema: ClassVar[int] = 1

    lines: tuple[Line, ...]
    differences: tuple[str, ...]
    names: tuple[str, str] = ("", "")
    """What the user calls the two studies, such as their folders."""

    def to_json(self) -> dict[str, Any]:
        """``{"schema": 1, "names": [left, right], "lines": [{"name", "left", "right", "differs"}], "differences": [...]}``."""
        lines = [to_json(dataclasses.asdict(line)) | {"differs": line.differs} for line in self.lines]
        return {"schema": self.schema, "names": list(self.names), "lines": lines, "differences": list(self.differences)}

    def shown(self, columns: int | None = None) -> str:
        """Text for a terminal of ``columns``, of which at most 100 are used."""
        width = words.columns(columns)
        side = (width - NAME - 4) // 2
        left, right = (f"{place} {name}".rstrip() for place, name in zip(("LEFT", "RIGHT"), self.names, strict=True))
        head = [f"  {row[2:]}" for row in _table_rows(Line(name="", left=left, right=right), side)]
        differences = [
            line for sentence in self.differences for line in textwrap.wrap(f"- {sentence}", width, subsequent_indent="  ")
        ]
        body = [row for line in self.lines for row in _table_rows(line, side)]
        return "\n".join([*head, *body, "", *(differences or ["Nothing that matters differs."])])

    def __str__(self) -> str:
        return self.shown()


def side_by_side(left: Record, right: Record, names: tuple[str, str] = ("", "")) -> SideBySide:
    """Compare two studies called ``names``."""
    differences = tuple(plain(sentence) for sentence in _differences(left, right))
    return SideBySide(lines=tuple(_lines(left, right)), differences=differences, names=names)


def _table_rows(line: Line, width: int) -> Iterator[str]:
    """A fact in as many rows as its longer side needs; a tilde marks a difference."""
    sides = [textwrap.wrap(side, width) or [""] for side in (line.left, line.right)]
    names = textwrap.wrap(line.name, NAME)
    for index in range(max(len(names), *map(len, sides))):
        cells = [lines[index] if index < len(lines) else "" for lines in (names, *sides)]
        mark = "~" if line.differs and index == 0 else " "
        yield f"{mark} {cells[0]:<{NAME}} {cells[1]:<{width}} {cells[2]}".rstrip()


def _facts(record: Record) -> Iterator[tuple[str, str]]:
    best, terms = headline.leader(record), words.terms(record)
    yield "workload", record.workload
    yield "answer", headline.headline(record)
    yield terms.answer.lower() if record.status else "best so far", str(best.recipe) if best is not None else "nothing"
    for rung in RUNGS:
        yield from _rung(rung, record)
    for tile in headline.tiles(record):
        if tile.name in ("speed-up over tuned", terms.lost, "error of the outputs", "throughput"):
            yield tile.name, f"{tile.value}" + (f" ({tile.below})" if tile.below else "")
    yield "trials", headline.tally(record)
    yield words.compared(record)
    yield from reliability.study(record)[1:]
    yield from reliability.machine(record)
    for name, number in record.environment.versions.items():
        yield f"version of {name}", number


def _rung(name: str, record: Record) -> Iterator[tuple[str, str]]:
    title, found = words.RUNG_WORDS[name], headline.rung(record, name)
    if found is None:
        yield title, "none"
        return
    latency = words.milliseconds(found["latency_ms"]["median"]) + headline.of_examples(record, found)
    yield title, f"{words.rung_speed(found)}, {latency}, {words.megabytes(found['size_mb'])}"


def _lines(left: Record, right: Record) -> Iterator[Line]:
    """Facts of both sides in order; versions only if they differ."""
    sides = [{name: plain(value) for name, value in _facts(record)} for record in (left, right)]
    for name in dict.fromkeys((*sides[0], *sides[1])):
        line = Line(name=name, left=sides[0].get(name, "–"), right=sides[1].get(name, "–"))
        if line.differs or not name.startswith("version of "):
            yield line


def _differences(left: Record, right: Record) -> Iterator[str]:
    if left.mode != right.mode:
        yield "One is a model that was optimized, the other a training that was tuned: their figures do not compare."
        return
    if left.prepared.identity != right.prepared.identity:
        yield "These are two different workloads, or two states of one: their speed-ups do not compare one to one."
    elif _evaluation_data(left) != _evaluation_data(right):
        yield "They were judged on other data: their scores, and what they lost, do not compare one to one."
    if left.objective != right.objective:
        yield f"They look for different things: {left.objective} on the left, {right.objective} on the right."
    if left.limits != right.limits:
        yield "Their limits differ, so what ships may differ for that reason alone."
    if left.environment.fingerprint != right.environment.fingerprint:
        yield "The machines differ, or the runtimes on them: a recipe that wins on one may lose on the other."
    if None in (left.status, right.status):
        yield "One of them has no verdict: it is still running, or it was cut off."
    yield from _winners(left, right)
    yield from _states(left, right)
    yield from _speed_differences(left, right)


def _evaluation_data(record: Record) -> tuple[Any, ...]:
    """Properties of the evaluation data that do not depend on the machine."""
    prepared = record.prepared
    return dict(prepared.splits), prepared.n, words.known(prepared.score) is None


def _by_recipe(record: Record) -> dict[str, Trial]:
    return {trial.recipe.hash: trial for trial in record.trials}


def _winners(left: Record, right: Record) -> Iterator[str]:
    """How the winner of each side did on the other."""
    for here, there, place in ((left, right, "right"), (right, left, "left")):
        if here.winner is None or here.best == there.best:
            continue
        other = _by_recipe(there).get(here.winner.recipe.hash)
        home = "left" if place == "right" else "right"
        what = f"{words.terms(here).answer} on the {home}, {here.winner.recipe},"
        many = here.mode == "train"  # settings are plural
        if other is None:
            yield f"{what} {'were' if many else 'was'} not tried on the {place}."
        else:
            speed = f" at {words.speed(other.speedup)}" if other.speedup else ""
            yield f"{what} {'are' if many else 'is'} {other.state}{speed} on the {place}."


def _states(left: Record, right: Record) -> Iterator[str]:
    other = _by_recipe(right)
    pairs = [(trial, other[trial.recipe.hash]) for trial in left.trials if trial.recipe.hash in other]
    changed = [(a, b) for a, b in pairs if a.state is not b.state]
    for a, b in changed[:MAX_NAMED]:
        why = words.clipped(next((t.reason for t in (b, a) if t.reason), ""), 160)
        yield f"{a.recipe} is {a.state} on the left and {b.state} on the right" + (f": {why}" if why else ".")
    if len(changed) > MAX_NAMED:
        yield f"{words.count(len(changed) - MAX_NAMED, 'other recipe')} ended in different states too."
    unmatched = len(left.trials) - len(pairs), len(right.trials) - len(pairs)
    if any(unmatched):
        yield f"{words.count(unmatched[0], 'recipe')} tried on the left only, {unmatched[1]:,} on the right only."


def _differ(a: Interval, b: Interval) -> bool:
    """Whether two speed-ups differ by more than their intervals; unknown, and so ``False``, if a bound is not finite."""
    known = all(words.known(figure) is not None for each in (a, b) for figure in (each.value, each.low, each.high))
    return known and min(a.value, b.value) > 0 and not (a.low <= b.high and b.low <= a.high)


def _speed_differences(left: Record, right: Record) -> Iterator[str]:
    """Recipes whose speed-ups differ by more than their intervals, largest difference first."""
    other = _by_recipe(right)
    found: list[tuple[float, str]] = []
    for trial in left.trials:
        a, b = trial.speedup, getattr(other.get(trial.recipe.hash), "speedup", None)
        if a is None or b is None or not _differ(a, b):
            continue
        sentence = f"{trial.recipe}: {words.speed(a)} on the left, {words.speed(b)} on the right."
        found.append((abs(math.log(a.value / b.value)), sentence))
    for _, sentence in sorted(found, key=lambda item: -item[0])[:MAX_NAMED]:
        yield sentence
