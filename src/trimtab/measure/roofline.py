"""The roofline: achieved operations per second relative to what the machine allows.

Source: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for multicore
architectures", Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from trimtab.hardware.peaks import Peaks

Dtype = Literal["float32", "bfloat16", "float16", "int8"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """One run against the two limits of a machine."""

    intensity: float
    """Operations per byte of memory traffic."""
    attainable: float
    """GFLOP/s (GOP/s for int8) that the machine allows at this intensity."""
    achieved: float
    """GFLOP/s of the run."""
    share: float
    """Achieved over attainable. Above 1 if the data stay in caches, which are faster than the measured memory."""
    bound: Literal["compute", "memory"]
    """Which of the two limits is the lower one at this intensity."""


def roofline(
    flops: float,
    bytes_moved: float,
    seconds: float,
    peaks: Peaks,
    *,
    dtype: Dtype = "float32",
    device: str = "cpu",
    threads: int | None = None,
) -> Roofline | None:
    """Compare a run of ``flops`` operations over ``bytes_moved`` bytes in ``seconds`` with the machine's roofline.

    ``threads`` defaults to all usable ones. Returns ``None`` if a peak for this device, type and number of threads was not
    measured, or if a count is not positive.
    """
    compute, memory = peaks.find(dtype, device, threads), peaks.find("memory", device, threads)
    if not compute or not memory or min(flops, bytes_moved, seconds) <= 0:
        return None
    intensity = flops / bytes_moved
    attainable = min(compute, intensity * memory)
    achieved = flops / seconds / 1e9
    return Roofline(
        intensity=intensity,
        attainable=attainable,
        achieved=achieved,
        share=achieved / attainable,
        bound="memory" if intensity * memory < compute else "compute",
    )
