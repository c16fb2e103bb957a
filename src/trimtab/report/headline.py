"""The top of a report: verdict, main figures, recipe in words."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from trimtab._internal.text import plain
from trimtab.core.measurement import Measurement
from trimtab.core.trial import Trial
from trimtab.evaluation.confirm import Confirmation
from trimtab.report import formatting as words
from trimtab.report.trial_table import has_files, labelled
from trimtab.study import ranking
from trimtab.study.record import Record, is_kept_original

RUNNING = "This study has no verdict: it is still running, or it was cut off. The same command goes on with it."


@dataclasses.dataclass(frozen=True)
class Tile:
    """One main figure, with a line below it."""

    name: str
    value: str
    below: str = ""


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of the recipe: name, description, fields."""

    words: str
    about: str
    fields: str


def headline(record: Record) -> str:
    """The verdict in a few words."""
    if record.status != "improved":
        return words.status(record)
    found, first = record.confirmation, rung(record, "as_written")
    if record.objective in ("size", "memory") and first is not None:
        key, what = ("size_mb", "size") if record.objective == "size" else ("peak_mb", "memory")
        before, after = first.get(key), (rung(record, "best") or {}).get(key)
        if record.objective == "memory" and found is not None and found.original_mb is not None:
            before = found.original_mb  # measured in the same confirmation
        now, then = words.all_megabytes([after, before])
        return f"{now} of {what} instead of {then}"
    if found is None or found.speedup is None:
        return words.status(record)
    if found.speedup.unclear:
        return "keeps the limits, at what speed is unclear"
    if found.speedup.high < 1:  # a slower winner is possible only if the original misses a limit
        return f"keeps the limits that the original misses, at {words.quoted(found.speedup)} its speed"
    wide = doubt(record) and not found.speedup.vague
    ratio = f"{words.span(found.speedup)} times" if wide else words.quoted(found.speedup)
    return f"{ratio} the throughput of as written" if record.objective == "throughput" else f"{ratio} as fast as written"


def sentence(record: Record) -> str:
    """The study's verdict as a sentence."""
    return words.clipped(record.sentence, 2000) or RUNNING


def rung(record: Record, name: str) -> Mapping[str, Any] | None:
    """A rung of the ladder by name."""
    return next((each for each in record.ladder if each.get("rung") == name), None)


def leader(record: Record) -> Trial | None:
    """The trial that ships, or the best so far."""
    if record.winner is not None or record.status is not None:
        return record.winner
    ranked = ranking.ranked(record.trials, record.limits, record.objective)
    return ranked[0] if ranked else None


def recipe(record: Record) -> str:
    """The recipe that ships, in words; empty if none does."""
    found = leader(record)
    return "" if found is None else plain(words.recipe(found.recipe, record))


def steps(record: Record) -> list[Step]:
    """The steps of the recipe that ships in order, the runtime last."""
    found = leader(record)
    if found is None:
        return []
    return [
        Step(
            words=plain(step.describe()),
            about=(inspect.getdoc(type(step)) or step.name).splitlines()[0],
            fields=", ".join(f"{field.name}={getattr(step, field.name)}" for field in dataclasses.fields(step)),
        )
        for step in (*found.recipe.passes, *([] if record.mode == "train" else [found.recipe.backend]))
    ]


def conditions(record: Record) -> str:
    """The conditions of the measurement, in a sentence."""
    found = record.confirmation.comparison if record.confirmation is not None else None
    pairs = "" if found is None else f", {words.count(found.pairs, 'pair')} of timings taken in turns"
    if found is not None and found.rival_ms is not None:
        low, high = words.all_milliseconds(found.rival_ms)
        pairs += f" over {words.count(found.starts, 'start')}; from start to start the original took {low} to {high}"
    pairs += "" if found is None else f"; {found.conditions}"
    threads = words.count(record.prepared.threads, "thread")
    inputs = words.clipped(record.prepared.inputs, 200)
    when = record.confirmation.measured_at if record.confirmation is not None else None
    date = f"last run on {plain(record.started)[:10]}" if when is None else f"on {plain(when)[:10]}"
    where = f"{plain(record.environment.cpu)}{',' if when is None else ''} {date}"
    measured = "Measured" if any(trial.comparison is not None for trial in record.trials) else "Nothing was timed"
    return f"{measured} on {where}, {threads} unless the recipe says otherwise, inputs {inputs}{pairs}."


