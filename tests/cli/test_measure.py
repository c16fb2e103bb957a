"""``trimtab measure --memory --operators``, and ``--note``."""

from __future__ import annotations

import dataclasses
import json
import types

import pytest
import torch
from torch import nn

import trimtab
from trimtab.cli import _profile, measure, optimize
from trimtab.core.measurement import OperatorTime
from trimtab.errors import MeasurementError


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


def test_a_note_goes_into_the_storage_before_the_record_is_written_again(monkeypatch) -> None:
    known = {}
    storage = types.SimpleNamespace(put=lambda key, value: known.update({key: value}))
    result = types.SimpleNamespace(study=types.SimpleNamespace(storage=storage))
    monkeypatch.setattr("trimtab.api.optimize.write_results", lambda each: (each, dict(known)))
    assert optimize.store_note(result, "  for the ticket ") == (result, {"note of the user": "for the ticket"})
    assert optimize.store_note(result, " ")[1] == {"note of the user": None}
