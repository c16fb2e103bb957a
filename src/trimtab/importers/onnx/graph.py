"""Translate an ONNX graph into a PyTorch module, node by node."""

from __future__ import annotations

import inspect
import keyword
import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from trimtab.core.candidate import OUTPUT
from trimtab.core.technique import require
from trimtab.importers.onnx import (
    layers,
    legacy_operators,  # noqa: F401  importing it registers the operators
)
from trimtab.importers.onnx.operators import DTYPES, MULTI_OUTPUT, OPS, TENSORS_ONLY
from trimtab.importers.onnx.values import MAX_HOST_VALUES, Host, host, tensor, unsupported

STANDARD_DOMAINS = ("", "ai.onnx")
FORMER_ATTRIBUTES = {
    "Pad": ("pads", "value"),
    "Slice": ("starts", "ends", "axes"),
    "Split": ("split",),
    "Squeeze": ("axes",),
    "TopK": ("k",),
    "Unsqueeze": ("axes",),
    "Upsample": ("scales",),
}
"""Operator -> attributes of older opsets that are inputs now, in order."""
PYTHON_NUMBER_INPUTS = {"Pad", "Resize", "Upsample"}
"""Operators whose scales or fill values are passed as Python numbers, because exporters cannot read them from weights."""


def import_graph(model: Any) -> fx.GraphModule:
    """The module of an ``onnx.ModelProto``, with its weights. Its parameters are the graph's inputs, in order. It returns a
    tensor or, if the graph has several outputs, a dict of them by name.

    Raises:
        UsageError: the graph contains unknown operators (all are listed), attributes or types.
    """
    _refuse_unknown(model)
    return _Importer(model).module()


def identifiers(names: Sequence[str]) -> list[str]:
    """``names`` as distinct, valid parameter names."""
    found: list[str] = []
    for name in names:
        word = re.sub(r"\W", "_", name)
        word = word if word.isidentifier() and not keyword.iskeyword(word) and word != "self" else f"input_{word}"
        while word in found:
            word += "_"
        found.append(word)
    return found


def graph_inputs(model: Any) -> list[Any]:
    """The inputs of the graph that are not weights."""
    weights = {item.name for item in model.graph.initializer}
    return [item for item in model.graph.input if item.name not in weights]


def _refuse_unknown(model: Any) -> None:
    kinds = [(node.domain, node.op_type) for node in model.graph.node]
    found = {kind if domain in STANDARD_DOMAINS else f"{domain}.{kind}" for domain, kind in kinds}
    if unknown := sorted(found - set(OPS) - {"Constant", "LSTM", "GRU"}):
        raise unsupported(f"it holds the operator{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}, not known here")
    if model.graph.sparse_initializer:
        raise unsupported("it holds sparse weights")


