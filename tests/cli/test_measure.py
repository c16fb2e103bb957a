"""``trimtab measure``: what is timed, memory and operators, and a busy machine."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

import trimtab
from trimtab.cli import _profile, measure
from trimtab.core.measurement import OperatorTime
from trimtab.errors import ArtifactError, MeasurementError, UsageError
from trimtab.measure.host import OtherLoad


class Net(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ x.T)


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of order")


def test_memory_and_operators_come_from_a_process_of_their_own() -> None:
    workload = trimtab.Workload(model=Net, inputs=torch.randn(64, 64), name="net")
    found = _profile.profile_model(workload, memory=True, operators=True, trust=False)
    assert found.peak_mb is not None
    assert found.peak_mb >= 0
    assert found.first_call_s is not None
    assert found.operators is not None
    assert {"aten::mm", "aten::relu"} & {each.name for each in found.operators}
    assert "memory of net: peak" in str(found)
    assert "operators of net in one call, as torch's profiler names them:" in str(found)


def test_a_model_that_fails_is_a_sentence() -> None:
    workload = trimtab.Workload(model=Broken, inputs=torch.randn(4, 4), name="net")
    with pytest.raises(MeasurementError, match="net could not be profiled: The model failed on the example inputs"):
        _profile.profile_model(workload, memory=True, operators=False, trust=False)


def test_the_command_adds_what_was_asked_for(monkeypatch, capsys) -> None:
    asked = []

    def profiled(side: str, **more: bool) -> _profile.ModelProfile:
        asked.append((side, more))
        rows = tuple(OperatorTime(name=f"op{n}", calls=1.0, self_ms=0.1, share=0.05) for n in range(20))
        return _profile.ModelProfile(subject=side, peak_mb=12.5, method="samples", operators=rows, source="torch's profiler")

    monkeypatch.setattr(trimtab, "compare", lambda *args, **more: Timed())
    monkeypatch.setattr(_profile, "profile_model", profiled)
    assert measure.measure_command("m:net", memory=True, operators=True) == 0
    printed = capsys.readouterr().out
    assert "timed\nmemory of m:net: peak 12.5 MB above an idle process (samples)\n" in printed
    assert "10 others" in printed
    assert measure.measure_command("m:net", memory=True, json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ms"], told["profiles"][0]["peak_mb"]) == (1.0, 12.5)
    assert asked[1][1] == {"memory": True, "operators": False, "trust": False}
    assert measure.measure_command("m:net") == 0
    assert capsys.readouterr().out == "timed\n"


@dataclasses.dataclass(frozen=True)
class Timed:
    ms: float = 1.0

    def __str__(self) -> str:
        return "timed"


def test_a_busy_machine_is_said_before_anything_is_read_or_timed(monkeypatch, capsys, tmp_path) -> None:
    line = "note: Busy machine: other processes used 85% of these 2 CPUs, so figures will be wide.\n"
    for share, said in ((0.85, True), (0.0, False)):
        monkeypatch.setattr("trimtab.measure.host.other_load", lambda share=share: OtherLoad(share, 2))
        with pytest.raises(UsageError, match="There is no file"):
            measure.measure_command(str(tmp_path / "none.onnx"))
        assert capsys.readouterr().err.startswith(line) is said
        with pytest.raises(ArtifactError):
            measure.verify_command(tmp_path / "none")
        assert capsys.readouterr().err.startswith(line) is said


def test_throughput_is_that_of_several_requests_at_once(capsys, monkeypatch, tmp_path) -> None:
    (tmp_path / "several.py").write_text(
        "import torch, trimtab\nmodel = torch.nn.Linear(64, 8)\n"
        "workload = trimtab.Workload(model=model.eval(), inputs=torch.ones(4, 64), name='several')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert measure.measure_command("several.py", objective="throughput", time="500ms", json=True) == 0
    found = json.loads(capsys.readouterr().out)
    rate, call_ms = found["throughput"], found["comparison"]["candidate"]["median"]
    assert rate["unit"] == "examples/s"
    assert rate["median"] == pytest.approx(4 / call_ms * 1e3)
    assert found["rival_throughput"] is None
