"""The table of trials, and the details that a click on a row shows."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from trimtab._internal.text import plain
from trimtab.core.measurement import Comparison, Drop
from trimtab.core.recipe import Recipe
from trimtab.core.trial import State, Trial
from trimtab.evaluation.confirm import Confirmation
from trimtab.report import formatting as words
from trimtab.report.logs import MAX_LOG_BYTES, MIN_LOG_BYTES, ROW_BYTES, Tail, allowances, fitted, tail
from trimtab.study import ranking
from trimtab.study.record import Record

MAX_ROWS = 200 + (MAX_LOG_BYTES - MIN_LOG_BYTES) // ROW_BYTES
"""Maximum rows of a report."""
MAX_REASON = 240
"""Letters of a reason in the table; a click shows all of it."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One figure of a row: as text, and as sort key (``None`` is last)."""

    text: str
    key: float | None
    minor: bool = False
    """Whether a narrow screen shows it in the details only."""

    @property
    def order(self) -> str:
        """The sort key as text."""
        return "" if self.key is None else f"{self.key:.9g}"


@dataclasses.dataclass(frozen=True)
class Row:
    """One trial."""

    trial: Trial
    recipe: str
    words: str
    keeps: bool
    ships: bool
    reason: str
    cells: tuple[Cell, ...]


@dataclasses.dataclass(frozen=True)
class Column:
    """A heading over figures, and its explanation."""

    name: str
    about: str
    minor: bool = False


SPEED = Column("speed-up", "Against the model as written, in turns, with its 95% interval; above 1 is faster.")
EXAMPLES = Column("examples a call", "How many examples the call takes at once that the latency is of.")
SIZE = Column("size", "Of the files that ship.", minor=True)
REST = (
    Column("peak memory", "Of a fresh process that loads it and calls it, above what it has with torch imported.", minor=True),
    Column("cold start", "Load and first call.", minor=True),
    Column("took", "What the whole trial took, compilation and scoring included.", minor=True),
)


def labelled(record: Record) -> bool:
    """Whether there are scores and drops."""
    return words.known(record.prepared.score) is not None or any(trial.drop is not None for trial in record.trials)


def has_files(record: Record) -> bool:
    """Whether the result is files (of a model) and not settings (of a training)."""
    return record.mode == "infer"


def columns(record: Record) -> tuple[Column, ...]:
    """The headings of :attr:`Row.cells`."""
    terms = words.terms(record)
    about = f"Root mean square error of the {terms.outputs}, relative to what the reference varies by."
    error = Column("error", about, minor=labelled(record))
    latency = Column(terms.measure, f"Median time of one {terms.call}.")
    drop = Column(f"{terms.drop} (≤ bound)", f"The {terms.lost} {terms.searched}, and the upper bound of that.")
    several = [EXAMPLES] if words.single_call_latencies(record) else []
    return (
        SPEED,
        latency,
        *several,
        *([drop] if labelled(record) else []),
        error,
        *([SIZE] if has_files(record) else []),
        *REST,
    )


def rows(record: Record) -> list[Row]:
    """All trials that fit into a report: those within the limits first, best first."""
    ranked = ranking.ranked(record.trials, record.limits, record.objective)
    place = {trial.recipe.hash: index for index, trial in enumerate(ranked)}

    def order(trial: Trial) -> tuple[int, int, float, int]:
        speed = words.known(trial.speedup.value) if trial.speedup else None
        return place.get(trial.recipe.hash, len(place)), int(speed is None), -(speed or 0.0), trial.number

    return [_row(trial, record, trial.recipe.hash in place) for trial in sorted(record.trials, key=order)[:MAX_ROWS]]


def why_not(trial: Trial, record: Record) -> str:
    """Why ``trial`` does not ship: the reason for its state, the limit that it misses, its refusal, or its comparison with what
    ships; empty for what ships, and if nothing does."""
    if trial.state is not State.COMPLETE:
        return plain(trial.reason or "")
    if reason := trial.reason or " ".join(miss.words for miss in ranking.misses(trial, record.limits)):
        return plain(reason)
    winner = record.winner
    if winner is None or trial.recipe == winner.recipe:
        return ""
    if any(each.recipe == trial.recipe for each in record.refused):
        return "Refused when it was measured again; Trust says why."
    if trial.recipe == _original(record):
        return "The original." if record.status == "improved" else ""
    return _compared_with_winner(trial, winner, record)


def _original(record: Record) -> Recipe | None:
    """The recipe of the workload as written, which every study tries first."""
    return record.trials[0].recipe if record.trials else None


def _compared_with_winner(trial: Trial, winner: Trial, record: Record) -> str:
    """How a complete trial compares with what ships, in the objective and in the search."""
    who = "the original" if record.status == "kept_original" else "the winner"
    if record.objective in ("memory", "size"):
        now, least = (each.peak_mb if record.objective == "memory" else each.size_mb for each in (trial, winner))
        return "" if not now or not least else f"{words.times(now / least)} the {record.objective} of {who}."
    one, other = trial.speedup, winner.speedup
    if one is None or other is None or not other.value > 0:
        return ""
    if one.vague or other.vague:
        if one.high < other.low:
            return f"At most {words.times(one.high / other.low)} of {who}."
        return f"Not told apart from {who} in the search, which has {words.speed(other)}."
    ratio = one.value / other.value
    ratio_text = "half as fast as" if 0.475 <= ratio < 0.525 else f"{words.times(ratio)} of"
    meets = one.low <= other.high and other.low <= one.high
    if ratio < 1:
        return f"{ratio_text[0].upper()}{ratio_text[1:]} {who}{', within the noise of the search' if meets else ''}."
    gain = "not surely faster" if meets else "but behind it when timed again"
    return f"{words.times(ratio)} of {who} in the search, {gain}."


