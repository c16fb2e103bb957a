"""Figures and recipes in readable form. An unknown figure is shown as not measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trimtab._internal.text import counted, plain
from trimtab.core.measurement import MAX_SHOWN, Drop, Interval, Parity
from trimtab.core.recipe import Recipe
from trimtab.core.technique import Mode
from trimtab.core.trial import Trial
from trimtab.study.record import KEPT_SPEEDUP, Record, is_kept_original

UNKNOWN = "not measured"
RUNG_WORDS = {"as_written": "as written", "tuned": "tuned", "lossless": "lossless", "best": "best"}
STATUS_WORDS = {
    "improved": "improved",
    "limits_not_met": "limits not met",
    None: "no verdict yet",
}
STOP_WORDS = {
    "width": "the interval was narrow enough",
    "time": "the time for it was up",
    "pairs": "the pairs asked for were done",
}
WIDTH, NARROWEST = 100, 40
"""Default columns of text for a terminal of unknown width, and the minimum."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of one kind of study: inference or training."""

    subject: str
    """The baseline."""
    answer: str
    """Heading of the result."""
    stays: str
    """The verdict if the baseline stays."""
    quality: str
    """What a faster recipe may lose."""
    score: str
    drop: str
    """A score that is worse than as written."""
    gain: str
    """A score that is better."""
    outputs: str
    """What is compared with the reference."""
    basis: str
    """Preposition before the number of samples that a drop rests on."""
    sample: str
    scored: str
    """Phrase for the number of samples of the baseline's score."""
    searched: str
    """Phrase for the drop in the search."""
    again: str
    """Phrase for the drop in the confirmation."""
    rungs: str
    """Phrase for the rungs of the ladder."""
    measure: str
    call: str
    """What is timed; ``measure`` is the name of its duration."""
    drawn: str
    """Legend of a point's size and colour."""

    @property
    def lost(self) -> str:
        """The figure that the accuracy limit bounds, such as ``drop of the score``."""
        return f"{self.drop} of the {self.score}"

    def samples(self, number: int) -> str:
        """``on 500 examples``."""
        return f"{self.basis} {count(number, self.sample)}"


TERMS: Mapping[Mode, Terms] = {
    "infer": Terms(
        subject="the model as written",
        answer="What ships",
        stays="the original ships",
        quality="accuracy",
        score="score",
        drop="drop",
        gain="improvement",
        outputs="outputs",
        basis="on",
        sample="example",
        scored="on {} of the selection data",
        searched="on the selection data",
        again="on the test data",
        rungs="over its tuned form, to the best that loses nothing, to the best within the limits",
        measure="latency",
        call="call",
        drawn="Area is size on disk, colour the runtime.",
    ),
    "train": Terms(
        subject="the training as written",
        answer="The settings",
        stays="the settings as written stay",
        quality="loss",
        score="loss",
        drop="rise",
        gain="fall",
        outputs="losses",
        basis="over the last",
        sample="update",
        scored="at the end of {}",
        searched="in the search",
        again="from other parameters",
        rungs="to the best settings that change nothing in what is learnt, to the best within the limits",
        measure="update time",
        call="update",
        drawn="",
    ),
}


def terms(record: Record) -> Terms:
    """The terms of this study."""
    return TERMS[record.mode]


def columns(asked: int | None) -> int:
    """Columns to use on a terminal with ``asked`` columns, if that is known."""
    return WIDTH if asked is None else max(NARROWEST, min(asked, WIDTH))


def status(record: Record) -> str:
    """The verdict in one or two words."""
    if record.status != "kept_original":
        return STATUS_WORDS[record.status]
    if record.confirmation is not None and not record.confirmation.ok:
        return "nothing ships"
    own = record.mode == "train" or record.winner is None or record.winner.recipe.backend.name == "eager"
    return terms(record).stays if own else "nothing is faster than the original"


