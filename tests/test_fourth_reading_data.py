"""What the first axis of data counts, sizes in multiples, and data and models in forms that used to be misread."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import trimtab
from trimtab._independence import Judge
from trimtab.backends._program import export_program
from trimtab.backends.onnxruntime import OnnxRuntime
from trimtab.candidate import Candidate
from trimtab.errors import InputError, UsageError, WorkloadError
from trimtab.reference import Fitted, refer
from trimtab.signature import Dim, parameter_names
from trimtab.splits import Batch
from trimtab.study.handing import handed
from trimtab.subject import Subject, prepare
from trimtab.workload import Evaluation, Workload


def top1(output: torch.Tensor, target: Any) -> torch.Tensor:
    return output.argmax(1) == torch.as_tensor(target)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> float:
    return float((output.argmax(-1) == target).float().mean())


def batches(subject: Subject) -> list[Batch]:
    splits = subject.splits
    return [*splits.calibration, *splits.selection, *splits.test]


def classifier(data: Any, **more: Any) -> Workload:
    options = {"model": nn.Linear(8, 2).eval(), "inputs": torch.ones(1, 8)} | more
    return Workload(evaluation=Evaluation(data=data, score=top1), **options)


X, Y = torch.randn(120, 8, generator=torch.Generator().manual_seed(0)), torch.arange(120) % 2


class Tagger(nn.Module):
    """torch's own layout: (time, batch)."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers, self.head = nn.Embedding(1000, 8), nn.LSTM(8, 8), nn.Linear(8, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.table(ids))[0])


class Sound(nn.Conv1d):
    """Samples without a batch."""

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        return super().forward(wave[None, None]).mean((0, 2))


class Cloud(nn.Linear):
    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return super().forward(points).amax(0)


UNITS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "time": (Tagger, lambda k: torch.arange(30 * k, 30 * k + 30)[:, None].repeat(1, 4)),
    "samples": (lambda: Sound(1, 4, 9, 4), lambda k: torch.arange(1600.0) + 10000 * k),
    "points": (lambda: Cloud(3, 8), lambda k: torch.randn(64, 3) + 10 * k),
    "sequence before batch": (lambda: nn.TransformerEncoderLayer(8, 2, 16), lambda k: torch.randn(6, 3, 8) + k),
}


@pytest.mark.parametrize("dynamic", ["found", "stated"])
@pytest.mark.parametrize("unit", UNITS)
def test_items_whose_rows_are_no_examples_stay_whole(unit: str, dynamic: str) -> None:
    make, item = UNITS[unit]
    items = [item(k) for k in range(12)]
    name = parameter_names(make().forward, 1)[0]
    stated = {name: {0: "frames"}} if dynamic == "stated" else None
    subject = prepare(Workload(model=make().eval(), inputs=(items[0],), calibration=items, dynamic=stated))
    found = [batch.call[0][0] for batch in batches(subject)]
    assert len(found) == 12
    assert all(any(torch.equal(one, other) for other in items) for one in found)
    assert any("never taken apart, because the model gives no row an answer of its own" in note for note in subject.notes)
    assert subject.candidate.signature.batch is None


def test_a_tagger_is_scored_on_whole_sequences() -> None:
    torch.manual_seed(0)
    model, data = Tagger().eval(), []
    for _ in range(12):
        ids = torch.randint(1000, (30, 8))
        data.append((ids, model(ids).argmax(-1)))
    for dynamic in (None, {"ids": {0: "time", 1: "batch"}}):
        judged = Evaluation(data=iter(data), metric=accuracy)
        subject = prepare(Workload(model=model, inputs=(data[0][0],), dynamic=dynamic, evaluation=judged))
        assert refer(model, subject.splits.test, judged).scores.value == 1.0, dynamic


@pytest.mark.parametrize("form", ["pair", "dataset", "calibration", "stated"])
def test_rows_that_trimtab_itself_puts_together_must_be_examples(form: str) -> None:
    ids = torch.randint(1000, (300, 8))
    data = TensorDataset(ids, ids % 5) if form == "dataset" else (ids, ids % 5)
    more = {"calibration": ids} if form == "calibration" else {"evaluation": Evaluation(data=data, metric=accuracy)}
    dynamic = {"ids": {0: "time", 1: "batch"}} if form == "stated" else None
    with pytest.raises(UsageError, match=r"are no examples to this model: .* Axis 0 of its inputs counts something else"):
        prepare(Workload(model=Tagger().eval(), inputs=(ids[:30],), dynamic=dynamic, **more))


def test_asking_what_rows_are_costs_two_small_calls() -> None:
    seen: list[int] = []

    model = nn.Linear(8, 2).eval()
    model.register_forward_pre_hook(lambda model, args: seen.append(len(args[0])))
    prepare(classifier([(X[:60], Y[:60]), (X[60:], Y[60:])], model=model, dynamic={"input": {0: "batch"}}))
    assert seen == [4, 2, 1, 2]  # two to ask, two to learn the signature


