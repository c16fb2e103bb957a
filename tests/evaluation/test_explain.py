"""Where the time goes, by the profiler of whichever runtime has one, and the place under the roof."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import nn

import trimtab
from trimtab._internal.serialization import from_json, to_json
from trimtab._internal.text import counted
from trimtab.core.backend import BACKENDS
from trimtab.core.recipe import Recipe
from trimtab.core.technique import PASSES, missing_package
from trimtab.evaluation.evaluate import apply_passes, build, save
from trimtab.evaluation.explain import TORCH, Explanation, explain
from trimtab.evaluation.prepared_workload import Subject, prepare
from trimtab.hardware.peaks import Peaks, Rate


@pytest.fixture(scope="module")
def subject() -> Subject:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 10))
    return prepare(trimtab.Workload(name="small", model=model, inputs=torch.randn(2, 3, 8, 8)))


FLOPS = 2 * 2 * (8 * 6 * 6 * 3 * 3 * 3 + 8 * 6 * 6 * 10)
"""A multiplication and an addition for each weight that each output of the two layers meets, for two images."""


def peaks(**values: float) -> Peaks:
    threads = torch.get_num_threads()
    units = {"memory": "GB/s", "int8": "GOP/s"}
    rates = [
        Rate(kind=kind, device="cpu", threads=threads, unit=units.get(kind, "GFLOP/s"), value=value)
        for kind, value in values.items()
    ]
    return Peaks(fingerprint="x", threads=threads, rates=tuple(rates))


@pytest.mark.parametrize(
    ("backend", "source", "operator"),
    [
        ("eager", TORCH, "aten::"),
        ("torchscript", TORCH, "::"),
        ("onnxruntime", "onnxruntime's own profiler", "Gemm"),
        ("openvino", "openvino's own profiler", "FullyConnected"),
    ],
)
def test_each_runtime_names_its_operators(subject: Subject, backend: str, source: str, operator: str) -> None:
    if package := missing_package(BACKENDS[backend].requires):
        pytest.skip(f"{package} is not installed")
    recipe = Recipe(backend=BACKENDS[backend]())
    found = explain(recipe, None, subject, peaks(float32=100.0, memory=20.0), seconds=1e-4)
    assert found.source == source
    assert any(operator in row.name for row in found.operators)
    assert sum(row.share for row in found.operators) == pytest.approx(1.0)
    assert all(row.calls == int(row.calls) for row in found.operators)
    assert found.flops == FLOPS
    assert found.roofline is not None
    assert found.roofline.achieved == pytest.approx(FLOPS / 1e-4 / 1e9)
    assert found.bytes_moved is not None
    assert found.bytes_moved >= 4 * sum(p.numel() for p in subject.model.parameters()) + 4 * (2 * 3 * 8 * 8 + 2 * 10)
    assert from_json(Explanation, to_json(found)) == found


def test_a_peak_that_was_not_measured_is_said(subject: Subject) -> None:
    recipe = Recipe(passes=(PASSES["autocast"](),), backend=BACKENDS["eager"]())
    found = explain(recipe, None, subject, peaks(float32=100.0, memory=20.0), seconds=1e-4)
    assert found.dtype == "bfloat16"
    assert found.roofline is None
    threads = counted(torch.get_num_threads(), "thread")
    assert found.notes == (f"Not placed under the roofline: the bfloat16 peak at {threads} was not measured on this machine.",)
    assert explain(recipe, None, subject, peaks()).notes == ("Not placed under the roofline: its time was not measured.",)


class Rows(nn.Module):
    """Runs its layer row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.layer(row) for row in x])


@pytest.mark.parametrize(("backend", "model"), [("eager", Rows()), ("onnxruntime", nn.Linear(64, 32))])
def test_a_recipe_is_told_of_with_the_batch_that_it_runs(backend: str, model: nn.Module, tmp_path: pathlib.Path) -> None:
    if package := missing_package(BACKENDS[backend].requires):
        pytest.skip(f"{package} is not installed")
    axis = "x" if isinstance(model, Rows) else "input"
    workload = trimtab.Workload(name="rows", model=model, inputs=torch.randn(2, 64), dynamic={axis: {0: "batch"}})
    subject = prepare(workload)
    recipe = Recipe(passes=(PASSES["batch"](size=8),), backend=BACKENDS[backend]())
    executable = build(recipe, apply_passes(recipe, subject.candidate))[0]
    save(executable, tmp_path)
    for files in (tmp_path, None):
        found = explain(recipe, files, subject, peaks(float32=100.0, memory=20.0), seconds=1e-4)
        assert found.operators
        assert found.flops == 2 * 8 * 64 * 32
        assert found.seconds == pytest.approx(4e-4)
        assert found.roofline is not None
        assert found.roofline.achieved == pytest.approx(found.flops / 4e-4 / 1e9)
