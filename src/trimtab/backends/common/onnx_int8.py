"""Eight-bit integers with ONNX Runtime's quantizers, and what of a graph they reached."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch

from trimtab.backends.common.foreign import quiet
from trimtab.backends.common.onnx_export import DATA, MODEL
from trimtab.core.technique import require
from trimtab.hardware import environment

Operators = Literal["auto", "all", "linear"]

EXACTLY = "session.x64quantprecision"
"""The session's option not to let sums of products saturate on an x86 CPU without VNNI, for weights of eight bits. It is slower
there, and on other CPUs the session of a model with branches cannot be made."""

LINEAR = ("MatMul", "Gemm")
HEAVY = (*LINEAR, "Conv", "ConvTranspose", "LSTM", "GRU", "RNN", "Attention", "MultiHeadAttention")
"""Operators that decide a model's speed; others staying float is no news."""
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
    """Calibration rows as ONNX Runtime's quantizer asks for them: one dict of arrays at a time, then ``None``."""

    def __init__(self, rows: Sequence[Sequence[torch.Tensor]], names: Sequence[str], known: set[str]) -> None:
        self._rows: Iterator[dict[str, np.ndarray[Any, Any]]] = iter(
            [{n: t.numpy(force=True) for n, t in zip(names, row, strict=True) if n in known} for row in rows]
        )

    def get_next(self) -> dict[str, np.ndarray[Any, Any]] | None:
        """The next row, or ``None`` at the end."""
        return next(self._rows, None)


def prepare(source: pathlib.Path, target: pathlib.Path) -> None:
    """Write the model ready for a quantizer: shapes inferred, batch norms folded, constants computed.

    *Symbolic* shape inference is left out: it raises on graphs with data-dependent sizes (MiniLM's is one), and the quantizers
    reach the same operators without it.
    """
    external = {"save_as_external_data": True, "external_data_location": target.name + ".data"}
    options = external if (source.parent / DATA).is_file() else {}
    preprocess = require("onnxruntime.quantization.shape_inference").quant_pre_process
    with quiet():
        preprocess(str(source), str(target), skip_symbolic_shape=True, **options)
    onnx = require("onnx")
    model = onnx.load(target)
    # The quantizer turns Gemm into MatMul with a transposed weight, then trips over the shape that was noted for the old one;
    # it infers shapes itself, so the notes are dropped.
    del model.graph.value_info[:]
    transpose_shared(model.graph)
    set_outputs_apart(model.graph)
    onnx.save(model, target, save_as_external_data=bool(options), location=target.name + ".data")


def transpose_shared(graph: Any) -> None:
    """Transpose the weights that several Gemm nodes share, once and into a tensor of their own.

    The dynamic quantizer would transpose such a weight in place for each node that uses it: a square one used twice comes out
    as it was, and every product with it is wrong.
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


def set_outputs_apart(graph: Any) -> None:
    """Give every output that nodes use too a copy of its own.

    The static quantizer takes the range of what a Relu gives for what it is given, without asking whether that is an output of
    the graph, whose negative values are then clipped away.
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


def quantize_dynamic(prepared: pathlib.Path, target: pathlib.Path, operators: Operators) -> None:
    """Weights to int8 now, activations when they are computed: matrix products and LSTMs.

    ``auto`` leaves convolutions out, because ONNX Runtime has no kernel for them with signed weights.
    Source: https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html
    """
    quantization = require("onnxruntime.quantization")
    kinds = {"auto": [*LINEAR, "LSTM", "Gather", "Attention"], "linear": list(LINEAR), "all": None}[operators]
    with quiet():
        quantization.quantize_dynamic(
            str(prepared),
            str(target),
            op_types_to_quantize=kinds,
            per_channel=True,
            reduce_range=not environment.has_vnni(),
            weight_type=quantization.QuantType.QInt8,
            use_external_data_format=prepared.with_name(prepared.name + ".data").is_file(),
        )


def quantize_static(prepared: pathlib.Path, target: pathlib.Path, operators: Operators, calibration: Calibration) -> None:
    """Weights and activations to int8, ranges taken from calibration data, one scale per channel of a weight.

    Weights of :func:`per_tensor_weights` have one scale.

    Source: https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html
    """
    quantization = require("onnxruntime.quantization")
    nodes = linear_nodes(prepared) if operators == "linear" or (operators == "auto" and is_transformer(prepared)) else None
    scales = {name: [{"quant_type": quantization.QuantType.QInt8}] for name in per_tensor_weights(prepared)}
    with quiet():
        quantization.quantize_static(
            str(prepared),
            str(target),
            calibration,
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=list(LINEAR) if nodes is not None else None,
            nodes_to_quantize=nodes,
            per_channel=True,
            reduce_range=not environment.has_vnni(),
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            use_external_data_format=prepared.with_name(prepared.name + ".data").is_file(),
            extra_options={"TensorQuantOverrides": scales} if scales else {},
        )


def per_tensor_weights(path: pathlib.Path) -> list[str]:
    """Names of the weights that get one scale for the whole tensor: those of grouped transposed convolutions.

    The channels of their outputs lie in two axes of the weight, which ONNX Runtime's quantizer takes for one
    (microsoft/onnxruntime#19694).
    """
    graph = require("onnx").load(path, load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    grouped = [
        node
        for node in graph.node
        if node.op_type == "ConvTranspose" and any(a.name == "group" and a.i > 1 for a in node.attribute)
    ]
    return [node.input[1] for node in grouped if node.input[1] in constants]


def is_transformer(path: pathlib.Path) -> bool:
    """Whether the graph holds attention: a softmax whose result goes into a matrix product, or an operator that is attention;
    or is made of layer norms and no convolution.

    Quantizing *every* operator of such a graph ruins it: the additive mask of about -3e38 becomes part of a range.
    """
    graph = require("onnx").load(path, load_external_data=False).graph
    kinds = {node.op_type for node in graph.node}
    if kinds & {"Attention", "MultiHeadAttention", "GroupQueryAttention"}:
        return True
    if kinds & {"LayerNormalization", "SkipLayerNormalization"} and not kinds & {"Conv"}:
        return True
    follows: set[str] = set()
    for node in graph.node:  # in topological order, as ONNX demands
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
    """Which of the operators that decide the speed are int8 and which stayed float, in a sentence."""
    graph = require("onnx").load(path, load_external_data=False).graph
    made_by = {name: node.op_type for node in graph.node for name in node.output}
    integer: collections.Counter[str] = collections.Counter()
    floating: collections.Counter[str] = collections.Counter()
    for node in graph.node:
        if node.op_type in _QUANTIZED or node.op_type.startswith("QLinear"):
            integer[_QUANTIZED.get(node.op_type, node.op_type.removeprefix("QLinear"))] += 1
        elif node.op_type in HEAVY:
            sources = [made_by.get(name) for name in node.input[:2]]
            (integer if sources == ["DequantizeLinear"] * 2 else floating)[node.op_type] += 1
    if not integer:
        return [f"No operator that decides the speed became int8; float stayed {_counted(floating)}."]
    return [f"int8: {_counted(integer)}; float: {_counted(floating)}."]


def _counted(counter: collections.Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counter.most_common()) or "none"


def remove_prepared(folder: pathlib.Path) -> None:
    """Delete what the quantizers needed on the way, so that only the model is left in ``folder``."""
    for path in folder.iterdir():
        if path.name not in (MODEL, DATA):
            path.unlink()
