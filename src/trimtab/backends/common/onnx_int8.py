"""Int8 quantization with ONNX Runtime, and reports about the quantized operators."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from trimtab.backends.common.onnx_file import DATA, MODEL
from trimtab.backends.common.process_lock import quiet
from trimtab.core.technique import require
from trimtab.hardware import environment

Operators = Literal["auto", "all", "linear"]
Ranges = Literal["minmax", "percentile", "entropy"]
Form = Literal["qdq", "qoperator"]
SATURATING = "8, saturating"
"""Metadata of a file whose 8-bit weights were judged with sums that saturate, as on the CPU that it was made on."""
PER_TENSOR = "per_tensor.txt"
"""File beside a model whose weights have one scale each: why they have none per channel."""


def weight_bits(full: bool) -> str:
    """The bits of weights that the quantizers give here; ``full`` asks for 8 on every CPU."""
    return "8" if environment.has_vnni() else SATURATING if full else "7"


LINEAR = ("MatMul", "Gemm")
TRANSPOSED = "ConvTranspose"
HEAVY = (*LINEAR, "Conv", TRANSPOSED, "LSTM", "GRU", "RNN", "Attention", "MultiHeadAttention")
"""Operators that dominate run time; only these are reported if they stay float."""
_QUANTIZED = {
    "MatMulInteger": "MatMul",
    "MatMulIntegerToFloat": "MatMul",
    "DynamicQuantizeMatMul": "MatMul",
    "DynamicQuantizeLSTM": "LSTM",
    "ConvInteger": "Conv",
    "QAttention": "Attention",
    "QGemm": "Gemm",
}
_PASSES_THROUGH = ("Cast", "Reshape", "Transpose", "Identity", "Dropout", "Where", "Expand", "Squeeze", "Unsqueeze")


class Calibration:
    """Calibration rows in the form that ONNX Runtime's quantizer reads: one dict of arrays per call, then ``None``."""

    def __init__(self, rows: Sequence[Sequence[torch.Tensor]], names: Sequence[str], known: set[str]) -> None:
        self._rows: Iterator[dict[str, np.ndarray[Any, Any]]] = iter(
            [{n: t.numpy(force=True) for n, t in zip(names, row, strict=True) if n in known} for row in rows]
        )

    def get_next(self) -> dict[str, np.ndarray[Any, Any]] | None:
        """The next row, or ``None`` at the end."""
        return next(self._rows, None)


def prepare(source: pathlib.Path, target: pathlib.Path) -> None:
    """Prepare the model for a quantizer: infer shapes, fold batch norms and constants.

    *Symbolic* shape inference is skipped: it fails on graphs with data-dependent sizes (such as MiniLM), and the quantizers
    find the same operators without it.
    """
    external = {"save_as_external_data": True, "external_data_location": target.name + ".data"}
    options = external if (source.parent / DATA).is_file() else {}
    preprocess = require("onnxruntime.quantization.shape_inference").quant_pre_process
    with quiet(stream=False):
        preprocess(str(source), str(target), skip_symbolic_shape=True, **options)
    onnx = require("onnx")
    model = onnx.load(target)
    # The quantizer converts Gemm to MatMul with a transposed weight, and fails on the stored shape of the original. Without
    # stored shapes it infers them.
    del model.graph.value_info[:]
    transpose_shared(model.graph)
    copy_used_outputs(model.graph)
    onnx.save(model, target, save_as_external_data=bool(options), location=target.name + ".data")


def transpose_shared(graph: Any) -> None:
    """Transpose weights that several Gemm nodes share, once and into a new tensor.

    The dynamic quantizer transposes such a weight in place for each node. A square weight that is used twice would end up
    untransposed, and the products would be wrong.
    """
    helper = require("onnx.numpy_helper")
    weights = {tensor.name: tensor for tensor in graph.initializer}
    users = collections.Counter(name for node in graph.node for name in node.input)
    done: set[str] = set()
    for node in graph.node:
        flag = next((a for a in node.attribute if a.name == "transB" and a.i == 1), None)
        if node.op_type != "Gemm" or flag is None or node.input[1] not in weights or users[node.input[1]] < 2:
            continue
        name = f"{node.input[1]}.transposed"
        if name not in done:
            array = helper.to_array(weights[node.input[1]])
            graph.initializer.append(helper.from_array(np.ascontiguousarray(array.T), name))
            done.add(name)
        node.input[1] = name
        flag.i = 0
    used = {name for node in graph.node for name in node.input}
    for index in [i for i, tensor in enumerate(graph.initializer) if f"{tensor.name}.transposed" in done][::-1]:
        if graph.initializer[index].name not in used:
            del graph.initializer[index]


def copy_used_outputs(graph: Any) -> None:
    """Insert an Identity before each graph output that nodes use as well.

    The static quantizer gives the input of a Relu the range of its output, even if that input is a graph output. Negative
    values of the output would be clipped.
    """
    helper = require("onnx.helper")
    outputs = {output.name for output in graph.output} & {name for node in graph.node for name in node.input}
    outputs -= {tensor.name for tensor in (*graph.input, *graph.initializer)}
    for node in graph.node:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                if name in outputs:
                    names[i] = f"{name}.inner"
    graph.node.extend(helper.make_node("Identity", [f"{name}.inner"], [name], f"{name}.copy") for name in sorted(outputs))


