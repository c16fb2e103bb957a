"""Build the :class:`ProbeRecord` of a run from the raw log of the probe."""

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
from trimtab.hardware import system
from trimtab.measure.quantiles import t_quantile
from trimtab.probe.inside.clock import PHASES

Json = Mapping[str, Any]
PROBE = PHASES.index("probe")
MS_PER_NS = 1e-6
MOST_LINES, MOST_SPANS, MOST_MEMORY_LINES, MOST_STACKS = 40, 400, 10, 200
CURVE = 40
"""Points of the memory over a step."""
RISE = 0.25
"""A step adds to the memory if it grows by this share of the mean growth. Less is memory of the probe. A mean that few steps
cause, such as an allocator that warms up, is not steady growth."""


class Step:
    """One step: the time between two events of the anchor, and what was counted in it."""

    def __init__(self, before: Sequence[Any], after: Sequence[Any]) -> None:
        self.start, self.end, self.held_mb = int(before[0]), int(after[0]), before[3] / 1e6
        self.phases = [(b - a) * MS_PER_NS for a, b in zip(before[1], after[1], strict=True)]
        self.probe_ms = self.phases[PROBE]
        self.ms = (self.end - self.start) * MS_PER_NS - self.probe_ms
        self.evaluates, self.begins_epoch = after[4] > before[4], after[5] > before[5]


class Usage:
    """What the process used in ``steps`` steps between two readings, as means per step."""

    def __init__(self, before: Sequence[Any], after: Sequence[Any], steps: int) -> None:
        self.steps = steps
        self.ms = (after[0] - before[0]) * MS_PER_NS / steps
        self.faults = (after[2] - before[2]) / steps
        self.grown_mb = (after[3] - before[3]) / 1e6 / steps
        self.cpu_ms = (after[6] - before[6]) * MS_PER_NS / steps


def _usages(marks: Sequence[Any], all_steps: Sequence[Step], measured: Sequence[Step], clean: Sequence[Step]) -> list[Usage]:
    """The usage between two readings, of those with clean steps only; without any, of those within the measured steps, or all.
    At a mark without a reading the CPU time is that of the mark before."""
    read = [place for place, mark in enumerate(marks) if place == 0 or mark[6] != marks[place - 1][6]]
    windows = [(first, last) for first, last in itertools.pairwise(read)] or [(0, len(marks) - 1)]
    for among in (set(clean), set(measured)):
        kept = [(first, last) for first, last in windows if among.issuperset(all_steps[first:last])]
        if kept:
            windows = kept
            break
    return [Usage(marks[first], marks[last], last - first) for first, last in windows]


