"""The operators of torch over two steps, under torch's profiler, after the steps that are timed."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from trimtab.probe.inside import calls

STEPS, TRIES = 2, 4
SMALL_US = 10.0
MOST = 40

found: dict[str, Any] = {}
_profiler: Any = None
_steps = _tries = 0


def start(notes: list[str]) -> bool:
    """Begin to record. Returns whether torch lets us; the script may have a profiler of its own."""
    global _profiler, _steps, _tries
    _steps, _tries = 0, _tries + 1
    flags = dict(calls.flags)
    try:
        enabled: Any = torch.autograd
        if enabled._profiler_enabled():
            notes.append("Operators were not recorded: the script runs a profiler of its own.")
            return False
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        _profiler = torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True, with_flops=True)
        _profiler.start()
    except (RuntimeError, AttributeError) as error:
        notes.append(f"Operators were not recorded: {error}.")
        return False
    finally:
        calls.flags.clear()
        calls.flags.update(flags)
    return True


def ended_step(mixed: bool) -> bool:
    """Count a step; return whether enough were recorded. With a ``mixed`` one among them it starts again, a few times."""
    global _steps
    _steps += 1
    if mixed and _tries < TRIES:
        _profiler.stop()
        start([])
    return _steps >= STEPS


def stop() -> None:
    """End recording, and keep the figures per step."""
    _profiler.stop()
    steps = max(_steps, 1)
    by: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    count, small, whole = 0, 0.0, 0.0
    for event in _profiler.events():
        if not event.name.startswith(("aten::", "mkldnn::", "torch_", "c10d::")) and "::" not in event.name:
            continue
        us = float(event.self_cpu_time_total) + float(getattr(event, "self_device_time_total", 0.0) or 0.0)
        count += 1
        whole += us
        small += us if us < SMALL_US else 0.0
        entry = by[event.name, str(event.input_shapes)]
        entry[0] += 1
        entry[1] += us
        entry[2] += float(event.flops or 0)
        entry[3] += _elements(event.input_shapes) * 4.0
    most = sorted(by.items(), key=lambda item: -item[1][1])[:MOST]
    found.update(
        calls=count / steps,
        small=small / whole if whole else 0.0,
        operators=[
            {
                "name": name,
                "shapes": shapes if shapes != "[]" else "",
                "calls": calls_ / steps,
                "ms": us / steps / 1000,
                "flops": flops / steps,
                "gbytes": size / steps / 1e9,
            }
            for (name, shapes), (calls_, us, flops, size) in most
        ],
    )


def _elements(shapes: Any) -> int:
    total = 0
    for shape in shapes or ():
        if isinstance(shape, list | tuple) and shape and all(isinstance(size, int) for size in shape):
            elements = 1
            for size in shape:
                elements *= size
            total += elements
    return total
