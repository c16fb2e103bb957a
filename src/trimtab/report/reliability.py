"""Reliability of the figures, and how to reproduce them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from trimtab._internal.text import plain
from trimtab.core.measurement import Comparison
from trimtab.core.technique import Mode
from trimtab.core.trial import State
from trimtab.evaluation.confirm import Confirmation
from trimtab.report import formatting as words
from trimtab.report.request import option
from trimtab.study.record import Record, is_kept_original, without_repeats

Fact = tuple[str, str]


def confirmation(record: Record) -> list[Fact]:
    """The confirmation, beside the figures of the search."""
    later = [] if record.verified is None else [("verified since on a quiet machine", plain(str(record.verified)))]
    return [*_confirmation(record), *later, *_refused(record)]


def _confirmation(record: Record) -> Iterator[Fact]:
    found, searched, terms = record.confirmation, record.winner, words.terms(record)
    if found is None and record.refused:
        yield "confirmation", "none: what was measured again did not hold"
        return
    if found is None:
        yield "confirmation", f"none: nothing was measured again in fresh processes and {terms.again}"
        return
    if not found.again:
        yield "confirmation", "none: nothing was measured again, the figures are those of the search"
        return
    yield "confirmed", "yes" if found.ok else f"no: {plain(found.reason or 'the log of the confirmation says why')}"
    yield "measured from", _source(record.mode, found)
    before = f"; {words.speed(searched.speedup)} in the search" if searched is not None and searched.speedup else ""
    if any(is_kept_original(rung) for rung in record.ladder):
        yield f"the form that stands alone, against {terms.subject}", words.speed(found.speedup)
    else:
        yield f"speed-up over {terms.subject}", words.speed(found.speedup) + before
    if found.against_tuned is not None:
        yield "speed-up over the tuned original", words.speed(found.against_tuned)
    if found.drop is not None:
        scores = f"{words.score(found.baseline_score, record)} before, {words.score(found.score, record)} after"
        yield f"{terms.score} {terms.again}", f"{scores}, {terms.samples(found.drop.n)}"
        before = f"; {words.change(searched.drop, record)} {terms.searched}" if searched is not None and searched.drop else ""
        yield f"{terms.lost} {terms.again}", words.change(found.drop, record) + before
    yield f"{terms.outputs} {terms.again}", words.parity(found.parity, record)
    if found.measured_at is not None:
        yield "measured again at", plain(found.measured_at)


def _refused(record: Record) -> Iterator[Fact]:
    """Other recipes that were measured again and refused, with the paths of their logs in the run folder."""
    for found in {each.recipe.hash: each for each in record.refused}.values():
        if found != record.confirmation:
            log = f" ({words.clipped(found.log, 120)})" if found.log else ""
            reason = found.reason or "the log says why"
            known = any(reason.rstrip(".") in text for text in (record.sentence, *record.notes))
            why = "" if known else f": {words.clipped(reason, 400)}"  # the verdict or a note says it
            yield "refused when measured again", f"{words.clipped(str(found.recipe), 200)}{why}{log}"


def _source(mode: Mode, found: Confirmation) -> str:
    if mode == "train":
        n = "" if found.parity is None else f", over {words.count(found.parity.n, 'update')}"
        return f"other parameters, with the data in another order{n}"
    return "the files that ship" if found.loaded else "a build in memory, because no files that stand alone exist"


def noise(record: Record) -> list[Fact]:
    """How busy the machine was."""
    facts: list[Fact] = []
    if record.confirmation is not None and record.confirmation.comparison is not None:
        facts += _noise(record.confirmation.comparison)
    trials = [t.comparison for t in record.trials if t.comparison is not None and t.state is State.COMPLETE]
    spreads = sorted(value for each in trials if (value := words.known(each.noise)) is not None)
    if spreads:
        middle = words.share(spreads[len(spreads) // 2])
        several = f"{words.share(spreads[0])} to {words.share(spreads[-1])}, half of them up to {middle}"
        facts.append(("spread of the original against itself, over the trials", several if len(spreads) > 1 else middle))
    thrown = sum(each.discarded for each in trials)
    if trials:
        kept = sum(each.pairs for each in trials)
        facts.append(("the search timed", f"{words.count(kept, 'pair')}; {words.count(thrown, 'block')} thrown away"))
    return facts


def _noise(found: Comparison) -> Iterator[Fact]:
    yield "pairs of the confirmation", f"{found.pairs:,}, until {words.STOP_WORDS[found.stopped_by]}"
    yield "blocks thrown away, because others had the CPU or the core was slow", f"{found.discarded:,}"
    yield "spread of the original against itself (A/A)", words.share(found.noise)
    source = f", over {found.starts} starts" if found.starts > 1 else ", taken from other models and machines"
    if found.starts_left_out:
        yield "further starts, not counted, in which the original's threads met slowly", f"{found.starts_left_out}"
    if found.starts_corrected:
        yield "starts in which the original's threads met slowly, with its time in the search", f"{found.starts_corrected}"
    yield "spread of the ratio from one start to the next", words.share(found.process_noise) + source
    if found.rival_ms is not None:
        low, high = words.all_milliseconds(found.rival_ms)
        yield "time of the original from start to start, and over the trials", f"{low} to {high}"
    yield "CPU time that other processes took", words.share(found.foreign)
    yield "CPU time that the hypervisor took (stolen)", words.share(found.stolen)
    yield "blocks in which the core was slower than usual", words.share(found.slowed)


def data(record: Record) -> list[Fact]:
    """How the data was split."""
    prepared = record.prepared
    purpose = {
        "calibration": "quantizers see it",
        "selection": "the search sees it",
        "test": _test_data_seen(record),
    }
    facts = [
        (name, f"{words.count(size, 'example')}: {purpose.get(name, 'kept apart')}") for name, size in prepared.splits.items()
    ]
    if words.known(prepared.score) is not None:
        terms = words.terms(record)
        where = "" if prepared.n is None else " " + terms.scored.format(words.count(prepared.n, terms.sample))
        facts.append((f"{terms.score} of {terms.subject}", words.score(prepared.score, record) + where))
    return facts


def _test_data_seen(record: Record) -> str:
    """How many recipes saw the test data. Each refused recipe raises the chance that a later one passes by luck."""
    number = len(record.tried)
    if not number:
        return "only recipes that are confirmed see it"
    luck = ", each of them a chance more to pass by luck" if number > 1 else ""
    return f"only recipes that were confirmed saw it, one after the other: {number} here{luck}"


def undecided(record: Record) -> list[str]:
    """Recipes for which the data cannot decide the limit of the drop, a sentence for each."""
    terms = words.terms(record)
    return [
        f"{words.clipped(str(t.recipe), 200)}: its {terms.score} {t.drop.change(2)} ({t.drop.bound(2)}), which "
        f"{words.count(t.drop.n, terms.sample)} cannot decide against a limit of {words.lost(t.drop.limit, record)}"
        + (f"; about {t.drop.n_needed:,} would tell." if t.drop.n_needed else "; more would hardly help.")
        for t in record.trials
        if t.drop is not None and t.drop.limit is not None and t.drop.decided is None and not t.recipe.exact
    ]


def undecided_exact(record: Record) -> int:
    """The number of exact recipes for which the data cannot decide either."""
    return sum(
        t.drop is not None and t.drop.limit is not None and t.drop.decided is None and t.recipe.exact for t in record.trials
    )


def exact_recipes_note(record: Record) -> str:
    """How exact recipes are judged that the data cannot decide, in a sentence; empty if there are none."""
    number = undecided_exact(record)
    if not number:
        return ""
    to = "floating-point noise" if record.mode == "infer" else "what rounding explains"
    those = "is undecided by the data; it was" if number == 1 else "are undecided by the data; they were"
    return f"{words.count(number, 'exact recipe')} {those} held to {to} instead."


def notes(record: Record) -> list[str]:
    """All other notes, without repetitions and without those that the verdict states."""
    peaks = () if record.peaks is None else record.peaks.notes
    return words.limited(without_repeats(record.sentence, (*record.prepared.notes, *record.notes, *peaks)))


def machine(record: Record) -> list[Fact]:
    """The machine and its system."""
    found = record.environment
    quota = "" if found.cpu_quota is None else f", quota {found.cpu_quota:g}"
    limit = "" if found.memory_limit_mb is None else f", limited to {words.megabytes(found.memory_limit_mb)}"
    cores = f"{found.usable_cores} usable of {found.logical_cores}{quota}"
    facts = [
        ("processor", f"{found.cpu} ({found.machine})"),
        ("cores", cores),
        ("instruction sets", ", ".join(found.isa) or "none that matters"),
        ("memory", words.megabytes(found.memory_mb) + limit),
        ("graphics processors", "; ".join(map(str, found.gpus)) or "none"),
        ("system", f"{found.os}, Python {found.python}"),
        ("C++ compiler", found.compiler or "none"),
        ("fingerprint of the machine", found.fingerprint),
    ]
    return [*facts, *_peaks(record), *_energy(record)]


def _energy(record: Record) -> Iterator[Fact]:
    """The scope of the energy measurement, or why energy was not measured."""
    if record.energy is not None:
        yield "energy of a call", plain(record.energy.reason or f"counted for the {record.energy.scope}")


def _peaks(record: Record) -> Iterator[Fact]:
    if record.peaks is None:
        yield "peaks of the machine", words.UNKNOWN
        return
    for rate in record.peaks.rates:
        where = rate.device if rate.threads is None else words.count(rate.threads, "thread")
        value = words.digits(rate.value)
        reason = f": {words.clipped(rate.reason, 160)}" if rate.reason and value == words.UNKNOWN else ""
        yield f"peak of {rate.kind}, {where}", f"{value}{reason}" if value == words.UNKNOWN else f"{value} {rate.unit}"


def study(record: Record) -> list[Fact]:
    """The study's options, and its dates."""
    return [
        ("workload", f"{record.workload}, fingerprint {words.clipped(record.prepared.fingerprint, 64)}"),
        ("inputs that must be fast", record.prepared.inputs),
        ("threads", str(record.prepared.threads)),
        ("objective", record.objective),
        *((f"limit: {name}", value) for name, value in words.limits(record)),
        ("sampler", record.sampler),
        ("last run began", record.started),
        ("last run took", words.duration(record.seconds)),
    ]


def commands(record: Record) -> list[str]:
    """Commands that reproduce the result."""
    made = [line for line in (plain(record.command).strip(),) if line]
    if record.artifact is None or not made:
        return made
    folder, ships = option(record.command, "--out"), record.winner
    if folder is None:
        return made
    # machine code is loaded only with the user's consent
    trust = ["--trust"] if ships is not None and ships.recipe.backend.native_code else []
    return [*made, shlex.join(["trimtab", "verify", f"{folder.rstrip('/')}/{record.artifact}", *trust])]
