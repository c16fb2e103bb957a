"""OpenVINO models: convert and verify a candidate, quantize it, and report precisions and kernels."""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch

from trimtab._internal.text import counted
from trimtab.backends.common.causes import CONVERSION_ERRORS, first_line
from trimtab.backends.common.decisions import refuse_decisions
from trimtab.backends.common.exportable import exportable
from trimtab.backends.common.exported_program import export_dynamic, export_static
from trimtab.backends.common.foreign import OpenRun, Row, convert, wrong_graph
from trimtab.backends.common.io_names import io_names
from trimtab.backends.common.openvino_file import FILES, MODEL, SHAPES_KEY, core, no_telemetry, runtime
from trimtab.backends.common.process_lock import quiet
from trimtab.backends.common.signal_stack import signal_stack_kept
from trimtab.core.candidate import Candidate
from trimtab.core.signature import Signature
from trimtab.core.technique import require
from trimtab.errors import CompileError
from trimtab.hardware import environment

Ranges = Literal["minmax", "percentile"]
GROUP = 64
"""Inputs of a linear layer that share a scale with 4 bits."""
RECURRENT = ("LSTMSequence", "LSTMCell", "GRUSequence", "GRUCell", "RNNSequence", "RNNCell")


def convert_openvino(candidate: Candidate, folder: pathlib.Path, open_run: OpenRun) -> None:
    """Write the candidate as a float32 OpenVINO model into ``folder``, with ``conversion.json``.

    It is traced or exported, see :func:`convert`. A graph is accepted if its outputs, computed by ``open_run``, match the
    model's.

    Raises:
        CompileError: no way gives a correct graph; the message contains the error of each.
    """
    attempt = functools.partial(_attempt, folder, open_run)
    convert(candidate, folder, _CONVERTERS, attempt, "OpenVINO cannot convert this model.")


def write_model(model: Any, folder: pathlib.Path) -> None:
    """Save ``model`` with unchanged weights; OpenVINO's default rounds them to 16 bits."""
    runtime().save_model(model, folder / MODEL, compress_to_fp16=False)


def quantize(
    model: Any, rows: Sequence[Row], *, recurrent: bool, ranges: Ranges = "minmax", excluded: Sequence[str] = ()
) -> Any:
    """Quantize weights and activations to int8 except in the operations ``excluded``, with ranges from calibration rows.

    NNCF corrects the biases, and smooths the activations of transformers (SmoothQuant, https://arxiv.org/abs/2211.10438).

    Recurrent layers stay float unless ``recurrent``: with a dynamic batch, the last hidden state of a quantized two-layer LSTM
    had a cosine similarity of 0.09 to 0.2, but 1.0 with fixed sizes. On CPUs where int8 sums saturate, weights have 7 bits:
    with 8 bits errors were ten times as large.
    Source: https://docs.openvino.ai/2026/openvino-workflow/model-optimization-guide/quantizing-models-post-training.html
    """
    with _nncf() as nncf:
        advanced = nncf.AdvancedQuantizationParameters()
        if not environment.has_vnni():
            advanced.overflow_fix = nncf.OverflowFix.ENABLE
        if ranges == "percentile":
            known = require("nncf.quantization.range_estimator").RangeEstimatorParametersSet
            advanced.activations_range_estimator_params = known.MEAN_QUANTILE
        return nncf.quantize(
            model,
            nncf.Dataset([[t.numpy(force=True) for t in row] for row in rows]),
            subset_size=len(rows),
            model_type=nncf.ModelType.TRANSFORMER if is_transformer(model) else None,
            advanced_parameters=advanced,
            ignored_scope=nncf.IgnoredScope(names=list(excluded), types=[] if recurrent else list(RECURRENT), validate=False),
        )


def compress(model: Any, excluded: Sequence[str] = (), *, four_bits: bool = False) -> Any:
    """Quantize weights to int8, except in the operations ``excluded``. The CPU plug-in quantizes activations at run time.
    With ``four_bits``, linear layers get int4 with one scale per group of inputs; embeddings, the last layer and ``excluded``
    get int8. No data is needed. Source: NNCF documentation."""
    with _nncf() as nncf:
        scope = nncf.IgnoredScope(names=list(excluded), validate=False)
        if not four_bits:
            return nncf.compress_weights(model, ignored_scope=scope)
        mode = nncf.CompressWeightsMode.INT4_SYM
        model = nncf.compress_weights(model, mode=mode, ratio=1.0, group_size=GROUP, ignored_scope=scope)
        return nncf.compress_weights(model)  # of what is float yet


@contextlib.contextmanager
def _nncf() -> Iterator[Any]:
    core()  # created before nncf's own cores, so that it outlives them
    with signal_stack_kept(), no_telemetry(), quiet(stream=False), contextlib.redirect_stdout(io.StringIO()):
        yield require("nncf")


