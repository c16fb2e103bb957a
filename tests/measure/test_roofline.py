from __future__ import annotations

import pytest

from trimtab.hardware.peaks import Peaks, Rate
from trimtab.measure.roofline import roofline


def rate(kind: str, value: float | None, threads: int | None = 2, device: str = "cpu") -> Rate:
    unit = {"memory": "GB/s", "int8": "GOP/s"}.get(kind, "GFLOP/s")
    reason = None if value else "no kernel"
    return Rate(kind=kind, device=device, threads=threads, unit=unit, value=value, reason=reason)  # type: ignore[arg-type]


PEAKS = Peaks(
    fingerprint="0" * 12,
    threads=2,
    rates=(
        rate("float32", 200.0),
        rate("memory", 50.0),
        rate("bfloat16", None),
        rate("float32", 100.0, 1),
        rate("memory", 25.0, 1),
        rate("float16", 8e5, None, "cuda:0"),
        rate("memory", 4e3, None, "cuda:0"),
    ),
)


def test_bound_by_compute() -> None:
    found = roofline(flops=1e9, bytes_moved=1e8, seconds=0.01, peaks=PEAKS)
    assert found is not None
    assert (found.intensity, found.attainable, found.bound) == (10.0, 200.0, "compute")
    assert found.achieved == pytest.approx(100.0)
    assert found.share == pytest.approx(0.5)


def test_bound_by_memory() -> None:
    found = roofline(flops=1e9, bytes_moved=1e9, seconds=0.04, peaks=PEAKS)
    assert found is not None
    assert (found.attainable, found.bound) == (50.0, "memory")
    assert found.share == pytest.approx(0.5)


def test_threads_and_device_choose_the_roof() -> None:
    single = roofline(1e9, 1e8, 0.01, PEAKS, threads=1)
    gpu = roofline(1e12, 1e9, 0.01, PEAKS, dtype="float16", device="cuda:0")
    assert single is not None
    assert single.attainable == 100.0
    assert gpu is not None
    assert gpu.attainable == 8e5


@pytest.mark.parametrize(
    "other",
    [{"dtype": "bfloat16"}, {"dtype": "int8"}, {"threads": 4}, {"device": "cuda:1"}, {"dtype": "float32", "device": "cuda:0"}],
)
def test_no_share_of_a_peak_that_was_not_measured(other: dict[str, str]) -> None:
    assert roofline(1e9, 1e8, 0.01, PEAKS, **other) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(("flops", "moved", "seconds"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_nothing_is_divided_by_nothing(flops: float, moved: float, seconds: float) -> None:
    assert roofline(flops, moved, seconds, PEAKS) is None
