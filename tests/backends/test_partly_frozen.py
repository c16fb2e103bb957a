"""Models that tie down one of their dynamic sizes: the others stay free."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
import torch
from torch import nn

from _backends import needs_compiler, reloaded
from trimtab.artifact.padded_batches import PaddedExecutable
from trimtab.backends.aoti import Aoti
from trimtab.backends.common.exported_program import NOT_FROZEN, export_program
from trimtab.backends.common.foreign import calibration_rows
from trimtab.backends.eager import Eager
from trimtab.backends.onnxruntime import OnnxRuntime
from trimtab.backends.openvino import OpenVino
from trimtab.backends.torchscript import TorchScript
from trimtab.core.backend import Backend
from trimtab.core.candidate import Candidate
from trimtab.core.signature import Dim
from trimtab.core.workload import Workload
from trimtab.errors import CompileError, InputError
from trimtab.evaluation.prepared_workload import prepare


class Rows(nn.Module):
    """Takes its rows one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        told = [self.proj(row).cumsum(0) + len(x) for row in x]
        return torch.stack(told), torch.cat(told)


class Steps(nn.Module):
    """Goes from step to step, as far as Python can count."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(x.shape[0], 3)
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state) / float(x.shape[1])
        return state


class Mapped(Rows):
    """Takes its rows one by one in a way that is no TorchScript."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.stack([*map(self.proj, x.unbind())])


DIMS = {"x": {0: Dim("batch"), 1: Dim("length")}}
BACKENDS = [OnnxRuntime(), OpenVino(), pytest.param(Aoti(), marks=needs_compiler)]


def candidate_of(model: nn.Module) -> Candidate:
    torch.manual_seed(0)
    return Candidate.of(model.eval(), (torch.randn(2, 5, 4),), dynamic=DIMS)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize(
    ("model", "kept", "lost"), [pytest.param(Rows, "length", "batch", marks=pytest.mark.long), (Steps, "batch", "length")]
)
def test_the_size_that_is_not_tied_down_stays_free(
    backend: Backend, model: type[nn.Module], kept: str, lost: str, tmp_path: pathlib.Path
) -> None:
    candidate = candidate_of(model())
    built = backend.compile(candidate)
    assert [dim.name for dim in built.signature.dims] == [kept]
    assert any(f"the example's {lost} only" in note for note in built.notes)
    for executable in (built, reloaded(backend, built, tmp_path)):
        for size in (1, 2, 17):
            leaves = torch.randn(2, size, 4) if kept == "length" else torch.randn(size, 5, 4)
            for got, want in zip(executable.run([leaves]), candidate.flat()(leaves), strict=True):
                torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        with pytest.raises(InputError, match="was given, but this was built for x: float32"):
            executable(torch.randn(3, 7, 4))


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_where_sizes_are_stated_a_form_that_would_keep_only_some_is_not_built(backend: Backend) -> None:
    subject = prepare(Workload(model=Steps().eval(), inputs=torch.randn(2, 5, 4), dynamic=DIMS))
    with pytest.raises(CompileError) as refused:
        backend.compile(subject.candidate)
    assert str(refused.value).endswith(NOT_FROZEN)


def test_the_original_is_saved_for_the_sizes_of_the_example_if_it_exports_for_no_others(tmp_path: pathlib.Path) -> None:
    """An artifact carries it, to compare speeds with."""
    candidate = dataclasses.replace(candidate_of(Mapped()), all_sizes=True)
    eager = Eager().compile(candidate)
    x = torch.randn(2, 5, 4)
    torch.testing.assert_close(reloaded(Eager(), eager, tmp_path)(x), candidate.model(x))
    assert eager.signature.dims == ()
    assert eager.notes == [
        "What is saved takes the example's batch, length only, because the model does not export for others."
    ]


def test_outputs_that_may_follow_what_is_kept_stay_open() -> None:
    signature = candidate_of(Rows()).keeping(["length"]).signature
    assert [spec.shape for spec in signature.inputs] == [(2, "length", 4)]
    assert [spec.shape for spec in signature.outputs] == [(2, "length", 3), ("?", 3)]
    assert candidate_of(Rows()).keeping([]).signature.outputs[1].shape == (10, 3)


def test_a_frozen_batch_is_called_with_any_at_every_length() -> None:
    class Own(Rows):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return torch.stack([self.proj(row).cumsum(0) for row in x])

    candidate = candidate_of(Own())
    fitted = PaddedExecutable(OnnxRuntime().compile(candidate), candidate.signature)
    for shape in ((1, 9, 4), (5, 3, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(fitted(x), candidate.model(x), atol=1e-5, rtol=1e-4)


def test_what_the_original_saves_takes_the_sizes_that_its_export_does(tmp_path: pathlib.Path) -> None:
    candidate = candidate_of(Steps())
    assert [dim.name for dim in export_program(candidate)[1].dims] == ["batch"]
    eager = Eager().compile(candidate)
    again = reloaded(Eager(), eager, tmp_path)
    x = torch.randn(7, 5, 4)
    torch.testing.assert_close(again(x), candidate.model(x))


@pytest.mark.parametrize(("dims", "shapes"), [(["length"], [(2, 9, 4)] * 2), (["batch"], [(4, 5, 4)]), ([], [(2, 5, 4)] * 2)])
def test_calibration_inputs_are_fitted_to_what_is_frozen_only(dims: list[str], shapes: list[tuple[int, ...]]) -> None:
    x = torch.randn(2, 5, 4)
    candidate = Candidate.of(Rows(), (x,), dynamic=DIMS, calibration=[((torch.randn(4, 9, 4),), {})])
    rows = calibration_rows(candidate, candidate.keeping(dims).signature)
    assert [tuple(row[0].shape) for row in rows] == shapes


def test_a_trace_that_ties_down_one_size_is_used_where_the_source_is_no_torchscript(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    calibration = [((torch.randn(rows, 9, 4),), {}) for rows in (2, 3)]
    candidate = Candidate.of(Mapped().eval(), (torch.randn(2, 5, 4),), dynamic=DIMS, calibration=calibration)
    executable = TorchScript().compile(candidate)
    assert [dim.name for dim in executable.signature.dims] == ["length"]
    assert executable.notes == ["Built for the example's batch only, because it is not right for others."]
    x = torch.randn(2, 30, 4)
    torch.testing.assert_close(reloaded(TorchScript(), executable, tmp_path)(x), candidate.model(x))
    with pytest.raises(CompileError, match="TorchScript cannot take this model. Traced: "):
        TorchScript().compile(dataclasses.replace(candidate, all_sizes=True))
