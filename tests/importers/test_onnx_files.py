"""ONNX files as workloads: operators against ONNX's own cases, whole models of both exporters, and what is refused."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.case.node import collect_testcases
from torch import nn

import trimtab
from trimtab.core.backend import BACKENDS
from trimtab.core.candidate import Candidate
from trimtab.core.workload import Evaluation
from trimtab.errors import IntegrityError, UsageError
from trimtab.evaluation.prepared_workload import prepare
from trimtab.evaluation.reference import reference_of
from trimtab.importers.load import load_workload
from trimtab.importers.onnx.graph import import_graph
from trimtab.importers.onnx.operators import OPS
from trimtab.importers.onnx.session import open_session, runtime_errors
from trimtab.testing.models import CASES

EMPTY = ("uint16", "uint32", "uint64", "empty_set", "same_values")
"""Cases of types that torch does not compute with, of tensors without elements, and where any of several answers is right."""
PADS = {"test_averagepool_2d_pads", "test_averagepool_2d_pads_count_include_pad"}
"""Averages over windows that lie mostly in the padding: torch refuses them, with an error, when they are run."""


def answers(model: onnx.ModelProto, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        found = import_graph(model)(*inputs)
    return tuple(found.values()) if isinstance(found, dict) else (found,)


def with_constants(model: onnx.ModelProto, arrays: list[np.ndarray[Any, Any]]) -> onnx.ModelProto:
    """All inputs but the first as weights, as they mostly are."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for item, array in list(zip(model.graph.input, arrays, strict=False))[1:]:
        copy.graph.initializer.append(numpy_helper.from_array(array, item.name))
    return copy


@pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
def test_operators_say_what_onnx_says_or_refuse_in_a_sentence() -> None:
    right, wrong, refused = set(), [], 0
    for case in collect_testcases(None):
        kinds = {node.op_type for node in case.model.graph.node} if case.model is not None else {"none"}
        if not kinds <= {*OPS, "LSTM", "GRU", "Constant"} or any(word in case.name for word in EMPTY) or case.name in PADS:
            continue
        inputs, outputs = case.data_sets[0]
        if any(not isinstance(a, (np.ndarray, np.generic)) or a.dtype.kind not in "fiub" for a in (*inputs, *outputs)):
            continue
        arrays = [np.asarray(array) for array in inputs]
        for model, used in ((case.model, arrays), (with_constants(case.model, arrays), arrays[:1])):
            try:
                found = answers(model, [torch.from_numpy(np.ascontiguousarray(a).reshape(a.shape)) for a in used])
            except UsageError as error:
                refused += "The ONNX file cannot be brought back to PyTorch: " in str(error)
                continue
            fits = all(
                tuple(ours.shape) == theirs.shape and np.allclose(ours.numpy(), theirs, rtol=1e-3, atol=1e-4, equal_nan=True)
                for ours, theirs in zip(found, map(np.asarray, outputs), strict=True)
            )
            right |= kinds if fits else set()
            wrong += [] if fits else [case.name]
    assert wrong == []
    assert len(right) > 100
    assert refused < 350


