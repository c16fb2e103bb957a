"""What limits a step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from _diagnoses import record
from trimtab.hardware.peaks import Peaks, Rate
from trimtab.probe.bound import bound

COMPUTING = {"forward": 40.0, "backward": 50.0, "optimizer": 8.0, "other": 2.0}


def peaks(memory: float) -> Peaks:
    rates = [
        Rate(kind="float32", device="cpu", threads=2, value=200.0, unit="GFLOP/s"),
        Rate(kind="memory", device="cpu", threads=2, value=memory, unit="GB/s"),
    ]
    return Peaks(fingerprint="", threads=2, rates=tuple(rates))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "data"),
        ({"phases": COMPUTING}, "CPU"),
        ({"phases": {"forward": 40.0, "other": 60.0}}, "Python"),
        ({"phases": COMPUTING, "small_operators": 0.7}, "Python"),
        ({"phases": {"forward": 40.0, "communication": 60.0}}, "communication"),
        ({"phases": {}}, "not known"),
        ({"phases": COMPUTING, "device": "cuda", "gpu_share": 0.2, "operators": ()}, "CPU"),
    ],
)
def test_the_largest_share_names_the_resource(changes: dict[str, Any], kind: str) -> None:
    assert bound(dataclasses.replace(record(), **changes)).kind == kind


def test_the_roofline_tells_compute_from_memory_bandwidth() -> None:
    computing = dataclasses.replace(record(), phases=COMPUTING)
    fast = bound(computing, peaks(memory=50.0))
    assert (fast.kind, fast.share) == ("compute", round(6e9 / 0.098 / 200e9, 4))
    assert bound(computing, peaks(memory=5.0)).kind == "memory bandwidth"
    slow = bound(dataclasses.replace(computing, phases={"forward": 980.0}, step_ms=1000.0), peaks(memory=50.0))
    assert slow.kind == "CPU"
    assert "3% of what compute allows" in slow.sentence
