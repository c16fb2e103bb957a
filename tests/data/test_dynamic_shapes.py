"""Sizes that come in multiples: stated, or found in examples, data and files; what runtimes keep of them."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trimtab
from _backends import needs_compiler, reloaded
from _labelled import X
from trimtab.artifact.padded_batches import PaddedExecutable
from trimtab.backends.aoti import Aoti
from trimtab.backends.common import other_sizes
from trimtab.backends.common.exported_program import PROGRAM, export_program, verified
from trimtab.backends.common.foreign import wrong_graph
from trimtab.backends.eager import Eager
from trimtab.backends.onnxruntime import OnnxRuntime
from trimtab.backends.torchscript import TorchScript
from trimtab.core.backend import BACKENDS, Backend
from trimtab.core.candidate import Candidate
from trimtab.core.signature import Dim
from trimtab.core.workload import Evaluation, Workload
from trimtab.errors import CompileError, InputError, UsageError, WorkloadError
from trimtab.evaluation.prepared_workload import prepare
from trimtab.execution.jobs.inference import prepare_job
from trimtab.study.samplers.ladder import as_written


class Unet(nn.Sequential):
    """Sizes must be even."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3, 2, 1), nn.ConvTranspose2d(8, 3, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, super().forward(x)], 1)


IMAGE = torch.randn(1, 3, 32, 32)


def test_a_dimension_in_multiples() -> None:
    dim = Dim("h", min=5, max=99, step=16)
    assert (dim.min, dim.max, dim.bounds) == (16, 96, "16 to 96 in multiples of 16")
    assert [size for size in range(110) if size in dim] == [16, 32, 48, 64, 80, 96]
    assert (dim.near(32, 2, 1), dim.near(96, 1, -1), dim.holding(33)) == (64, 80, 48)
    with pytest.raises(UsageError, match="has no multiple of 16 in its bounds 17..31"):
        Dim("h", min=17, max=31, step=16)


@pytest.mark.parametrize("known", ["stated", "examples", "data"])
def test_a_size_in_multiples_is_kept_by_runtimes(known: str) -> None:
    more: dict[str, Any] = {
        "stated": {"dynamic": {"x": {2: Dim("x_2", step=2), 3: Dim("x_3", step=2)}}},
        "examples": {"examples": [torch.randn(1, 3, 48, 32), torch.randn(1, 3, 64, 96)]},
        "data": {"calibration": [torch.randn(1, 3, k, 96 - k) for k in (32, 48, 64, 32, 48, 64)]},
    }[known]
    candidate = prepare(Workload(model=Unet().eval(), inputs=IMAGE, **more)).candidate
    assert [(dim.name, dim.step) for dim in candidate.signature.dims] == [("x_2", 2), ("x_3", 2)]
    assert candidate.signature.outputs[0].shape == (1, 6, "x_2", "x_3")
    assert export_program(candidate)[1].dims == candidate.signature.dims
    executable = OnnxRuntime().compile(candidate)
    other = torch.randn(1, 3, 40, 70)
    assert torch.allclose(executable(other), candidate.model(other), atol=1e-4)
    with pytest.raises(InputError, match="'x_2' of 'x' is 41; this was built for 2 to any in multiples of 2"):
        executable(torch.randn(1, 3, 41, 70))


def test_a_size_that_fails_is_named_with_what_to_state() -> None:
    with pytest.raises(
        WorkloadError, match=r"^At h=33 the model fails: .* state trimtab.Dim\('h', step=...\), or leave it out"
    ):
        prepare(Workload(model=Unet().eval(), inputs=IMAGE, dynamic={"x": {2: "h", 3: "w"}}))
    with pytest.raises(UsageError, match="has h=32, but dynamic states 24 to any in multiples of 24"):
        Candidate.of(Unet().eval(), (IMAGE,), dynamic={"x": {2: Dim("h", step=24)}})


def test_a_batch_in_multiples_is_filled_up() -> None:
    candidate = Candidate.of(nn.Linear(8, 2).eval(), (X[:4],), dynamic={"input": {0: Dim("batch", step=4)}})
    fitted = PaddedExecutable(OnnxRuntime().compile(candidate), candidate.signature)
    assert torch.allclose(fitted(X[:7]), candidate.model(X[:7]), atol=1e-5)