def known(value: float | None) -> float | None:
    """``value``, or ``None`` if it is ``None``, NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


def clipped(text: str, length: int) -> str:
    """``text`` on one line of at most ``length`` characters."""
    line = " ".join(plain(text).split())
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"


def limited(lines: Iterable[str]) -> list[str]:
    """Up to 20 distinct ``lines`` of up to 600 characters each, and a line with the number of omitted lines."""
    found = list(dict.fromkeys(clipped(line, 600) for line in lines))
    if len(found) <= 21:
        return found
    return [*found[:20], f"… and {len(found) - 20:,} others, which `trimtab report RUN --json` lists."]


def digits(value: float | None, count: int = 3) -> str:
    """``value`` to ``count`` significant digits, with thousands separators, without an exponent if that is readable."""
    value = known(value)
    if value is None:
        return UNKNOWN
    if value == 0:
        return "0"
    power = math.floor(math.log10(abs(value)))
    if not -5 < power < 7:
        return f"{value:.{count - 1}e}"
    return f"{value:,.{max(0, count - 1 - power)}f}"


def times(ratio: float | None) -> str:
    """``2.53x``."""
    ratio = known(ratio)
    if ratio is None:
        return UNKNOWN
    return f"{ratio:.2f}x" if 0.095 <= ratio < 100 else f"{digits(ratio)}x"


def span(interval: Interval | None) -> str:
    """``2.41 to 2.66``; empty if unknown. An infinite upper bound is left out."""
    if interval is None or known(interval.low) is None:
        return ""
    high = times(interval.high)[:-1] if interval.high <= MAX_SHOWN else f">{MAX_SHOWN:.0f}"
    return f"{times(interval.low)[:-1]} to {high}"


def speed(interval: Interval | None) -> str:
    """``2.53x (2.41 to 2.66)``, ``at least 5.64x (5.64 to 32.20)`` or ``unclear (0.11 to 5.64)``."""
    bounds = span(interval)
    if interval is None or not bounds:
        return UNKNOWN if interval is None else times(interval.value)
    return f"{quoted(interval)} ({bounds})"


def quoted(interval: Interval | None) -> str:
    """``2.53x``; if the interval is too wide for one number, the bound nearer to 1, or that it is unclear."""
    if interval is None or known(interval.value) is None:
        return UNKNOWN
    return interval.quoted() if interval.vague else times(interval.value)


def bounds(interval: Interval) -> str:
    """The line below a speed-up."""
    found = span(interval)
    return f"{found}, 95% interval" if found else ""


def milliseconds(value: float | None) -> str:
    """A latency in a suitable unit."""
    return all_milliseconds([value])[0]


def all_milliseconds(values: Sequence[float | None]) -> list[str]:
    """Latencies in one unit, which suits their geometric mean, so that they can be compared at a glance."""
    return _in_unit(values, ((1e3, "s"), (0.1, "ms"), (1e-3, "µs"), (0.0, "ns")), {"s": 1e-3, "ms": 1.0, "µs": 1e3, "ns": 1e6})


def _in_unit(values: Sequence[float | None], units: Sequence[tuple[float, str]], scales: Mapping[str, float]) -> list[str]:
    """``values`` in the first of ``units`` whose least value is not above their geometric mean."""
    found = [abs(number) for value in values if (number := known(value)) is not None and number != 0]
    mean = math.exp(sum(map(math.log, found)) / len(found)) if found else 0.1
    unit = next(name for least, name in units if mean >= least)
    shown = [None if (number := known(value)) is None else number * scales[unit] for value in values]
    return [UNKNOWN if number is None else f"{digits(number)} {unit}" for number in shown]


def single_call_latencies(record: Record) -> bool:
    """Whether latencies are of single calls with each recipe's batch size, instead of from the paired timing."""
    return record.objective == "throughput" and record.mode == "infer"


def examples(trial: Trial | None, record: Record) -> int | None:
    """Examples in the call of a trial's latency; ``None`` if all trials have the same number."""
    found = None if trial is None or not single_call_latencies(record) else trial.latency_ms
    number = None if found is None else found.conditions.get("examples")
    return number if isinstance(number, int) else None


def megabytes(value: float | None) -> str:
    """A size in MB (10**6 bytes)."""
    return all_megabytes([value])[0]


def all_megabytes(values: Sequence[float | None]) -> list[str]:
    """Sizes in one unit of kB, MB and GB, as in :func:`all_milliseconds`."""
    return _in_unit(values, ((1e3, "GB"), (0.1, "MB"), (0.0, "kB")), {"GB": 1e-3, "MB": 1.0, "kB": 1e3})


def all_joules(values: Sequence[float | None]) -> list[str]:
    """Energies in one unit of J, mJ and µJ, as in :func:`all_milliseconds`."""
    return _in_unit(values, ((0.1, "J"), (1e-4, "mJ"), (0.0, "µJ")), {"J": 1.0, "mJ": 1e3, "µJ": 1e6})


def duration(seconds: float | None) -> str:
    """``0.42 s``, ``12 s``, ``3 min 20 s``, ``1 h 5 min``."""
    seconds = known(seconds)
    if seconds is None:
        return UNKNOWN
    if seconds < 60:
        return f"{digits(seconds, 2)} s" if seconds < 59.5 else "60 s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def share(value: float | None, decimals: int = 1) -> str:
    """``3.2%``; a positive value never becomes 0%."""
    value = known(value)
    if value is None:
        return UNKNOWN
    least = 10.0 ** -(decimals + 2)
    return f"below {least:.{decimals}%}" if 0 < value < least / 2 else f"{value:.{decimals}%}"


