"""The benchmark for GPUs, as far as that can be told without one."""

from __future__ import annotations

import importlib
import pathlib
import subprocess
import sys
import time
from types import ModuleType

import psutil
import pytest

from trimtab.core.measurement import Comparison, Interval, Measurement

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


def started(*arguments: str) -> subprocess.Popen[str]:
    """The benchmark of tiny models on the CPU."""
    pytest.importorskip("transformers")
    command = [sys.executable, str(FOLDER / "gpu.py"), "--device", "cpu", "--quick", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_no_side_outlives_who_asks_it() -> None:
    with started("--parts", "naive", "--models", "ResNet-50") as process:
        until, sides = time.monotonic() + 60, list[psutil.Process]()
        while len(sides) < 2 and time.monotonic() < until:
            time.sleep(0.1)
            sides = psutil.Process(process.pid).children()
        process.kill()
    assert len(sides) == 2
    assert psutil.wait_procs(sides, timeout=30)[1] == []


@pytest.mark.slow
def test_what_a_side_that_fails_wrote_is_shown() -> None:
    with started("--parts", "naive", "--models", "ResNet-50", "--patience", "0") as process:
        _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert told.startswith("The tuned side takes too long.\n")
    assert "\nThe tuned side wrote:\n" in told


def test_a_part_that_there_is_not_is_refused() -> None:
    with started("--parts", "naive,prefech") as process:
        _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert told.startswith("There is no prefech. Parts are naive, prefetch, parity; models are ResNet-50, GPT-2.")