def quantize_dynamic(
    prepared: pathlib.Path,
    target: pathlib.Path,
    operators: Operators,
    excluded: Sequence[str] = (),
    *,
    per_channel: bool = True,
) -> None:
    """Quantize matrix products and LSTMs except the nodes ``excluded``: weights to int8 now, activations at run time. Weights
    get one scale per channel, or per tensor.

    ``auto`` skips convolutions, because ONNX Runtime has no kernel for them with signed weights.
    Source: https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html
    """
    quantization = require("onnxruntime.quantization")
    kinds = {"auto": [*LINEAR, "LSTM", "Gather", "Attention"], "linear": list(LINEAR), "all": None}[operators]
    with quiet(stream=False):
        quantization.quantize_dynamic(
            str(prepared),
            str(target),
            op_types_to_quantize=kinds,
            nodes_to_exclude=[*excluded, *(f"{name}_MatMul" for name in excluded)],  # so it renames Gemm nodes first
            per_channel=per_channel,
            reduce_range=not environment.has_vnni(),
            weight_type=quantization.QuantType.QInt8,
            use_external_data_format=prepared.with_name(prepared.name + ".data").is_file(),
        )


def quantize_static(
    prepared: pathlib.Path,
    target: pathlib.Path,
    operators: Operators,
    calibration: Calibration,
    *,
    ranges: Ranges = "minmax",
    form: Form = "qdq",
    full: bool = False,
    excluded: Sequence[str] = (),
    per_channel: bool = True,
) -> None:
    """Quantize weights and activations to int8 with ranges from calibration data, and one scale per channel of a weight, or per
    weight. The nodes ``excluded`` and those of :func:`grouped_transposed` stay float.

    Without VNNI, weights have 7 bits unless ``full``. Activations are unsigned: with int8 activations a CNN ran at 0.3 to 0.5
    times the speed of float32 without VNNI. On one such CPU (AMD Zen 3, digits) the form QOperator was as fast as QDQ, which
    the runtime converts to it, and 8-bit weights had 7 times the error of 7-bit weights, because sums saturate.

    Source: https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html
    """
    quantization = require("onnxruntime.quantization")
    nodes = linear_nodes(prepared) if operators == "linear" or (operators == "auto" and is_transformer(prepared)) else None
    with quiet(stream=False):
        quantization.quantize_static(
            str(prepared),
            str(target),
            calibration,
            quant_format={"qdq": quantization.QuantFormat.QDQ, "qoperator": quantization.QuantFormat.QOperator}[form],
            op_types_to_quantize=list(LINEAR) if nodes is not None else None,
            nodes_to_quantize=None if nodes is None else [name for name in nodes if name not in excluded],
            nodes_to_exclude=[*excluded, *grouped_transposed(prepared)],
            calibrate_method={
                "minmax": quantization.CalibrationMethod.MinMax,
                "percentile": quantization.CalibrationMethod.Percentile,
                "entropy": quantization.CalibrationMethod.Entropy,
            }[ranges],
            per_channel=per_channel,
            reduce_range=weight_bits(full) == "7",
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            use_external_data_format=prepared.with_name(prepared.name + ".data").is_file(),
        )
    keep_products_float(target)


def keep_products_float(path: pathlib.Path) -> None:
    """Remove the rounding of matrix products to int8 where only float operators, or the caller, read them.

    The quantizer rounds each product, but the runtime's int8 kernels give float sums as well. On a transformer encoder int8
    ran 1.10 times as fast without the rounding, and its error was 11% smaller.
    """
    onnx = require("onnx")
    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    users = collections.defaultdict(list)
    for node in graph.node:
        for name in node.input:
            users[name].append(node)
    outputs = {output.name for output in graph.output}
    for product in [node for node in graph.node if node.op_type in LINEAR and node.output[0] not in outputs]:
        rounding = users[product.output[0]]
        restoring = users[rounding[0].output[0]] if len(rounding) == 1 and rounding[0].op_type == "QuantizeLinear" else []
        if len(restoring) != 1 or restoring[0].op_type != "DequantizeLinear":
            continue
        restored = restoring[0].output[0]
        if not all(_reads_float(node, users) for node in users[restored]):
            continue
        if restored in outputs:
            product.output[0] = restored
        for node in users[restored]:
            node.input[:] = [product.output[0] if name == restored else name for name in node.input]
        graph.node.remove(rounding[0])
        graph.node.remove(restoring[0])
    path.write_bytes(model.SerializeToString())


def _reads_float(node: Any, users: Mapping[str, Sequence[Any]]) -> bool:
    """Whether the runtime computes ``node`` in float: it is no product or convolution, and no other operator with an int8 form
    whose output is quantized."""
    registry = require("onnxruntime.quantization.registry")
    quantized = any(user.op_type == "QuantizeLinear" for name in node.output for user in users[name])
    known = node.op_type in registry.QDQRegistry or node.op_type in registry.QLinearOpsRegistry
    return node.op_type not in HEAVY and not (quantized and known)


