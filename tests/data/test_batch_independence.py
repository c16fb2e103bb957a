"""What the first axis of data counts: examples, which are taken apart and joined, or something that an example is made of."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn
from torch.utils.data import TensorDataset

import trimtab
from _labelled import X, Y, accuracy, all_batches, classifier
from trimtab.artifact.test_vectors import Golden
from trimtab.core.candidate import Candidate
from trimtab.core.signature import parameter_names
from trimtab.core.workload import Evaluation, Workload
from trimtab.data.batch_independence import Judge
from trimtab.data.batches import Batch
from trimtab.errors import UsageError
from trimtab.evaluation.evaluate import rows
from trimtab.evaluation.prepared_workload import prepare
from trimtab.evaluation.reference import reference_of
from trimtab.passes.batch import Batch as BatchPass


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
    found = [batch.call[0][0] for batch in all_batches(subject)]
    assert len(found) == 12
    assert all(any(torch.equal(one, other) for other in items) for one in found)
    assert any("never taken apart, because the model gives no row an answer of its own" in note for note in subject.notes)
    assert subject.candidate.signature.batch is None


class Graph(nn.Linear):
    """Nodes of one graph, and the pairs that are joined."""

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        return found.index_add(0, edges[1], found[edges[0]])


class Bag(nn.EmbeddingBag):
    def forward(self, tokens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, offsets)


class Stateful(nn.LSTM):
    def forward(self, x: torch.Tensor, state: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(x * scale, (state, state))[0]


def joined(nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(nodes, 4), torch.stack([torch.arange(nodes), torch.arange(nodes).roll(1)])[:, : nodes - 1]


@pytest.mark.parametrize("known", ["found", "stated"])
@pytest.mark.parametrize(
    ("model", "calls", "counted"),
    [
        (Graph(4, 3), [joined(nodes) for nodes in (10, 7, 12)], False),
        (Bag(50, 4), [(torch.arange(n) * 7 % 50, torch.tensor([0, 2, 5])) for n in (9, 11, 8)], False),
        (Stateful(4, 6), [(torch.randn(n, 2, 4), torch.zeros(1, 2, 6), torch.ones(1)) for n in (5, 3, 4)], False),
        (Stateful(4, 6, batch_first=True), [(torch.randn(n, 5, 4), torch.zeros(1, n, 6), torch.ones(1)) for n in (3, 2)], True),
        (Stateful(4, 6, batch_first=True), [(torch.randn(n, 5, 4), torch.zeros(1, n, 6), torch.ones(1)) for n in (1, 2)], True),
    ],
    ids=["graph", "bag", "time first", "batch first", "one row"],
)
def test_the_first_axis_is_the_batch_only_where_the_model_takes_rows_of_it(
    model: nn.Module, calls: list[Any], counted: bool, known: str
) -> None:
    found = prepare(Workload(model=model.eval(), inputs=calls[0], examples=calls[1:])).candidate.signature
    dynamic = {spec.name: {axis: size for axis, size in enumerate(spec.shape) if size == "batch"} for spec in found.inputs}
    more: dict[str, Any] = {"examples": calls[1:]} if known == "found" else {"dynamic": dynamic}
    if known == "stated" and isinstance(model, Graph):
        dynamic["edges"] = {1: "pairs"}
    subject = prepare(Workload(model=model.eval(), inputs=calls[0], **more))
    assert (subject.candidate.signature.batch is not None) == counted, subject.notes
    assert any("is not taken for the batch: " in note for note in subject.notes) != counted
    blocked = BatchPass(size=8).why_not(subject.candidate)
    assert (blocked is None) == counted


def test_a_tagger_is_scored_on_whole_sequences() -> None:
    torch.manual_seed(0)
    model, data = Tagger().eval(), []
    for _ in range(12):
        ids = torch.randint(1000, (30, 8))
        data.append((ids, model(ids).argmax(-1)))
    for dynamic in (None, {"ids": {0: "time", 1: "batch"}}):
        judged = Evaluation(data=iter(data), metric=accuracy)
        subject = prepare(Workload(model=model, inputs=(data[0][0],), dynamic=dynamic, evaluation=judged))
        assert reference_of(model, subject.splits.test, judged).scores.value == 1.0, dynamic


@pytest.mark.parametrize("form", ["pair", "dataset", "calibration", "stated"])
def test_rows_that_trimtab_itself_puts_together_must_be_examples(form: str) -> None:
    ids = torch.randint(1000, (300, 8))
    data = TensorDataset(ids, ids % 5) if form == "dataset" else (ids, ids % 5)
    more = {"calibration": ids} if form == "calibration" else {"evaluation": Evaluation(data=data, metric=accuracy)}
    dynamic = {"ids": {0: "time", 1: "batch"}} if form == "stated" else None
    with pytest.raises(UsageError, match=r"are no examples to this model: .* Axis 0 of its inputs counts something else"):
        prepare(Workload(model=Tagger().eval(), inputs=(ids[:30],), dynamic=dynamic, **more))


def test_where_another_axis_is_called_the_batch_the_first_is_no_fixed_one() -> None:
    torch.manual_seed(0)
    model, data = Tagger().eval(), []
    for _ in range(12):
        ids = torch.randint(1000, (30, 8))
        data.append((ids, model(ids).argmax(-1)))
    judged = Evaluation(data=data, score=lambda output, target: (output.argmax(-1) == target).all(0))
    subject = prepare(Workload(model=model, inputs=(data[0][0],), dynamic={"ids": {1: "batch"}}, evaluation=judged))
    assert all(batch.single and not batch.rows for batch in subject.splits.selection)
    found = reference_of(model, subject.splits.selection, judged).scores
    assert (found.value, found.n) == (1.0, 8 * len(subject.splits.selection))


def test_scores_of_what_follows_each_other_count_as_one() -> None:
    torch.manual_seed(0)
    model, data = Tagger().eval(), []
    for _ in range(12):
        ids = torch.randint(1000, (200, 1))
        target = model(ids).argmax(-1)
        target[:50] = -1
        data.append((ids, target))
    for dynamic in (None, {"ids": {0: "time", 1: "batch"}}):
        judged = Evaluation(data=data, score=lambda output, target: (output.argmax(-1) == target).flatten())
        subject = prepare(Workload(model=model, inputs=(data[0][0],), dynamic=dynamic, evaluation=judged))
        found = reference_of(model, subject.splits.test, judged).scores
        assert found.n == len(subject.splits.test), "frames of a sequence are no examples"
        assert found.each == (0.75,) * found.n


class Mean(nn.Linear):
    """Nodes of one graph for a batch of features."""

    def forward(self, adjacency: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ij,bjf->bif", adjacency, super().forward(x))


@pytest.mark.parametrize(
    ("model", "inputs", "dynamic", "examples"),
    [
        (Sound(1, 4, 9, 4), (torch.randn(1600),), None, 1),
        (Tagger(), (torch.arange(30)[:, None],), None, 1),
        (Tagger(), (torch.arange(60).reshape(30, 2),), {"ids": {0: "time", 1: "batch"}}, 2),
        (Mean(4, 3), (torch.rand(5, 5), torch.randn(2, 5, 4)), {"x": {0: "batch"}}, 2),
        (nn.Linear(8, 2), (X[:6],), None, 6),
        (nn.Linear(8, 2), (X[:6],), {"input": {0: "n"}}, 6),
    ],
)
def test_examples_per_call_are_those_of_the_batch(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], dynamic: Any, examples: int
) -> None:
    candidate = prepare(Workload(model=model.eval(), inputs=inputs, dynamic=dynamic)).candidate
    assert rows(candidate.leaves, candidate.signature) == examples


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


class Buffered(nn.Linear):
    """Answers in memory that it keeps."""

    def __init__(self) -> None:
        super().__init__(8, 3)
        self.register_buffer("out", torch.zeros(64, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out[: len(x)].copy_(super().forward(x))


def test_answers_in_memory_that_the_model_keeps_are_each_calls_own() -> None:
    model = Buffered().eval().requires_grad_(False)
    assert Judge(model, 1e-3)(Batch(X, None, 60)).kind == "own"
    found = reference_of(model, [Batch(X[:60], None, 60), Batch(X[60:], None, 60)], None)
    assert all(
        torch.allclose(leaves[0], X[i : i + 60] @ model.weight.T + model.bias, atol=1e-5)
        for leaves, i in zip(found.outputs, (0, 60), strict=True)
    )
    candidate = Candidate.of(model, (X[:4],))
    first, second = Golden.of(candidate, candidate.signature, [[X[4:8]]]).cases
    assert not torch.equal(first.outputs[0], second.outputs[0])


def test_answers_in_another_axis_or_in_whole_numbers_are_followed() -> None:
    class Turned(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x).T, super().forward(x).flatten(), len(x), self.bias

    class Found(Tagger):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids).argmax(-1)

    assert Judge(Turned(8, 2), 1e-3)(Batch(X, None, 120)).kind == "own"
    assert Judge(Found().eval(), 1e-3)(Batch(torch.randint(1000, (30, 1)), None, 30)).kind == "ordered"


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