def error(value: float | None) -> str:
    """An error relative to the variation of the outputs."""
    value = known(value)
    if value is None:
        return UNKNOWN
    return share(value, 2) if value >= 1e-4 else f"{value:.1e}" if value else "0"


def in_percent(record: Record) -> bool:
    """Whether scores are shares, such as an accuracy, so that drops are shown in percent."""
    return record.prepared.share


def score(value: float | None, record: Record) -> str:
    """A score in its own units."""
    value = known(value)
    if value is None:
        return UNKNOWN
    return f"{value:.2%}" if in_percent(record) else digits(value, 4)


def lost(value: float | None, record: Record) -> str:
    """A difference of scores, in percent points if the score is a share."""
    value = known(value)
    if value is None:
        return UNKNOWN
    return f"{value + 0.0:.2%}" if in_percent(record) else digits(value)


def drop(found: Drop | None, record: Record) -> str:
    """``0.20% (≤ 0.55%)``."""
    if found is None:
        return UNKNOWN
    return f"{lost(found.value, record)} (≤ {lost(found.upper, record)})"


def change(found: Drop, record: Record) -> str:
    """The drop in a sentence or a list of facts: ``0.20% (≤ 0.55%)``, or ``improvement of 1.09% (drop ≤ 2.08%)``."""
    if found.value >= 0:
        return drop(found, record)
    named = terms(record)
    return f"{named.gain} of {lost(abs(found.value), record)} ({named.drop} ≤ {lost(found.upper, record)})"


def parity(found: Parity | None, record: Record) -> str:
    """The error of the outputs, or of the losses of a training."""
    if found is None:
        return UNKNOWN
    if record.mode == "train":
        figures = f"apart by {error(found.max_relative)} at most, over {count(found.n, 'update')}"
    else:
        largest = f"largest {error(found.tail_error)}, on {count(found.n, 'example')}"
        figures = f"centred error {error(found.centred_error)}, {largest}"
        if found.unrelated:
            figures += f"; {count(found.unrelated, 'example')} off by as much as the outputs vary"
        if found.left_out:
            figures += f"; the score alone judges {found.left_out} of the batches, which have other sizes than the reference's"
    return figures if found.ok else f"{found.reason} ({figures})"


count = counted


def recipe(found: Recipe, record: Record) -> str:
    """A recipe in words: runtime, passes, calibration data, threads."""
    words = [found.describe()] if record.mode == "infer" else [step.describe() for step in found.passes]
    words = words or ["the settings as written"]
    examples = record.prepared.splits.get("calibration", 0)
    if examples and any("calibration" in step.needs for step in (*found.passes, found.backend)):
        words.append(f"calibrated on {count(examples, 'example')}")
    if not any("threads" in step.sets for step in found.passes):
        words.append(count(record.prepared.threads, "thread"))
    return ", ".join(words)


def compared(record: Record) -> tuple[str, str]:
    """The data of the scores: its name and its amount."""
    if record.mode == "train":
        return "losses compared", count(record.prepared.n or 0, "update")
    return "examples", ", ".join(f"{name} {size:,}" for name, size in record.prepared.splits.items()) or "none"


def limits(record: Record) -> list[tuple[str, str]]:
    """The study's limits, as names and values."""
    wished = record.limits
    found = [
        ("latency", None if wished.latency_ms is None else milliseconds(wished.latency_ms)),
        ("memory", None if wished.memory_mb is None else megabytes(wished.memory_mb)),
        ("size", None if wished.size_mb is None else megabytes(wished.size_mb)),
        ("at least", None if wished.throughput is None else f"{digits(wished.throughput)} examples/s"),
    ]
    base = known(record.prepared.score)
    if base is not None:
        stated = (
            f" ({wished.max_drop})" if isinstance(wished.max_drop, str) else " (by default)" if wished.max_drop is None else ""
        )
        found.insert(0, (terms(record).lost, lost(wished.drop_limit(base), record) + stated))
    else:
        found.insert(0, ("error of the outputs of lossy recipes", error(wished.max_error)))
        if wished.max_drop is not None:
            found.insert(0, (terms(record).lost, f"{wished.max_drop}, which nothing shows without labels"))
    return [(name, value) for name, value in found if value is not None]


def rung_speed(rung: Mapping[str, Any]) -> str:
    """The speed-up of a ladder rung with its interval; of an original that ships, that it is one."""
    return KEPT_SPEEDUP if is_kept_original(rung) else speed(rung_interval(rung))


def rung_interval(rung: Mapping[str, Any]) -> Interval | None:
    """The speed-up of a ladder rung, which is stored as plain JSON."""
    values = [rung["speedup"][key] for key in ("value", "low", "high")]
    return None if None in values else Interval(*values)