def exported(candidate: Candidate, path: pathlib.Path, *, dynamo: bool) -> pathlib.Path:
    flat, names = candidate.flat(), [spec.name.replace(".", "_") for spec in candidate.signature.inputs]
    axes = {
        name: {axis: size for axis, size in enumerate(spec.shape) if isinstance(size, str)}
        for name, spec in zip(names, candidate.signature.inputs, strict=True)
    }
    options: dict[str, Any] = {"dynamo": True, "verbose": False} if dynamo else {"dynamo": False, "dynamic_axes": axes}
    if dynamo:
        dims = {dim.name: torch.export.Dim(dim.name, min=dim.min, max=dim.max) for dim in candidate.signature.dims}
        options["dynamic_shapes"] = (tuple({a: dims[s] for a, s in found.items()} or None for found in axes.values()),)
    inputs = tuple(candidate.dynamic_leaves())
    torch.onnx.export(flat, inputs, path, input_names=names, external_data=False, **options)
    return path


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.filterwarnings("ignore")
def test_models_come_back_as_they_were(name: str, dynamo: bool, tmp_path: pathlib.Path) -> None:
    candidate = CASES[name]()
    path = exported(candidate, tmp_path / f"{name}.onnx", dynamo=dynamo)
    workload = trimtab.load_workload(path)
    assert workload.notes[0] == (
        f"{name}.onnx was brought back to PyTorch; its answers are those of ONNX Runtime on the example inputs."
    )
    subject = prepare(workload)
    module = subject.candidate.model
    leaves = dict(
        zip([spec.name.replace(".", "_") for spec in candidate.signature.inputs], candidate.dynamic_leaves(), strict=True)
    )
    taken = [leaves[spec.name] for spec in subject.candidate.signature.inputs]  # one exporter leaves out what is not used
    with torch.no_grad():
        ours = torch.utils._pytree.tree_leaves(module(*taken))
        for mine, wanted in zip(ours, candidate.flat()(*leaves.values()), strict=True):
            assert torch.allclose(mine.double(), wanted.double(), atol=1e-4)
    torch.export.export(module, tuple(subject.candidate.leaves))  # and compilers can take it


def test_layers_come_back_as_modules_that_techniques_look_for(tmp_path: pathlib.Path) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)
    ).eval()
    path = tmp_path / "net.onnx"
    options: dict[str, Any] = {"dynamo": True, "external_data": False, "verbose": False, "optimize": False}
    torch.onnx.export(model, (torch.randn(1, 3, 6, 6),), path, input_names=["images"], **options)
    kinds = [type(module) for module in trimtab.load_workload(path).build_model().modules()]
    assert {nn.Conv2d, nn.BatchNorm2d, nn.Linear} <= set(kinds)


def graph(nodes: list[Any], inputs: dict[str, list[Any]] | None = None, **more: Any) -> onnx.ModelProto:
    shapes = inputs or {"x": ["N", 4]}
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    made = helper.make_graph(nodes, "g", given, [y], **more)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_what_cannot_come_back_is_said(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "odd.onnx"
    for nodes, words in (
        ([helper.make_node("Unique", ["x"], ["y"])], "it holds the operator Unique, not known here."),
        ([helper.make_node("Magic", ["x"], ["y"], domain="my")], "it holds the operator my.Magic, not known here."),
        ([helper.make_node("Relu", ["none"], ["y"])], "the value 'none' is used but never made."),
    ):
        onnx.save(graph(nodes), path)
        with pytest.raises(UsageError) as raised:
            trimtab.load_workload(path).build_model()
        assert str(raised.value).startswith(f"The ONNX file cannot be brought back to PyTorch: {words}")
    path.write_bytes(b"no model at all")
    with pytest.raises(IntegrityError, match="is no ONNX model that can be read"):
        trimtab.load_workload(path)


def test_weights_outside_the_folder_are_not_read(tmp_path: pathlib.Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(64))
    (tmp_path / "in").mkdir()
    weight = numpy_helper.from_array(np.zeros((4, 4), np.float32), "w")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "../secret"), ("offset", "0"), ("length", "64")):
        entry = weight.external_data.add()
        entry.key, entry.value = key, value
    path = tmp_path / "in" / "m.onnx"
    path.write_bytes(graph([helper.make_node("MatMul", ["x", "w"], ["y"])], initializer=[weight]).SerializeToString())
    with pytest.raises(IntegrityError):
        trimtab.load_workload(path)


def test_a_size_that_only_looks_open_is_fixed(tmp_path: pathlib.Path) -> None:
    shape = numpy_helper.from_array(np.array([1, 4], np.int64), "s")
    path = tmp_path / "fixed.onnx"
    onnx.save(graph([helper.make_node("Reshape", ["x", "s"], ["y"])], initializer=[shape]), path)
    workload = trimtab.load_workload(path)
    assert workload.dynamic is None
    assert workload.notes[1] == "The file leaves N open, but only the example's size works; it is fixed."