def tiles(record: Record) -> list[Tile]:
    """The main figures; those that were not measured are left out."""
    found = [*_speed(record), *_cost(record)]
    return [tile for tile in found if tile.value != words.UNKNOWN]


def _speed(record: Record) -> Iterator[Tile]:
    found, first, best = record.confirmation, rung(record, "as_written"), rung(record, "best")
    if found is None:
        trial = leader(record)
        if trial is not None and trial.speedup is not None:
            below = f"{words.span(trial.speedup)} in the search, not confirmed".lstrip()
            yield Tile("best so far" if record.status is None else "speed-up", words.quoted(trial.speedup), below)
        return
    if best is not None and is_kept_original(best):
        yield Tile("speed-up over as written", "1.00x", "the original itself")
    elif found.speedup is not None and found.again:  # the ratio of settings to themselves was not measured
        yield Tile("speed-up over as written", words.quoted(found.speedup), words.bounds(found.speedup))
    if found.against_tuned is not None:
        yield Tile("speed-up over tuned", words.quoted(found.against_tuned), words.bounds(found.against_tuned))
    if best is not None:
        value, below = _latency(record, found, first, best)
        yield Tile(f"median {words.terms(record).measure}", value, below)
    if found.throughput is not None:
        yield _throughput(found, found.throughput)


def _latency(record: Record, found: Confirmation, first: Mapping[str, Any] | None, best: Mapping[str, Any]) -> tuple[str, str]:
    """The latency of what ships, and the baseline's in the same unit. Both are timed in turns, because latencies of different
    minutes are not comparable."""
    now, before = best["latency_ms"]["median"], None if first is None else first["latency_ms"]["median"]
    in_turns = found.comparison is not None and not words.single_call_latencies(record)
    if in_turns and found.comparison is not None and not is_kept_original(best):
        before = found.comparison.rival.median
    value, written = words.all_milliseconds([now, before])
    below = "" if written == words.UNKNOWN else f"{written} as written"
    if words.single_call_latencies(record):  # timed one after the other, each with as many examples as its recipe takes
        examples = f"{below}{of_examples(record, first)}" if below else ""
        return value, "; ".join(part for part in (of_examples(record, best).strip(), examples) if part)
    return value, f"{below}, in turns with it" if below and in_turns and not is_kept_original(best) else below


def _throughput(found: Confirmation, measured: Measurement) -> Tile:
    bounds, times = f"{words.digits(measured.interval.low)} to {words.digits(measured.interval.high)}", found.comparison
    before = ""
    if times is not None:  # both have the same number of examples
        before = f"; {words.digits(measured.median * times.candidate.median / times.rival.median)} as written, in turns with it"
    return Tile("throughput", f"{words.digits(measured.median)} {plain(measured.unit)}", bounds + before)


def examples(record: Record, found: Mapping[str, Any] | None) -> int | None:
    """Examples in the call of a rung's latency; ``None`` if all rungs have the same number."""
    name = None if found is None else found["recipe"]
    return words.examples(next((trial for trial in record.trials if str(trial.recipe) == name), None), record)


def of_examples(record: Record, found: Mapping[str, Any] | None) -> str:
    """`` for 8 examples``, to follow the latency of a rung; empty if all rungs have the same number."""
    number = examples(record, found)
    return "" if number is None else f" for {words.count(number, 'example')}"


