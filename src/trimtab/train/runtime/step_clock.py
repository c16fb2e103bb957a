"""Measure the time of each phase of a training step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch

PHASES = ("data", "copy", "forward", "backward", "communication", "optimizer", "other")
"""Waiting for the loader; moving a batch to the device; forward pass and loss; backward pass; waiting for other processes; the
optimizer's step; everything else, such as logging, checkpoints and callbacks."""


class Clock(Protocol):
    """Divides time among :data:`PHASES`: it counts for the phase that was entered last."""

    def enter(self, phase: str) -> str:
        """Begin ``phase``; returns the phase before."""

    def take(self) -> Mapping[str, float]:
        """Seconds per phase since the last call; their sum is the elapsed time."""


class HostClock:
    """Clock of the host, for synchronous work."""

    def __init__(self) -> None:
        self._spent = dict.fromkeys(PHASES, 0)
        self._phase, self._since = "other", time.perf_counter_ns()

    def enter(self, phase: str) -> str:
        """Begin ``phase``; returns the phase before."""
        now, before = time.perf_counter_ns(), self._phase
        self._spent[before] += now - self._since
        self._phase, self._since = phase, now
        return before

    def take(self) -> Mapping[str, float]:
        """Seconds per phase since the last call."""
        self.enter(self._phase)
        found = {phase: ns / 1e9 for phase, ns in self._spent.items()}
        self._spent = dict.fromkeys(PHASES, 0)
        return found


class CudaClock:
    """Clock of a CUDA stream: records an event at each change of phase, and reads them in :meth:`take`.

    Time in which the stream is idle counts for the phase in which the host was then, such as waiting for data.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._phase = "other"
        self._marks: list[tuple[str, Any]] = []
        self._spare: list[Any] = []
        self.enter("other")

    def enter(self, phase: str) -> str:
        """Begin ``phase``; returns the phase before."""
        before, self._phase = self._phase, phase
        mark = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record(self._stream)
        self._marks.append((phase, mark))
        return before

    def take(self) -> Mapping[str, float]:
        """Seconds per phase since the last call; waits for the device."""
        self.enter(self._phase)
        self._marks[-1][1].synchronize()
        found = dict.fromkeys(PHASES, 0.0)
        for (phase, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            found[phase] += start.elapsed_time(end) / 1e3
        self._spare += [mark for _, mark in self._marks[:-1]]
        self._marks = self._marks[-1:]
        return found


def clock_for(device: torch.device) -> Clock:
    """The clock that fits ``device``."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
