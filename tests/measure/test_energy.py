from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Iterator

import pytest
import torch

from _faulty import write
from trimtab._internal.serialization import dumps
from trimtab.api import compare
from trimtab.measure.energy import Counter, Energy, Meter, Power, energy_meter

RANGE = 262_143_328_850


def zone(root: pathlib.Path, folder: str, name: str, value: int, limit: int = RANGE) -> pathlib.Path:
    """A powercap zone as the kernel lays it out."""
    path = root / folder
    path.mkdir(parents=True)
    for file, text in (("name", name), ("energy_uj", str(value)), ("max_energy_range_uj", str(limit))):
        (path / file).write_text(text + "\n")
    return path / "energy_uj"


def test_packages_and_memory_count_but_not_their_parts(tmp_path: pathlib.Path) -> None:
    counted = [
        zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000),
        zone(tmp_path, "intel-rapl:1", "package-1", 0),
        zone(tmp_path, "intel-rapl:0:1", "dram", 0),
    ]
    inside = [zone(tmp_path, "intel-rapl:0:0", "core", 0), zone(tmp_path, "intel-rapl:2", "psys", 0)]
    meter = energy_meter(tmp_path)
    assert isinstance(meter, Meter)
    assert "package-0 (intel-rapl:0)" in meter.scope
    assert "dram" in meter.scope
    assert "core" not in meter.scope
    assert "psys" not in meter.scope
    before = meter.joules()
    for file, value in zip([*counted, *inside], ("4000000", "500000", "250000", "9000000", "9000000"), strict=True):
        file.write_text(value)
    assert meter.joules() - before == pytest.approx(3.0 + 0.5 + 0.25, abs=1e-6 if not torch.cuda.is_available() else 50)


def test_a_counter_that_starts_again(tmp_path: pathlib.Path) -> None:
    values = iter([90, 98, 5, 5, 99, 0])
    meter = Meter([Counter("c", lambda: next(values), 0.5, wraps_at=99)])
    assert [meter.joules() for _ in range(5)] == [4.0, 7.5, 7.5, 54.5, 55.0]


def test_a_counter_without_a_range_never_runs_backwards() -> None:
    values = iter([100, 40, 45])
    meter = Meter([Counter("c", lambda: next(values), 1.0)])
    assert [meter.joules(), meter.joules()] == [0.0, 5.0]


def test_broken_zones_are_left_out(tmp_path: pathlib.Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 0).write_text("not a number")
    zone(tmp_path, "intel-rapl:1", "package-1", 7)
    meter = energy_meter(tmp_path)
    assert isinstance(meter, Meter)
    assert "intel-rapl:0" not in meter.scope


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may have a counter of its own")
def test_the_reason_is_a_sentence(tmp_path: pathlib.Path) -> None:
    assert energy_meter(tmp_path) == (
        "Energy cannot be measured here: the processor's RAPL counters are not there (virtual machines rarely have them), "
        "and no CUDA GPU is in use."
    )
    zone(tmp_path, "intel-rapl:0", "psys", 0)
    assert "name no package" in str(energy_meter(tmp_path))


def test_a_counter_that_may_not_be_read_says_how_to_change_that(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 0)
    real = pathlib.Path.read_text

    def refused(path: pathlib.Path, *args: str) -> str:  # root may read everything, so the refusal itself is played
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return real(path, *args)

    monkeypatch.setattr(pathlib.Path, "read_text", refused)
    if not torch.cuda.is_available():
        assert "sudo chmod a+r" in str(energy_meter(tmp_path))


def test_this_machine_has_a_meter_or_a_reason() -> None:
    found = energy_meter()
    assert isinstance(found, str) or found.joules() >= 0
    assert not isinstance(found, str) or found.endswith(".")


class Steady:
    """Calls of 20 ms that draw 10 watts beside the 5 of an idle machine."""

    pid = 0

    def __init__(self) -> None:
        self.joules = 0.0

    def block(self, calls: int) -> list[int]:
        time.sleep(0.02 * calls)
        self.joules += 10 * 0.02 * calls
        return [20_000_000] * calls

    def pace(self) -> int:
        return 0


def test_the_energy_of_a_call_is_the_power_meanwhile_and_its_time() -> None:
    runner, begun = Steady(), time.perf_counter()
    counter = Counter("c", lambda: int(1e6 * (runner.joules + 5 * (time.perf_counter() - begun))), 1e-6)
    power = Power(Meter([counter]))
    for name in ("subject", "rival"):
        power.measure(name, runner, 0.02)
    found = power.energy(0.02, 0.04)
    assert found.subject_j == pytest.approx(15 * 0.02, rel=0.2)
    assert found.rival_j == pytest.approx(15 * 0.04, rel=0.2)
    assert power.energy(0.02, None).rival_j is None
    assert found.scope == "whole device, all processes: c"


def test_what_cannot_be_counted_is_a_reason() -> None:
    still = Power(Meter([Counter("c", lambda: 7, 1.0)]))
    values = iter([7, 8])
    for power in (still, gone := Power(Meter([Counter("c", lambda: read(values), 1.0)])), none := Power("There is no meter.")):
        power.measure("subject", Steady(), 0.02)
    assert still.energy(1.0, None).reason == "Energy cannot be measured here: its counters do not move."
    assert gone.energy(1.0, None).reason == "Energy cannot be measured here: it was switched off."
    assert none.energy(1.0, 1.0) == Energy(reason="There is no meter.")


def read(values: Iterator[int]) -> int:
    """The next of ``values``; after the last the counter is gone."""
    for value in values:
        return value
    raise OSError("it was switched off")


def test_measure_tells_the_energy_of_both_sides(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter([Counter("package-0", lambda: int(25e6 * time.perf_counter()), 1e-6)])  # 25 watts, always
    monkeypatch.setattr(compare, "energy_meter", lambda: meter)
    reference = write(tmp_path, "def made(): return workload()")
    found = compare.compare(reference, reference, seconds=1.0)
    energy = json.loads(dumps(found))["energy"]
    assert energy["subject_j"] == pytest.approx(25e-3 * found.comparison.candidate.median, rel=0.01)
    assert energy["rival_j"] == pytest.approx(25e-3 * found.comparison.rival.median, rel=0.01)
    assert f"energy of a call: {energy['subject_j']:.3g} J, {reference} {energy['rival_j']:.3g} J (whole device, all" in str(
        found
    )
    monkeypatch.setattr(compare, "energy_meter", lambda: "Energy cannot be measured here: it is a secret.")
    alone = compare.compare(reference, seconds=1.0)
    assert "Energy cannot be measured here: it is a secret." in str(alone).splitlines()
    assert json.loads(dumps(alone))["energy"]["subject_j"] is None