@pytest.mark.parametrize("kind", ["auto.pt2", "derived.pt2", "u.onnx"])
def test_files_whose_sizes_are_multiples(kind: str, tmp_path: pathlib.Path) -> None:
    model, path, two = Unet().eval(), tmp_path / kind, torch.randn(2, 3, 32, 32)
    if kind == "u.onnx":
        axes = {"x": {0: "n", 2: "h", 3: "w"}}
        torch.onnx.export(model, (two,), str(path), dynamo=False, input_names=["x"], dynamic_axes=axes)
    else:
        auto, axis = torch.export.Dim.AUTO, torch.export.Dim
        dims = {0: auto, 2: auto, 3: auto} if kind == "auto.pt2" else {2: 2 * axis("h", max=100), 3: 2 * axis("w", max=100)}
        torch.export.save(torch.export.export(model, (two,), dynamic_shapes={"x": dims}), path)
    workload = trimtab.load_workload(path, shapes={"x": "2x3x32x32"})
    assert [dim.step for axis, dim in workload.dynamic["x"].items() if axis] == [2, 2]
    assert [dim.step for dim in prepare(workload).candidate.signature.dims][-2:] == [2, 2]


def test_sizes_that_a_program_computes_are_fixed_and_told_of(tmp_path: pathlib.Path) -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y[1:]

    n = torch.export.Dim("n", min=2)
    program = torch.export.export(Two(), (X[0], torch.ones(9)), dynamic_shapes={"x": {0: n}, "y": {0: n + 1}})
    torch.export.save(program, tmp_path / "two.pt2")
    workload = trimtab.load_workload(tmp_path / "two.pt2")
    assert workload.dynamic is None
    assert "two.pt2 computes sizes of x (axis 0), y (axis 0) from others; they are fixed at the example's." in workload.notes


def test_an_output_that_loses_an_axis_at_one_row_freezes_the_batch_and_says_so() -> None:
    class Head(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).squeeze()

    judged = Evaluation(data=(X, X.sum(1)), score=lambda output, target: -(output - target).abs().reshape(-1))
    subject = prepare(Workload(model=Head(8, 1).eval(), inputs=X[:1], evaluation=judged))
    assert subject.candidate.signature.describe() == "x: float32[1, 8]"
    assert {batch.rows for batch in subject.splits.selection} == {1}
    (note,) = [note for note in subject.notes if "stays fixed" in note]
    assert note == (
        "The output 'output' has 0 axes for one size of 'batch' and 1 for another, so that batch stays fixed. squeeze() drops "
        "every axis of size one: name the axis."
    )
    with pytest.raises(UsageError, match="has 0 axes for one size of 'batch' and 1 for another. Let the model keep them"):
        prepare(Workload(model=Head(8, 1).eval(), inputs=X[:1], dynamic={"x": {0: "batch"}}))