class _Importer:
    def __init__(self, model: Any) -> None:
        onnx = require("onnx")
        self._helper, self._numpy = onnx.helper, onnx.numpy_helper
        self._model = model
        self._opset = next((item.version for item in model.opset_import if item.domain in STANDARD_DOMAINS), 1)
        self._root = nn.Module()
        self._graph = fx.Graph()
        self._constants: dict[str, Any] = {}
        self._nodes: dict[str, fx.Node] = {}
        self._uses: dict[str, list[Any]] = {}
        self._skipped: set[int] = set()
        self._ranks, self._floats = _infer_shapes(model)
        for node in model.graph.node:
            for name in node.input:
                self._uses.setdefault(name, []).append(node)

    def module(self) -> fx.GraphModule:
        """Translate the whole graph. Nodes with constant inputs are evaluated."""
        graph = self._model.graph
        self._constants = {item.name: self._constant(item) for item in graph.initializer}
        names = [item.name for item in graph_inputs(self._model)]
        for name, word in zip(names, identifiers(names), strict=True):
            self._nodes[name] = self._graph.placeholder(word)
        for node in graph.node:
            if id(node) not in self._skipped:
                self._translate(node)
        outputs = {item.name: self._graph.call_function(tensor, (self._argument(item.name),)) for item in graph.output}
        self._graph.output(outputs if len(outputs) > 1 else next(iter(outputs.values())))
        module = fx.GraphModule(self._root, self._graph, "OnnxGraph").eval()
        if len(outputs) == 1:
            module.meta[OUTPUT] = next(iter(outputs))
        module.delete_all_unused_submodules()
        return module

    def _constant(self, item: Any) -> Any:
        if item.data_type not in DTYPES:
            raise unsupported(f"the constant {item.name!r} has the element type {item.data_type}, not known here")
        array = self._numpy.to_array(item)
        if item.data_type == 16:
            return torch.from_numpy(array.astype("float32")).to(torch.bfloat16)
        return _as_host(torch.from_numpy(array.copy()))

    def _translate(self, node: Any) -> None:
        attributes = {item.name: self._attribute(item) for item in node.attribute}
        if node.op_type == "Constant":
            (value,) = attributes.values()
            self._constants[node.output[0]] = value if isinstance(value, (torch.Tensor, Host)) else _plain(value)
            return
        if self._layer(node, attributes):
            return
        kind = "Upsample" if node.op_type == "Resize" and self._opset < 11 else node.op_type
        function = OPS.get(kind)
        if function is None:
            raise unsupported(f"the weights of a {node.op_type} in it are computed")
        names = list(node.input)
        while names and not names[-1]:
            names.pop()
        attributes = self._newest_attributes(kind, attributes, names, len(node.output))
        _check_attributes(node.op_type, function, attributes)
        tensors = TENSORS_ONLY.get(node.op_type, 0)
        if all(name in self._constants or not name for name in names) and names:
            given = [self._constants.get(name) for name in names]
            self._bind_constants(node, function(*map(tensor, given[:tensors]), *given[tensors:], **attributes))
            return
        arguments = [self._argument(names[0])] if names else []
        arguments += [self._as_numbers(name) if kind in PYTHON_NUMBER_INPUTS else self._argument(name) for name in names[1:]]
        for place, name in enumerate(names[:tensors]):
            arguments[place] = self._as_tensor(name, arguments[place])
        self._bind_outputs(node, self._graph.call_function(function, tuple(arguments), attributes))

    def _bind_constants(self, node: Any, values: Any) -> None:
        several = values if node.op_type in MULTI_OUTPUT else (values,)
        for name, value in zip(node.output, several, strict=False):
            self._constants[name] = _as_host(value) if isinstance(value, torch.Tensor) else value

    def _bind_outputs(self, node: Any, made: fx.Node) -> None:
        if node.op_type in MULTI_OUTPUT:
            for number, name in enumerate(node.output):
                if name:
                    self._nodes[name] = self._graph.call_function(operator.getitem, (made, number))
            return
        self._nodes[node.output[0]] = made
        ends = {item.name for item in self._model.graph.output}
        for name in node.output[1:]:
            if name and (name in self._uses or name in ends):
                raise unsupported(f"the second output of a {node.op_type} in it is used")

    def _argument(self, name: str) -> Any:
        """The argument for input ``name``: a node, a weight, or ``None``."""
        if not name:
            return None
        if name not in self._nodes:
            value = self._constants.get(name)
            if value is None:
                raise unsupported(f"the value {name!r} is used but never made")
            self._nodes[name] = self._weight(value) if isinstance(value, torch.Tensor) else self._numbers(value)
        return self._nodes[name]

    def _as_numbers(self, name: str) -> Any:
        """Like :meth:`_argument`, but a constant tensor becomes a list of Python numbers."""
        value = self._constants.get(name)
        return value.flatten().tolist() if isinstance(value, torch.Tensor) else self._argument(name)

    def _as_tensor(self, name: str, made: Any) -> Any:
        """``made`` as a tensor, if it may be a :class:`Host`."""
        sure = made is None or made.op != "call_function" or name in self._floats
        return made if sure else self._graph.call_function(tensor, (made,))

    def _weight(self, value: torch.Tensor) -> fx.Node:
        target = f"weight_{len(list(self._root.parameters(False))) + len(list(self._root.buffers(False)))}"
        if value.is_floating_point():
            self._root.register_parameter(target, nn.Parameter(value, requires_grad=False))
        else:
            self._root.register_buffer(target, value)
        return self._graph.get_attr(target)

    def _numbers(self, value: Host) -> fx.Node:
        return self._graph.call_function(host, (list(value.values), value.scalar))

    def _attribute(self, item: Any) -> Any:
        value = self._helper.get_attribute_value(item)
        if item.type == item.TENSOR:
            return self._constant(value)
        if item.type in (item.GRAPH, item.GRAPHS):
            raise unsupported("it holds control flow")
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value

    def _newest_attributes(self, kind: str, attributes: dict[str, Any], names: list[str], outputs: int) -> dict[str, Any]:
        """The attributes in the form of the newest opset."""
        if kind in ("Softmax", "LogSoftmax") and self._opset < 13:
            axis = attributes.get("axis", 1)
            rank = self._ranks.get(names[0])
            last = rank is not None and axis % rank == rank - 1
            attributes = {**attributes, "axis": -1} if last else {**attributes, "axis": axis, "rest": 1}
        former = ("axes",) if kind.startswith("Reduce") else FORMER_ATTRIBUTES.get(kind, ())
        if any(name in attributes for name in former):
            for name in former:
                made = f"{name}/{len(self._constants)}" if name in attributes else ""
                if made:
                    self._constants[made] = _plain(attributes[name])
                names.append(made)
            attributes = {key: value for key, value in attributes.items() if key not in former}
        if kind == "Dropout":  # an attribute up to opset 11; inference needs neither form
            attributes = {key: value for key, value in attributes.items() if key != "ratio"}
        if kind == "Split" and len(names) == 1 and "num_outputs" not in attributes:
            attributes = {**attributes, "num_outputs": outputs}
        if kind == "ConstantOfShape" and "value" in attributes:  # generated code can contain a number, but not a tensor
            value = tensor(attributes["value"])
            attributes = {"value": value.item(), "dtype": value.dtype}
        return attributes

    def _layer(self, node: Any, attributes: dict[str, Any]) -> bool:
        """Translate a node with constant weights into a module, because passes look for modules."""
        weights: list[Any] = [self._constants.get(name) for name in node.input]
        rest = weights[1:]
        known = all(isinstance(value, torch.Tensor) for name, value in zip(node.input[1:], rest, strict=True) if name)
        made: nn.Module | None = None
        inputs = [node.input[0]] if node.input else []
        output = node.output[0]
        if node.op_type == "Conv" and known:
            made = layers.conv_module(rest[0], rest[1] if len(rest) > 1 else None, attributes)
        elif node.op_type == "BatchNormalization" and known and self._ranks.get(output) in layers.NORMS:
            if not attributes.get("training_mode", 0):
                made = layers.norm_module(rest, self._ranks[output], attributes.get("epsilon", 1e-5))
        elif node.op_type == "Gemm" and known and rest[0].dim() == 2 and _is_linear(attributes, rest):
            weight = rest[0] if attributes.get("transB", 0) else rest[0].t().contiguous()
            made = layers.linear_module(weight, rest[1] if len(rest) > 1 else None)
        elif node.op_type == "MatMul" and known and rest[0].dim() == 2:
            bias, output = self._bias_after(node, rest[0].shape[1])
            made = layers.linear_module(rest[0].t().contiguous(), bias)
        elif node.op_type in ("LSTM", "GRU") and all(isinstance(value, torch.Tensor) for value in rest[:2]):
            return self._recurrent(node, attributes, rest)
        if made is None:
            return False
        self._nodes[output] = self._call(made, [self._argument(name) for name in inputs])
        return True

    def _bias_after(self, node: Any, size: int) -> tuple[torch.Tensor | None, str]:
        """The bias that is added to the result of a MatMul, if that result has no other use, and the name of the output."""
        users = self._uses.get(node.output[0], [])
        if len(users) == 1 and users[0].op_type == "Add" and node.output[0] not in {o.name for o in self._model.graph.output}:
            other = [name for name in users[0].input if name != node.output[0]]
            value = self._constants.get(other[0]) if other else None
            if isinstance(value, torch.Tensor) and value.shape == (size,):
                self._skipped.add(id(users[0]))
                return value, users[0].output[0]
        return None, node.output[0]

    def _recurrent(self, node: Any, attributes: dict[str, Any], rest: list[Any]) -> bool:
        bias = rest[2] if len(rest) > 2 else None
        if len(node.input) > 4 and node.input[4]:
            raise unsupported(f"a {node.op_type} in it has sequences of different lengths")
        if len(node.input) > 7 and node.input[7]:
            raise unsupported(f"an {node.op_type} in it has peepholes")
        module = layers.recurrent_module(node.op_type, [rest[0], rest[1], bias], attributes)
        states = [self._argument(name) for name in node.input[5:7] if name]
        self._bind_outputs(node, self._call(module, [self._argument(node.input[0]), *states]))
        return True

    def _call(self, module: nn.Module, arguments: list[Any]) -> fx.Node:
        target = f"layer_{len(list(self._root.children()))}"
        self._root.add_module(target, module)
        return self._graph.call_module(target, tuple(arguments))


