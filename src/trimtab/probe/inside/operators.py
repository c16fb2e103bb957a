"""Record the operators of two steps with torch's profiler, after the timed steps."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from trimtab.probe.inside import calls

STEPS, TRIES = 2, 6
STEP = "trimtab: step"
"""Name of the range that encloses a step."""

SMALL_US = 10.0
MOST = 40

found: dict[str, Any] = {}
_profiler: Any = None
_range: Any = None
_kept: list[bool] = []


def start(notes: list[str]) -> bool:
    """Start recording. Returns ``False`` if it is not possible, for example because the script runs a profiler of its own."""
    global _profiler
    flags = dict(calls.flags)
    try:
        enabled: Any = torch.autograd
        if enabled._profiler_enabled():
            notes.append("Operators were not recorded: the script runs a profiler of its own.")
            return False
        device = "cuda" if torch.cuda.is_available() else None
        # torch.profiler.profile imports TorchInductor, which takes longer than most scripts' steps
        _profiler = profile(use_device=device, use_kineto=True, record_shapes=True, profile_memory=True, with_flops=True)
        _profiler.__enter__()
        _begin_range()
    except (RuntimeError, AttributeError) as error:
        notes.append(f"Operators were not recorded: {error}.")
        return False
    finally:
        calls.flags.clear()
        calls.flags.update(flags)
    return True


def _begin_range() -> None:
    global _range
    _range = record_function(STEP)
    _range.__enter__()


def end_step(mixed: bool) -> bool:
    """Count a step. Returns whether enough steps were recorded. A ``mixed`` step is recorded but left out of the figures:
    stopping and restarting the profiler corrupts the heap with torch 2.13."""
    _range.__exit__(None, None, None)
    _kept.append(not mixed)
    if sum(_kept) >= STEPS or len(_kept) >= TRIES:
        return True
    _begin_range()
    return False


def _recorded() -> tuple[list[Any], int]:
    """The events of the steps that count, and the number of these steps."""
    events = list(_profiler.function_events)
    ranges = sorted((e.time_range.start, e.time_range.end) for e in events if e.name == STEP)
    kept = [found for found, clean in zip(ranges, _kept, strict=False) if clean] or ranges
    return [e for e in events if any(start <= e.time_range.start < end for start, end in kept)], max(len(kept), 1)


def stop() -> None:
    """Stop recording, and store the figures per step in :data:`found`."""
    if not _kept:
        _range.__exit__(None, None, None)
        _kept.append(True)
    _profiler.__exit__(None, None, None)
    recorded, steps = _recorded()
    by: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    count, small, whole = 0, 0.0, 0.0
    for event in recorded:
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
