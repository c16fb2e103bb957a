"""Make the record of a run out of the raw log that the probe wrote."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from trimtab.core.evidence import (
    CallRecord,
    DistributedRecord,
    LineRecord,
    LoaderRecord,
    MemoryRecord,
    ModuleRecord,
    OperatorRecord,
    OptimizerRecord,
    Phase,
    ProbeRecord,
    RecompileRecord,
    SpanRecord,
    StackRecord,
)
from trimtab.measure.quantiles import t_quantile
from trimtab.probe.inside.clock import PHASES

Json = Mapping[str, Any]
PROBE = PHASES.index("probe")
NS = 1e-6
"""ms of a nanosecond."""
MOST_LINES, MOST_SPANS, MOST_MEMORY_LINES, MOST_STACKS = 40, 400, 10, 200
CURVE = 40
"""Points of the memory over a step."""
RISE = 0.25
"""Share of the mean growth from which on a step adds to the memory: less is what the probe keeps of a step, and a mean that a
few steps make, as an allocator that settles, is no growth with every step."""


class Unit:
    """What happened between two events of the anchor."""

    def __init__(self, before: Sequence[Any], after: Sequence[Any]) -> None:
        self.start, self.end, self.held_mb = int(before[0]), int(after[0]), before[3] / 1e6
        self.phases = [(b - a) * NS for a, b in zip(before[1], after[1], strict=True)]
        self.probe_ms = self.phases[PROBE]
        self.ms = (self.end - self.start) * NS - self.probe_ms
        self.faults = int(after[2] - before[2])
        self.grown_mb = (after[3] - before[3]) / 1e6
        self.evaluates, self.begins_epoch = after[4] > before[4], after[5] > before[5]
        self.cpu_ms = (after[6] - before[6]) * NS


def record_of(log: Json, *, command: Sequence[str], **outside: Any) -> ProbeRecord:
    """The record of a log. ``outside`` are fields that only the driver knows, such as ``contained``."""
    marks = log["marks"]
    skipped = min(int(log["warm_up"]), max(1, (len(marks) - 1) // 3))
    every = [Unit(before, after) for before, after in itertools.pairwise(marks)]
    units = every[skipped:] or every[-1:]
    kind, where, _ = log["anchor"]
    evaluating = {u for u in units if u.evaluates} if kind in ("optimizer", "backward") else set()
    starting = {u for u in units if u.begins_epoch}
    notes = list(log["notes"])
    for found, what in ((evaluating, "a call in evaluation mode or without gradients"), (starting, "the begin of an epoch")):
        if 2 * len(found) > len(units):
            found.clear()
            notes.append(f"Most steps hold {what}; it counts as part of a step.")
    clean = [u for u in units if u not in evaluating and u not in starting] or units
    n = len(clean)
    windows = _Windows(clean)
    totals, mixed = windows.tallies(log["tallies"])
    step_ms = sum(u.ms for u in clean) / n
    phases = {name: sum(u.phases[i] for u in clean) / n for i, name in enumerate(PHASES) if i != PROBE}
    median = statistics.median(u.ms for u in clean)
    busy = log["busy"]
    return ProbeRecord(
        command=tuple(command),
        anchor=kind,
        anchor_site=where,
        start_s=log["started_s"],
        steps=n,
        step_ms=step_ms,
        median_ms=median,
        probe_ms=statistics.median(u.probe_ms for u in clean),
        times_ms=tuple(u.ms for u in clean),
        phases=phases,
        run_s=_run(log, every, units, evaluating, starting, median),
        finished=log["finished"],
        lines=_lines(log["samples"], windows, log["runs"]),
        stacks=_stacks(log, windows),
        loaders=_loaders(log, totals, mixed, n, len(evaluating)),
        optimizers=_optimizers(log, totals, n),
        modules=_modules(log, totals, windows, n, len(evaluating)),
        calls=tuple(CallRecord(name=name, site=where, calls=0.0, ms=0.0) for name, where in log["called"].items())
        + _calls(totals, mixed, n, len(every)),
        operators=_operators(log),
        operator_calls=log["operators"].get("calls", 0.0),
        small_operators=log["operators"].get("small", 0.0),
        recompiles=_recompiles(log),
        memory=_memory(log, marks, clean, windows),
        distributed=_distributed(log, totals, n),
        timeline=_timeline(log["spans"], clean, median),
        threads=log["threads"],
        cores=log["cores"],
        cpu_share=min(1.0, sum(u.cpu_ms for u in clean) / max(sum(u.ms + u.probe_ms for u in clean), 1e-9) / log["cores"]),
        others_share=max(0.0, min(1.0, (busy["all_s"] - busy["own_s"]) / busy["wall_s"] / log["cores"])) if busy else 0.0,
        device=log["device"],
        flags=log["flags"],
        texts=log["texts"] | {where: text for row in log["reading"] for where, text, *_ in row["lines"] if text},
        losses=tuple(log["losses"]),
        notes=tuple(notes),
        **outside,
    )


Key = tuple[Any, ...]
Totals = dict[Key, tuple[float, float]]
"""Key -> calls and ms."""


class _Windows:
    """The time within clean units."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self.units = sorted(units, key=lambda u: u.start)
        self._ends = [u.end for u in self.units]

    def at(self, ns: float) -> Unit | None:
        """The unit that ``ns`` is within."""
        return self.units[bisect.bisect_right(self._ends, ns)] if self.holds(ns) else None

    def holds(self, ns: float, end: bool = False) -> bool:
        """Whether ``ns`` is within a unit; ``end``: its end counts and its begin does not."""
        place = bisect.bisect_left(self._ends, ns) if end else bisect.bisect_right(self._ends, ns)
        return place < len(self.units) and (self.units[place].start < ns if end else self.units[place].start <= ns)

    def tallies(self, tallies: Sequence[Any]) -> tuple[Totals, Totals]:
        """What was counted in clean units, and elsewhere."""
        inside: dict[Key, list[float]] = defaultdict(lambda: [0.0, 0.0])
        outside: dict[Key, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for ns, entries in tallies:
            into = inside if self.holds(ns, end=True) else outside
            for key, (calls, spent) in entries:
                found = into[tuple(key)]
                found[0] += calls
                found[1] += spent * NS
        return {k: (v[0], v[1]) for k, v in inside.items()}, {k: (v[0], v[1]) for k, v in outside.items()}


def _of(totals: Totals, *key: Any) -> tuple[float, float]:
    return totals.get(tuple(key), (0.0, 0.0))


def _run(
    log: Json, every: list[Unit], units: list[Unit], evaluating: set[Unit], starting: set[Unit], median: float
) -> dict[str, float]:
    saving = PHASES.index("saving")
    over = {u: max(0.0, u.ms - median) / 1000 for u in units}
    return {
        "start": log["started_s"],
        "steps": sum(u.ms for u in every) / 1000,
        "evaluation": sum(over[u] for u in evaluating),
        "epoch start": sum(over[u] for u in starting - evaluating),
        "saving": sum(u.phases[saving] for u in every) / 1000,
    }


def _lines(samples: Sequence[Any], windows: _Windows, runs: Mapping[str, int]) -> tuple[LineRecord, ...]:
    seen: dict[tuple[str, str, int, str], int] = defaultdict(int)
    whole = 0
    for ns, where, text, phase, function, *_ in samples:
        if windows.holds(ns):
            whole += 1
            if where:
                seen[where, text, phase, function] += 1
    most = sorted(seen.items(), key=lambda item: -item[1])[:MOST_LINES]
    return tuple(
        LineRecord(
            site=where,
            text=text,
            phase=cast(Phase, PHASES[phase]),
            share=count / whole,
            function=function,
            runs=float(runs.get(where, 0)),
        )
        for (where, text, phase, function), count in most
    )


def _stacks(log: Json, windows: _Windows) -> tuple[StackRecord, ...]:
    within = [number for ns, *_, number in log["samples"] if windows.holds(ns)]
    seen = Counter(number for number in within if log["stacks"][number])
    return tuple(
        StackRecord(calls=tuple(log["stacks"][number]), share=count / len(within))
        for number, count in seen.most_common(MOST_STACKS)
    )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _loaders(log: Json, totals: Totals, mixed: Totals, n: int, evaluations: int) -> tuple[LoaderRecord, ...]:
    found: dict[Any, LoaderRecord] = {}
    for facts in log["loaders"]:
        calls, ms = _of(totals, "loader", facts["number"])
        other_calls, other_ms = _of(mixed, "loader", facts["number"])
        made = [_of(t, "epoch", facts["number"]) for t in (totals, mixed)]
        iterators = sum(count for count, _ in made)
        if not calls + other_calls + iterators:
            continue
        here, there = _of(totals, "read", facts["dataset_id"]), _of(mixed, "read", facts["dataset_id"])
        worker = _Workers(log["reading"], facts)
        reads, read_ms = here[0] + there[0], here[1] + there[1]
        record = LoaderRecord(
            site=facts["site"],
            dataset=facts["dataset"],
            **{
                name: facts[name]
                for name in (
                    "iterable",
                    "tensors",
                    "batch_fetch",
                    "draws",
                    "examples",
                    "batch_size",
                    "workers",
                    "persistent",
                )
                if name in facts
            },
            opens=facts.get("opens") or worker.opens,
            prefetch=facts.get("prefetch"),
            pin_memory=facts.get("pin_memory", False),
            batches=round(calls),
            iterators=round(iterators),
            start_ms=sum(ms for _, ms in made) / iterators if iterators else 0.0,
            wait_ms=ms / calls if calls else other_ms / other_calls if other_calls else 0.0,
            read_ms=read_ms / reads if reads else worker.read_ms,
            lines=worker.lines(),
            batch_bytes=round(_mean(facts.get("bytes", ()))),
            dtypes=tuple(facts.get("dtypes", ())),
            padding=_mean(facts["padding"]) if facts.get("padding") else None,
        )
        key = record.site, record.dataset, record.examples, record.batch_size
        found[key] = _together(found[key], record) if key in found else record
    return tuple(found.values())


class _Workers:
    """What the workers of a loader wrote. Those that were spawned have the data set at another address; its class tells."""

    def __init__(self, rows: Sequence[Json], facts: Json) -> None:
        own = [row for row in rows if row["dataset"] == facts["dataset_id"]]
        self._rows = own or [row for row in rows if row["name"] == facts["dataset"]]
        examples = sum(row["examples"] for row in self._rows)
        self.opens = sum(row["opened"] for row in self._rows) / max(examples, 1)
        timed = [row["ns"] * NS for row in self._rows if row["ns"]]
        self.read_ms = statistics.fmean(timed) if timed else None

    def lines(self) -> tuple[LineRecord, ...]:
        """The lines of the script by their share of the samples; those that were only counted last."""
        seen: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
        for row in self._rows:
            for where, text, function, samples, runs in row["lines"]:
                entry = seen[where, text, function]
                entry[0] += samples
                entry[1] += runs
        whole = max(sum(samples for samples, _ in seen.values()), 1)
        most = sorted(seen.items(), key=lambda item: [-number for number in item[1]])[:MOST_LINES]
        return tuple(
            LineRecord(site=where, text=text.strip(), phase="data", share=samples / whole, function=function, runs=float(runs))
            for (where, text, function), (samples, runs) in most
            if where
        )


def _together(one: LoaderRecord, other: LoaderRecord) -> LoaderRecord:
    """The record of two loaders that one line made, as where a loader is made for each epoch."""
    batches, iterators = one.batches + other.batches, one.iterators + other.iterators
    wait = one.wait_ms * one.batches + other.wait_ms * other.batches
    start = one.start_ms * one.iterators + other.start_ms * other.iterators
    return dataclasses.replace(
        one,
        batches=batches,
        iterators=iterators,
        wait_ms=wait / batches if batches else one.wait_ms,
        start_ms=start / iterators if iterators else one.start_ms,
    )


def _optimizers(log: Json, totals: Totals, n: int) -> tuple[OptimizerRecord, ...]:
    found = []
    for facts in log["optimizers"]:
        calls, ms = _of(totals, "optimizer", facts["number"])
        if calls:
            kept = {name: facts[name] for name in ("site", "name", "tensors", "elements", "kernel", "can_fuse")}
            filled = _of(totals, "zero", facts["number"], True)[0] + _of(totals, "zero", -1, True)[0]
            found.append(OptimizerRecord(**kept, ms=ms / calls, steps=calls / n, zero_filled=filled / n))
    return tuple(found)


def _modules(log: Json, totals: Totals, windows: _Windows, n: int, evaluations: int) -> tuple[ModuleRecord, ...]:
    found = []
    learns = log["anchor"][0] in ("optimizer", "backward")
    for facts in log["modules"]:
        number = facts["number"]
        kept = {name: value for name, value in facts.items() if name not in ("number", "inputs")}
        by_mode = {training: _of(totals, "module", number, training) for training in (True, False)}
        calls, ms = by_mode[True][0] + by_mode[False][0], by_mode[True][1] + by_mode[False][1]
        graphs = [graph for graph in log["graphs"] if graph[0] == number]
        unused = [graph for graph in graphs if not graph[3]]
        within = [graph for graph in unused if windows.holds(graph[4])]
        outside = sum(graph[2] for graph in unused if graph not in within) * NS if learns else 0.0
        per_step = sum(graph[2] for graph in within) * NS / n
        kept_by = {graph[5] for graph in graphs if graph[3]}
        wasting = [graph[5] for graph in unused if graph[5] and graph[5] not in kept_by]
        called = sum(count for _, entries in log["tallies"] for key, (count, _) in entries if key[:2] == ["module", number])
        found.append(
            ModuleRecord(
                **kept,
                inputs=tuple(facts["inputs"]),
                training=by_mode[True][0] >= by_mode[False][0] if calls else False,
                calls=calls / n,
                forward_ms=ms / calls if calls else 0.0,
                gradients_unused=min(1.0, len(unused) / called) if called else 0.0,
                unused_site=statistics.mode(wasting) if wasting else None,
                unused_ms=per_step or outside / max(evaluations, 1),
            )
        )
    return tuple(sorted(found, key=lambda module: -module.forward_ms * module.calls))


def _calls(totals: Totals, mixed: Totals, n: int, every: int) -> tuple[CallRecord, ...]:
    """Calls per clean step; of ``torch.save``, which belongs to no step, per step of the whole run."""
    found = []
    for key in {**totals, **mixed}:
        (calls, ms), (rare, rare_ms) = _of(totals, *key), _of(mixed, *key)
        if key[0] == "call" and key[1] == "torch.save":
            found.append(CallRecord(name=key[1], site=key[2] or "", calls=(calls + rare) / every, ms=(ms + rare_ms) / every))
        elif key[0] == "call" and calls:
            found.append(CallRecord(name=key[1], site=key[2] or "", calls=calls / n, ms=ms / n))
    return tuple(sorted(found, key=lambda call: -call.ms))


def _recompiles(log: Json) -> tuple[RecompileRecord, ...]:
    found = []
    for facts in log["recompiles"]:
        breaks = facts["breaks"]
        for reason, count in breaks.items():
            found.append(RecompileRecord(site="", reason=reason, graph_breaks=count, ms=1000 * facts["seconds"]))
    for facts in log["compilations"]:
        reason, ms = facts["reason"], 1000 * facts["seconds"]
        found.append(RecompileRecord(site=facts["site"], reason=reason, recompiles=facts["recompiles"], ms=ms))
    return tuple(found)


def _operators(log: Json) -> tuple[OperatorRecord, ...]:
    """The operators of the profiler, each with the line that calls it most, by its name and the shape of its first tensor."""
    found = []
    for facts in log["operators"].get("operators", ()):
        lines = [
            (n, where)
            for name, shape, where, n in log["sites"]
            if facts["name"] == name and facts["shapes"][1:].startswith(shape)
        ]
        calls, where = max(lines, default=(0, None))
        found.append(OperatorRecord(**facts, site=where, site_calls=float(calls)))
    return tuple(found)


def _distributed(log: Json, totals: Totals, n: int) -> DistributedRecord | None:
    if not log["distributed"]:
        return None
    ranks = [times for times in log["arrivals"] if times]
    late = [max(times) - min(times) for times in zip(*ranks, strict=False)] if len(ranks) > 1 else []
    skew = statistics.median(late[int(log["warm_up"]) :] or late) * NS if late else None
    return DistributedRecord(**log["distributed"], reductions=_of(totals, "reduce")[0] / n, skew_ms=skew)


def _memory_over_steps(samples: Sequence[Any], windows: _Windows) -> tuple[list[tuple[float, float]], list[tuple[str, float]]]:
    """The curve of the memory over a step, and lines by the MB that they added. Both start from the memory at the begin of each
    step, so that growth from step to step is not in the curve."""
    points: dict[int, list[float]] = defaultdict(list)
    added: dict[str, float] = defaultdict(float)
    for ns, where, _, _, _, held, grown, _ in samples:
        unit = windows.at(ns)
        if unit is not None:
            points[int(CURVE * (ns - unit.start) / max(unit.end - unit.start, 1))].append(held / 1e6 - unit.held_mb)
            added[where] += max(grown, 0) / 1e6
    step_ms, base = _mean([u.ms for u in windows.units]), _mean([u.held_mb for u in windows.units])
    curve = [((place + 0.5) / CURVE * step_ms, base + _mean(points[place])) for place in sorted(points)]
    most = sorted(added.items(), key=lambda item: -item[1])[:MOST_MEMORY_LINES]
    return curve, [(where, mb) for where, mb in most if where and mb > 0]


def _memory(log: Json, marks: Sequence[Any], clean: list[Unit], windows: _Windows) -> MemoryRecord:
    growths = [u.grown_mb for u in clean]
    slope = _mean(growths)
    low = slope
    if len(growths) > 2:
        low = slope - t_quantile(0.975, len(growths) - 1) * statistics.stdev(growths) / math.sqrt(len(growths))
    resident = [mark[3] / 1e6 for mark in marks]
    curve, lines = _memory_over_steps(log["samples"], windows)
    return MemoryRecord(
        peak_mb=max(resident),
        at_start_mb=resident[0],
        growth_mb=slope,
        growth_low_mb=low,
        rises=_mean([float(grown > max(RISE * slope, 0.0)) for grown in growths]),
        page_faults=_mean([float(u.faults) for u in clean]),
        grows_at=log["growth"].get("site") or None,
        lines=tuple(lines),
        curve=tuple(curve),
    )


def _timeline(spans: Sequence[Any], clean: list[Unit], median: float) -> tuple[SpanRecord, ...]:
    unit = min(clean, key=lambda u: abs(u.ms - median))
    inside = [span for span in spans if unit.start <= span[1] and span[2] <= unit.end]
    longest = sorted(inside, key=lambda span: span[1] - span[2])[:MOST_SPANS]
    return tuple(
        SpanRecord(
            phase=cast(Phase, PHASES[phase]),
            start_ms=(start - unit.start) * NS,
            ms=(end - start) * NS,
            depth=depth - 1,
            name="",
        )
        for phase, start, end, depth in sorted(longest, key=lambda span: span[1])
    )
