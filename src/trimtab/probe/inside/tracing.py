"""Traces of torch's profiler for TensorBoard, Chrome and Perfetto, and NVTX ranges for Nsight, of an unmodified script.

``PLAN["trace"]`` holds the folder and the schedule: ``wait``, ``warmup``, ``active``, ``repeat``, in steps. ``PLAN["nvtx"]``
asks for ranges.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

import torch

from trimtab.probe.inside import roots, steps
from trimtab.probe.inside.plan import PLAN


def start() -> None:
    """Begin what the plan asks for."""
    if PLAN.get("trace"):
        _trace(PLAN["trace"])
    if PLAN.get("nvtx") and torch.cuda.is_available():
        _ranges()


def _trace(plan: dict[str, Any]) -> None:
    """Record the steps of the schedule; each cycle becomes a file ``*.pt.trace.json``."""
    schedule = torch.profiler.schedule(wait=plan["wait"], warmup=plan["warmup"], active=plan["active"], repeat=plan["repeat"])
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(
        activities=activities,
        schedule=schedule,
        on_trace_ready=torch.profiler.tensorboard_trace_handler(plan["folder"]),  # type: ignore[no-untyped-call]
        profile_memory=True,
        record_shapes=True,
    )
    profiler.start()
    atexit.register(profiler.stop)
    steps.on_step_end(lambda number: profiler.step())


def _ranges() -> None:
    """A range for each step, and one within for each call of an outermost module."""
    nvtx = torch.cuda.nvtx
    nvtx.range_push("step 0")  # type: ignore[no-untyped-call]

    def step(number: int) -> None:
        nvtx.range_pop()  # type: ignore[no-untyped-call]
        nvtx.range_push(f"step {number}")  # type: ignore[no-untyped-call]

    def called(module: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        nvtx.range_push(f"forward {type(module).__name__}")  # type: ignore[no-untyped-call]
        try:
            return call(*args, **kwargs)
        finally:
            nvtx.range_pop()  # type: ignore[no-untyped-call]

    steps.on_step_end(step)
    roots.around_calls(called)
