"""Watch a script: register with every hook, keep a log of events, and write the log when enough steps were measured.

The log is raw: :mod:`trimtab.probe.analysis` makes the record of it, in the driver's process.
"""

from __future__ import annotations

import atexit
import os
import resource
import sys
import tempfile
import threading
import time
from typing import Any

import torch
from torch.nn.modules.loss import _Loss

from trimtab.probe.inside import (
    audit,
    calls,
    clock,
    facts,
    growth,
    hooks,
    line_counts,
    lines,
    loaders,
    operators,
    reading,
    remedies,
    roots,
    steps,
)
from trimtab.probe.inside.boundary import attempt
from trimtab.probe.inside.ending import end_process
from trimtab.probe.inside.facts import batch_facts, first_tensors
from trimtab.probe.inside.plan import PLAN, process_age_s, rank, write_out
from trimtab.probe.inside.sites import caller, counters, site, sources, texts
from trimtab.probe.inside.steps import Key

WARM_UP = 6
"""Warm-up: events of the anchor that are not counted."""

MOST_GRAPH_CALLS = 30
"""Calls of a module in training mode after which the search for graphs without a backward pass ends."""

USAGE_EVERY_NS = 20_000_000
"""Least time between two readings of the process's usage, which take as long as all other hooks of a step of a few ms."""
LEAST_NS, MOST_STEPS = 1_000_000_000, 6
"""Least time of the measured steps, for enough samples of lines; but at most that many times the steps wanted."""
WANTED = int(PLAN.get("steps") or 40)

Snapshot = tuple[int, tuple[int, ...], int, int, int, int, int]
"""Time in ns, totals of the phases in ns, minor page faults, resident bytes, calls of modules in evaluation, iterators made,
and CPU time in ns, all since the start of the process. Faults, resident bytes and CPU time are those of the last reading."""

marks: dict[Key, list[Snapshot]] = {}
tallies: list[tuple[int, dict[tuple[object, ...], list[int]]]] = []
losses: list[Any] = []
"""Losses as numbers; on a GPU as tensors, which are read at the end only, to avoid synchronization."""
outputs: list[torch.Tensor] = []
graphs: list[list[Any]] = []
"""[module, training, ns, used, time] of calls that recorded a graph."""
notes: list[str] = []
_calls: dict[int, int] = {}
_evaluations = _iterators = 0
_age_s, _began_ns = process_age_s(), time.perf_counter_ns()
_busy_at_start: tuple[int, float, float] | None = None
_done = threading.Lock()
_clean = 0
_profiled_from: int | None = None
_counting = False
_warm_s, _warm_ns = time.time(), time.perf_counter_ns()
_out_of_time = False
_owner = os.getpid()
_arrivals: list[int] = []
"""Start times of backward passes that reduce gradients, in ns of a clock that all processes of the machine share."""


def begin() -> None:
    """Watch this process from now on."""
    lines.watch(time.monotonic() + max(float(PLAN.get("seconds") or 60.0) - _age_s, 1.0), _time_is_up)
    if PLAN.get("guard"):
        audit.guard()
    audit.watch()
    if PLAN.get("settings"):
        remedies.apply(PLAN["settings"])
    calls.watch()
    hooks.watch_gradients()
    clock.keep_spans(True)
    loaders.on_epoch(_epoch)
    loaders.on_batch(batch_facts)
    reading.watch()
    hooks.around_backward(before=_backward)
    roots.around_calls(_forward)
    steps.on_mark(_mark)
    atexit.register(finish, True)
    os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    atexit.unregister(finish)
    clock.keep_spans(False)


def _epoch(loader: loaders.Loader) -> None:
    global _iterators
    _iterators += 1
    facts.note_loader(loader)


def _backward(tensors: Any) -> None:
    loss = hooks.scalar(tensors)
    if loss is not None and len(losses) < 10_000:
        losses.append(float(hooks.tensor_item(loss)) if loss.is_cpu else loss.detach())
    if torch.is_anomaly_enabled():
        facts.note_anomaly_mode()
    if facts.parallel and facts.reduces_gradients():
        clock.add(("reduce",), 0)
        facts.note_waits()
        _arrivals.append(time.perf_counter_ns())


