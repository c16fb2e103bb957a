"""OpenVINO on the CPU."""

from __future__ import annotations

import copy
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import nn

from trimtab._internal.text import counted
from trimtab.backends.common import float_layers
from trimtab.backends.common import openvino_conversion as ir
from trimtab.backends.common import openvino_file as file
from trimtab.backends.common.causes import CONVERSION_ERRORS, first_line
from trimtab.backends.common.foreign import (
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
from trimtab.backends.common.openvino_request import Request, run_queue
from trimtab.backends.common.scratch import copy_files, data_fingerprint, fingerprint, own_folder, shared_folder
from trimtab.core.backend import Backend, Executable
from trimtab.core.candidate import Candidate
from trimtab.core.measurement import OperatorTime
from trimtab.core.settings import Settings
from trimtab.core.signature import Signature
from trimtab.core.technique import Choice, install_hint, missing_package
from trimtab.errors import CompileError, InputError, IntegrityError, UsageError
from trimtab.tensors.weights import weight_bytes, weights

MIN_INT4_MB = 64.0
"""Least weights, in MB of float32, with which 4 bits can pay; fewer fit into the caches of a server."""


class OpenVinoExecutable(Executable):
    """A model compiled for the example's sizes and, when other sizes come, once more for any size."""

    own_threads = True

    def __init__(
        self, folder: pathlib.Path, config: dict[str, Any], signature: Signature, settings: Settings, owned: object = None
    ) -> None:
        super().__init__(signature, settings)
        self._folder, self._config, self._owned = folder, config, owned
        self._graph = signature_with_writes(signature)
        model = file.read_model(folder)
        if (len(model.inputs), len(model.outputs)) != (len(signature.inputs), len(self._graph.outputs)):
            raise IntegrityError(
                f"{folder / file.MODEL} has other inputs or outputs than the signature: {signature.describe()}."
            )
        shapes = file.example_shapes(model, folder, signature)
        # kept in memory for other sizes; the files may be gone or replaced by then
        self._model = model.clone() if shapes is None or signature.dims else None
        self._passthrough = file.passthrough_outputs(model)
        self._static: Request | None = None
        self._dynamic: Request | None = None
        if shapes is not None:
            file.reshape(model, shapes)
            self._static = Request(self._compile(model), self._graph, self._passthrough)
        self._shapes = [torch.Size(shape) for shape in shapes or []]
        self._takes_empty = any(dim.min == 0 for dim in signature.dims)
        """A request whose first inputs are empty gives wrong outputs later (OpenVINO 2026.4), so others go first."""

    def run(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the request for these sizes. Inputs need not be contiguous."""
        outputs = self._request(leaves).run(leaves)
        return apply_writes(leaves, outputs, self.signature.written) if self.signature.writes else outputs

    def run_many(self, requests: Sequence[Sequence[torch.Tensor]]) -> list[Sequence[torch.Tensor]]:
        """Run as many requests in parallel as there are streams."""
        wanted = [self._request(leaves) for leaves in requests]
        if len(requests) < 2 or wanted[0].parallel < 2 or self._takes_empty:
            return [self.run(leaves) for leaves in requests]
        single = all(request is wanted[0] for request in wanted)
        answers = run_queue(wanted[0] if single else self._dynamic_request(), requests)
        if not (written := self.signature.written):
            return answers
        return [apply_writes(leaves, outputs, written) for leaves, outputs in zip(requests, answers, strict=True)]

    def operator_times(self, leaves: Sequence[torch.Tensor], repeats: int) -> list[OperatorTime]:
        """OpenVINO's performance counters, of a second compilation with counters enabled; names include the kernel."""
        model = file.read_model(self._folder)
        file.reshape(model, [list(leaf.shape) for leaf in leaves])
        request = Request(self._compile(model, {"PERF_COUNT": True}), self._graph, self._passthrough)
        return request.operator_times(leaves, repeats)

    def _new_instance(self) -> Executable:
        """The same compiled models, with requests of its own."""
        twin = copy.copy(self)
        twin._owned = None
        twin._static, twin._dynamic = (
            None if request is None else Request(request.compiled, self._graph, self._passthrough)
            for request in (self._static, self._dynamic)
        )
        return twin

    def save(self, folder: pathlib.Path) -> list[str]:
        """Copy the model, with its dynamic dimensions, and its weights."""
        return copy_files(self._folder, file.FILES, folder)

    def close(self) -> None:
        self._static = self._dynamic = self._model = None
        if isinstance(self._owned, tempfile.TemporaryDirectory):
            self._owned.cleanup()

    def coverage(self) -> list[str]:
        """The runtime's report about precisions and kernels."""
        return (self._static or self._dynamic_request()).coverage()

    def _request(self, leaves: Sequence[torch.Tensor]) -> Request:
        if self._static is not None:
            for leaf, shape in zip(leaves, self._shapes, strict=True):
                if leaf.shape != shape:
                    return self._dynamic_request()
            return self._static
        return self._dynamic_request()

    def _dynamic_request(self) -> Request:
        if self._dynamic is None:
            if self._model is None:
                raise InputError(f"The model was built for the sizes {self.signature.describe()} only, or it is closed.")
            self._dynamic = Request(self._compile(self._model), self._graph, self._passthrough)
            if self._takes_empty:
                shapes = zip(file.smallest(self.signature), self.signature.inputs, strict=True)
                self._dynamic.run([torch.zeros(shape, dtype=getattr(torch, spec.dtype)) for shape, spec in shapes])
        return self._dynamic

    def _compile(self, model: Any, more: Mapping[str, Any] | None = None) -> Any:
        return file.compiled(model, {**self._config, **(more or {})})


@dataclass(frozen=True, kw_only=True)
class OpenVino(Backend):
    """Intel's OpenVINO: compiles the whole graph with oneDNN kernels; often the fastest runtime on x86 CPUs.

    Pays off for convolutional networks and transformers, already in float32, because it fuses the whole graph and chooses its
    layouts. ``int8_static`` pays off most for convolutions. Try ``int8_weights`` on every transformer: it needs no data, and on
    CPUs with VNNI the plug-in quantizes activations at run time too (on one machine BERT and MiniLM ran 2.4 times as fast at
    batch 1). It pays off least for recurrent networks: on one machine a small LSTM was slower than in eager mode in every
    precision. Inputs of other sizes than the example's run a second, more general compilation.
    Source: https://docs.openvino.ai/2026/openvino-workflow/running-inference/optimize-inference.html
    """

    requires = ("openvino",)
    packages = ("openvino", "numpy")
    honours = frozenset({"threads", "data.batch"})
    own_graph = True
    tells_fallbacks = True
    overlap = frozenset({"hint", "streams"})

    precision: Literal["f32", "bf16", "int8_static", "int8_weights", "int4_weights"] = "f32"
    """``f32`` is float32 everywhere; by default OpenVINO uses bfloat16 if the CPU supports it. ``int8_static`` takes ranges
    from calibration data; ``int8_weights`` needs none. ``int4_weights`` gives linear layers 4 bits, and embeddings, the last
    layer and the most sensitive layers 8; it is for weights that do not fit into caches, and for small files."""
    rest: Literal["f32", "bf16"] = "f32"
    """Precision of the operators that are not int8, with the int8 precisions. bfloat16 is faster on CPUs with bfloat16
    instructions (with AMX, int8 BERT ran 1.07 times as fast)."""
    operators: Literal["auto", "all"] = "auto"
    """Operators for ``int8_static``: ``auto`` leaves recurrent layers in float, ``all`` quantizes them too."""
    float_layers: int = 0
    """Number of layers that stay float with the int8 precisions, and take 8 bits with ``int4_weights``: those whose rounding
    changes the outputs most."""
    ranges: Literal["minmax", "percentile"] = "minmax"
    """Bounds of activations for ``int8_static``: extremes, or all but a small share of the values."""
    hint: Literal["latency", "throughput"] = "latency"
    """Optimize for one request at a time, or for many in parallel."""
    streams: Annotated[int | None, Choice(None, 1, 2, 4)] = None
    """Number of parallel requests; ``None``: the hint decides."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.streams is not None and self.streams < 1:
            raise UsageError(f"openvino: streams is {self.streams}; it is at least 1, or None to let the hint decide.")
        check_fields(self, {"operators": "int8_static", "rest": "int8", "float_layers": "int8", "ranges": "int8_static"})

    def describe(self) -> str:
        words = {
            "f32": "float32",
            "bf16": "bfloat16",
            "int8_static": "int8 weights and activations",
            "int8_weights": "int8 weights",
            "int4_weights": "int4 weights",
        }[self.precision]
        everything = " in every operator" if self.operators == "all" else ""
        overlap = ", many requests at once" if self.hint == "throughput" else ""
        rest = ", the rest in bfloat16" if self.rest == "bf16" else ""
        streams = f", {self.streams} stream{'s' if self.streams != 1 else ''}" if self.streams else ""
        wider = "8 bits" if self.precision == "int4_weights" else "float"
        but = f", but {counted(self.float_layers, 'layer')} in {wider}" if self.float_layers else ""
        but += "" if self.ranges == "minmax" else f", ranges by {self.ranges}"
        return f"OpenVINO, {words}{everything}{but}{rest}{overlap}{streams}"

    @property
    def exact(self) -> bool:
        return self.precision == "f32"

    @property
    def quantizes(self) -> bool:
        return self.precision.startswith("int")

    @property
    def needs(self) -> frozenset[str]:
        """Static int8 needs calibration data for its ranges."""
        return frozenset({"calibration"}) if self.precision == "int8_static" else frozenset()

    @property
    def arithmetic(self) -> str:
        """With int8 weights only, products are computed in float32."""
        return {"int8_static": "int8", "bf16": "bfloat16"}.get(self.precision, "float32")

    def why_not_here(self) -> str | None:
        """Int8 needs nncf; bfloat16 needs CPU instructions."""
        if self.quantizes and missing_package(("nncf",)):
            return f"openvino with {self.precision} needs nncf, which is not installed: {install_hint('nncf')}."
        if "bf16" in (self.precision, self.rest) and "BF16" not in file.core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            return "This CPU has no bfloat16 instructions (avx512_bf16 or amx_bf16). Use f32."
        return None

    def why_not(self, candidate: Candidate) -> str | None:
        """Tensors must have a numpy form, and int8 needs weights."""
        if self.operators != "auto" and not _recurrent(candidate.model):
            return f"operators={self.operators} is about recurrent layers, and the model has none. Leave it at auto."
        if self.precision == "int4_weights" and (size := weight_bytes(candidate.model) / 1e6) < MIN_INT4_MB:
            return (
                f"int4_weights pays where the weights do not fit into caches, above {MIN_INT4_MB:g} MB, and the model has "
                f"{size:.3g} MB. Try int8_weights."
            )
        if self.quantizes and not any(weight.dim() >= 2 for weight in weights(candidate.model)):
            return f"{self.precision} quantizes matrix products and convolutions, and the model has none."
        return no_numpy_form(candidate.signature, "OpenVINO")

    def compile(self, candidate: Candidate) -> Executable:
        """Convert (or reuse the conversion of an earlier trial), quantize, and compile for the example's sizes."""
        openvino = file.runtime()
        candidate, kept = float_layers.choose(candidate, self.float_layers)
        owned = own_folder(candidate)
        folder = pathlib.Path(owned.name)
        graph = returning_writes(candidate)
        name = f"openvino-{fingerprint(graph, openvino.__version__)}"
        with shared_folder(candidate, name, lambda base: ir.convert_openvino(graph, base, self._open_run)) as base:
            facts = read_conversion(base)
            signature = candidate.keeping(facts.dims).signature
            if self.quantizes:
                rows = calibration_rows(candidate, signature) if self.precision == "int8_static" else []
                made = data_fingerprint(rows, self.precision, self.operators, self.ranges, kept)
                with shared_folder(
                    candidate, f"{name}-{made}", lambda target: self._quantize(rows, base, target, kept, candidate)
                ) as quantized:
                    copy_files(quantized, file.FILES, folder, link=True)
            else:
                copy_files(base, file.FILES, folder, link=True)
        executable = OpenVinoExecutable(folder, self._config(candidate.settings), signature, candidate.settings, owned)
        if lost := [dim.name for dim in candidate.signature.dims if dim not in signature.dims]:
            executable.notes.append(f"Built for the example's {', '.join(lost)} only: {' '.join(facts.notes)}")
        wider = "8 bits" if self.precision == "int4_weights" else "float"
        executable.notes += [*executable.coverage(), *float_layers.note(kept, wider)]
        return executable

    def load(self, folder: pathlib.Path, signature: Signature, settings: Settings) -> Executable:
        """Read the model and compile it for the sizes that it was made for."""
        file.check_files(folder)
        try:
            return OpenVinoExecutable(folder, self._config(settings), signature, settings)
        except CompileError as error:
            raise IntegrityError(f"{folder / file.MODEL} cannot be loaded: {error}") from error

    def script(self) -> str:
        """Runs the model with OpenVINO: compiled for the first sizes that come, and for any size when others follow."""
        return f"""
def load(folder, threads):
    import numpy, openvino
    core = openvino.Core()
    config = {self._config(Settings())!r} | ({{"INFERENCE_NUM_THREADS": threads}} if threads else {{}})
    compiled = {{}}
    def call(arrays):
        shapes = tuple(array.shape for array in arrays)
        model = compiled.get(shapes) or compiled.get("any")
        if model is None:
            graph = core.read_model(f"{{folder}}/model.xml")
            if not compiled:
                graph.reshape({{port: openvino.PartialShape(list(s)) for port, s in zip(graph.inputs, shapes)}})
            model = compiled[shapes if not compiled else "any"] = core.compile_model(graph, "CPU", config)
            if "any" in compiled:  # empty inputs must not be the first that it sees: later outputs would be wrong
                model([array if array.size else numpy.zeros([n or 1 for n in array.shape], array.dtype) for array in arrays])
        outputs = model(arrays)
        return [outputs[i] for i in range(len(outputs))]
    return call
"""

    def _quantize(
        self, rows: Sequence[Row], base: pathlib.Path, folder: pathlib.Path, kept: Sequence[str], candidate: Candidate
    ) -> None:
        try:
            model = file.read_model(base)
            excluded = float_layers.openvino_nodes(model, kept, candidate)
            if self.precision.endswith("weights"):
                model = ir.compress(model, excluded, four_bits=self.precision == "int4_weights")
            else:
                model = ir.quantize(model, rows, recurrent=self.operators == "all", ranges=self.ranges, excluded=excluded)
            ir.write_model(model, folder)
        except CONVERSION_ERRORS as error:
            raise CompileError(f"NNCF cannot quantize this model ({self.precision}): {first_line(error)}.") from error

    def _config(self, settings: Settings) -> dict[str, Any]:
        return file.configuration(
            precision=self.precision, rest=self.rest, hint=self.hint, streams=self.streams, threads=settings.threads
        )

    def _open_run(self, folder: pathlib.Path, signature: Signature) -> Run:
        return OpenVinoExecutable(folder, OpenVino()._config(Settings()), signature, Settings()).run


def _recurrent(model: nn.Module) -> bool:
    """Whether the model has recurrent layers, or TorchScript, whose layers are hidden."""
    kinds = (nn.RNNBase, nn.RNNCellBase, torch.jit.ScriptModule)
    return any(isinstance(part, kinds) for module in model.modules() for part in (module, *vars(module).values()))