def test_functions_of_a_file_are_inlined(tmp_path: pathlib.Path) -> None:
    function = onnx.helper.make_function(
        "mine", "Twice", ["x"], ["y"], [onnx.helper.make_node("Add", ["x", "x"], ["y"])], [onnx.helper.make_opsetid("", 18)]
    )
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Twice", ["x"], ["y"], domain="mine")],
        "g",
        [value("x", onnx.TensorProto.FLOAT, [2, 3])],
        [value("y", onnx.TensorProto.FLOAT, [2, 3])],
    )
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("mine", 1)]
    onnx.save(onnx.helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=10), tmp_path / "f.onnx")
    workload = load_workload(tmp_path / "f.onnx")
    x = torch.randn(2, 3)
    assert torch.equal(workload.build_model()(x), x + x)


def test_sizes_that_the_runtime_does_not_take_are_asked_for(tmp_path: pathlib.Path) -> None:
    items = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "n"])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])]
    weight = numpy_helper.from_array(np.ones((10, 3), np.float32), "w")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", items, outputs, [weight])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    with pytest.raises(
        UsageError, match=r"ONNX Runtime cannot run m.onnx on inputs of these sizes: x \[1, 16\]. It says: .*--shape x="
    ):
        load_workload(path)
    assert load_workload(path, shapes={"x": "1x10"}).inputs[0].shape == (1, 10)


def test_the_proof_looks_beside_infinities(tmp_path: pathlib.Path) -> None:
    from trimtab.importers.onnx import load as intake

    path = tmp_path / "g.onnx"
    shift = numpy_helper.from_array(np.array([-np.inf, 1.0, 0, 0], np.float32), "c")
    onnx.save(graph([helper.make_node("Add", ["x", "c"], ["y"])], initializer=[shift]), path)
    session = intake._session(str(path))[0]

    class Moved(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tensor([-torch.inf, 500.0, 0, 0])

    rows = [torch.ones(1, 4)]
    assert intake._difference(intake.OnnxFile(str(path))(), session, rows) is None
    assert "off by 499" in str(intake._difference(Moved(), session, rows))


def test_older_and_rarer_forms_of_operators(tmp_path: pathlib.Path) -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    pads = numpy_helper.from_array(np.array([0, 1, 0, 0, 1, 0], np.int64), "p")
    model = graph([helper.make_node("Pad", ["x", "p"], ["y"], mode="reflect")], initializer=[pads])
    torch.testing.assert_close(answers(model, [x])[0][:, 0], x[:, 1])
    parts = graph(
        [
            helper.make_node("Split", ["x"], ["a", "b"], axis=1, num_outputs=2),
            helper.make_node("Split", ["x"], ["c", "d", "e", "f"], axis=1, num_outputs=4),
            helper.make_node("Concat", ["f", "a"], ["y"], axis=1),
        ]
    )
    rows = torch.arange(8.0).reshape(2, 4)
    torch.testing.assert_close(answers(parts, [rows])[0], torch.cat([rows[:, 3:], rows[:, :2]], 1))
    old = helper.make_model(
        helper.make_graph(
            [helper.make_node("Dropout", ["x"], ["y"], ratio=0.5)],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 4])],
        ),
        opset_imports=[helper.make_opsetid("", 11)],
        ir_version=6,
    )
    assert torch.equal(answers(old, [rows])[0], rows)


def opset(version: int, nodes: list[onnx.NodeProto], sizes: list[Any], **arrays: Any) -> onnx.ModelProto:
    """A graph of ``version`` from ``x`` of these ``sizes`` to ``y``, with ``arrays`` as weights."""
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    made = helper.make_graph(nodes, "g", [x], [y], weights)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", version)], ir_version=4)


