from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import time
import tomllib

import pytest
import torch
from rich.console import Console

from _places import ROOT
from trimtab._internal.serialization import dumps, to_json
from trimtab.cli.environment import _packages_table
from trimtab.errors import UsageError
from trimtab.hardware import peaks as _peaks
from trimtab.hardware.environment import (
    OPTIONAL,
    Environment,
    Gpu,
    has_vnni,
    instruction_sets,
    measured_peaks,
)
from trimtab.hardware.peaks import Peaks, Rate
from trimtab.hardware.system import cache_folder


@pytest.fixture(scope="module")
def here() -> Environment:
    return Environment.capture()


@pytest.fixture(scope="module")
def peaks(here: Environment, tmp_path_factory: pytest.TempPathFactory) -> Peaks:
    """Of this machine, really measured, once for all tests here."""
    return measured_peaks(here, cache=tmp_path_factory.mktemp("peaks") / "new" / "peaks.json")


def test_capture(here: Environment) -> None:
    assert here.cpu
    assert 1 <= here.usable_cores <= here.logical_cores
    assert here.memory_mb > 100
    assert here.versions["torch"] == torch.__version__
    assert "trimtab" in here.versions
    assert len(here.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def test_json_round_trip(here: Environment) -> None:
    gpu = Gpu(name="H", capability="9.0", memory_mb=141000.0, driver="570.1")
    for environment in (here, dataclasses.replace(here, gpus=(gpu,), cpu_quota=1.5)):
        assert Environment.from_json(json.loads(dumps(environment))) == environment
    with pytest.raises(UsageError, match="schema 2 cannot be read"):
        Environment.from_json(to_json(here) | {"schema": 2})


def test_fingerprint_follows_what_decides_speed(here: Environment) -> None:
    assert dataclasses.replace(here, cpu="\ud800").fingerprint != here.fingerprint  # which a damaged record may hold
    assert len(here.fingerprint) == 12
    assert int(here.fingerprint, 16) >= 0
    assert Environment.capture().fingerprint == here.fingerprint
    same = {"python": "3.99", "compiler": "other", "versions": dict(here.versions) | {"optuna": "0"}}
    assert dataclasses.replace(here, **same).fingerprint == here.fingerprint
    gpu = Gpu(name="H", capability="9.0", memory_mb=1.0, driver="570.1")  # which is known where pynvml is installed
    with_driver, without = (dataclasses.replace(here, gpus=(each,)) for each in (gpu, dataclasses.replace(gpu, driver=None)))
    assert with_driver.fingerprint == without.fingerprint
    changes = [
        {"cpu": "Z80"},
        {"isa": ()},
        {"usable_cores": 99},
        {"cpu_quota": 0.5},
        {"gpus": (Gpu(name="H", capability="9.0", memory_mb=1.0),)},
        *({"versions": dict(here.versions) | {name: "0"}} for name in ("torch", "trimtab", "onnx", "onnxscript", "nncf")),
    ]
    prints = {dataclasses.replace(here, **change).fingerprint for change in changes}
    assert len(prints - {here.fingerprint}) == len(changes)


def test_differences_are_one_sentence_each(here: Environment) -> None:
    gpu = Gpu(name="H200", capability="9.0", memory_mb=141000.0)
    base = dataclasses.replace(here, isa=("avx2",), gpus=(), usable_cores=2, versions={"torch": "2.13.0", "openvino": "2026.4"})
    other = dataclasses.replace(
        base,
        cpu="Z80",
        isa=("avx2", "amx_int8"),
        usable_cores=1,
        cpu_quota=1.5,
        gpus=(gpu,),
        os="CP/M",
        python="2.7",
        compiler=None,
        versions={"torch": "2.9.0", "openvino": "2026.4", "nncf": "3.4"},
    )
    assert base.differences(base) == []
    sentences = base.differences(other)
    assert sentences == [
        f"The CPU is {base.cpu} here; the artifact was proven on Z80.",
        "This CPU has no amx_int8, which the machine of the proof had; its speed does not carry over.",
        "2 cores can be used here; the artifact was proven with 1.",
        f"The CPU quota is {'no quota' if base.cpu_quota is None else f'{base.cpu_quota:g} cores'} here; "
        "the artifact was proven with 1.5 cores.",
        "The GPU is none here; the artifact was proven with H200 (capability 9.0, 141 GB).",
        f"The operating system is {base.os} here; the artifact was proven on CP/M.",
        f"Python is {base.python} here; the artifact was proven on 2.7.",
        f"The C++ compiler is {base.compiler or 'missing'} here; it was missing at the proof.",
        "nncf is not installed here; the artifact was proven with 3.4.",
        "torch is 2.13.0 here; the artifact was proven with 2.9.0.",
    ]
    assert "another recipe may win" in other.differences(base)[1]
    narrow = base.differences(dataclasses.replace(base, isa=("avx2", "avx512_vnni")))
    assert narrow == [
        "This CPU has no avx512_vnni, which the machine of the proof had; its speed does not carry over, and int8 may give "
        "other outputs."
    ]
    assert len([s for s in base.differences(other, packages=["openvino", "torch"]) if "torch is" in s or "nncf" in s]) == 1


def test_a_new_driver_and_another_architecture_are_told(here: Environment) -> None:
    old, new = (Gpu(name="H", capability="9.0", memory_mb=1e3, driver=driver) for driver in ("550", "570"))
    sides = [dataclasses.replace(here, gpus=(gpu,), machine=machine) for gpu, machine in ((new, "x86_64"), (old, "arm64"))]
    assert sides[0].differences(sides[1]) == [
        "The CPU is x86_64 here; the artifact was proven on arm64.",
        "The GPU driver is 570 here; the artifact was proven with 550.",
    ]


def test_optional_packages_match_the_extras_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    without_use_yet = {"mobile", "ray", "serve", "tensorrt"}
    assert {item.extra for item in OPTIONAL} == extras - {"all", "dev", "docs"} - without_use_yet
    assert all(item.brings.endswith(".") for item in OPTIONAL)
    assert next(item for item in OPTIONAL if item.package == "openvino").command == 'pip install "trimtab[openvino]"'
    assert all(isinstance(item.installed, bool) for item in OPTIONAL)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.delenv("TRIMTAB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "trimtab"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == pathlib.Path.home() / ".cache" / "trimtab"
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"


def test_peaks_of_this_machine(here: Environment, peaks: Peaks) -> None:
    threads = torch.get_num_threads()
    assert peaks.fingerprint == here.fingerprint
    assert peaks.threads == here.usable_cores
    for count in {1, here.usable_cores}:
        assert (peaks.find("float32", threads=count) or 0) > 0.1
        assert (peaks.find("memory", threads=count) or 0) > 0.1
        for kind in ("int8", "bfloat16"):
            rate = next(r for r in peaks.rates if r.kind == kind and r.threads == count)
            assert (rate.value is None) == (rate.reason is not None)
    assert (peaks.find("float32") or 0) >= (peaks.find("float32", threads=1) or 0)
    assert peaks.find("float16") is None
    assert peaks.find("float32", "cuda:7") is None
    assert torch.get_num_threads() == threads


def quiet(peaks: Peaks, **changes: object) -> Peaks:
    """The same as measured on a machine without neighbours."""
    return dataclasses.replace(peaks, foreign=0.0, notes=(), **changes)


def test_peaks_are_remembered(here: Environment, peaks: Peaks, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    known = quiet(peaks, rates=(Rate(kind="memory", device="cpu", threads=1, unit="GB/s", value=1.0),))
    (tmp_path / f"peaks-{here.fingerprint}.json").write_text(dumps(known))
    assert measured_peaks(here) == known


@pytest.mark.parametrize("text", ["{", '{"schema": 1}', "[" * 100_000, '"\\ud800"', '{"schema": 9}'])
def test_a_corrupt_cache_is_said(
    here: Environment, peaks: Peaks, tmp_path: pathlib.Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "peaks.json"
    file.write_text(text)
    monkeypatch.setattr("trimtab.hardware.environment.measure", lambda *_: quiet(peaks))
    again = measured_peaks(here, cache=file)
    assert "could not be read" in again.notes[0]
    assert measured_peaks(here, cache=file) == quiet(peaks)


def test_peaks_of_another_machine_are_not_used(
    here: Environment, peaks: Peaks, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "peaks.json"
    file.write_text(dumps(quiet(peaks, fingerprint="0" * 12)))
    monkeypatch.setattr("trimtab.hardware.environment.measure", lambda *_: quiet(peaks))
    assert "of another machine" in measured_peaks(here, cache=file).notes[0]


def test_a_cache_that_cannot_be_written_is_said(
    here: Environment, peaks: Peaks, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimtab.hardware.environment.measure", lambda *_: quiet(peaks))
    (tmp_path / "file").write_text("in the way")
    for folder in ("file", "x" * 300):
        assert "could not be kept" in measured_peaks(here, cache=tmp_path / folder / "peaks.json").notes[-1]


def test_peaks_of_a_busy_machine_are_measured_again_and_only_rise(
    here: Environment, peaks: Peaks, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rated(value: float | None, foreign: float) -> Peaks:
        rate = Rate(kind="memory", device="cpu", threads=1, unit="GB/s", value=value)
        return dataclasses.replace(peaks, rates=(rate,), foreign=foreign, notes=())

    runs = iter([rated(5.0, 0.6), rated(3.0, 0.4), rated(8.0, 0.0)])
    monkeypatch.setattr("trimtab.hardware.environment.measure", lambda *_: next(runs))
    file = tmp_path / "peaks.json"

    def after(seconds: float) -> Peaks:
        if file.exists():
            os.utime(file, (time.time() - seconds,) * 2)
        return measured_peaks(here, cache=file)

    found = [after(seconds) for seconds in (0, 3500, 3700, 3700, 3700)]
    assert [p.find("memory", threads=1) for p in found] == [5.0, 5.0, 5.0, 8.0, 8.0]
    assert ["60% of the CPU" in "".join(p.notes) for p in found] == [True, True, False, False, False]
    assert "40% of the CPU" in found[2].notes[0]
    assert "again in an hour, or with trimtab env --refresh" in found[0].notes[0]
    assert found[3].notes == found[4].notes == ()


def test_what_torch_cannot_multiply_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(size: int, kind: str, device: str) -> object:
        raise NotImplementedError("no kernel\nfor you")

    monkeypatch.setattr(_peaks, "_INT8", (missing,))
    rate = _peaks._gemm("int8", "cpu", 1)
    assert rate.value is None
    assert rate.reason == "torch cannot multiply int8 matrices on cpu: no kernel"


@pytest.mark.parametrize("make", _peaks._INT8[1:])
def test_the_other_int8_kernels_run(make: _peaks.Product) -> None:
    with _peaks._quiet():
        out = make(256, "int8", "cpu")()
    assert isinstance(out, torch.Tensor)
    assert out.shape == (256, 256)


def test_many_threads_are_no_slower_than_one() -> None:
    one, two = (Rate(kind="int8", device="cpu", threads=t, unit="GOP/s", value=v) for t, v in ((1, 90.0), (2, 1.2)))
    assert [rate.value for rate in _peaks._at_least_one_thread([one, two])] == [90.0, 90.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_peaks_of_a_gpu(peaks: Peaks) -> None:
    values = [peaks.find(kind, "cuda:0") for kind in ("float32", "bfloat16", "float16", "memory")]  # type: ignore[arg-type]
    assert all(value is not None and value > 1 for value in values)


def test_the_commands_that_bring_what_is_missing_are_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    missing = [item for item in OPTIONAL if not item.installed]
    assert missing, "every optional package is installed here, so that this test has nothing to look at"
    Console(width=300).print(_packages_table(Environment.capture()))
    shown = capsys.readouterr().out
    assert [item.command for item in missing if item.command not in shown] == []


def test_an_older_torch_that_tells_no_capabilities_will_do(here: Environment, monkeypatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    for name in ("avx2", "avx512", "vnni", "avx512_bf16"):
        monkeypatch.setattr(torch.cpu, f"_is_{name}_supported", lambda: False, raising=False)
    assert instruction_sets() == here.isa
    assert has_vnni() is (here.machine != "x86_64" or not {"avx512_vnni", "avx_vnni"}.isdisjoint(here.isa))


def test_a_variant_of_a_runtime_is_that_runtime(here: Environment) -> None:
    there = dataclasses.replace(here, versions={"onnxruntime": "1.0"})
    variant = dataclasses.replace(here, versions={"onnxruntime-gpu": "1.0", "torch": "2.0"})
    assert variant.differences(there, packages=("onnxruntime",)) == []
    newer = dataclasses.replace(variant, versions={"onnxruntime-gpu": "1.1"})
    assert newer.differences(there) == ["onnxruntime is 1.1 here; the artifact was proven with 1.0."]
