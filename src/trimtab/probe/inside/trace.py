"""Traces of torch's profiler for TensorBoard, Chrome and Perfetto, and NVTX ranges for Nsight, of an unmodified script.

``PLAN["schedule"]`` has ``wait``, ``warmup``, ``active`` and ``repeat`` in steps, or is absent; the files land in
``PLAN["out"]``. ``PLAN["nvtx"]`` asks for ranges. The process ends after ``PLAN["steps"]`` steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trimtab.probe.inside import roots, steps
from trimtab.probe.inside.ending import end_process
from trimtab.probe.inside.plan import PLAN


def start() -> None:
    """Begin what the plan asks for."""
    stop = _start_profiler(PLAN["schedule"]) if PLAN.get("schedule") else None
    if PLAN.get("nvtx") and torch.cuda.is_available():
        _add_ranges()

    def end(number: int) -> None:
        if number < PLAN["steps"]:
            return
        if stop is not None:
            stop()
        end_process()

    steps.on_step_end(end)


def _start_profiler(schedule: dict[str, int]) -> Callable[[], None]:
    """Record the steps of the schedule; each cycle writes a file ``*.pt.trace.json``. Returns the function that stops it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(**schedule),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(PLAN["out"]),
        profile_memory=True,
        record_shapes=True,
    )
    profiler.start()
    steps.on_step_end(lambda number: profiler.step())
    return profiler.stop


def _add_ranges() -> None:
    """Push an NVTX range for each step, and within it one for each call of an outermost module."""
    nvtx = torch.cuda.nvtx
    nvtx.range_push("step 1")  # type: ignore[no-untyped-call]

    def step(number: int) -> None:
        nvtx.range_pop()  # type: ignore[no-untyped-call]
        nvtx.range_push(f"step {number + 1}")  # type: ignore[no-untyped-call]

    def called(module: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        nvtx.range_push(f"forward {type(module).__name__}")  # type: ignore[no-untyped-call]
        try:
            return call(*args, **kwargs)
        finally:
            nvtx.range_pop()  # type: ignore[no-untyped-call]

    steps.on_step_end(step)
    roots.around_calls(called)
