"""The ONNX file of an artifact: refuse one that refers to paths outside of its folder, and open a session. Without torch."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

from trimtab.backends.common.causes import CONVERSION_ERRORS, first_line
from trimtab.core.technique import require
from trimtab.errors import CompileError, IntegrityError
from trimtab.hardware import environment
from trimtab.importers.onnx.session import open_session, runtime_errors

MODEL = "model.onnx"
DATA = "model.onnx.data"
FATAL = 4
"""Log level of sessions: fatal errors only. Errors are raised anyway, and messages would print node names from an untrusted
file to the terminal unfiltered."""
EXACT_PRODUCTS = "session.x64quantprecision"
"""Session option for exact int8 products on x86 CPUs without VNNI, where sums saturate otherwise. It is slower there. On other
CPUs, sessions of models with branches cannot be created with it."""
_PLACE_KEYS = {"location", "offset", "length", "checksum"}


def open_model(folder: pathlib.Path, *, threads: int | None, spinning: bool, exact: bool = False) -> tuple[Any, str | None]:
    """A session for the model in ``folder``, and why its graph optimizations are off; ``None`` where they are on. ``exact``
    computes int8 products without saturation on any CPU.

    Raises:
        CompileError: ONNX Runtime cannot open the model.
    """
    onnxruntime = require("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = FATAL
    options.intra_op_num_threads = threads or 0
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
    if exact:
        options.add_session_config_entry(EXACT_PRODUCTS, "1")
    try:
        return open_session(folder / MODEL, options)
    except (*CONVERSION_ERRORS, *runtime_errors()) as error:
        raise CompileError(f"ONNX Runtime cannot open the model: {first_line(error)}.") from error


def load_model(folder: pathlib.Path, *, threads: int | None, spinning: bool, int8: bool) -> Any:
    """A session for a model that :func:`refuse_unsafe` lets pass.

    Raises:
        IntegrityError: the file is unsafe, or cannot be opened.
    """
    facts = refuse_unsafe(folder)
    bits = facts.get("trimtab.weight_bits")
    exact = (int8 or bits is not None) and bits in (None, "8") and not environment.has_vnni()
    try:
        return open_model(folder, threads=threads, spinning=spinning, exact=exact)[0]
    except CompileError as error:
        raise IntegrityError(f"{folder / MODEL} cannot be loaded: {error}") from error


def refuse_unsafe(folder: pathlib.Path) -> dict[str, str]:
    """Check the ONNX file and return its metadata. Raises :class:`IntegrityError` unless it parses and stores its weights in
    files of its own folder.

    An ONNX tensor may refer to any file as its data, and the runtime would read that file.
    """
    onnx = require("onnx")
    path = folder / MODEL
    if linked := next((name for name in (MODEL, DATA) if (folder / name).is_symlink()), None):
        raise IntegrityError(f"{folder / linked} is a link, and an artifact keeps its own files. Do not use it.")
    try:
        model = onnx.load(path, load_external_data=False)
    except (*CONVERSION_ERRORS, require("google.protobuf.message").DecodeError) as error:
        raise IntegrityError(f"{path} is not an ONNX file that can be read ({first_line(error)}).") from error
    for tensor in tensors(model):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        keys = [entry.key for entry in tensor.external_data]
        if keys.count("location") != 1 or len(set(keys)) != len(keys) or not set(keys) <= _PLACE_KEYS:
            raise IntegrityError(  # for duplicate keys, readers differ in which entry they use
                f"{path} says where the tensor {tensor.name!r} lies by {', '.join(keys)[:200]!r}. Do not use it."
            )
        place = next(entry.value for entry in tensor.external_data if entry.key == "location")
        if place != DATA or not (folder / place).is_file():
            raise IntegrityError(
                f"{path} keeps the tensor {tensor.name!r} in {place!r}, but only {DATA!r} beside it is allowed. Do not use it."
            )
    return {item.key: item.value for item in model.metadata_props}


def tensors(model: Any) -> Iterator[Any]:
    """Every tensor of an ONNX model: initializers and attributes, including those in subgraphs and functions."""
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        yield from _node_tensors(function.node)
        yield from _attribute_tensors(function.attribute_proto)
    for training in model.training_info:
        yield from _graph_tensors(training.initialization)
        yield from _graph_tensors(training.algorithm)


def _graph_tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Any) -> Iterator[Any]:
    for node in nodes:
        yield from _attribute_tensors(node.attribute)


def _attribute_tensors(attributes: Any) -> Iterator[Any]:
    for attribute in attributes:
        yield from (attribute.t, *attribute.tensors)
        for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
            yield from (sparse.values, sparse.indices)
        for graph in (attribute.g, *attribute.graphs):
            yield from _graph_tensors(graph)