class Decoder(nn.Module):
    def forward(self, x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        return torch.cat([past, x[:, None]], 1)


@pytest.mark.parametrize("sizes", [(0, 1, 2), (2, 1, 0)])
def test_a_size_that_is_0_in_some_calls_is_dynamic_like_others(sizes: tuple[int, ...]) -> None:
    module, calls = Decoder().eval(), [(torch.ones(1, 4), torch.ones(1, size, 4)) for size in sizes]

    def run() -> None:
        for call in calls:
            module(*call)

    captured, given = Workload.capture(module, run), Workload(model=module, inputs=calls[0], examples=calls[1:])
    for workload in (captured, given):
        signature = prepare(workload).candidate.signature
        assert signature.inputs[1].shape == (1, "past_1", 4)
        assert signature.dims == (Dim("past_1", min=0),)
    stated = Workload(model=module, inputs=calls[0], dynamic={"past": {1: Dim("length", min=0, max=8)}})
    assert prepare(stated).candidate.signature.dims == (Dim("length", min=0, max=8),)
    assert prepare(Workload(model=module, inputs=calls[sizes.index(0)])).candidate.signature.dims == ()


def test_data_beyond_the_sizes_that_are_stated_is_refused_by_the_dry_run() -> None:
    texts = [torch.ones(1, 9 if i == 5 else 2 + i % 4, 4) for i in range(16)]
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()

    def refused(least: int, most: int, **data: object) -> str:
        dynamic = {"input": {0: "batch", 1: Dim("length", min=least, max=most)}}
        with pytest.raises(UsageError) as raised:
            prepare(Workload(model=module, inputs=texts[0], dynamic=dynamic, **data))  # type: ignore[arg-type]
        return str(raised.value)

    message = refused(1, 8, calibration=texts)
    assert "does not allow the sizes of 1 of 16 calls that the data makes, the first of them item 5" in message
    assert "Dimension 'length' of 'input' is 9; this was built for 1 to 8. State the sizes that occur" in message
    pairs = [(text, torch.ones(1)) for text in texts]
    labelled = Evaluation(data=pairs, score=lambda output, target: output.mean() - target)
    assert "the first of them item 5" in refused(1, 8, evaluation=labelled)
    rows = [(text[0], torch.ones(())) for text in texts]
    for data in (Listed(rows), DataLoader(Listed(rows), shuffle=True)):
        labelled = Evaluation(data=data, score=lambda output, target: output.mean() - target, batch_size=1)
        assert "the first of them item 5" in refused(1, 8, evaluation=labelled)


def test_sizes_of_the_calls_that_run_makes_are_refused_by_the_dry_run_too(tmp_path: pathlib.Path) -> None:
    texts = [torch.ones(1, 9 if i == 5 else 2 + i % 4, 4) for i in range(16)]
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    labelled = Evaluation(
        data=[(text, torch.ones(1)) for text in texts],
        run=lambda model, text: model(text) + model(text[:, :1]),
        score=lambda output, target: float(output.mean()),
    )
    dynamic = {"input": {0: "batch", 1: Dim("length", min=1, max=8)}}
    workload = Workload(model=module, inputs=texts[0], dynamic=dynamic, evaluation=labelled, calibration=texts[:5])
    (tmp_path / "workload.pkl").write_bytes(cloudpickle.dumps(workload))
    job = {
        "workload": {"pickle": str(tmp_path / "workload.pkl")},
        "reference": str(tmp_path / "reference"),
        "prepared": str(tmp_path / "prepared"),
        "recipe": as_written().to_json(),
    }
    with pytest.raises(UsageError) as raised:
        prepare_job(job, tmp_path)
    assert "does not allow the sizes of a call that Evaluation run makes, as of item 5 of the data:" in str(raised.value)
    assert "Dimension 'length' of 'input' is 9; this was built for 1 to 8. State the sizes that occur" in str(raised.value)
    few = {"input": {0: Dim("batch", max=2), 1: Dim("length", min=1, max=9)}}
    larger = dataclasses.replace(labelled, run=lambda model, text: model(torch.cat([text] * 3)))  # trials split such batches
    workload = Workload(model=module, inputs=texts[0], dynamic=few, evaluation=larger, calibration=texts[:5])
    (tmp_path / "workload.pkl").write_bytes(cloudpickle.dumps(workload))
    assert prepare_job(job, tmp_path)["fingerprint"]


class Listed(Dataset[Any]):
    """A map-style data set of the items of a list."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Window(nn.Module):
    """Looks at the last 64 steps only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 64:
            x = x[:, -64:]
        return x.mean(1)


class Limited(nn.Module):
    """Takes up to 40 steps, and says so in its own way."""

    class TooLong(Exception):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.jit.is_tracing() and not torch.compiler.is_compiling() and x.shape[1] > 40:
            raise self.TooLong
        return x.mean(1)


def of_length(model: nn.Module, most: int | None) -> Candidate:
    dims = {"x": {0: Dim("batch"), 1: Dim("length", max=most)}}
    return Candidate.of(model.eval(), (torch.randn(2, 16, 8),), dynamic=dims)


@pytest.mark.parametrize("most", [512, None])
def test_a_form_that_keeps_one_side_of_a_decision_on_a_size_is_found_far_from_the_example(most: int | None) -> None:
    candidate = of_length(Window(), most)
    with pytest.raises(CompileError, match=rf"at the sizes .*'length': {most or 144}\}}: output is off by"):
        verified(candidate, lambda leaves: [leaves[0].mean(1)])
    assert f"length={most or 144}" in str(wrong_graph(lambda leaves: [leaves[0].mean(1)], candidate, candidate.signature))
    assert wrong_graph(lambda leaves: [candidate.model(leaves[0])], candidate, candidate.signature) is None


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_traced_decision_on_a_size_costs_the_dimension(name: str) -> None:
    pytest.importorskip(name)
    executable = BACKENDS[name]().compile(of_length(Window(), 512))
    assert [dim.name for dim in executable.signature.dims] == ["batch"]
    assert any("length" in note for note in executable.notes)


def test_a_size_that_the_model_itself_refuses_is_halved() -> None:
    candidate, asked = of_length(Limited(), 512), list[int]()

    def run(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        asked.append(leaves[0].shape[1])
        return [leaves[0].mean(1)]

    assert verified(candidate, run).dims == candidate.signature.dims
    assert max(asked) == 32
    asked.clear()
    assert wrong_graph(run, candidate, candidate.signature) is None
    assert max(asked) == 32


def test_what_is_far_is_bounded_by_elements() -> None:
    candidate = Candidate.of(nn.Identity(), (torch.zeros(1, 1 << 20),), dynamic={"input": {0: Dim("batch")}})
    asked: list[int] = []
    verified(candidate, lambda leaves: [asked.append(len(leaves[0])) or leaves[0]])  # type: ignore[func-returns-value]
    assert max(asked) == 2


def test_other_sizes_are_small_where_one_is_far() -> None:
    asked: list[tuple[int, ...]] = []
    candidate = Candidate.of(nn.Identity(), (torch.zeros(5, 16, 8),), dynamic={"input": {0: Dim("batch"), 1: Dim("length")}})
    verified(candidate, lambda leaves: [asked.append(leaves[0].shape) or leaves[0]])  # type: ignore[func-returns-value]
    assert {shape for shape in asked if shape[0] > 6 or shape[1] > 18} == {(48, 2, 8), (2, 144, 8)}


def test_other_sizes_are_near_where_the_model_takes_no_small_ones() -> None:
    dims = {"input": {0: Dim("batch"), 2: Dim("height"), 3: Dim("width")}}
    candidate = Candidate.of(nn.Conv2d(3, 4, 8).eval(), (torch.zeros(1, 3, 16, 16),), dynamic=dims)
    far = other_sizes.largest_inputs(candidate, candidate.signature.dims[1], {"batch": 2, "height": 18, "width": 19})
    assert far is not None
    assert dict(far.sizes) == {"batch": 2, "height": 144, "width": 19}


@pytest.mark.parametrize("what", ["seconds", "memory"])
def test_far_sizes_end_with_a_call_that_costs_much(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, peak = list[int](), [100.0]

    class Quadratic(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            asked.append(x.shape[1])
            if what == "seconds":
                time.sleep((x.shape[1] / 64) ** 2 * 0.1)
            peak[0] = max(peak[0], x.shape[1] ** 2 / 16)
            return x.mean(1)

    candidate = of_length(Quadratic(), 512)
    monkeypatch.setattr(other_sizes, "MAX_CALL_S", 0.1 if what == "seconds" else 60.0)
    monkeypatch.setattr(other_sizes, "free_mb", lambda: 1000.0)
    monkeypatch.setattr(other_sizes, "peak_rss_mb", lambda: peak[0])
    asked.clear()
    far = other_sizes.largest_inputs(candidate, candidate.signature.dims[1], {"batch": 3, "length": 17})
    assert far is not None
    assert far.sizes["length"] == max(asked) == 64
    assert far.reference[1][0].shape == (2, 8)


@pytest.mark.parametrize("dim", [Dim("rows", max=1), Dim("rows", min=3, max=3), Dim("rows", step=16, max=30)])
def test_a_dimension_of_one_size_is_kept_as_it_is(dim: Dim, tmp_path: pathlib.Path) -> None:
    x = torch.randn(dim.min, 8)
    candidate = Candidate.of(nn.Linear(8, 2).eval(), (x,), dynamic={"input": {0: dim}})
    assert [leaf.shape for leaf in candidate.dynamic_leaves()] == [x.shape]
    for backend in (Eager(), TorchScript(), OnnxRuntime()):
        (tmp_path / backend.name).mkdir()
        executable = reloaded(backend, backend.compile(candidate), tmp_path / backend.name)
        assert executable.signature.dims == (dim,)
        assert torch.allclose(executable(x), candidate.model(x), atol=1e-6)


class One(nn.Module):
    """Treats one image otherwise than several."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.conv(x)
        return 2 * y if x.shape[0] == 1 else y


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_the_least_size_is_tried_though_not_all_dimensions_can_be_least(name: str) -> None:
    pytest.importorskip(name)
    dims = {"x": {0: Dim("batch"), 2: Dim("height"), 3: Dim("width")}}
    candidate = Candidate.of(One().eval(), (torch.randn(2, 3, 16, 16),), dynamic=dims)
    executable = BACKENDS[name]().compile(candidate)
    alone = torch.randn(1, 3, 16, 16)
    if executable.signature.batch is not None:
        assert torch.allclose(executable(alone), candidate.model(alone), atol=1e-4)
    assert torch.allclose(executable(*candidate.args), candidate.model(*candidate.args), atol=1e-4)


class Flattened(nn.Linear):
    """(batch, steps, 8) -> (batch * steps, 5), as logits are handed to a loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).flatten(0, 1)


def test_rows_of_a_fixed_batch_that_an_output_counts_by_steps_are_put_together() -> None:
    model = Flattened(8, 5).eval()
    candidate = Candidate.of(model, (torch.randn(3, 16, 8),), dynamic={"x": {0: Dim("batch")}})
    fixed = TorchScript().compile(Candidate.of(model, (torch.randn(3, 16, 8),)))
    assert candidate.signature.outputs[0].shape == ("?", 5)
    x = torch.randn(7, 16, 8)
    assert torch.allclose(PaddedExecutable(fixed, candidate.signature)(x), model(x), atol=1e-6)


def test_rows_of_a_fixed_batch_that_an_output_counts_by_itself_are_not() -> None:
    class Positive(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x[:, 0] > 0]

    example, x = torch.tensor([[1.0], [2.0], [-1.0]]), torch.arange(-4.0, 3.0)[:, None]
    candidate = Candidate.of(Positive().eval(), (example,), dynamic={"x": {0: Dim("batch")}})
    assert candidate.signature.outputs[0].shape == ("?", 1)
    fitted = PaddedExecutable(Eager().compile(Candidate.of(Positive().eval(), (example,))), candidate.signature)
    assert fitted(x[:6]).tolist() == [[1.0]]
    with pytest.raises(CompileError, match=r"the output output: float32\[\?, 1\] of several batches cannot be put together"):
        fitted(x)


class Strided(nn.Module):
    """A front end as speech models have: several sizes of its input give one size of its output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv1d(1, 4, 10, 5), nn.GELU(), nn.Conv1d(4, 4, 3, 2), nn.GELU())

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(wave)
        return found


def strided() -> Candidate:
    return Candidate.of(Strided().eval(), (torch.randn(2, 1, 100),), dynamic={"wave": {0: Dim("batch"), 2: Dim("length")}})


class Pairs(nn.Module):
    """The distances between all pairs of points: as many as there are points, where there are three."""

    def forward(self, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return points * 2, nn.functional.pdist(points)


def test_an_output_that_follows_in_steps_is_not_said_to_be_of_one_size() -> None:
    assert strided().signature.outputs[0].shape == ("batch", 4, "?")
    pairs = Candidate.of(Pairs(), (torch.randn(2, 3),), dynamic={"points": {0: Dim("points")}})
    assert [spec.shape for spec in pairs.signature.outputs] == [("points", 3), ("?",)]
    asked: list[int] = []

    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            asked.append(len(x))
            if len(x) < 5:
                raise KeyError("too few")
            return x[:3]

    spec = Candidate.of(Picky(), (torch.randn(8, 2),), dynamic={"x": {0: Dim("rows")}}).signature.outputs[0]
    assert (spec.shape, asked) == ((3, 2), [8, 9, 4])
    asked.clear()
    Candidate.of(Picky(), (torch.randn(8, 2),), dynamic={"x": {0: Dim("rows", min=7, max=8)}})
    assert asked == [8, 7]


class Scaled(nn.Module):
    """Layers with strides on an image, as classifiers have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 8, 3, 2, 1), nn.AdaptiveAvgPool2d(1)
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(image)
        return found


@pytest.mark.parametrize(
    ("backend", "kind"),
    [(Eager(), "wave"), (Eager(), "image"), pytest.param(Aoti(mode="default"), "wave", marks=needs_compiler)],
    ids=str,
)
def test_sizes_behind_strides_are_kept(backend: Backend, kind: str, tmp_path: pathlib.Path) -> None:
    dims = {"image": {0: Dim("batch"), 2: Dim("height"), 3: Dim("width")}}
    candidate = strided() if kind == "wave" else Candidate.of(Scaled().eval(), (torch.randn(1, 3, 64, 64),), dynamic=dims)
    executable = reloaded(backend, backend.compile(candidate), tmp_path)
    assert executable.signature.dims == candidate.signature.dims
    if backend.name == "eager":
        assert (tmp_path / PROGRAM).exists()
    shapes = {"wave": [(1, 1, 25), (3, 1, 29), (2, 1, 35), (1, 1, 1000)], "image": [(1, 3, 1, 1), (2, 3, 9, 40), (1, 3, 33, 2)]}
    with torch.no_grad():
        for shape in shapes[kind]:
            given = torch.randn(shape)
            torch.testing.assert_close(executable(given), candidate.model(given))
