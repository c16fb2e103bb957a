"""Traces of an unmodified script in a run of their own."""

from __future__ import annotations

import dataclasses
import pathlib

from trimtab.probe.command import Command
from trimtab.probe.tracing import NO_RANGES, Schedule, record_traces
from trimtab.testing.records import sound_records

SCRIPT = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(200):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    optimizer.step()
"""


def test_each_cycle_of_the_schedule_is_a_file_and_what_cannot_be_made_is_told(tmp_path: pathlib.Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "traces"
    script.write_text(SCRIPT, encoding="utf-8")
    command, sound = Command.of(script), sound_records()["training"]
    record = dataclasses.replace(sound, anchor="optimizer", anchor_site="train.py:4", device="cpu", step_ms=1.0)
    schedule = Schedule(wait=1, warmup=1, active=2, repeat=2)
    found, note = record_traces(command, record, schedule=schedule, folder=folder, nvtx=True)
    assert [path.parent for path in found] == [folder, folder]
    assert note == NO_RANGES
    assert record_traces(command, record, nvtx=True) == ([], NO_RANGES)
    nothing, why = record_traces(command, record, schedule=schedule, folder=folder, seconds=0.0)
    assert nothing == []
    assert why is not None
    assert why.endswith("or it did not end within 0 s.")
