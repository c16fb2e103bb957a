"""A peak of this machine that nobody measured, for what is only told where one is known."""

from __future__ import annotations

import pathlib

from trimtab._internal.serialization import write_json
from trimtab.hardware.environment import Environment
from trimtab.hardware.peaks import Peaks, Rate


def write_peaks(folder: pathlib.Path, gflops: float) -> None:
    """Make ``gflops`` the float32 peak of this machine at 1 to 4 threads, where ``folder`` is trimtab's cache."""
    here = Environment.capture()
    rates = tuple(Rate(kind="float32", device="cpu", threads=n, unit="GFLOP/s", value=gflops) for n in (1, 2, 3, 4))
    write_json(folder / f"peaks-{here.fingerprint}.json", Peaks(fingerprint=here.fingerprint, threads=1, rates=rates))
