"""Workloads from ONNX files: imported into PyTorch, and compared with ONNX Runtime before use."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from trimtab._internal.text import with_fix
from trimtab.core.candidate import MODEL_ERRORS
from trimtab.core.dynamic_dims import BATCH
from trimtab.core.signature import Dim
from trimtab.core.technique import require
from trimtab.core.workload import as_call
from trimtab.errors import IntegrityError, UsageError
from trimtab.importers.input_spec import InputSpec, keep_working_sizes, structure_of
from trimtab.importers.onnx.graph import STANDARD_DOMAINS, graph_inputs, identifiers, import_graph
from trimtab.importers.onnx.operators import DTYPES
from trimtab.importers.onnx.session import open_session, runtime_errors
from trimtab.tensors.comparison import is_discrete, too_many_differ
from trimtab.tensors.structure import flatten
from trimtab.tensors.weights import tolerance

TOLERANCE = 1e-3
"""Largest error against ONNX Runtime, relative to the largest value. Two correct float32 runtimes differ by far less."""
HUGE = 1e30
MAX_INLINED_BYTES, MIN_NODE_BYTES, MAX_NESTED_CALLS = 2_000_000_000, 1000, 100
"""Limits for inlining functions: total bytes, bytes that a node counts at least, and nested calls."""


@dataclasses.dataclass(frozen=True)
class OnnxFile:
    """Factory of the PyTorch module of an ONNX file."""

    path: str

    def __call__(self) -> nn.Module:
        """The module, with the file's weights. Nothing in the file is executed as code.

        Raises:
            UsageError: the file contains an operator or type that is not supported.
            IntegrityError: the file is not an ONNX model or is damaged.
        """
        return import_graph(read_model(self.path))

    def input_spec(self) -> InputSpec:
        """Names, dtypes and shapes of the graph's inputs."""
        items = graph_inputs(read_model(self.path, weights=False))
        source = pathlib.Path(self.path).name
        names = tuple(identifiers([item.name for item in items]))
        return InputSpec(
            source=source,
            names=names,
            dtypes=tuple(_dtype(item, source) for item in items),
            shapes=tuple(_shape(item, name, source) for item, name in zip(items, names, strict=True)),
            structure=structure_of([torch.empty(1, device="meta") for _ in items], {}),
        )

    def verified_spec(self, spec: InputSpec, example: Any) -> tuple[InputSpec, tuple[str, ...]]:
        """``spec`` with only those dynamic sizes that work, and notes. Compares the imported module with ONNX Runtime.

        Raises:
            UsageError: the outputs differ, because of a bug of the importer; the message says by how much.
        """
        module = self()
        session, unoptimized = _session(self.path)
        args, _ = as_call(example)
        if reason := _runtime_error(session, list(args)):
            tried = ", ".join(f"{name} {list(leaf.shape)}" for name, leaf in zip(spec.names, args, strict=True))
            raise UsageError(
                f"ONNX Runtime cannot run {spec.source} on inputs of these sizes: {tried}. It says: {reason}. State the sizes "
                f"that the model takes, as in --shape {spec.names[0]}=1x10, or give real inputs with --inputs FILE.npz."
            )
        if reason := _difference(module, session, list(args)):
            raise UsageError(
                f"{spec.source} was brought back to PyTorch, but {reason}. It cannot be used; please report the model, and "
                "start from the PyTorch model that it was exported from."
            )
        found, notes = keep_working_sizes(spec, list(args), lambda leaves: _difference(module, session, leaves) is None)
        equal = f"{spec.source} was brought back to PyTorch; its answers are those of ONNX Runtime on the example inputs."
        return found, (equal, *notes, *([unoptimized] if unoptimized else []))


def read_model(path: str, *, weights: bool = True) -> Any:
    """The ``onnx.ModelProto`` in ``path``, with its functions inlined. External weights are read from the file's folder only.

    Raises:
        IntegrityError: the file is not an ONNX model, or a weight lies outside of the folder.
    """
    onnx = require("onnx")
    protobuf = require("google.protobuf.message")
    try:
        model = onnx.load(path, load_external_data=False)
        if not model.graph.node or not model.ir_version:
            raise IntegrityError(f"{path} is no ONNX model: it has no nodes.")
        if model.functions:
            _check_functions(model, path)
            # before the weights are loaded: inlining needs one protobuf message, which holds at most 2 GB
            model = require("onnx.inliner").inline_local_functions(model)
        if weights:
            require("onnx.external_data_helper").load_external_data_for_model(model, os.path.dirname(path))
        return model
    except (protobuf.DecodeError, onnx.checker.ValidationError, ValueError, OSError) as error:
        raise IntegrityError(f"{path} is no ONNX model that can be read: {error}") from error


def _check_functions(model: Any, path: str) -> None:
    """Refuse functions whose inlining would exceed the limits, for example because they call themselves.

    Raises:
        IntegrityError: a limit is exceeded, or a function has a graph as attribute, which only control flow needs.
    """
    bodies = {_function_key(item, item.name): list(_nested_nodes(item.node)) for item in model.functions}
    known: dict[tuple[str, str, str], tuple[int, int]] = {}

    def inlined(nodes: list[Any], depth: int) -> tuple[int, int]:
        """Bytes of ``nodes`` with all inlined calls, and the depth of nested calls."""
        size, deepest = sum(max(node.ByteSize(), MIN_NODE_BYTES) for node in nodes), 0
        for node in nodes:
            if (key := _function_key(node, node.op_type)) not in bodies:
                continue
            if any(item.type in (item.GRAPH, item.GRAPHS) for item in node.attribute):
                raise IntegrityError(f"{path} gives a graph to a function, as control flow does; it is not read.")
            if key not in known and depth < MAX_NESTED_CALLS:
                known[key] = inlined(bodies[key], depth + 1)
            more, below = known.get(key, (0, MAX_NESTED_CALLS))  # unknown: nested too deep, perhaps recursive
            size, deepest = size + more, max(deepest, below + 1)
        return size, deepest

    size, deepest = inlined(list(_nested_nodes(model.graph.node)), 0)
    if size > MAX_INLINED_BYTES or deepest > MAX_NESTED_CALLS:
        raise IntegrityError(
            f"{path} holds functions that call each other too often or too deep: at most {MAX_INLINED_BYTES / 1e9:.0f} GB and "
            f"{MAX_NESTED_CALLS} calls in each other are read."
        )