def test_what_was_an_attribute_once_and_a_softmax_over_the_rest() -> None:
    nodes = [
        helper.make_node("Slice", ["x"], ["s"], starts=[0, 1], ends=[2, 100], axes=[1, 3]),
        helper.make_node("Softmax", ["s"], ["all"], axis=1),
        helper.make_node("LogSoftmax", ["all"], ["log"], axis=2),
        helper.make_node("Upsample", ["log", "by"], ["up"], mode="nearest"),
        helper.make_node("LRN", ["up"], ["n"], size=3, alpha=0.5, beta=0.6, bias=1.5),
        helper.make_node("AveragePool", ["n"], ["a"], kernel_shape=[3, 2], strides=[2, 2], auto_pad="SAME_UPPER"),
        helper.make_node("ConvTranspose", ["a", "w"], ["t"], strides=[2, 2], pads=[0, 1, 1, 0]),
        helper.make_node("TopK", ["t"], ["top", "at"], axis=3, k=2),
        helper.make_node("Pad", ["top"], ["y"], pads=[0, 0, 1, 0, 0, 0, 0, 2], value=0.25),
    ]
    weights = {"by": np.array([1, 1, 2, 2], np.float32), "w": np.random.default_rng(0).normal(size=(2, 3, 3, 3))}
    model = opset(9, nodes, ["N", 3, 5, 4], by=weights["by"], w=weights["w"].astype(np.float32))
    x = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    (theirs,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x.numpy()})
    torch.testing.assert_close(answers(model, [x])[0], torch.from_numpy(theirs))


@pytest.mark.parametrize("version", [10, 17])
def test_sizes_stay_open_behind_a_resize_by_scales(version: int, tmp_path: pathlib.Path) -> None:
    resize = helper.make_node("Resize", ["x", "by"] if version == 10 else ["x", "", "by"], ["r"], mode="nearest")
    pad = helper.make_node("Pad", ["r"], ["y"], pads=[0, 0, 1, 1, 0, 0, 0, 2], value=0.25)
    filled = helper.make_node("Pad", ["r", "p", "v"], ["y"])
    weights = {"by": np.array([1, 1, 2, 3], np.float32), "p": np.array([0, 0, 1, 1, 0, 0, 0, 2]), "v": np.float32(0.25)}
    model = opset(version, [resize, pad if version == 10 else filled], ["N", 2, "H", "W"], **weights)
    onnx.save(model, tmp_path / "r.onnx")
    candidate = prepare(load_workload(tmp_path / "r.onnx", shapes={"x": (1, 2, 8, 8)})).candidate
    x = torch.randn(2, 2, 5, 6, generator=torch.Generator().manual_seed(0))
    (theirs,) = onnxruntime.InferenceSession(tmp_path / "r.onnx").run(None, {"x": x.numpy()})
    for name in ("onnxruntime", "torchscript"):
        torch.testing.assert_close(BACKENDS[name]().compile(candidate)(x), torch.from_numpy(theirs))