def _row(trial: Trial, record: Record, keeps: bool) -> Row:
    return Row(
        trial=trial,
        recipe=plain(str(trial.recipe)),
        words=plain(words.recipe(trial.recipe, record)),
        keeps=keeps,
        ships=record.winner is not None and trial.recipe.hash == record.best,
        reason=why_not(trial, record),
        cells=tuple(_cells(trial, record)),
    )


def _cells(trial: Trial, record: Record) -> Iterator[Cell]:
    known = words.known
    yield Cell(_or_dash(words.speed(trial.speedup)), known(trial.speedup.value) if trial.speedup else None)
    latency = trial.latency_ms.median if trial.latency_ms else None
    yield Cell(_or_dash(words.milliseconds(latency)), known(latency))
    if words.single_call_latencies(record):
        examples = words.examples(trial, record)
        yield Cell("–" if examples is None else f"{examples:,}", examples)
    if labelled(record):
        yield Cell(_or_dash(words.drop(trial.drop, record)), known(trial.drop.value) if trial.drop else None)
    error = trial.parity.centred_error if trial.parity else None
    yield Cell(_or_dash(words.error(error)), known(error), minor=labelled(record))
    if has_files(record):
        yield Cell(_or_dash(words.megabytes(trial.size_mb)), known(trial.size_mb), minor=True)
    yield Cell(_or_dash(words.megabytes(trial.peak_mb)), known(trial.peak_mb), minor=True)
    yield Cell(_or_dash(words.duration(trial.cold_s)), known(trial.cold_s), minor=True)
    yield Cell(words.duration(trial.seconds), known(trial.seconds), minor=True)


def _or_dash(text: str) -> str:
    """A dash for an unknown figure; the caption explains the dash."""
    return "–" if text == words.UNKNOWN else text


def details(found: Sequence[Row], folder: pathlib.Path, record: Record) -> list[dict[str, Any]]:
    """Details of each row for a click, within the report's byte limit."""
    refused = [each.recipe.hash for each in record.refused]
    again = {each.recipe.hash: each for each in (*record.refused, record.confirmation) if each is not None}
    allowed = allowances([row.trial for row in found], refused)
    return [
        _details(row, folder, record, again.get(row.trial.recipe.hash), most) for row, most in zip(found, allowed, strict=True)
    ]


def _details(row: Row, folder: pathlib.Path, record: Record, again: Confirmation | None, most: int) -> dict[str, Any]:
    trial = row.trial
    texts = {
        "reason": fitted(row.reason, most // 4) if len(row.reason) > MAX_REASON else "",
        "notes": fitted(plain("\n".join(trial.notes)), most // 4),
        "traceback": fitted(plain(trial.traceback or "").strip("\n"), most // 3),
        "again": "" if again is None else _confirmation_text(again, folder, most // 2),
    }
    used = sum(len(text.encode()) for text in texts.values())
    log = tail(folder, trial.log, max(most // 4, most - used))
    if log is not None:
        texts |= {"log": log.text, "path": _log_caption(trial.log, log)}
    facts = [list(fact) for fact in _facts(trial, record)]
    return {name: text for name, text in texts.items() if text} | {"facts": facts}


def _confirmation_text(found: Confirmation, folder: pathlib.Path, most: int) -> str:
    """The result of a confirmation, in at most ``most`` bytes of JSON: why it was refused, and the end of its log."""
    log = tail(folder, found.log, most // 2)
    parts = [plain(found.reason or ""), plain(found.traceback or "").strip("\n")]
    if log is not None:
        parts.append(f"{_log_caption(found.log, log)}:\n{log.text}")
    return fitted("\n\n".join(part for part in parts if part), most)


def _log_caption(path: str | None, log: Tail) -> str:
    """The path of a log, and how much of it is shown."""
    cut = f", the last {words.digits(len(log.text.encode()) / 1e3, 2)} kB of {words.digits(log.whole / 1e3, 2)} kB"
    return f"{path}{cut if log.cut else ''}"


def _facts(trial: Trial, record: Record) -> Iterator[tuple[str, str]]:
    terms = words.terms(record)
    if trial.stage:
        yield "stage of the search", words.clipped(trial.stage, 60).replace("_", " ")
    if trial.latency_ms is not None and trial.latency_ms.p90 is not None:
        yield "90% of calls within", words.milliseconds(trial.latency_ms.p90)
    if trial.drop is not None and trial.drop.limit is not None:
        decided = _decided(trial.drop, terms.sample, trial.recipe.exact)
        yield f"limit of the {terms.drop}", f"{words.lost(trial.drop.limit, record)}, {decided}"
    if trial.parity is not None:
        yield terms.outputs, words.clipped(words.parity(trial.parity, record), 300)
    if trial.comparison is not None:
        yield "timed", _timed(trial.comparison)
    if trial.dims:
        yield "sizes that may differ", words.clipped(", ".join(trial.dims), 120)
    yield "name", trial.recipe.hash


def _decided(drop: Drop, sample: str, exact: bool) -> str:
    if drop.decided is None and exact:
        return f"undecidable with {words.count(drop.n, sample)}, but it is exact and was held to rounding instead"
    if drop.decided is None:
        more = f"; about {drop.n_needed:,} would decide" if drop.n_needed else ""
        return f"undecidable with {words.count(drop.n, sample)}{more}"
    return "kept" if drop.decided else "not kept"


def _timed(found: Comparison) -> str:
    thrown = f", {words.count(found.discarded, 'block')} thrown away" if found.discarded else ""
    return f"{words.count(found.pairs, 'pair')}{thrown}, until {words.STOP_WORDS[found.stopped_by]}"
