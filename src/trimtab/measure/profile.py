"""Where the time of one call goes, operator by operator."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from trimtab.core.measurement import OperatorTime, operator_shares

_LEVEL = "KINETO_LOG_LEVEL"
_OF_THE_DRIVER = ("cuda", "Activity Buffer", "Lazy Function", "Runtime Triggered")
"""How events of the GPU's driver begin, which are listed beside the operators that had it do something."""


def operator_times(call: Callable[[], object], *, repeats: int = 10) -> list[OperatorTime]:
    """Profile ``repeats`` runs of ``call`` after one that warms up; the slowest operator first, empty if torch ran none.

    The profiler costs about a microsecond per operator: its times add up to more than the call takes without it, and small
    operators look a little larger than they are.

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
    """The profiler's events by operator. Kernels of a GPU are listed beside the operators that launched them, which have their
    time already, so they are left out."""
    on_gpu = _gpu_has_anything()
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
        if event.device_type.name == "CPU" and not event.key.startswith(_OF_THE_DRIVER)
    ]


def _gpu_has_anything() -> bool:
    """Whether anything lies on a GPU: a driver that somebody asked for its name would put its own events into the profile."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return any(torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count()))


def _self_times(events: Sequence[Any]) -> list[tuple[Any, float]]:
    """Each event's own microseconds: on the GPU where any has some, because what the host does meanwhile hides behind it."""
    if any(event.self_device_time_total > 0 for event in events):
        return [(event, float(event.self_device_time_total)) for event in events]
    return [(event, float(event.self_cpu_time_total)) for event in events]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A block in which torch's profiler starts without a word: Kineto writes stages to stderr unless told not to at first."""
    before = os.environ.get(_LEVEL)
    os.environ[_LEVEL] = before or "99"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LEVEL]
