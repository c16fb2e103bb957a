"""OpenVINO models: converting a candidate, proving the graph, quantizing it, and reading what the runtime made of it."""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from trimtab._internal.text import counted
from trimtab.backends.common.causes import first_line
from trimtab.backends.common.decisions import refuse_decisions
from trimtab.backends.common.exportable import exportable
from trimtab.backends.common.exported_program import SHARED, export_program, lost_dims
from trimtab.backends.common.foreign import CONVERSION_ERRORS, OpenRun, Row, convert, io_names, quiet, wrong_graph
from trimtab.backends.common.signal_stack import signal_stack_kept
from trimtab.core.candidate import Candidate
from trimtab.core.signature import Signature
from trimtab.core.technique import require
from trimtab.errors import CompileError
from trimtab.hardware import environment

MODEL = "model.xml"
WEIGHTS = "model.bin"
FILES = (MODEL, WEIGHTS)
RECURRENT = ("LSTMSequence", "LSTMCell", "GRUSequence", "GRUCell", "RNNSequence", "RNNCell")
HOT = ["trimtab", "shapes"]
"""Where a model's metadata keeps the sizes that must be fast: those of the example, as ``1,8;1,8``."""


def runtime() -> Any:
    """The openvino package, imported without its telemetry."""
    with no_telemetry():
        return require("openvino")


@functools.cache
def core() -> Any:
    """The one ``Core`` of this process, never freed: see :func:`signal_stack_kept` for what more than one would do."""
    return runtime().Core()


@contextlib.contextmanager
def no_telemetry() -> Iterator[None]:
    """Keep openvino and nncf from starting their telemetry, which sends over the network and writes into the home folder.

    Both fall back to a stand-in that does nothing when ``openvino_telemetry`` cannot be imported, which is what they see here.
    Where somebody imported openvino before, its converter's own reference is exchanged for that stand-in meanwhile.
    """
    with SHARED:
        known, swapped = "openvino_telemetry" in sys.modules, []
        before = sys.modules.get("openvino_telemetry")  # None where this is called inside of itself
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
        if before is not None and "openvino.tools.ovc" in sys.modules:
            stub = require("openvino.tools.ovc.telemetry_stub")
            for name, module in list(sys.modules.items()):
                if name.startswith("openvino.tools.ovc.") and getattr(module, "tm", None) is before:
                    swapped.append(module)
                    module.tm = stub  # type: ignore[attr-defined]
        try:
            yield
        finally:
            if known:
                sys.modules["openvino_telemetry"] = before  # type: ignore[assignment]
            else:
                del sys.modules["openvino_telemetry"]
            for module in swapped:
                module.tm = before  # type: ignore[attr-defined]


def convert_openvino(candidate: Candidate, folder: pathlib.Path, open_run: OpenRun) -> None:
    """Write the candidate as a float32 OpenVINO model into ``folder``, with the facts about it beside it.

    It is traced or exported, as :func:`convert` says; a graph is taken only if its outputs, computed by what ``open_run`` makes
    of the file, are the model's.

    Raises:
        CompileError: no way gives a right graph; carries what each said.
    """
    attempt = functools.partial(_attempt, folder, open_run)
    convert(candidate, folder, _CONVERTERS, attempt, "OpenVINO cannot convert this model.")


def hot_shapes(model: Any) -> list[list[int]] | None:
    """The sizes of the example that the model was made for; ``None`` where it does not say."""
    if not model.has_rt_info(HOT):
        return None
    text = str(model.get_rt_info(HOT).value)
    return [[int(size) for size in shape.split(",") if size] for shape in text.split(";")]


def given_back(model: Any) -> dict[int, int]:
    """Outputs that are inputs as they came: ``{output: input}``."""
    inputs = {port.get_node().get_friendly_name(): i for i, port in enumerate(model.inputs)}
    sources = [port.get_node().input_value(0).get_node().get_friendly_name() for port in model.outputs]
    return {i: inputs[name] for i, name in enumerate(sources) if name in inputs}


def write_model(model: Any, folder: pathlib.Path) -> None:
    """Save ``model`` with its weights as they are; OpenVINO's own default would round them to sixteen bits."""
    runtime().save_model(model, folder / MODEL, compress_to_fp16=False)