def is_transformer(model: Any) -> bool:
    """Whether the graph has attention: the fused operator, or a softmax that feeds a matrix product."""
    follows: set[str] = set()
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        sources = {node.input_value(i).get_node().get_friendly_name() for i in range(node.get_input_size())}
        if kind == "ScaledDotProductAttention" or (kind == "MatMul" and follows & sources):
            return True
        through = kind in ("Convert", "Reshape", "Transpose", "Select", "Squeeze", "Unsqueeze") and follows & sources
        if kind == "Softmax" or through:
            follows.add(node.get_friendly_name())
    return False


def coverage(compiled: Any) -> list[str]:
    """Notes about the precisions of the dominant operators, and about operators without an optimized kernel."""
    precisions: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    plain: collections.Counter[str] = collections.Counter()
    for node in compiled.get_runtime_model().get_ops():
        facts = node.get_rt_info()
        kind, precision, code = (_fact(facts, key) for key in ("layerType", "runtimePrecision", "primitiveType"))
        if kind in _HEAVY:
            precisions[kind][precision] += 1
        elif code.startswith("ref") and kind not in _BOOKKEEPING:
            plain[kind] += 1
    heavy = [
        f"{count} {kind} in {precision}" for kind, found in sorted(precisions.items()) for precision, count in found.items()
    ]
    notes = [f"Runs {', '.join(heavy)}."] if heavy else []
    return notes + ([f"In reference code: {', '.join(f'{n} {k}' for k, n in plain.most_common())}."] if plain else [])


_HEAVY = {"Convolution", "Deconvolution", "FullyConnected", "MatMul", "LSTMSequence", "LSTMCell", "GRUSequence", "RNNSeq"} | {
    "RNNCell",
    "ScaledDotProductAttention",
    "MHA",
}
_BOOKKEEPING = {"Input", "Output", "Const", "Constant", "ShapeOf", "Reshape", "Reorder", "Broadcast"}


def _fact(facts: Any, key: str) -> str:
    return str(facts[key].value) if key in facts else ""


def _attempt(folder: pathlib.Path, open_run: OpenRun, converter: str, candidate: Candidate) -> None:
    openvino, signature = runtime(), candidate.signature
    try:
        with quiet(stream=False), no_telemetry(), torch.no_grad():
            model = _CONVERTERS[converter](candidate)
        _name_ports(model, signature)
        model.set_rt_info(";".join(",".join(map(str, leaf.shape)) for leaf in candidate.leaves), SHAPES_KEY)
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        write_model(model, folder)
    except (*CONVERSION_ERRORS, *frontend_errors(openvino)) as error:
        raise CompileError(f"{first_line(error)}.") from error
    if wrong := wrong_graph(open_run(folder, signature), candidate, signature):
        raise CompileError(f"the converted graph is not the model: {wrong}.")


def frontend_errors(openvino: Any) -> tuple[type[Exception], ...]:
    """Exceptions of the converter that derive from :class:`Exception` directly."""
    return tuple(v for v in vars(openvino.frontend).values() if isinstance(v, type) and issubclass(v, Exception))


def _name_ports(model: Any, signature: Signature) -> None:
    inputs, outputs = io_names(signature)
    if len(model.inputs) != len(inputs):
        raise ValueError(f"the converted graph takes {counted(len(model.inputs), 'input')} instead of {len(inputs)}")
    for port, name in zip(model.inputs, inputs, strict=True):
        port.get_tensor().set_names({name})
    for port, name in zip(model.outputs, outputs, strict=False):
        if port.names.isdisjoint(inputs):  # else an input is given back
            port.get_tensor().set_names({name})


def _trace(candidate: Candidate) -> Any:
    leaves, shapes = candidate.dynamic_leaves(), _shapes(candidate.signature)
    refuse_decisions(candidate, leaves)
    return runtime().convert_model(exportable(candidate, traced=True), example_input=tuple(leaves), input=shapes)


def _export(candidate: Candidate) -> Any:
    export = export_dynamic if candidate.signature.dims else export_static
    model = runtime().convert_model(export(candidate)[0])
    model.reshape(dict(zip(model.inputs, _shapes(candidate.signature), strict=True)))
    return model


def _shapes(signature: Signature) -> list[Any]:
    openvino = runtime()
    dims: dict[int | str, Any] = {
        dim.name: openvino.Dimension(dim.min, -1 if dim.max is None else dim.max) for dim in signature.dims
    }
    return [openvino.PartialShape([dims.get(s, s) for s in spec.shape]) for spec in signature.inputs]


_CONVERTERS: dict[str, Callable[[Candidate], Any]] = {"trace": _trace, "export": _export}
