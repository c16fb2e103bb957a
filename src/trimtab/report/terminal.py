"""The report for a terminal: at most 40 lines of 100 columns.

Every section gets a :class:`Screen`, which says how many lines a statement may use beyond its minimum. The largest rendering
that fits into 40 lines is shown, so that nothing is cut while there is room.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator
from itertools import islice

from trimtab._internal.text import plain
from trimtab.core.trial import State
from trimtab.report import compression, headline, operator_breakdown, reliability, request
from trimtab.report import formatting as words
from trimtab.report.roofline_chart import SIDES, placed
from trimtab.report.trial_table import Row, has_files, labelled, rows
from trimtab.study.record import Record

LINES = 40
SPARE = (8, 4, 2, 1, 0, -1)


@dataclasses.dataclass(frozen=True)
class Screen:
    """The width of the text, and the lines that a statement may use beyond its minimum."""

    width: int
    spare: int

    @property
    def wide(self) -> bool:
        """Whether a recipe fits beside figures."""
        return self.width >= words.WIDTH

    def wrapped(self, line: str, fewest: int, *, hang: int = 0) -> list[str]:
        """``line`` in at most ``fewest`` lines plus the spare ones; continuation lines are indented by ``hang``."""
        return textwrap.wrap(
            " ".join(plain(line).split()),
            self.width,
            max_lines=max(1, fewest + self.spare),
            placeholder=" …",
            subsequent_indent=" " * hang,
            break_on_hyphens=False,
        )

    def row(self, figures: str, recipe: str) -> Iterator[str]:
        """Figures in columns, with the recipe beside them or, on a narrow screen, below them."""
        if self.wide:
            yield self._cut(f"{figures}  {recipe}")
        else:
            yield from (self._cut(figures), self._cut(f"{'':<12}{recipe}"))

    def _cut(self, line: str) -> str:
        """``line`` cut to the width, without wrapping its columns."""
        line = plain(line).replace("\n", " ")
        return line if len(line) <= self.width else line[: self.width - 1] + "…"


def text(record: Record, columns: int | None = None) -> str:
    """``record`` in at most 40 lines, the verdict first, for a terminal of ``columns``, of which at most 100 are used."""
    sections = (_verdict, _ladder, _trials, _compressed, _reasons, _reliability, _reproduction)
    for spare in SPARE:
        screen = Screen(words.columns(columns), spare)
        blocks = [block for section in sections if (block := list(section(record, screen)))]
        lines = [line for block in blocks for line in (*block, "")][:-1]
        if len(lines) <= LINES:
            break
    return "\n".join(line.rstrip() for line in lines[:LINES])


def _verdict(record: Record, screen: Screen) -> Iterator[str]:
    head = f"{record.workload}: {headline.headline(record)}   [last run {record.started}, {words.duration(record.seconds)}]"
    yield from screen.wrapped(head, 1, hang=4)
    yield from screen.wrapped(headline.sentence(record), 3)
    if recipe := headline.recipe(record):
        what = words.terms(record).answer if record.status else "Best so far"
        yield from screen.wrapped(f"{what}: {recipe}.", 2, hang=4)
    yield from screen.wrapped("; ".join(f"{name}: {value}" for name, value in request.asked(record)), 1, hang=4)
    yield from screen.wrapped(headline.conditions(record), 1, hang=4)


def _ladder(record: Record, screen: Screen) -> Iterator[str]:
    found, terms = headline.rungs(record), words.terms(record)
    if not found:
        return
    speed = _speed_columns(rung["speed-up"] for rung in found[:4])
    head = f"{'LADDER':<11} {'speed-up':<{speed}} {terms.measure:>12} {terms.score:>12} {terms.drop + ' at most':>12}"
    yield f"{head}  recipe" if screen.wide else head[: screen.width]
    for rung in found[:4]:
        figures = f"{rung[terms.measure]:>12} {rung[terms.score]:>12} {rung['at most']:>12}"
        yield from screen.row(f"{rung['rung']:<11} {rung['speed-up']:<{speed}} {figures}", rung["recipe"])
    if words.single_call_latencies(record):
        many = ", ".join(rung["examples a call"] for rung in found[:4])
        yield from screen.wrapped(f"A latency is that of one call alone; examples a call, from the top: {many}.", 1)
    if note := headline.original_test_score(record):
        yield from screen.wrapped(note, 1)


def _trials(record: Record, screen: Screen) -> Iterator[str]:
    found = rows(record)
    measured = [row for row in found if row.cells[0].key is not None]
    marks = "  (* ships, + keeps the limits)" if measured else ""
    yield from screen.wrapped(f"TRIALS  {headline.tally(record)}{marks}", 1, hang=8)
    shown = measured[: 5 if screen.wide else 2]
    speed = _speed_columns(words.speed(row.trial.speedup) for row in shown)
    for row in shown:
        mark = "*" if row.ships else "+" if row.keeps else " "
        yield from screen.row(f"{mark} {words.speed(row.trial.speedup):<{speed}} {_figures(row, record)}", row.recipe)
    for row in islice((row for row in found if row.trial.state in (State.FAILED, State.MISMATCH)), 3):
        yield from screen.wrapped(f"! {row.trial.state} {row.recipe}: {row.reason}", 1, hang=4)
    if compression.untried(record):
        yield from screen.wrapped("Not tried: smaller networks (--compress auto).", 1)


def _speed_columns(speeds: Iterable[str]) -> int:
    """Columns that these speed-ups need."""
    return max([23, *map(len, speeds)])


def _compressed(record: Record, screen: Screen) -> Iterator[str]:
    trial = compression.shown_form(record)
    if trial is not None and trial.network is not None:
        sizes = f"{words.share(trial.network.share, 0)} of the weights in {words.recipe(trial.recipe, record)}"
        yield from screen.wrapped(f"SMALLER  {sizes}. {compression.spent(record) or ''}", 2, hang=9)


def _figures(row: Row, record: Record) -> str:
    """The figures after the speed-up of a trial."""
    trial = row.trial
    if trial.drop is not None:
        loss = f"{words.terms(record).drop} ≤ {words.lost(trial.drop.upper, record)}"
    else:
        loss = "" if labelled(record) else f"error {words.error(trial.parity.centred_error if trial.parity else None)}"
    if record.objective == "memory" or not has_files(record):
        return f"{loss:<18} {words.megabytes(trial.peak_mb):>12} of memory"
    return f"{loss:<18} {words.megabytes(trial.size_mb):>12}"


def _reasons(record: Record, screen: Screen) -> Iterator[str]:
    if left := operator_breakdown.slowest(record):
        yield from screen.wrapped(f"WHY  {left}", 2, hang=5)
    places = {name: place for name, _, place in placed(record)}
    for side, name in zip(
        operator_breakdown.sides(record), (name for name in SIDES if name in record.explanations), strict=True
    ):
        slowest = ", ".join(f"{bar.name} {bar.share}" for bar in side.bars[:3]) or "operators not known"
        place = places.get(name)
        roof = "" if place is None else f"; {words.share(place.share, 0)} of what {place.bound} allows here"
        yield from screen.wrapped(f"{side.title}: {slowest}{roof}", 2, hang=4)


def _reliability(record: Record, screen: Screen) -> Iterator[str]:
    confirmed = "; ".join(f"{name}: {value}" for name, value in reliability.confirmation(record)[:3])
    yield from screen.wrapped(f"TRUST  {confirmed}", 2, hang=7)
    if quiet := reliability.noise(record):
        yield from screen.wrapped("; ".join(f"{name}: {value}" for name, value in quiet), 2, hang=4)
    undecided = f"undecidable trials: {len(reliability.undecided(record))}"
    if exact := reliability.undecided_exact(record):
        undecided += f", and {exact:,} exact, held to rounding instead"
    yield from screen.wrapped(f"{': '.join(words.compared(record))}; {undecided}", 1, hang=4)
    if doubt := headline.doubt(record):
        yield from screen.wrapped(doubt, 1, hang=4)
    for note in reliability.notes(record)[: 1 if doubt else 2]:
        yield from screen.wrapped(f"note: {note}", 1, hang=4)


def _reproduction(record: Record, screen: Screen) -> Iterator[str]:
    for command in reliability.commands(record)[:1]:
        yield from screen.wrapped(f"AGAIN  {command}", 2, hang=7)
    found = record.environment
    versions = " ".join(
        f"{name} {found.versions[name]}" for name in ("torch", "onnxruntime", "openvino") if name in found.versions
    )
    machine = f"{found.cpu}, {found.usable_cores} of {found.logical_cores} cores, {found.os}, {versions}"
    yield from screen.wrapped(machine, 1, hang=4)
