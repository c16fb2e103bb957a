"""The report for a terminal: at most 40 lines of 100 columns, whatever the record holds.

Every section is asked with ``spare``, the number of lines that each of its statements may have beyond the fewest; the most
generous rendering that keeps to 40 lines is shown, so that nothing is cut as long as there is room.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import islice

from trimtab._plain import plain
from trimtab.report import _trust, _verdict, _why
from trimtab.report import _words as words
from trimtab.report._roof import SIDES, placed
from trimtab.report._rows import Row, labelled, rows
from trimtab.study.record import Record
from trimtab.trial import State

LINES, WIDTH = 40, 100
SPARE = (8, 4, 2, 1, 0)


def text(record: Record) -> str:
    """``record`` in at most 40 lines of at most 100 columns, the verdict first."""
    sections = (_answer, _ladder, _trials, _reasons, _trusted, _again)
    for spare in SPARE:
        blocks = [block for section in sections if (block := list(section(record, spare)))]
        lines = [line for block in blocks for line in (*block, "")][:-1]
        if len(lines) <= LINES:
            break
    return "\n".join(line.rstrip() for line in lines[:LINES])


def _wrapped(line: str, most: int, *, hang: int = 0) -> list[str]:
    """``line`` in at most ``most`` lines; later ones are indented by ``hang``."""
    return textwrap.wrap(
        " ".join(plain(line).split()),
        WIDTH,
        max_lines=most,
        placeholder=" …",
        subsequent_indent=" " * hang,
        break_on_hyphens=False,
    )


def _answer(record: Record, spare: int) -> Iterator[str]:
    head = f"{record.workload}: {_verdict.headline(record)}   [{record.started}, {words.duration(record.seconds)}]"
    yield from _wrapped(head, 1 + spare, hang=4)
    yield from _wrapped(_verdict.sentence(record), 3 + spare)
    if recipe := _verdict.recipe(record):
        yield from _wrapped(f"{'What ships' if record.status else 'Best so far'}: {recipe}.", 2 + spare, hang=4)
    yield from _wrapped(_verdict.conditions(record), 1 + spare, hang=4)


def _ladder(record: Record, spare: int) -> Iterator[str]:
    found = _verdict.rungs(record)
    if not found:
        return
    yield f"{'LADDER':<11} {'speed-up':<23} {'latency':>12} {'score':>12} {'drop at most':>12}  recipe"
    for rung in found[:4]:
        figures = f"{rung['latency']:>12} {rung['score']:>12} {rung['at most']:>12}"
        yield _cut(f"{rung['rung']:<11} {rung['speed-up']:<23} {figures}  {rung['recipe']}")


def _cut(line: str) -> str:
    """``line`` cut to the width, its columns as they are."""
    line = plain(line).replace("\n", " ")
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


def _trials(record: Record, spare: int) -> Iterator[str]:
    yield from _wrapped(f"TRIALS  {_verdict.tally(record)}", 1 + spare, hang=8)
    found = rows(record)
    measured = [row for row in found if row.cells[0].key is not None]
    for row in measured[:5]:
        yield _cut(f"{'*' if row.ships else '+' if row.keeps else ' '} {_figures(row, record)}  {row.recipe}")
    for row in islice((row for row in found if row.trial.state in (State.FAILED, State.MISMATCH)), 3):
        yield from _wrapped(f"! {row.trial.state} {row.recipe}: {row.reason}", 1 + spare, hang=4)


def _figures(row: Row, record: Record) -> str:
    trial = row.trial
    error = words.error(trial.parity.centred_error if trial.parity else None)
    loss = f"drop ≤ {words.lost(trial.drop.upper, record)}" if trial.drop else f"error {error}" if not labelled(record) else ""
    return f"{words.speed(trial.speedup):<23} {loss:<18} {words.megabytes(trial.size_mb):>12}"


def _reasons(record: Record, spare: int) -> Iterator[str]:
    if left := _why.left(record):
        yield from _wrapped(f"WHY  {left}", 2 + spare, hang=5)
    places = {name: place for name, _, place in placed(record)}
    for side, name in zip(_why.sides(record), (name for name in SIDES if name in record.explanations), strict=True):
        slowest = ", ".join(f"{bar.name} {bar.share}" for bar in side.bars[:3]) or "operators not known"
        place = places.get(name)
        roof = "" if place is None else f"; {words.share(place.share, 0)} of what {place.bound} allows here"
        yield from _wrapped(f"{side.title}: {slowest}{roof}", 2 + spare, hang=4)


def _trusted(record: Record, spare: int) -> Iterator[str]:
    confirmed = "; ".join(f"{name}: {value}" for name, value in _trust.confirmation(record)[:3])
    yield from _wrapped(f"TRUST  {confirmed}", 2 + spare, hang=7)
    if quiet := _trust.noise(record):
        yield from _wrapped("; ".join(f"{name}: {value}" for name, value in quiet), 2 + spare, hang=4)
    split = ", ".join(f"{name} {size:,}" for name, size in record.prepared.splits.items())
    undecided = f"undecidable trials: {len(_trust.undecided(record))}"
    yield from _wrapped(f"examples: {split or 'none'}; {undecided}", 1 + spare, hang=4)
    if doubt := _verdict.doubt(record):
        yield from _wrapped(doubt, 1 + spare, hang=4)
    for note in _trust.notes(record)[: 1 if doubt else 2]:
        yield from _wrapped(f"note: {note}", 1 + spare, hang=4)


def _again(record: Record, spare: int) -> Iterator[str]:
    for command in _trust.commands(record)[:1]:
        yield from _wrapped(f"AGAIN  {command}", 2 + spare, hang=7)
    found = record.environment
    versions = " ".join(
        f"{name} {found.versions[name]}" for name in ("torch", "onnxruntime", "openvino") if name in found.versions
    )
    machine = f"{found.cpu}, {found.usable_cores} of {found.logical_cores} cores, {found.os}, {versions}"
    yield from _wrapped(machine, 1 + spare, hang=4)
