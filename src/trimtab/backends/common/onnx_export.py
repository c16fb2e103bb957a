"""ONNX files: export and verify a candidate, write metadata, and refuse files that refer to paths outside of their folder."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from trimtab.backends.common.causes import CONVERSION_ERRORS, first_line
from trimtab.backends.common.decisions import refuse_decisions
from trimtab.backends.common.exportable import exportable
from trimtab.backends.common.exported_program import dynamic_shapes
from trimtab.backends.common.foreign import OpenRun, convert, wrong_graph
from trimtab.backends.common.io_names import io_names
from trimtab.backends.common.onnx_file import DATA, MODEL
from trimtab.backends.common.onnx_int8 import store_rounded_weights
from trimtab.backends.common.process_lock import quiet
from trimtab.core.candidate import Candidate
from trimtab.core.technique import require
from trimtab.errors import CompileError
from trimtab.hardware import environment
from trimtab.passes.common.quantized import fake_quantize_meta_kernels, is_quantized
from trimtab.tensors.weights import weight_bytes

INPUTS = "trimtab.inputs"
"""Metadata key: input names in the order of the signature, because runtimes may list them in another order."""

ONE_FILE_BYTES = 1_900_000_000
"""Largest weights in bytes that are stored in the ONNX file itself; protobuf files are limited to 2 GB."""

TRACING = "torchscript exporter"


def export_onnx(candidate: Candidate, folder: pathlib.Path, open_run: OpenRun) -> None:
    """Write the candidate as float32 ONNX into ``folder``, with ``conversion.json``.

    The exporters are tried in turn, see :func:`convert`. A graph is accepted if its outputs, computed by ``open_run``, match
    the model's.

    Raises:
        CompileError: no exporter gives a correct graph; the message contains the error of each.
    """
    attempt = functools.partial(_attempt, folder, open_run)
    convert(candidate, folder, _EXPORTERS, attempt, "torch.onnx cannot export this model.")


def model_files(folder: pathlib.Path) -> list[str]:
    """Names of the existing model files in ``folder``."""
    return [name for name in (MODEL, DATA) if (folder / name).is_file()]


def write_metadata(path: pathlib.Path, names: Sequence[str], **facts: str) -> None:
    """Write the order of the inputs and ``facts`` into the file's metadata. External weights are not touched."""
    onnx = require("onnx")
    model = onnx.load(path, load_external_data=False)
    onnx.helper.set_model_props(model, {INPUTS: ",".join(names)} | {f"trimtab.{name}": fact for name, fact in facts.items()})
    path.write_bytes(model.SerializeToString())


def _attempt(folder: pathlib.Path, open_run: OpenRun, exporter: str, candidate: Candidate) -> None:
    for name in (MODEL, DATA):
        (folder / name).unlink(missing_ok=True)
    try:
        with quiet(stream=False), torch.no_grad():
            _EXPORTERS[exporter](candidate, folder / MODEL)
        bits = {}
        if is_quantized(candidate.model):
            store_rounded_weights(folder / MODEL)
            bits = {"weight_bits": "8" if environment.has_vnni() else "7"}
        write_metadata(folder / MODEL, io_names(candidate.signature)[0], **bits)
    except CONVERSION_ERRORS as error:
        raise CompileError(f"{first_line(error)}.") from error
    if wrong := wrong_graph(open_run(folder, candidate.signature), candidate, candidate.signature):
        raise CompileError(f"the exported graph is not the model: {wrong}.")


def _export_dynamo(candidate: Candidate, path: pathlib.Path) -> None:
    signature = candidate.signature
    inputs, outputs = io_names(signature)
    with fake_quantize_meta_kernels():
        program = torch.onnx.export(
            exportable(candidate),
            tuple(candidate.dynamic_leaves()),
            dynamo=True,
            dynamic_shapes=dynamic_shapes(signature) if signature.dims else None,
            input_names=inputs,
            output_names=outputs,
            verbose=False,
        )
    assert program is not None
    _rename_clashes(program.model.graph, {*inputs, *outputs})
    if all(dim.min for dim in signature.dims):  # the pooling operator has no kernel for empty inputs
        _pool_means(program.model.graph)
    program.save(path, external_data=weight_bytes(candidate.model) > ONE_FILE_BYTES)


def _rename_clashes(graph: Any, names: Collection[str]) -> None:
    """Rename inner values that have the name of an input or output. The exporter names values after operators, and an input may
    be called ``cat`` or ``mean`` too."""
    outer = {id(value) for value in graph.outputs}
    for value in (value for node in graph.all_nodes() for value in node.outputs):
        if value.name in names and id(value) not in outer:
            value.name = f"{value.name}.inner"


def _pool_means(graph: Any) -> None:
    """Replace the mean over the pixels of float32 images by GlobalAveragePool, which the runtime computes in the layout of its
    convolutions and in int8. A small CNN ran 1.02 times as fast in float32, and 1.04 times in int8."""
    ir = require("onnx_ir")
    for node in list(graph):
        source = node.inputs[0] if node.op_type == "ReduceMean" and len(node.inputs) == 2 else None
        if source is None or source.dtype != ir.DataType.FLOAT or source.shape is None or len(source.shape) != 4:
            continue
        axes = ir.convenience.get_const_tensor(node.inputs[1])
        if axes is None or {int(axis) % 4 for axis in axes.numpy().reshape(-1)} != {2, 3}:
            continue
        keeps = node.attributes.get_int("keepdims", 1)
        pool = ir.node("GlobalAveragePool", [source], name=f"{node.name}.pool")
        pool.outputs[0].name = f"{node.outputs[0].name}.pooled"
        graph.insert_before(node, pool)
        node.resize_inputs(1)
        node.replace_input_with(0, pool.outputs[0])
        node.op_type, node.version = ("Identity" if keeps else "Flatten"), None
        node.attributes.clear()


def _export_torchscript(candidate: Candidate, path: pathlib.Path) -> None:
    """The older exporter, based on tracing; for models that torch.export refuses."""
    signature = candidate.signature
    inputs, outputs = io_names(signature)
    if weight_bytes(candidate.model) > ONE_FILE_BYTES:
        raise ValueError("the tracing exporter is not used for weights over 1.9 GB")
    leaves = candidate.dynamic_leaves()
    refuse_decisions(candidate, leaves)
    model: nn.Module = exportable(candidate, traced=True)
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        # the exporter's own tracer refuses TorchScript submodules
        model = torch.jit.trace(model, tuple(leaves), check_trace=False)  # type: ignore[no-untyped-call]
    named = zip([*inputs, *outputs], [*signature.inputs, *signature.outputs], strict=True)
    torch.onnx.export(
        model,
        tuple(leaves),
        str(path),
        dynamo=False,
        input_names=inputs,
        output_names=outputs,
        dynamic_axes={
            name: {i: s for i, s in enumerate(spec.shape) if isinstance(s, str) and s != "?"} for name, spec in named
        },
        verbose=False,
    )


_EXPORTERS: dict[str, Callable[[Candidate, pathlib.Path], None]] = {
    "dynamo exporter": _export_dynamo,
    TRACING: _export_torchscript,
}
