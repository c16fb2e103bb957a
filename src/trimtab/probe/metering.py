"""Measure energy and GPU utilisation while a script is watched."""

from __future__ import annotations

import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trimtab.measure.energy import energy_meter


class Metering:
    """Readings of the energy counters, and of NVML's utilisation, each with its time."""

    def __init__(self) -> None:
        self._meter = energy_meter()
        self._busy = _utilisation()
        self._readings: list[tuple[int, float | None, float | None]] = []

    def read(self) -> None:
        """Take a reading."""
        joules = None
        if not isinstance(self._meter, str):
            try:
                joules = self._meter.joules()
            except OSError as error:
                self._meter = f"Energy cannot be measured here: {error}."
        self._readings.append((time.perf_counter_ns(), joules, None if self._busy is None else self._busy()))

    def used(self, times: Sequence[int]) -> dict[str, Any]:
        """``energy_j``, ``energy`` and ``gpu_share`` of a :class:`~trimtab.core.evidence.ProbeRecord` whose steps ended at
        ``times`` of ``time.perf_counter_ns()``."""
        first, last = times[0], times[-1]
        busy = [share for ns, _, share in self._readings if first <= ns <= last and share is not None]
        share = statistics.fmean(busy) if busy else None
        if isinstance(self._meter, str):
            return {"energy_j": None, "energy": self._meter, "gpu_share": share}
        joules = 0.0
        for (start, before, _), (end, after, _) in itertools.pairwise(self._readings):
            within = max(0, min(end, last) - max(start, first)) / max(end - start, 1)
            joules += within * ((after or 0.0) - (before or 0.0))
        if joules <= 0:
            return {"energy_j": None, "energy": "Energy cannot be measured here: its counters do not move.", "gpu_share": share}
        return {"energy_j": joules / max(len(times) - 1, 1), "energy": self._meter.scope, "gpu_share": share}


def _utilisation() -> Callable[[], float | None] | None:
    """A function that returns the current GPU utilisation of NVML, 0 to 1; ``None`` without GPUs or NVML."""
    if not torch.cuda.is_available():
        return None
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return None

    def busy() -> float | None:
        try:
            return max(float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) for handle in handles) / 100
        except nvml.NVMLError:
            return None

    return busy