def _forward(module: Any, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    global _evaluations
    start = time.perf_counter_ns()
    output = call(*args, **kwargs)
    ns = time.perf_counter_ns() - start
    if isinstance(module, _Loss):
        return output
    clock.enter(clock.PROBE)
    number = facts.note_call(module, args, kwargs)
    training, gradients = module.training, torch.is_grad_enabled()
    if not (training and gradients):
        _evaluations += 1
    clock.add(("module", number, training), ns)
    entry = [number, training, ns, 0, start, None]
    _calls[number] = count = _calls.get(number, 0) + training
    if gradients and len(graphs) < 20_000 and not (training and count > MOST_GRAPH_CALLS):
        nodes = [tensor.grad_fn for tensor in first_tensors(output) if tensor.grad_fn is not None]
        for node in nodes:
            node.register_prehook(lambda _, entry=entry: entry.__setitem__(3, 1))
        if nodes:
            entry[5] = caller(sys._getframe(1))
            graphs.append(entry)
    if not losses and len(outputs) < 200:
        found = first_tensors(output, most=1)
        if found and found[0].is_floating_point():
            outputs.append(found[0].detach().abs().mean())
    clock.leave()
    return output


_usage = (0, 0, 0)
_usage_read_ns = -USAGE_EVERY_NS
"""Time at which ``_usage`` (minor page faults, resident bytes, CPU time in ns) was read."""


def _snapshot() -> Snapshot:
    global _usage, _usage_read_ns
    now, totals = clock.reading()
    if now - _usage_read_ns >= USAGE_EVERY_NS:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        _usage = usage.ru_minflt, lines.resident(), round((usage.ru_utime + usage.ru_stime) * 1e9)
        _usage_read_ns = now
    faults, resident, cpu = _usage
    return now, totals, faults, resident, _evaluations, _iterators, cpu


def _mark(key: Key) -> None:
    global _clean, _profiled_from, _busy_at_start, _warm_s, _warm_ns
    now = _snapshot()
    of_key = marks.setdefault(key, [])
    before = of_key[-1] if of_key else None
    of_key.append(now)
    tallies.append((now[0], clock.take_tally()))
    if _busy_at_start is None:
        _busy_at_start = facts.cpu_usage()
    if steps.anchor is None:
        if _out_of_time:
            finish(False)
        return
    count = len(of_key)
    mixed = before is not None and now[4:6] != before[4:6]
    unusual = mixed and _profiled_from is not None and 2 * _clean > _profiled_from - WARM_UP
    if _counting:
        if unusual and not _out_of_time and line_counts.restart():
            return
        line_counts.stop()
        finish(False)
        return
    if _profiled_from is not None:
        if not _counting and (operators.end_step(unusual) or _out_of_time):
            operators.stop()
            _count_lines()
        return
    if count == WARM_UP:
        _warm_s, _warm_ns = time.time(), now[0]
    if before is not None and count > WARM_UP:
        _clean += not mixed
    measured = count - WARM_UP
    enough = _clean >= WANTED or (measured >= WANTED and 2 * _clean < measured)
    enough = (enough and now[0] - _warm_ns >= LEAST_NS) or measured >= MOST_STEPS * WANTED
    growth.check(measured, enough)
    if enough or _out_of_time:
        if _out_of_time:
            finish(False)
        _profiled_from = count
        if rank() == 0:  # because the profiler may crash the process
            attempt(_write, False, "early")
        elif _arrivals:
            attempt(write_out, f"arrivals-{os.getpid()}.json", {"ns": _arrivals})
        if not operators.start(notes):
            finish(False)


def _count_lines() -> None:
    """Count the lines of one more step, which the other ranks run too. The log is written before, because tracing may crash the
    process."""
    global _counting
    if _out_of_time:
        finish(False)
    _counting = True
    lines.sampling.clear()
    if rank() == 0:
        attempt(_write, False, "early")
        line_counts.start(compiled=facts.forbids_dispatch_mode())


def _time_is_up() -> None:
    """End the run at the next step; if none ends soon, end it here, in the sampling thread."""
    global _out_of_time
    _out_of_time = True
    time.sleep(min(5.0, 0.1 * float(PLAN.get("seconds") or 60.0)))
    finish(False)


def finish(finished: bool) -> None:
    """Write the log. If the script has not ``finished``, end the process, so that none of its code runs any more."""
    if os.getpid() != _owner or not _done.acquire(blocking=False):
        return
    if rank() == 0:
        _, error = attempt(_write, finished)
        if error is not None:
            write_out(f"failed-{os.getpid()}.json", {"error": f"{type(error).__name__}: {error}"})
            if PLAN.get("debug"):
                raise error
    if finished:
        return
    end_process()


def _is_temporary(path: str) -> bool:
    """Whether ``path`` was a temporary file that has been deleted."""
    return path.startswith(tempfile.gettempdir()) and not os.path.lexists(path)


def _write(finished: bool, name: str = "log") -> None:
    anchor = steps.anchor or steps.decide(late=True)
    of_anchor = marks.get(anchor, []) if anchor else []
    if anchor is not None and anchor[0] == "batch":
        of_anchor = sorted(snapshot for key, found in marks.items() if key[:2] == anchor[:2] for snapshot in found)
    if anchor is None or len(of_anchor) < 2:
        counts = [[*key, count] for key, count in steps.counts.items()]
        write_out(f"seen-{os.getpid()}.json", {"counts": counts, "finished": finished})
        return
    first_ns = of_anchor[0][0]
    measured = of_anchor[: _profiled_from or len(of_anchor)]
    last_ns = measured[-1][0]
    write_out(
        f"{name}-{os.getpid()}.json",
        {
            "finished": finished,
            "anchor": list(anchor),
            "started_s": _age_s + (first_ns - _began_ns) / 1e9,
            "marks": measured,
            "warm_up": WARM_UP,
            "tallies": [[ns, facts.tally_as_json(entries)] for ns, entries in tallies if ns <= last_ns],
            "samples": facts.samples_as_json(first_ns, last_ns),
            "stacks": facts.stacks(),
            "spans": [span for span in clock.spans if first_ns <= span[1] <= last_ns],
            "graphs": [[*entry[:5], site(entry[5])] for entry in graphs],
            "losses": [float(loss) for loss in losses or outputs],
            "notes": notes,
            "busy": facts.cpu_usage_since(_busy_at_start),
            "writes": [path for path in dict.fromkeys([*calls.saved, *audit.writes]) if not _is_temporary(path)],
            "network": list(audit.network),
            "children": list(audit.children),
            "operators": operators.found,
            "growth": growth.found,
            "runs": {site(place): count for place, count in line_counts.found.items()},
            "sites": [[name, shape, site(place), n] for (name, shape, place), n in line_counts.operators.items()],
            "arrivals": _arrivals,
            "sources": sources(),
            **facts.collect(_warm_s),
            "texts": texts(),
            "counters": counters(),
        },
    )