def _function_key(item: Any, name: str) -> tuple[str, str, str]:
    """The key by which a node finds its function."""
    return "" if item.domain in STANDARD_DOMAINS else item.domain, name, getattr(item, "overload", "")


def _nested_nodes(nodes: Any) -> Iterator[Any]:
    """``nodes``, and the nodes of the graphs in their attributes."""
    for node in nodes:
        yield node
        for item in node.attribute:
            for graph in (*([item.g] if item.type == item.GRAPH else []), *item.graphs):
                yield from _nested_nodes(graph.node)


def _session(path: str) -> tuple[Any, str | None]:
    options = require("onnxruntime").SessionOptions()
    options.log_severity_level = 4  # sizes that it refuses are tried on purpose
    try:
        return open_session(path, options)
    except runtime_errors() as error:
        problem = f"{path} does not load into ONNX Runtime, so nothing can be compared with it: {error}"
        raise UsageError(with_fix(problem, "Start from the PyTorch model that it was exported from.")) from error


def _runtime_outputs(session: Any, leaves: list[torch.Tensor]) -> list[Any]:
    """The outputs of ONNX Runtime.

    Raises:
        RuntimeError: it refuses these inputs.
    """
    names = [item.name for item in session.get_inputs()]
    if any(leaf.dtype == torch.bfloat16 for leaf in leaves):
        raise UsageError(
            "The ONNX model takes bfloat16, which ONNX Runtime does not take from Python, so nothing can be compared with it. "
            "Start from the PyTorch model that it was exported from, or export it with float32 inputs."
        )
    try:
        found: list[Any] = session.run(None, {name: leaf.numpy(force=True) for name, leaf in zip(names, leaves, strict=True)})
    except runtime_errors() as error:
        raise RuntimeError(str(error).splitlines()[0][:200]) from error
    return found


def _runtime_error(session: Any, leaves: list[torch.Tensor]) -> str | None:
    """The error that ONNX Runtime raises for ``leaves``; ``None`` if it runs."""
    try:
        _runtime_outputs(session, leaves)
    except RuntimeError as error:
        return str(error)
    return None


def _difference(module: nn.Module, session: Any, leaves: list[torch.Tensor]) -> str | None:
    """How the outputs of ``module`` and of ONNX Runtime differ, as text; ``None`` if they agree."""
    try:
        wanted = _runtime_outputs(session, leaves)
    except RuntimeError as error:
        return f"ONNX Runtime itself fails: {error}"
    try:
        with torch.no_grad():
            found = flatten(module(*leaves), "output")[0]
    except MODEL_ERRORS as error:
        return f"it fails: {(str(error).splitlines() or [type(error).__name__])[0][:200]}"
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        other = torch.as_tensor(theirs)
        if ours.shape != other.shape:
            return f"its output {number} has the shape {list(ours.shape)} where ONNX Runtime gives {list(other.shape)}"
        if ours.dtype != other.dtype:
            return f"its output {number} is {ours.dtype} where ONNX Runtime gives {other.dtype}"
        if is_discrete(other.dtype):
            if turned := too_many_differ(other, ours):
                return f"its output {number} is not what ONNX Runtime gives: {turned}"
            continue
        a, b = ours.double(), other.double()
        mask = _finite(b)
        if not torch.equal(_finite(a), mask) or not torch.equal(a[~mask].sign().nan_to_num(), b[~mask].sign().nan_to_num()):
            return f"its output {number} has NaN or infinity where ONNX Runtime has none, or the other way round"
        worst, size = (float(values[mask].abs().max()) if mask.any() else 0.0 for values in (a - b, b))
        if worst > tolerance(module, TOLERANCE) * max(size, TOLERANCE):
            return f"its output {number} is off by {worst:.3g} from what ONNX Runtime gives"
    return None


def _finite(values: torch.Tensor) -> torch.Tensor:
    """Mask of the finite ``values``. Huge values count as infinite: attention masks use them in its place."""
    return values.isfinite() & (values.abs() < HUGE)


def _dtype(item: Any, source: str) -> torch.dtype:
    number = item.type.tensor_type.elem_type
    if number not in DTYPES:
        raise UsageError(
            f"{source} takes {item.name!r}, which is no tensor of numbers. Only tensors can be given to it here: start from "
            "the PyTorch model that it was exported from."
        )
    return DTYPES[number]


def _shape(item: Any, name: str, source: str) -> tuple[int | Dim, ...]:
    if not item.type.tensor_type.HasField("shape"):
        raise UsageError(f"{source} does not say how many axes {item.name!r} has. Export it again with its shapes.")
    sizes: list[int | Dim] = []
    for axis, dim in enumerate(item.type.tensor_type.shape.dim):
        if dim.HasField("dim_value") and dim.dim_value > 0:
            sizes.append(int(dim.dim_value))
            continue
        word = re.sub(r"\W", "_", dim.dim_param)
        unnamed = BATCH if axis == 0 else f"{name}_{axis}"
        sizes.append(Dim(word if word.isidentifier() else f"dim_{word}" if word else unnamed))
    return tuple(sizes)