def _is_linear(attributes: dict[str, Any], rest: list[Any]) -> bool:
    plain = attributes.get("alpha", 1.0) == 1 and attributes.get("beta", 1.0) == 1 and not attributes.get("transA", 0)
    out_features = rest[0].shape[0] if attributes.get("transB", 0) else rest[0].shape[1]
    return plain and (len(rest) < 2 or rest[1] is None or rest[1].shape == (out_features,))


def _as_host(value: torch.Tensor) -> Any:
    """``value``, or a :class:`Host` for a small vector or scalar of int64."""
    if value.dtype == torch.int64 and value.dim() <= 1 and value.numel() <= MAX_HOST_VALUES:
        return Host(value.flatten().tolist(), value.dim() == 0)
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return _as_host(torch.tensor(value, dtype=torch.int64 if all(isinstance(v, int) for v in value) else torch.float32))
    return _as_host(torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float32))


def _check_attributes(kind: str, function: Any, attributes: dict[str, Any]) -> None:
    try:
        known = {p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
    except ValueError:  # torch's own functions; these operators have no attributes
        known = set()
    if odd := sorted(set(attributes) - known):
        raise unsupported(f"the attribute {odd[0]!r} of its {kind} is not known here")


def _infer_shapes(model: Any) -> tuple[dict[str, int], set[str]]:
    """Number of axes of each value, and names of the floating-point values, as far as ONNX infers them."""
    onnx = require("onnx")
    try:
        inferred = onnx.shape_inference.infer_shapes(model) if model.ByteSize() < 2**31 - 2**20 else model
    except onnx.shape_inference.InferenceError:
        inferred = model  # contradictory shapes; ONNX Runtime decides whether the model is valid
    known = (*inferred.graph.value_info, *inferred.graph.output, *inferred.graph.input)
    ranks = {item.name: len(item.type.tensor_type.shape.dim) for item in known if item.type.tensor_type.HasField("shape")}
    floats = {item.name for item in known if (dtype := DTYPES.get(item.type.tensor_type.elem_type)) and dtype.is_floating_point}
    return ranks, floats