def _cost(record: Record) -> Iterator[Tile]:
    found, first, best = record.confirmation, rung(record, "as_written"), rung(record, "best")
    terms = words.terms(record)
    if found is not None and found.drop is not None:
        scores = f"{terms.score} {words.score(found.baseline_score, record)} to {words.score(found.score, record)}"
        label = f"{terms.gain} of the {terms.score}" if found.drop.value < 0 else terms.lost
        yield Tile(label, words.lost(abs(found.drop.value), record), f"{found.drop.bound(2)}; {scores}")
    elif found is not None and found.parity is not None and not labelled(record):
        yield Tile(f"error of the {terms.outputs}", words.error(found.parity.centred_error), f"of {found.parity.of}")
    if best is not None:
        yield _compared_tile("size on disk", best, first, "size_mb")
        yield _compared_tile("peak memory", best, first, "peak_mb")
        yield _compared_tile("cold start", best, first, "cold_s")
    if record.energy is not None and record.energy.subject_j is not None:
        now, before = words.all_joules([record.energy.subject_j, record.energy.rival_j])
        yield Tile("energy of a call", now, "" if before == words.UNKNOWN else f"{before} as written")


def _compared_tile(name: str, best: Mapping[str, Any], first: Mapping[str, Any] | None, key: str) -> Tile:
    """A figure of what ships, with the baseline's figure below it in the same unit."""
    values = [best[key], None if first is None else first[key]]
    now, before = map(words.duration, values) if key == "cold_s" else words.all_megabytes(values)
    return Tile(name, now, "" if before == words.UNKNOWN else f"{before} as written")


def doubt(record: Record) -> str:
    """A warning if the figures of the verdict come from a machine that was too busy, from too few calls, or from processes
    that differ from start to start; else empty."""
    found = record.confirmation.comparison if record.confirmation is not None else None
    if found is None or found.doubt is None:
        return ""
    fresh, longer = record.options
    if found.few:
        cause = f"The calls are so slow that only {words.count(found.pairs, 'pair')} were measured"
        way_out = f"Give it more time: {longer}."
    elif found.differs is not None:
        cause = found.differs[0].upper() + found.differs[1:]
        way_out = "That is how they run here: more time or a quieter machine would narrow it little."
    else:
        cause = "The machine was too busy while this was measured"
        way_out = f"Run the study again with {fresh} when the machine is quiet."
    quote = "Quote no number from it." if found.ratio.unclear else "Quote the interval, not the number."
    return f"{cause}: the interval of the speed-up goes from {words.span(found.ratio)}. {quote} {way_out}"


def rungs(record: Record) -> list[dict[str, str]]:
    """The ladder as a table; each column has one unit."""
    terms, several, found = words.terms(record), words.single_call_latencies(record), record.ladder
    times = words.all_milliseconds([each["latency_ms"]["median"] for each in found])
    sizes = words.all_megabytes([each["size_mb"] for each in found])
    peaks = words.all_megabytes([each["peak_mb"] for each in found])
    return [
        {
            "rung": words.RUNG_WORDS.get(each["rung"], str(each["rung"])),
            "recipe": plain(str(each["recipe"])),
            "speed-up": words.rung_speed(each),
            terms.measure: times[n],
            **({"examples a call": words.digits(examples(record, each), 1)} if several else {}),
            terms.score: words.score(each["score"]["value"], record),
            terms.drop: words.lost(each["drop"]["value"], record),
            "at most": words.lost(each["drop"]["upper"], record),
            **({"size": sizes[n]} if has_files(record) else {}),
            "peak memory": peaks[n],
            "cold start": words.duration(each["cold_s"]),
        }
        for n, each in enumerate(found)
    ]


def original_test_score(record: Record) -> str | None:
    """A sentence with the original's score on the test data, if the best rung is scored on other data than the other rungs."""
    found, terms = record.confirmation, words.terms(record)
    if found is None or not found.ok or found.before in (None, record.prepared.score):
        return None
    return f"The {terms.score} of the best is {terms.again}, where {terms.subject} has {words.score(found.before, record)}."


def tally(record: Record) -> str:
    """``12 trials: 9 complete, 2 skipped, 1 failed``."""
    states = [trial.state.lower() for trial in record.trials]
    parts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return words.count(len(states), "trial") + (f": {parts}" if parts else "")
