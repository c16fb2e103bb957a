"""The benchmark for GPUs, as far as that can be told without one."""

from __future__ import annotations

import importlib
import pathlib
from types import ModuleType

import pytest

from trimtab.measurement import Comparison, Interval, Measurement

FOLDER = pathlib.Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, imported as its own script does."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("gpu")


def milliseconds(value: float) -> Measurement:
    """So many, without doubt."""
    return Measurement(unit="ms", n=8, median=value, interval=Interval(value, value, value))


def test_what_of_a_copy_is_hidden_is_told_in_the_unit_of_the_updates(benchmark: ModuleType) -> None:
    found = Comparison(
        ratio=Interval(100 / 101, 100 / 102, 1.0), pairs=8, candidate=milliseconds(101.0), rival=milliseconds(100.0)
    )
    hidden = benchmark.share_hidden(found, Interval(4.0, 3.9, 4.1))
    assert (hidden.value, hidden.low, hidden.high) == pytest.approx((0.75, 0.5, 1.0))
