"""Time of one call by operator."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from trimtab.core.measurement import OperatorTime, operator_shares

_LEVEL = "KINETO_LOG_LEVEL"
_DRIVER_EVENTS = ("cuda", "Activity Buffer", "Lazy Function", "Runtime Triggered")
"""Prefixes of events of the GPU's driver, which are listed beside the operators that caused them."""


def operator_times(call: Callable[[], object], *, repeats: int = 10) -> list[OperatorTime]:
    """Profile ``repeats`` runs of ``call`` after a warm-up run; slowest operator first, empty if torch ran none.

    The profiler costs about a microsecond per operator: its times add up to more than the call takes without it, and small
    operators look slightly larger than they are.

    Raises:
        ValueError: ``repeats`` is not positive.
        Exception: whatever ``call`` raises.
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; at least one run must be profiled.")
    call()
    times = _self_times(_recorded(call, repeats))
    return operator_shares(((event.key, event.count, microseconds / 1e3) for event, microseconds in times), repeats)


def _recorded(call: Callable[[], object], repeats: int) -> list[Any]:
    """The profiler's events by operator, without GPU kernels: their time is already in the operators that launched them."""
    on_gpu = _gpu_in_use()
    if on_gpu:
        torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with quiet(), profile(activities=activities) as recorded:
        for _ in range(repeats):
            call()
        if on_gpu:
            torch.cuda.synchronize()
    return [
        event
        for event in recorded.key_averages()
        if event.device_type.name == "CPU" and not event.key.startswith(_DRIVER_EVENTS)
    ]


def _gpu_in_use() -> bool:
    """Whether torch has memory on a GPU. Asking the driver for anything would put its own events into the profile."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return any(torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count()))


def _self_times(events: Sequence[Any]) -> list[tuple[Any, float]]:
    """Each event's own microseconds: GPU time if any event has some, because host time is hidden behind it."""
    if any(event.self_device_time_total > 0 for event in events):
        return [(event, float(event.self_device_time_total)) for event in events]
    return [(event, float(event.self_cpu_time_total)) for event in events]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's profiler in a block: Kineto prints stages to stderr unless configured before its first use."""
    before = os.environ.get(_LEVEL)
    os.environ[_LEVEL] = before or "99"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LEVEL]
