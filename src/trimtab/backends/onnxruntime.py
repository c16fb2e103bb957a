"""ONNX Runtime on the CPU."""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._C import _from_dlpack as from_dlpack  # torch's public wrappers take longer than the conversion itself
from torch._C import _to_dlpack as to_dlpack

from trimtab._internal.text import counted
from trimtab.backends.common import float_layers, onnx_file
from trimtab.backends.common import onnx_int8 as int8
from trimtab.backends.common.causes import CONVERSION_ERRORS, first_line
from trimtab.backends.common.foreign import (
    Conversion,
    Row,
    Run,
    apply_writes,
    calibration_rows,
    check_fields,
    no_numpy_form,
    read_conversion,
    returning_writes,
    signature_with_writes,
)
from trimtab.backends.common.io_names import io_names
from trimtab.backends.common.onnx_export import TRACING, export_onnx, model_files, write_metadata
from trimtab.backends.common.onnx_file import FATAL, MODEL, load_model, open_model
from trimtab.backends.common.scratch import copy_files, data_fingerprint, fingerprint, own_folder, shared_folder
from trimtab.core.backend import Backend, Executable
from trimtab.core.candidate import Candidate
from trimtab.core.measurement import OperatorTime, operator_shares
from trimtab.core.settings import Settings
from trimtab.core.signature import Signature
from trimtab.core.technique import require
from trimtab.errors import CompileError, IntegrityError
from trimtab.hardware import environment
from trimtab.importers.onnx.session import open_session, runtime_errors
from trimtab.passes.common.quantized import is_quantized
from trimtab.tensors.weights import weights

_EXACT_PRODUCTS = f"""    flags = open("/proc/cpuinfo").read().split() if platform.system() == "Linux" else ["avx_vnni"]
    if platform.machine() in ("x86_64", "AMD64") and {{"avx512_vnni", "avx_vnni"}}.isdisjoint(flags):  # else sums saturate
        options.add_session_config_entry("{onnx_file.EXACT_PRODUCTS}", "1")
"""
"""Code for ``run.py`` that enables exact int8 products on the CPU that it runs on."""


BOOLEAN = "tensor(bool)"