def store_rounded_weights(path: pathlib.Path) -> None:
    """Replace each weight that the graph rounds to int8 by the int8 tensor: a quarter of the bytes, and equal outputs."""
    onnx = require("onnx")
    helper = require("onnx.numpy_helper")
    model = onnx.load(path)
    held = {tensor.name: tensor for tensor in model.graph.initializer}
    external = (path.parent / DATA).is_file()
    for node in [n for n in model.graph.node if n.op_type == "QuantizeLinear" and set(n.input) <= set(held)]:
        weight, scale, zero = (helper.to_array(held[name]) for name in node.input)
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
        shape = [-1 if i == axis % weight.ndim else 1 for i in range(weight.ndim)] if scale.size > 1 else [1] * weight.ndim
        steps = np.rint(weight / scale.reshape(shape)) + zero.reshape(shape).astype(np.float32)
        limits = np.iinfo(zero.dtype)
        rounded = steps.clip(limits.min, limits.max).astype(zero.dtype)
        model.graph.initializer.append(helper.from_array(rounded, node.output[0]))
        model.graph.node.remove(node)
    used = {name for node in model.graph.node for name in node.input}
    for index in [i for i, tensor in enumerate(model.graph.initializer) if tensor.name not in used][::-1]:
        del model.graph.initializer[index]
    (path.parent / DATA).unlink(missing_ok=True)
    onnx.save(model, path, save_as_external_data=external, location=DATA)


def grouped_transposed(path: pathlib.Path) -> list[str]:
    """Names of the transposed convolutions in groups, which stay float: the runtime has no int8 kernel for them, and its
    quantizer no scale per channel, because the channels of their outputs lie in two axes of the weight
    (microsoft/onnxruntime#19694). With one scale for all channels, those with small weights are lost.
    """
    graph = require("onnx").load(path, load_external_data=False).graph
    grouped = (node for node in graph.node if any(a.name == "group" and a.i > 1 for a in node.attribute))
    return [node.name for node in grouped if node.op_type == TRANSPOSED]


def is_transformer(path: pathlib.Path) -> bool:
    """Whether the graph is a transformer: it has an attention operator, a softmax that feeds a matrix product, or layer norms
    and no convolution.

    Quantizing *every* operator of such a graph ruins it, because additive masks of about -3e38 become part of a range.
    """
    graph = require("onnx").load(path, load_external_data=False).graph
    kinds = {node.op_type for node in graph.node}
    if kinds & {"Attention", "MultiHeadAttention", "GroupQueryAttention"}:
        return True
    if kinds & {"LayerNormalization", "SkipLayerNormalization"} and not kinds & {"Conv"}:
        return True
    follows: set[str] = set()
    for node in graph.node:  # ONNX nodes are in topological order
        if node.op_type == "MatMul" and follows & set(node.input):
            return True
        if node.op_type == "Softmax" or (node.op_type in _PASSES_THROUGH and follows & set(node.input)):
            follows.update(node.output)
    return False


def linear_nodes(path: pathlib.Path) -> list[str]:
    """Names of the matrix products with a constant weight."""
    graph = require("onnx").load(path, load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    return [n.name for n in graph.node if n.op_type in LINEAR and len(constants & set(n.input[:2])) == 1]


def coverage(path: pathlib.Path) -> list[str]:
    """A sentence about which of the dominant operators are int8, and which are computed in float."""
    graph = require("onnx").load(path, load_external_data=False).graph
    made_by = {name: node.op_type for node in graph.node for name in node.output}
    integer: collections.Counter[str] = collections.Counter()
    floating: collections.Counter[str] = collections.Counter()
    for node in graph.node:
        if node.op_type in _QUANTIZED or node.op_type.startswith("QLinear"):
            integer[_QUANTIZED.get(node.op_type, node.op_type.removeprefix("QLinear"))] += 1
        elif node.op_type in HEAVY:
            sources = [made_by.get(name) for name in node.input[:2]]
            computed = sources == ["DequantizeLinear"] * 2 and node.op_type != TRANSPOSED  # the runtime has no int8 kernel
            (integer if computed else floating)[node.op_type] += 1
    if not integer:
        return [f"No operator that decides the speed became int8; float stayed {_counted(floating)}."]
    return [f"int8: {_counted(integer)}; float: {_counted(floating)}."]


def _counted(counter: collections.Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counter.most_common()) or "none"


def remove_prepared(folder: pathlib.Path, *, whole: bool = False) -> None:
    """Delete intermediate files of the quantizers from ``folder``, and the model too if ``whole``."""
    for path in folder.iterdir():
        if whole or path.name not in (MODEL, DATA):
            path.unlink()


def per_tensor_note(folder: pathlib.Path) -> list[str]:
    """A sentence about weights of the model in ``folder`` that have no scale per channel."""
    if not (path := folder / PER_TENSOR).exists():
        return []
    reason = path.read_text(encoding="utf-8")
    return [f"Each quantized weight has one scale, because the quantizer fails with one per channel: {reason}."]