def quantize(model: Any, rows: Sequence[Row], *, recurrent: bool) -> Any:
    """Weights and activations to int8, ranges from calibration rows.

    Recurrent layers stay float unless asked for: with a dynamic batch, the last hidden state of a quantized two-layer LSTM was
    seen at cosine 0.09 to 0.2, while the same model of fixed sizes was at 1.0. Where sums of products clip, weights
    have seven bits: with eight, errors were seen to be ten times as large.
    Source: https://docs.openvino.ai/2026/openvino-workflow/model-optimization-guide/quantizing-models-post-training.html
    """
    with _nncf() as nncf:
        narrow = None if environment.has_vnni() else nncf.AdvancedQuantizationParameters(overflow_fix=nncf.OverflowFix.ENABLE)
        return nncf.quantize(
            model,
            nncf.Dataset([[t.numpy(force=True) for t in row] for row in rows]),
            subset_size=len(rows),
            model_type=nncf.ModelType.TRANSFORMER if is_transformer(model) else None,
            advanced_parameters=narrow,
            ignored_scope=None if recurrent else nncf.IgnoredScope(types=list(RECURRENT), validate=False),
        )


def compress(model: Any) -> Any:
    """Weights to int8, no data needed; the CPU plug-in then quantizes activations as they come. Source: NNCF documentation."""
    with _nncf() as nncf:
        return nncf.compress_weights(model)


@contextlib.contextmanager
def _nncf() -> Iterator[Any]:
    core()  # before those that nncf makes for itself, so that theirs are the ones that end first
    with signal_stack_kept(), no_telemetry(), quiet(), contextlib.redirect_stdout(io.StringIO()):
        yield require("nncf")


def is_transformer(model: Any) -> bool:
    """Whether the graph holds attention: its fused operator, or a softmax whose result goes into a matrix product."""
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
    """Which precisions the operators that decide the speed run in, and which ones run in plain reference code."""
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
        with quiet(), no_telemetry(), torch.no_grad():
            model = _CONVERTERS[converter](candidate)
        _name_inputs(model, signature)
        model.set_rt_info(";".join(",".join(map(str, leaf.shape)) for leaf in candidate.leaves), HOT)
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        write_model(model, folder)
    except (*CONVERSION_ERRORS, *frontend_errors(openvino)) as error:
        raise CompileError(f"{first_line(error)}.") from error
    if wrong := wrong_graph(open_run(folder, signature), candidate, signature):
        raise CompileError(f"the converted graph is not the model: {wrong}.")


def frontend_errors(openvino: Any) -> tuple[type[Exception], ...]:
    """The converter's exceptions, which derive from :class:`Exception` itself."""
    return tuple(v for v in vars(openvino.frontend).values() if isinstance(v, type) and issubclass(v, Exception))


def _name_inputs(model: Any, signature: Signature) -> None:
    names = io_names(signature)[0]
    if len(model.inputs) != len(names):
        raise ValueError(f"the converted graph takes {counted(len(model.inputs), 'input')} instead of {len(names)}")
    for port, name in zip(model.inputs, names, strict=True):
        port.get_tensor().set_names({name})


def _trace(candidate: Candidate) -> Any:
    leaves, shapes = candidate.dynamic_leaves(), _shapes(candidate.signature)
    refuse_decisions(candidate, leaves)
    return runtime().convert_model(exportable(candidate, traced=True), example_input=tuple(leaves), input=shapes)


def _export(candidate: Candidate) -> Any:
    program, kept = export_program(candidate)
    if lost := lost_dims(candidate.signature, kept):
        raise ValueError(f"torch.export keeps no other sizes of {', '.join(lost)} than the example's")
    model = runtime().convert_model(program)
    model.reshape(dict(zip(model.inputs, _shapes(candidate.signature), strict=True)))
    return model


def _shapes(signature: Signature) -> list[Any]:
    openvino = runtime()
    dims: dict[int | str, Any] = {
        dim.name: openvino.Dimension(dim.min, -1 if dim.max is None else dim.max) for dim in signature.dims
    }
    return [openvino.PartialShape([dims.get(s, s) for s in spec.shape]) for spec in signature.inputs]


_CONVERTERS: dict[str, Callable[[Candidate], Any]] = {"trace": _trace, "export": _export}
