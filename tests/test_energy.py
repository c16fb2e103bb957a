from __future__ import annotations

import pathlib

import pytest
import torch

from trimtab.measure.energy import Counter, Meter, energy_meter

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