def test_names_of_inputs_that_clash_or_are_taken(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "m.onnx"
    inputs = {"input.1": [1, 4], "input_1": [1, 4]}
    onnx.save(graph([helper.make_node("Add", ["input.1", "input_1"], ["y"])], inputs), path)
    assert len(trimtab.load_workload(path).inputs) == 2
    onnx.save(graph([helper.make_node("Sigmoid", ["self"], ["y"])], {"self": ["N", 4]}), path)
    assert list(trimtab.load_workload(path).dynamic) == ["input_self"]


def test_the_proof_lets_near_ties_pass(tmp_path: pathlib.Path) -> None:
    from trimtab.importers.onnx import load as intake

    class Classes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.argmax(-1)

    class Turned(Classes):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.count = count

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = super().forward(x)
            found[: self.count] += 1
            return found

    path, rows = tmp_path / "classes.onnx", [torch.randn(1000, 4)]
    torch.onnx.export(Classes(), tuple(rows), str(path), dynamo=False)
    session = intake._session(str(path))[0]
    assert intake._difference(Turned(1), session, rows) is None
    assert "1.00% of its values differ, where 0.50% may" in str(intake._difference(Turned(10), session, rows))


def calling(bodies: list[list[Any]], called: str) -> onnx.ModelProto:
    """A graph of one call, and functions ``f0``, ``f1`` and so on with these nodes."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("mine", 1)]
    functions = [helper.make_function("mine", f"f{i}", ["x"], ["y"], nodes, opsets) for i, nodes in enumerate(bodies)]
    model = graph([helper.make_node(called, ["x"], ["y"], domain="mine")])
    model.opset_import.append(opsets[1])
    model.functions.extend(functions)
    return model


def call(number: int, given: str, made: str) -> Any:
    return helper.make_node(f"f{number}", [given], [made], domain="mine")


def test_functions_that_never_end_are_not_inlined(tmp_path: pathlib.Path) -> None:
    path, relu = tmp_path / "f.onnx", [helper.make_node("Relu", ["x"], ["y"])]
    doubled = [relu, *([call(i, "x", "a"), call(i, "a", "y")] for i in range(40))]
    chained = [relu, *([call(i, "x", "y")] for i in range(5000))]
    large = numpy_helper.from_array(np.zeros(1 << 20, np.float32))
    heavy = [[helper.make_node("Constant", [], ["c"], value=large), *relu], *doubled[1:12]]
    for bodies, called in (
        (doubled, "f40"),
        (chained, "f5000"),
        (heavy, "f11"),
        ([[call(0, "x", "y")]], "f0"),
        ([[call(1, "x", "y")], [call(0, "x", "a"), call(0, "a", "y")]], "f1"),
    ):
        path.write_bytes(calling(bodies, called).SerializeToString())
        with pytest.raises(
            IntegrityError, match="holds functions that call each other too often or too deep: at most 2 GB and"
        ):
            trimtab.load_workload(path)
    path.write_bytes(calling(chained[:60], "f59").SerializeToString())
    assert torch.equal(
        trimtab.load_workload(path).build_model()(torch.tensor([[-1.0, 2, -3, 4]])), torch.tensor([[0.0, 2, 0, 4]])
    )


def test_numbers_of_a_graph_do_not_grow_without_end(tmp_path: pathlib.Path) -> None:
    path, node = tmp_path / "m.onnx", helper.make_node
    number = numpy_helper.from_array(np.array(2**62, np.int64), "n0")
    vector = numpy_helper.from_array(np.arange(8), "v0")
    for nodes, words in (
        ([node("Pow", ["n0", "n0"], ["p"])], "it takes a whole number to the power of 4611686018427387904"),
        ([node("Mul", [f"n{i}", f"n{i}"], [f"n{i + 1}"]) for i in range(60)], "whole numbers beyond 64 bits"),
        ([node("Concat", [f"v{i}", f"v{i}"], [f"v{i + 1}"], axis=0) for i in range(60)], "or with very many of them"),
    ):
        onnx.save(graph([*nodes, node("Relu", ["x"], ["y"])], initializer=[number, vector]), path)
        with pytest.raises(UsageError, match=words):
            trimtab.load_workload(path)


def test_graphs_that_make_no_sense_are_refused_with_a_sentence(tmp_path: pathlib.Path) -> None:
    path, relu = tmp_path / "m.onnx", helper.make_node("Relu", ["x"], ["y"])
    short = TensorProto(name="w", data_type=1, dims=[4], raw_data=bytes(8))
    weights = [numpy_helper.from_array(np.ones(4, np.float32), "f"), numpy_helper.from_array(np.array([3]), "three")]
    numbers = [numpy_helper.from_array(np.array(i), name) for i, name in enumerate(("zero", "one"))]
    for nodes, initializer, words in (
        ([helper.make_node("Add", ["x", "w"], ["y"])], [short], "ValueError: cannot reshape array"),
        ([helper.make_node("Constant", [], ["c"]), relu], [], "ValueError: not enough values"),
        ([helper.make_node("Reshape", ["f", "three"], ["c"]), relu], weights, "RuntimeError: shape"),
        ([helper.make_node("Div", ["one", "zero"], ["c"]), relu], numbers, "ZeroDivisionError"),
        ([helper.make_node("Relu", ["x"], []), relu], [], "IndexError"),
    ):
        path.write_bytes(graph(nodes, initializer=initializer).SerializeToString())
        with pytest.raises(IntegrityError, match=f"m.onnx holds no model that can be used: {words}.*Export the model again"):
            trimtab.load_workload(path)


def scaled_by_one() -> onnx.ModelProto:
    """A valid model on which ONNX Runtime's optimizer fails: Identity, then a product with 1 / 1 (onnxruntime#32413)."""
    nodes = [
        helper.make_node("Identity", ["x"], ["mid"]),
        helper.make_node("Div", ["one", "again"], ["scale"]),
        helper.make_node("Mul", ["mid", "scale"], ["scaled"]),
        helper.make_node("MatMul", ["scaled", "weight"], ["y"]),
    ]
    weight = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    arrays = {"weight": weight, "one": np.float32(1), "again": np.float32(1)}
    made = helper.make_graph(
        nodes,
        "scaled",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in arrays.items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_model_on_which_the_runtimes_optimizer_fails_is_opened_without_it(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "scaled.onnx"
    onnx.save(scaled_by_one(), path)
    with pytest.raises(runtime_errors(), match="Invalid model"):
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    session, reason = open_session(path, onnxruntime.SessionOptions())
    assert str(reason).startswith(
        "ONNX Runtime opens this model only with its graph optimizations off, because they fail on it"
    )
    x = np.ones((2, 8), np.float32)
    weight = numpy_helper.to_array(scaled_by_one().graph.initializer[0])
    np.testing.assert_allclose(session.run(None, {"x": x})[0], x @ weight, rtol=1e-5)
    notes = load_workload(str(path)).notes
    assert reason in notes


def test_a_model_that_opens_in_no_way_is_told_by_the_first_error(tmp_path: pathlib.Path) -> None:
    model = scaled_by_one()
    model.graph.node[3].op_type = "NoSuchOperator"
    onnx.save(model, tmp_path / "none.onnx")
    with pytest.raises(runtime_errors(), match="NoSuchOperator"):
        open_session(tmp_path / "none.onnx", onnxruntime.SessionOptions())


@pytest.mark.parametrize("raised", ["Fail", "InvalidArgument", "NoSuchFile", "EPFail", "ModelRequiresCompilation"])
def test_every_exception_of_the_runtime_is_known(raised: str) -> None:
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    assert issubclass(getattr(state, raised), runtime_errors())


def named_outputs(path: pathlib.Path, *names: str) -> pathlib.Path:
    weight = numpy_helper.from_array(np.ones((4, 3), dtype=np.float32), "w")
    items = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in names]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["scores"]), helper.make_node("Relu", ["scores"], ["boxes.0"])]
    graph = helper.make_graph(nodes, "g", items, outputs, [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_outputs_keep_their_names(tmp_path) -> None:
    """In the signature, in the file that ships, where an evaluation names one, and several in the model's output too."""
    one = prepare(load_workload(named_outputs(tmp_path / "one.onnx", "scores"))).candidate
    assert one.signature.output_names == ["scores"]
    assert isinstance(one.model(torch.ones(1, 4)), torch.Tensor)
    workload = load_workload(named_outputs(tmp_path / "named.onnx", "scores", "boxes.0"))
    several = prepare(workload).candidate
    assert [spec.name for spec in several.signature.outputs] == ["output.scores", "output.boxes.0"]
    for candidate, wanted in ((one, ["scores"]), (several, ["scores", "boxes_0"])):
        executable = BACKENDS["onnxruntime"]().compile(candidate)
        executable.save(tmp_path)
        executable.close()
        assert [item.name for item in onnx.load(tmp_path / "model.onnx").graph.output] == wanted
        executable = BACKENDS["openvino"]().compile(candidate)
        assert [port.any_name for port in executable._model.outputs] == wanted
        executable.close()
    rows = torch.randn(24, 4)
    data = [(row[None], torch.zeros(1)) for row in rows]
    judged = Evaluation(data=data, score=lambda output, target: output["scores"][:, 0] > target, outputs=("scores",))
    named = dataclasses.replace(workload, evaluation=judged)
    batches = prepare(named).splits.test
    assert reference_of(workload.build_model(), batches, judged).outputs[0][0].shape == (1, 3)