def record_of(log: Json, *, command: Sequence[str], **outside: Any) -> ProbeRecord:
    """The record of a log. ``outside`` are fields that only the driver knows, such as ``contained``."""
    marks = log["marks"]
    skipped = min(int(log["warm_up"]), max(1, (len(marks) - 1) // 3))
    all_steps = [Step(before, after) for before, after in itertools.pairwise(marks)]
    measured = all_steps[skipped:] or all_steps[-1:]
    kind, where, _ = log["anchor"]
    evaluating = {s for s in measured if s.evaluates} if kind in ("optimizer", "backward") else set()
    starting = {s for s in measured if s.begins_epoch}
    notes = list(log["notes"])
    for found, what in ((evaluating, "a call in evaluation mode or without gradients"), (starting, "the begin of an epoch")):
        if 2 * len(found) > len(measured):
            found.clear()
            notes.append(f"Most steps hold {what}; it counts as part of a step.")
    clean = [s for s in measured if s not in evaluating and s not in starting] or measured
    n = len(clean)
    steps = _CleanSteps(clean)
    usages = _usages(marks, all_steps, measured, clean)
    totals, elsewhere = steps.tallies(log["tallies"])
    step_ms = sum(s.ms for s in clean) / n
    phases = {name: sum(s.phases[i] for s in clean) / n for i, name in enumerate(PHASES) if i != PROBE}
    distributed = _distributed(log, totals, n)
    if distributed is not None and distributed.waits_ms is not None:  # gradients are exchanged within the backward pass
        waits = min(distributed.waits_ms * distributed.reductions, phases["backward"])
        phases["backward"] -= waits
        phases["communication"] += waits
    median = statistics.median(s.ms for s in clean)
    busy = log["busy"]
    return ProbeRecord(
        command=tuple(command),
        anchor=kind,
        anchor_site=where,
        start_s=log["started_s"],
        steps=n,
        step_ms=step_ms,
        median_ms=median,
        probe_ms=statistics.median(s.probe_ms for s in clean),
        times_ms=tuple(s.ms for s in clean),
        phases=phases,
        run_s=_run(log, all_steps, measured, evaluating, starting, median),
        evaluation_every=len(measured) / len(evaluating) if evaluating else 0.0,
        finished=log["finished"],
        lines=_lines(log["samples"], steps, log["runs"]),
        stacks=_stacks(log, steps),
        loaders=_loaders(log, totals, elsewhere),
        optimizers=_optimizers(log, totals, n),
        modules=_modules(log, totals, steps, n, len(evaluating)),
        calls=tuple(CallRecord(name=name, site=where, calls=0.0, ms=0.0) for name, where in log["called"].items())
        + _calls(totals, elsewhere, n, len(all_steps)),
        operators=_operators(log),
        operator_calls=log["operators"].get("calls", 0.0),
        small_operators=log["operators"].get("small", 0.0),
        recompiles=_recompiles(log),
        memory=_memory(log, marks, usages, steps),
        distributed=distributed,
        timeline=_timeline(log["spans"], clean, median),
        threads=log["threads"],
        cores=log["cores"],
        cpu_share=min(1.0, _per_step(usages, "cpu_ms") / max(_per_step(usages, "ms"), 1e-9) / log["cores"]),
        others_share=max(0.0, min(1.0, (busy["all_s"] - busy["own_s"]) / busy["wall_s"] / log["cores"])) if busy else 0.0,
        device=log["device"],
        flags=log["flags"],
        sources=tuple(log["sources"]),
        texts=log["texts"] | {where: text for row in log["reading"] for where, text, *_ in row["lines"] if text},
        counters=log["counters"],
        losses=tuple(log["losses"]),
        notes=tuple(notes),
        **outside,
    )


Key = tuple[Any, ...]
Totals = dict[Key, tuple[float, float]]
"""Key -> calls and ms."""


class _CleanSteps:
    """The clean steps: those without an evaluation and without the start of an epoch. Looks times up in them."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self.steps = sorted(steps, key=lambda step: step.start)
        self._ends = [s.end for s in self.steps]

    def at(self, ns: float) -> Step | None:
        """The clean step that contains the time ``ns``."""
        return self.steps[bisect.bisect_right(self._ends, ns)] if self.holds(ns) else None

    def holds(self, ns: float, end: bool = False) -> bool:
        """Whether ``ns`` is within a clean step; ``end``: the end of a step counts, and its start does not."""
        place = bisect.bisect_left(self._ends, ns) if end else bisect.bisect_right(self._ends, ns)
        return place < len(self.steps) and (self.steps[place].start < ns if end else self.steps[place].start <= ns)

    def tallies(self, tallies: Sequence[Any]) -> tuple[Totals, Totals]:
        """The tallies within clean steps, and those elsewhere."""
        inside: dict[Key, list[float]] = defaultdict(lambda: [0.0, 0.0])
        outside: dict[Key, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for ns, entries in tallies:
            into = inside if self.holds(ns, end=True) else outside
            for key, (calls, spent) in entries:
                found = into[tuple(key)]
                found[0] += calls
                found[1] += spent * MS_PER_NS
        return {k: (v[0], v[1]) for k, v in inside.items()}, {k: (v[0], v[1]) for k, v in outside.items()}


def _total(totals: Totals, *key: Any) -> tuple[float, float]:
    return totals.get(tuple(key), (0.0, 0.0))


def _run(
    log: Json, all_steps: list[Step], measured: list[Step], evaluating: set[Step], starting: set[Step], median: float
) -> dict[str, float]:
    saving = PHASES.index("saving")
    over = {s: max(0.0, s.ms - median) / 1000 for s in measured}
    return {
        "start": log["started_s"],
        "steps": sum(s.ms for s in all_steps) / 1000,
        "evaluation": sum(over[s] for s in evaluating),
        "epoch start": sum(over[s] for s in starting - evaluating),
        "saving": sum(s.phases[saving] for s in all_steps) / 1000,
    }


def _lines(samples: Sequence[Any], steps: _CleanSteps, runs: Mapping[str, int]) -> tuple[LineRecord, ...]:
    seen: dict[tuple[str, str, int, str], int] = defaultdict(int)
    whole = 0
    for ns, where, text, phase, function, *_ in samples:
        if steps.holds(ns):
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


def _stacks(log: Json, steps: _CleanSteps) -> tuple[StackRecord, ...]:
    within = [number for ns, *_, number in log["samples"] if steps.holds(ns)]
    seen = Counter(number for number in within if log["stacks"][number])
    return tuple(
        StackRecord(calls=tuple(log["stacks"][number]), share=count / len(within))
        for number, count in seen.most_common(MOST_STACKS)
    )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _loaders(log: Json, totals: Totals, elsewhere: Totals) -> tuple[LoaderRecord, ...]:
    found: dict[Any, LoaderRecord] = {}
    for facts in log["loaders"]:
        calls, ms = _total(totals, "loader", facts["number"])
        other_calls, other_ms = _total(elsewhere, "loader", facts["number"])
        made = [_total(t, "epoch", facts["number"]) for t in (totals, elsewhere)]
        iterators = sum(count for count, _ in made)
        if not calls + other_calls + iterators:
            continue
        here, there = _total(totals, "read", facts["dataset_id"]), _total(elsewhere, "read", facts["dataset_id"])
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
        found[key] = _merged(found[key], record) if key in found else record
    return tuple(found.values())


class _Workers:
    """What the workers of a loader recorded. Their data set is matched by address; in spawned workers, by its class."""

    def __init__(self, rows: Sequence[Json], facts: Json) -> None:
        own = [row for row in rows if row["dataset"] == facts["dataset_id"]]
        self._rows = own or [row for row in rows if row["name"] == facts["dataset"]]
        examples = sum(row["examples"] for row in self._rows)
        self.opens = sum(row["opened"] for row in self._rows) / max(examples, 1)
        timed = [row["ns"] * MS_PER_NS for row in self._rows if row["ns"]]
        self.read_ms = statistics.fmean(timed) if timed else None

    def lines(self) -> tuple[LineRecord, ...]:
        """The lines of the script by their share of the samples. Lines with counts but no samples come last."""
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


def _merged(one: LoaderRecord, other: LoaderRecord) -> LoaderRecord:
    """One record for two loaders that the same line made, as when each epoch makes a loader."""
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
        calls, ms = _total(totals, "optimizer", facts["number"])
        if calls:
            kept = {name: facts[name] for name in ("site", "name", "tensors", "elements", "kernel", "can_fuse")}
            filled = _total(totals, "zero", facts["number"], True)[0] + _total(totals, "zero", -1, True)[0]
            found.append(OptimizerRecord(**kept, ms=ms / calls, steps=calls / n, zero_filled=filled / n))
    return tuple(found)


def _modules(log: Json, totals: Totals, steps: _CleanSteps, n: int, evaluations: int) -> tuple[ModuleRecord, ...]:
    found = []
    learns = log["anchor"][0] in ("optimizer", "backward")
    for facts in log["modules"]:
        number = facts["number"]
        kept = {name: value for name, value in facts.items() if name not in ("number", "inputs")}
        by_mode = {training: _total(totals, "module", number, training) for training in (True, False)}
        calls, ms = by_mode[True][0] + by_mode[False][0], by_mode[True][1] + by_mode[False][1]
        graphs = [graph for graph in log["graphs"] if graph[0] == number]
        unused = [graph for graph in graphs if not graph[3]]
        within = [graph for graph in unused if steps.holds(graph[4])]
        outside = sum(graph[2] for graph in unused if graph not in within) * MS_PER_NS if learns else 0.0
        per_step = sum(graph[2] for graph in within) * MS_PER_NS / n
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


def _calls(totals: Totals, elsewhere: Totals, n: int, total: int) -> tuple[CallRecord, ...]:
    """Calls per clean step. Calls of ``torch.save``, which belong to no step, are counted per step of the whole run."""
    found = []
    for key in {**totals, **elsewhere}:
        (calls, ms), (rare, rare_ms) = _total(totals, *key), _total(elsewhere, *key)
        if key[0] == "call" and key[1] == "torch.save":
            found.append(CallRecord(name=key[1], site=key[2] or "", calls=(calls + rare) / total, ms=(ms + rare_ms) / total))
        elif key[0] == "call" and calls:
            found.append(CallRecord(name=key[1], site=key[2] or "", calls=calls / n, ms=ms / n))
    return tuple(sorted(found, key=lambda call: -call.ms))


def _recompiles(log: Json) -> tuple[RecompileRecord, ...]:
    found = []
    for place, facts in enumerate(log["graph_breaks"]):
        found.append(RecompileRecord(**facts, graph_breaks=1, ms=0.0 if place else 1000 * log["compile_s"]))
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
    skew = statistics.median(late[int(log["warm_up"]) :] or late) * MS_PER_NS if late else None
    return DistributedRecord(**log["distributed"], reductions=_total(totals, "reduce")[0] / n, skew_ms=skew)


def _memory_over_steps(samples: Sequence[Any], steps: _CleanSteps) -> tuple[list[tuple[float, float]], list[tuple[str, float]]]:
    """The memory curve over a step, and the MB that each line added. Both are relative to the memory at the start of the step,
    so they do not contain the growth from step to step."""
    points: dict[int, list[float]] = defaultdict(list)
    added: dict[str, float] = defaultdict(float)
    for ns, where, _, _, _, held, grown, _ in samples:
        step = steps.at(ns)
        if step is not None:
            points[int(CURVE * (ns - step.start) / max(step.end - step.start, 1))].append(held / 1e6 - step.held_mb)
            added[where] += max(grown, 0) / 1e6
    step_ms, base = _mean([s.ms for s in steps.steps]), _mean([s.held_mb for s in steps.steps])
    curve = [((place + 0.5) / CURVE * step_ms, base + _mean(points[place])) for place in sorted(points)]
    most = sorted(added.items(), key=lambda item: -item[1])[:MOST_MEMORY_LINES]
    return curve, [(where, mb) for where, mb in most if where and mb > 0]


def _per_step(usages: Sequence[Usage], name: str) -> float:
    """Mean of an attribute over all steps."""
    return float(sum(getattr(usage, name) * usage.steps for usage in usages) / sum(usage.steps for usage in usages))


def _memory(log: Json, marks: Sequence[Any], usages: Sequence[Usage], steps: _CleanSteps) -> MemoryRecord:
    growths = [usage.grown_mb for usage in usages]
    slope = _per_step(usages, "grown_mb")
    low = slope
    if len(growths) > 2:
        low = slope - t_quantile(0.975, len(growths) - 1) * statistics.stdev(growths) / math.sqrt(len(growths))
    resident = [mark[3] / 1e6 for mark in marks]
    curve, lines = _memory_over_steps(log["samples"], steps)
    return MemoryRecord(
        peak_mb=max(resident),
        at_start_mb=resident[0],
        growth_mb=slope,
        growth_low_mb=low,
        rises=_mean([float(grown > max(RISE * slope, 0.0)) for grown in growths]),
        page_faults=_per_step(usages, "faults"),
        huge_pages=system.huge_pages_variable(),
        grows_at=log["growth"].get("site") or None,
        graphs_kept=tuple(log["growth"].get("graphs", ())),
        lines=tuple(lines),
        curve=tuple(curve),
        **log["gpu_memory"],
    )


def _timeline(spans: Sequence[Any], clean: list[Step], median: float) -> tuple[SpanRecord, ...]:
    step = min(clean, key=lambda s: abs(s.ms - median))
    inside = [span for span in spans if step.start <= span[1] and span[2] <= step.end]
    longest = sorted(inside, key=lambda span: span[1] - span[2])[:MOST_SPANS]
    return tuple(
        SpanRecord(
            phase=cast(Phase, PHASES[phase]),
            start_ms=(start - step.start) * MS_PER_NS,
            ms=(end - start) * MS_PER_NS,
            depth=depth - 1,
            name="",
        )
        for phase, start, end, depth in sorted(longest, key=lambda span: span[1])
    )
