"""Median, spread and p95 of the times and losses of updates; memory in use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from trimtab.measure.memory import rss_mb
from trimtab.measure.quantiles import quantile_of

LEAST = 20
"""Fewest samples for a p95: one of them lies above it."""


class Distribution(NamedTuple):
    """Statistics of samples. A value is ``None`` if there are too few samples for it: p95 takes :data:`LEAST`."""

    median: float | None
    spread: float | None
    p95: float | None

    @classmethod
    def of(cls, samples: Sequence[float]) -> Distribution:
        """The statistics of the finite ``samples``."""
        found = np.sort(np.asarray(samples, np.float64))
        finite = found[np.isfinite(found)]
        if not (count := len(finite)):
            return cls(None, None, None)
        centered = finite - finite.mean()
        spread = math.sqrt(centered @ centered / (count - 1)) if count > 1 else None
        median = float(finite[(count - 1) // 2] + finite[count // 2]) / 2
        return cls(median, spread, quantile_of(finite.tolist(), 0.95) if count >= LEAST else None)


def of_updates(seconds: Sequence[float], losses: Sequence[float]) -> dict[str, float | None]:
    """The fields of :class:`~trimtab.train.telemetry.events.Progressed` for the times and losses of updates."""
    times, loss = Distribution.of([1e3 * each for each in seconds]), Distribution.of(losses)
    return {
        "median_ms": times.median,
        "spread_ms": times.spread,
        "p95_ms": times.p95,
        "loss_spread": loss.spread,
        "loss_p95": loss.p95,
    }


def memory(device: torch.device) -> dict[str, float | None]:
    """Memory now: resident in the process, and allocated and reserved by torch on a GPU, in MB (10**6 bytes)."""
    on_gpu: dict[str, Any] = {"allocated_mb": None, "reserved_mb": None}
    if device.type == "cuda":
        on_gpu = {
            "allocated_mb": torch.cuda.memory_allocated(device) / 1e6,
            "reserved_mb": torch.cuda.memory_reserved(device) / 1e6,
        }
    return {"resident_mb": rss_mb(), **on_gpu}