def test_examples_that_share_statistics_are_told_of_and_still_split() -> None:
    subject = prepare(classifier((X, Y), model=nn.BatchNorm1d(8, track_running_stats=False), inputs=X[:4]))
    assert subject.splits.examples() == {"calibration": 24, "selection": 48, "test": 48}
    assert any("depend on which examples are in one call" in note for note in subject.notes)


def test_answers_in_another_axis_or_in_whole_numbers_are_followed() -> None:
    class Turned(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x).T, super().forward(x).flatten(), len(x), self.bias

    class Found(Tagger):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids).argmax(-1)

    assert Judge(Turned(8, 2), 1e-3)(Batch(X, None, 120)).kind == "own"
    assert Judge(Found().eval(), 1e-3)(Batch(torch.randint(1000, (30, 1)), None, 30)).kind == "ordered"


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
    fitted = Fitted(OnnxRuntime().compile(candidate), candidate.signature)
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


@dataclasses.dataclass
class Counted(Dataset[Any]):
    n: int
    item: Callable[[int], Any]
    read: int = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        self.read += 1
        return self.item(i)


def test_calibration_is_drawn_from_the_whole_of_a_dataset_and_no_more_than_that_is_read() -> None:
    data = Counted(5000, lambda i: torch.full((8,), float(i // 500)))
    subject = prepare(Workload(model=nn.Linear(8, 2).eval(), inputs=X[:1], calibration=data))
    assert {float(value) for batch in batches(subject) for value in batch.inputs[:, 0]} == set(map(float, range(10)))
    assert data.read < 260
    assert "The calibration data has 5000 examples; 256 of them, drawn at random, are used." in subject.notes


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(torch.ones(8))


def test_endless_calibration_ends_and_labels_in_it_are_refused_at_once() -> None:
    subject = prepare(Workload(model=nn.Linear(8, 2).eval(), inputs=X[:1], calibration=Endless()))
    assert sum(batch.rows for batch in batches(subject)) == 256
    data = Counted(5000, lambda i: (X[i % 120], i % 2))
    with pytest.raises(UsageError, match="made of pairs, of which the first half .* Give the inputs without labels"):
        prepare(Workload(model=nn.Linear(8, 2).eval(), inputs=X[:1], calibration=data))
    assert data.read == 1


def onnx_file(folder: pathlib.Path, nodes: list[Any], inputs: dict[str, list[Any]]) -> pathlib.Path:
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", given, [out])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "m.onnx")
    return folder / "m.onnx"


@pytest.mark.parametrize(
    ("inputs", "arrays", "example", "calls"),
    [
        ({"x": [1000, 4]}, {"x": (1000, 4)}, [(1000, 4)], 0),
        ({"x": [16000]}, {"x": (48000,)}, [(16000,)], 2),
        ({"x": [1, 4], "s": []}, {"x": (1, 4), "s": ()}, [(1, 4), ()], 0),
        ({"x": ["N", 4], "s": []}, {"x": (600, 4), "s": ()}, [(1, 4), ()], 16),
        ({"x": ["N", 4]}, {"x": (600, 4)}, [(1, 4)], 16),
    ],
)
def test_files_of_inputs_are_cut_where_they_hold_rows(
    inputs: dict[str, list[Any]], arrays: dict[str, tuple[int, ...]], example: list[Any], calls: int, tmp_path: pathlib.Path
) -> None:
    node = helper.make_node("Mul", ["x", "s"], ["y"]) if "s" in inputs else helper.make_node("Sigmoid", ["x"], ["y"])
    path = onnx_file(tmp_path, [node], inputs)
    np.savez(tmp_path / "in.npz", **{name: np.asarray(np.random.standard_normal(shape), "f") for name, shape in arrays.items()})
    workload = trimtab.load_workload(path, inputs=tmp_path / "in.npz")
    assert [tuple(leaf.shape) for leaf in workload.inputs] == example
    assert len(workload.calibration or ()) == calls


def test_a_sound_in_a_file_is_one_call(tmp_path: pathlib.Path) -> None:
    size = torch.export.Dim("samples", min=32)
    program = torch.export.export(Sound(1, 4, 9, 4).eval(), (torch.randn(1600),), dynamic_shapes={"wave": {0: size}})
    torch.export.save(program, tmp_path / "s.pt2")
    np.savez(tmp_path / "in.npz", wave=np.random.randn(16000).astype("f"))
    workload = trimtab.load_workload(tmp_path / "s.pt2", inputs=tmp_path / "in.npz")
    assert workload.inputs[0].shape == (16000,)
    assert prepare(workload).candidate.signature.batch is None


def test_names_of_inputs_that_clash_or_are_taken(tmp_path: pathlib.Path) -> None:
    path = onnx_file(tmp_path, [helper.make_node("Add", ["input.1", "input_1"], ["y"])], {"input.1": [1, 4], "input_1": [1, 4]})
    assert len(trimtab.load_workload(path).inputs) == 2
    path = onnx_file(tmp_path, [helper.make_node("Sigmoid", ["self"], ["y"])], {"self": ["N", 4]})
    assert list(trimtab.load_workload(path).dynamic) == ["input_self"]


def test_models_that_cannot_be_pickled_or_have_no_shapes_are_refused_with_the_way_out(tmp_path: pathlib.Path) -> None:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 2))
    with pytest.raises(UsageError, match="cannot be handed to worker processes: .* or give model= a function that builds it"):
        handed(Workload(model=nn.Sequential(normed), inputs=X[:1]), tmp_path)
    with pytest.raises(WorkloadError, match="'weight' has no shape yet.* Call it once on the inputs before handing it over"):
        prepare(Workload(model=nn.LazyLinear(2), inputs=X[:1]))


NAMES = np.array(["neg", "pos"])
UNKNOWN = torch.where(torch.arange(120) % 3 == 0, torch.nan, Y.float())


@pytest.mark.parametrize(
    ("data", "score"),
    [
        ((X, UNKNOWN), lambda o, t: -(o[:, 0] - t).abs().nan_to_num()),
        ([(X[:60], Y[:60].tolist()), (X[60:], Y[60:].tolist())], top1),
        ((X, Y.tolist()), top1),
        (({"input": X}, Y), top1),
        ((X.numpy(), Y.numpy()), top1),
        ([(X.numpy()[:, ::-1], Y.numpy().astype(">i8"))], top1),
        ([(X.numpy(), Y.numpy().astype(object))], top1),
        ([(X, NAMES[Y.numpy()])], lambda o, t: torch.tensor([NAMES[int(k)] == name for k, name in zip(o.argmax(1), t)])),  # noqa: B905
    ],
    ids=["unknown", "lists", "list", "dict", "arrays", "reversed", "objects", "texts"],
)
def test_labelled_data_of_many_kinds(data: Any, score: Any) -> None:
    judged = Evaluation(data=data, score=score)
    subject = prepare(Workload(model=nn.Linear(8, 2).eval(), inputs=X[:1], evaluation=judged))
    assert subject.splits.examples() == {"calibration": 24, "selection": 48, "test": 48}
    assert refer(subject.model, subject.splits.test, judged).scores.n == 48


def test_masks_of_infinity_are_inputs_and_ragged_examples_need_a_collate_fn() -> None:
    class Masked(nn.Linear):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return super().forward(x * torch.softmax(mask, -1))

    mask = torch.zeros(120, 8)
    mask[:, 6:] = -torch.inf
    assert prepare(classifier([((X, mask), Y)], model=Masked(8, 2).eval(), inputs=(X[:1], mask[:1])))
    with pytest.raises(UsageError, match=r"cannot be put together into batches: .* Give a DataLoader with your own collate_fn"):
        prepare(classifier(Counted(40, lambda i: (torch.ones(3 + i % 5), i % 2))))


def test_methods_of_inputs_do_not_cross() -> None:
    @dataclasses.dataclass
    class Halves:
        x: torch.Tensor
        y: torch.Tensor

        def joined(self) -> torch.Tensor:
            return torch.cat([self.x, self.y], 1)

    class Joining(nn.Linear):
        def forward(self, pair: Any) -> torch.Tensor:
            return super().forward(pair.joined())

    with pytest.raises(WorkloadError, match="uses methods of `Halves`, which do not cross .* Pass its tensors"):
        prepare(Workload(model=Joining(8, 2).eval(), inputs=(Halves(X[:1, :4], X[:1, 4:]),)))


@pytest.mark.parametrize("dynamic", [{"input": [0]}, {"input": {0: torch.export.Dim("b")}}, {"input": {0: None}}, ["input"]])
def test_dynamic_in_another_form_is_refused_with_the_right_one(dynamic: Any) -> None:
    with pytest.raises(UsageError, match=r'Workload dynamic .* Give {"name of the input": {0: "batch"}}'):
        Workload(model=nn.Linear(8, 2), inputs=X[:1], dynamic=dynamic)


def test_tensors_that_no_runtime_takes_are_named() -> None:
    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to_dense().to(torch.complex128)

    with pytest.raises(UsageError, match=r"The input 'x' is a sparse tensor \(sparse_coo\).* \.to_dense\(\)"):
        prepare(Workload(model=Wide(), inputs=(torch.eye(5).to_sparse(),)))
    with pytest.raises(UsageError, match=r"The output 'output' has the dtype complex128.* Use complex64"):
        prepare(Workload(model=Wide(), inputs=X[:1]))


def test_a_metric_may_return_an_array_of_no_axes() -> None:
    judged = Evaluation(data=(X, Y), metric=lambda o, t: np.asarray(accuracy(o, t)))
    assert refer(nn.Linear(8, 2), [Batch(X, Y, 120)], judged).scores.n == 120