class OnnxExecutable(Executable):
    """A session of ONNX Runtime. Tensors are passed through DLPack without copies, and the outputs belong to the caller. On an
    8x8 CNN with 26 microseconds per call, this saves 3 against numpy arrays."""

    own_threads = True

    def __init__(
        self, session: Any, signature: Signature, settings: Settings, folder: pathlib.Path, owned: object = None
    ) -> None:
        super().__init__(signature, settings)
        inputs, outputs = session.get_inputs(), session.get_outputs()
        order = io_names(signature)[0]
        self._names, self._outputs = [item.name for item in inputs], [item.name for item in outputs]
        if not set(self._names) <= set(order) or len(outputs) != len(signature_with_writes(signature).outputs):
            raise IntegrityError(
                f"{folder / MODEL} takes {', '.join(self._names)}, but the signature lists {', '.join(order)}."
            )
        # the session does not support DLPack's booleans; they are passed as bytes
        self._feeds = [(order.index(item.name), item.type == BOOLEAN) for item in inputs]
        self._booleans = [place for place, item in enumerate(outputs) if item.type == BOOLEAN]
        self._written = signature.written
        state = require("onnxruntime").capi._pybind_state
        self._vector, self._options = state.OrtValueVector, state.RunOptions()
        self._options.log_severity_level = FATAL
        self._devices = [state.OrtDevice(state.OrtDevice.cpu(), state.OrtDevice.default_memory(), 0)] * len(outputs)
        self._run: Callable[..., Any] | None = getattr(session, "_sess", session).run_with_ortvaluevector
        self._session = session
        self._folder = folder
        self._owned = owned

    def run(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the session. Inputs need not be contiguous.

        Raises:
            RuntimeError: the session failed. ONNX Runtime's own exceptions derive from :class:`Exception` directly.
        """
        assert self._run is not None, "closed"
        feeds, found = self._vector(), self._vector()
        for place, boolean in self._feeds:
            leaf = leaves[place]
            if not (leaf.is_cpu and leaf.is_contiguous()) or leaf.is_neg():
                leaf = leaf.cpu().resolve_neg().contiguous()
            feeds.push_back(to_dlpack(leaf.view(torch.uint8) if boolean else leaf), boolean)
        try:
            self._run(self._options, self._names, feeds, self._outputs, found, self._devices)
        except runtime_errors() as error:
            raise RuntimeError(str(error)) from error
        outputs: list[torch.Tensor] = found.to_dlpacks(from_dlpack)
        for place in self._booleans:
            outputs[place] = outputs[place].view(torch.bool)
        return apply_writes(leaves, outputs, self._written) if self._written else outputs

    def operator_times(self, leaves: Sequence[torch.Tensor], repeats: int) -> list[OperatorTime]:
        """Times from the profile of a second session with profiling enabled."""
        with tempfile.TemporaryDirectory(prefix="trimtab-profile-") as place:
            options = self._session.get_session_options()
            options.enable_profiling, options.profile_file_prefix = True, f"{place}/profile"
            session = open_session(self._folder / MODEL, options)[0]
            profiled = OnnxExecutable(session, self.signature, self.settings, self._folder)
            for _ in range(repeats + 1):
                profiled.run(leaves)
            events = json.loads(pathlib.Path(session.end_profiling()).read_text(encoding="utf-8"))
        return operator_shares(_kernels(events), repeats)

    def _new_instance(self) -> Executable:
        """The same session, which takes calls of several threads at once."""
        return OnnxExecutable(self._session, self.signature, self.settings, self._folder)

    def save(self, folder: pathlib.Path) -> list[str]:
        """Copy the ONNX file, and its external weights if there are any."""
        return copy_files(self._folder, model_files(self._folder), folder)

    def close(self) -> None:
        self._run = self._session = None
        if isinstance(self._owned, tempfile.TemporaryDirectory):
            self._owned.cleanup()


@dataclass(frozen=True, kw_only=True)
class OnnxRuntime(Backend):
    """Microsoft's ONNX Runtime: fused graphs and optimized kernels in a small library that does not need torch.

    Pays off for most networks at small batches, because of its fusions and its low overhead per call, and for small
    deployments. Dynamic int8 pays off for transformers and recurrent networks (on one machine a small LSTM ran 2.8 times as
    fast; all other runtimes gained less than half of that), static int8 for convolutions; both on CPUs with VNNI or similar
    instructions. On an AVX2 CPU without VNNI, static int8 ran 1.3 times as fast as float32 for a CNN of 100 microseconds, and
    0.94 times for one of 45. Dynamic dimensions cost little (MiniLM: 7.6 ms with them, 7.9 ms without), so they are kept if the
    export keeps them. Source: https://onnxruntime.ai/docs/performance/model-optimizations/
    """

    requires = ("onnx", "onnxscript", "onnxruntime")
    packages = ("onnxruntime", "numpy")
    honours = frozenset({"threads", "data.batch"})
    own_graph = True
    tells_fallbacks = True  # a session cannot be created for a graph with an operator without kernel

    precision: Literal["f32", "int8_dynamic", "int8_static"] = "f32"
    """``int8_dynamic`` finds the ranges of activations at run time, for transformers and LSTMs. ``int8_static`` takes them from
    calibration data, for convolutions."""
    operators: Literal["auto", "all", "linear"] = "auto"
    """Operators to quantize: ``auto`` depends on the graph, ``all``: the quantizer's default, ``linear``: matrix products."""
    float_layers: int = 0
    """Number of layers that stay float with the int8 precisions: those whose rounding changes the outputs most."""
    ranges: Literal["minmax", "percentile", "entropy"] = "minmax"
    """Bounds of activations for ``int8_static``: extremes, all but one value in ten thousand, or least loss of information."""
    form: Literal["qdq", "qoperator"] = "qdq"
    """Operators of ``int8_static`` in the file: float operators between roundings, or the runtime's int8 operators."""
    full_range: bool = False
    """Whether weights of ``int8_static`` have 8 bits on CPUs without VNNI too, where sums may saturate, instead of 7."""
    spinning: bool = True
    """Whether waiting threads spin: lower latency, but CPU time is lost for other processes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        about = {"operators": "int8", "float_layers": "int8"}
        check_fields(self, about | dict.fromkeys(("ranges", "form", "full_range"), "int8_static"))

    def describe(self) -> str:
        words = "float32" if self.precision == "f32" else "int8 weights and activations"
        where = {"auto": "", "all": " in every operator", "linear": " in matrix products"}[self.operators]
        ranges = ", ranges taken at run time" if self.precision == "int8_dynamic" else ""
        waiting = "" if self.spinning else ", idle threads asleep"
        ranges += "" if self.ranges == "minmax" else f", ranges by {self.ranges}"
        ranges += ", as int8 operators" * (self.form == "qoperator") + ", weights of 8 bits" * self.full_range
        but = f", but {counted(self.float_layers, 'layer')} in float" if self.float_layers else ""
        return f"ONNX Runtime, {words}{where}{but}{ranges}{waiting}"

    @property
    def exact(self) -> bool:
        return self.precision == "f32"

    @property
    def quantizes(self) -> bool:
        return self.precision.startswith("int8")

    @property
    def needs(self) -> frozenset[str]:
        """Static int8 needs calibration data for its ranges."""
        return frozenset({"calibration"}) if self.precision == "int8_static" else frozenset()

    @property
    def arithmetic(self) -> str:
        """Both int8 precisions compute products in int8."""
        return "float32" if self.precision == "f32" else "int8"

    def why_not_here(self) -> str | None:
        """Forms for CPUs without VNNI."""
        if self.full_range and environment.has_vnni():
            return "Weights have 8 bits here without full_range, because this CPU has VNNI."
        return None

    def why_not(self, candidate: Candidate) -> str | None:
        """Tensors must have a numpy form, and int8 needs weights to quantize."""
        sizes = {weight.dim() for weight in weights(candidate.model)}
        if self.precision == "int8_dynamic" and 2 not in sizes:
            return "int8_dynamic quantizes matrix products and LSTMs, and the model has none. Try int8_static."
        if self.precision == "int8_static" and not any(size >= 2 for size in sizes):
            return "int8_static quantizes matrix products and convolutions, and the model has none."
        return no_numpy_form(candidate.signature, "ONNX Runtime")

    def compile(self, candidate: Candidate) -> Executable:
        """Export to ONNX (or reuse the export of an earlier trial), quantize, and create a session."""
        onnxruntime = require("onnxruntime")
        candidate, kept = float_layers.choose(candidate, self.float_layers)
        owned = own_folder(candidate)
        folder = pathlib.Path(owned.name)
        graph = returning_writes(candidate)
        name = f"onnx-{fingerprint(graph, onnxruntime.__version__)}"
        with shared_folder(candidate, name, lambda base: export_onnx(graph, base, self._open_run)) as base:
            facts, per_tensor = read_conversion(base), list[str]()
            signature = candidate.keeping(facts.dims).signature
            if self.precision == "f32":
                copy_files(base, model_files(base), folder, link=True)
            else:
                rows = calibration_rows(candidate, signature) if self.precision == "int8_static" else []
                made = data_fingerprint(rows, self.precision, self.operators, self.ranges, self.form, self.full_range, kept)
                excluded = float_layers.onnx_nodes(base / MODEL, kept, candidate) if kept else []
                with shared_folder(
                    candidate, f"{name}-{made}", lambda t: self._quantize(rows, signature, base, t, excluded)
                ) as quantized:
                    copy_files(quantized, model_files(quantized), folder, link=True)
                    per_tensor = int8.per_tensor_note(quantized)
        session, unoptimized = open_model(folder, threads=candidate.settings.threads, spinning=self.spinning)
        executable = OnnxExecutable(session, signature, candidate.settings, folder, owned)
        executable.notes += [unoptimized] if unoptimized else []
        executable.notes += [*_notes(candidate, signature, facts), *float_layers.note(kept), *per_tensor]
        if self.precision != "f32" or is_quantized(candidate.model):
            executable.notes += int8.coverage(folder / MODEL)
        return executable

    def load(self, folder: pathlib.Path, signature: Signature, settings: Settings) -> Executable:
        """Check that the file refers to no other files, and create a session."""
        session = load_model(folder, threads=settings.threads, spinning=self.spinning, int8=self.precision != "f32")
        return OnnxExecutable(session, signature, settings, folder)

    def script(self) -> str:
        """Runs the ONNX file with ONNX Runtime; 8-bit weights are computed exactly on any x86 CPU, as in :meth:`load`."""
        wide = _EXACT_PRODUCTS if self.precision != "f32" and environment.has_vnni() else ""
        return f"""
def load(folder, threads):
    import onnxruntime, platform
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, threads or 0
    options.add_session_config_entry("session.intra_op.allow_spinning", "{int(self.spinning)}")
{wide}    path, where = f"{{folder}}/model.onnx", ["CPUExecutionProvider"]
    try:
        session = onnxruntime.InferenceSession(path, options, providers=where)
    except Exception:  # its optimizer fails on some valid models
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(path, options, providers=where)
    names = session.get_modelmeta().custom_metadata_map["trimtab.inputs"].split(",")
    known, outputs = {{item.name for item in session.get_inputs()}}, [item.name for item in session.get_outputs()]
    def call(arrays):
        return session.run(outputs, {{name: array for name, array in zip(names, arrays) if name in known}})
    return call
"""

    def _quantize(
        self, rows: Sequence[Row], signature: Signature, base: pathlib.Path, folder: pathlib.Path, excluded: Sequence[str]
    ) -> None:
        """Write the int8 model into ``folder``: with one scale per channel of a weight or, if that fails, one per weight."""
        names = io_names(signature)[0]
        failure: Exception | None = None
        for per_channel in (True, False):
            try:
                self._quantize_weights(rows, names, base, folder, excluded, per_channel)
                write_metadata(folder / MODEL, names, weight_bits=int8.weight_bits(self.full_range))
                break
            except (*CONVERSION_ERRORS, *runtime_errors()) as error:
                failure = failure or error
                if not per_channel or isinstance(error, OSError | MemoryError):
                    words = f"ONNX Runtime cannot quantize this model ({self.precision}): {first_line(failure)}."
                    raise CompileError(words) from failure
                int8.remove_prepared(folder, whole=True)
        int8.remove_prepared(folder)
        if failure is not None:
            (folder / int8.PER_TENSOR).write_text(first_line(failure), encoding="utf-8")

    def _quantize_weights(
        self,
        rows: Sequence[Row],
        names: Sequence[str],
        base: pathlib.Path,
        folder: pathlib.Path,
        excluded: Sequence[str],
        per_channel: bool,
    ) -> None:
        prepared, target = folder / "prepared.onnx", folder / MODEL
        int8.prepare(base / MODEL, prepared)
        if self.precision == "int8_dynamic":
            int8.quantize_dynamic(prepared, target, self.operators, excluded, per_channel=per_channel)
            return
        known = {item.name for item in require("onnx").load(prepared, load_external_data=False).graph.input}
        int8.quantize_static(
            prepared,
            target,
            self.operators,
            int8.Calibration(rows, names, known),
            ranges=self.ranges,
            form=self.form,
            full=self.full_range,
            excluded=excluded,
            per_channel=per_channel,
        )

    def _open_run(self, folder: pathlib.Path, signature: Signature) -> Run:
        session = open_model(folder, threads=None, spinning=self.spinning)[0]
        return OnnxExecutable(session, signature, Settings(), folder).run


def _kernels(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, int, float]]:
    """Kernels of all calls but the first, which warms up, as ``(operator, calls, milliseconds)``."""
    seen: set[str] = set()
    for event in events:
        if event.get("cat") != "Node" or not event["name"].endswith("_kernel_time"):
            continue
        if event["name"] in seen:
            yield event["args"]["op_name"], 1, event["dur"] / 1e3
        seen.add(event["name"])


def _notes(candidate: Candidate, signature: Signature, facts: Conversion) -> list[str]:
    notes = []
    model = candidate.model
    if any(tensor.dtype is torch.float16 for tensor in (*candidate.leaves, *model.parameters(), *model.buffers())):
        notes.append("Computes in float32, with casts around it, where it has no kernel for float16.")
    if facts.way == TRACING:
        notes.append(f"Exported by tracing, because the newer exporter cannot: {facts.notes[0].partition(': ')[2]}")
    if lost := [dim.name for dim in candidate.signature.dims if dim not in signature.dims]:
        notes.append(f"Built for the example's {', '.join(lost)} only: {' '.join(facts.notes)}")
    return notes
