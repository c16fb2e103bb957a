"""A model of Triton's model repository from an artifact in ONNX or OpenVINO form."""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from trimtab.artifact.artifact import Artifact
from trimtab.artifact.manifest import MODEL
from trimtab.core.signature import Signature, TensorSpec
from trimtab.core.technique import require
from trimtab.errors import UsageError
from trimtab.serve.instance.load import joinable
from trimtab.serve.options import Options
from trimtab.serve.protocol import DATATYPES
from trimtab.serve.tuning import DEFAULT_ROWS

THREADS = {"onnxruntime": "intra_op_thread_count", "openvino": "INFERENCE_NUM_THREADS"}
"""Backend of trimtab, called the same in Triton -> its parameter for the number of threads."""

BFLOAT16 = (
    "# OpenVINO computes in bfloat16 on processors that have it, and this backend cannot tell it otherwise: outputs then "
    "differ from those\n# that trimtab proved. The ONNX form has no such difference."
)


def model(name: str, artifact: Artifact, options: Options) -> dict[str, str | bytes]:
    """The files of the model ``name``: ``config.pbtxt``, and the artifact's model files as version 1.

    Raises:
        UsageError: Triton's backends cannot run this form.
    """
    manifest = artifact.manifest
    backend = manifest.recipe["backend"]["name"]
    if backend not in THREADS:
        raise UsageError(
            f"{name} runs by {backend}; Triton is given ONNX and OpenVINO forms. Optimize again with one of those, or write "
            "another target."
        )
    files: dict[str, str | bytes] = {
        f"1/{file.removeprefix(f'{MODEL}/')}": (artifact.path / file).read_bytes()
        for file in manifest.files
        if file.startswith(f"{MODEL}/")
    }
    inputs, outputs = _names(artifact, backend, files)
    threads = options.threads or manifest.settings.threads
    return {"config.pbtxt": _config(name, backend, manifest.signature, inputs, outputs, threads, options)} | files


def _names(artifact: Artifact, backend: str, files: dict[str, str | bytes]) -> tuple[list[str | None], list[str]]:
    """Names in the file, in the order of the signature; ``None`` for an input that the graph does not take.

    A port of OpenVINO without a name gets one, in ``files``.
    """
    folder = artifact.path / MODEL
    if backend == "openvino":
        found = require("openvino").Core().read_model(folder / "model.xml")
        if _name_unnamed({"input": found.inputs, "output": found.outputs}):
            with tempfile.TemporaryDirectory(prefix="trimtab-triton-") as place:
                require("openvino").serialize(found, f"{place}/model.xml", f"{place}/model.bin")
                files |= {f"1/{name}": pathlib.Path(place, name).read_bytes() for name in ("model.xml", "model.bin")}
        return [port.any_name for port in found.inputs], [port.any_name for port in found.outputs]
    graph = require("onnx").load(folder / "model.onnx", load_external_data=False)
    order = next(item.value for item in graph.metadata_props if item.key == "trimtab.inputs").split(",")
    known = {item.name for item in graph.graph.input}
    return [each if each in known else None for each in order], [item.name for item in graph.graph.output]


def _name_unnamed(ports: dict[str, Sequence[Any]]) -> bool:
    """Name the ports that have no name; whether there were any."""
    bare = [(f"{kind}_{place}", port) for kind, found in ports.items() for place, port in enumerate(found) if not port.names]
    for name, port in bare:
        port.get_tensor().set_names({name})
    return bool(bare)


def _config(
    name: str,
    backend: str,
    signature: Signature,
    inputs: Sequence[str | None],
    outputs: Sequence[str],
    threads: int | None,
    options: Options,
) -> str:
    """``config.pbtxt``: Triton adds the batch to the sizes of tensors itself where ``max_batch_size`` is above 0."""
    dim = next((dim for dim in signature.dims if dim.name == signature.batch), None)
    batched = dim is not None and joinable(signature) and dim.min <= 1 and dim.step == 1
    wanted = options.batch or (dim.max if dim is not None else None) or DEFAULT_ROWS
    rows = 0 if dim is None or not batched else min(wanted, dim.max or wanted)
    lines = [
        f"# {name}, for Triton's {backend} backend. Written from the artifact's signature; not run.",
        *([BFLOAT16] if backend == "openvino" else []),
        f"name: {json.dumps(name)}",
        f"backend: {json.dumps(backend)}",
        f"max_batch_size: {rows}",
        *[
            _tensor("input", one, spec, bool(rows))
            for one, spec in zip(inputs, signature.inputs, strict=True)
            if one is not None
        ],
        *[_tensor("output", one, spec, bool(rows)) for one, spec in zip(outputs, signature.outputs, strict=True)],
        f"instance_group [ {{ count: {options.instances or 1} kind: KIND_CPU }} ]",
    ]
    if rows:
        lines.append(f"dynamic_batching {{ max_queue_delay_microseconds: {round(options.max_wait_s * 1e6)} }}")
    if threads is not None:
        lines.append(f'parameters {{ key: "{THREADS[backend]}" value {{ string_value: "{threads}" }} }}')
    return "\n".join(lines) + "\n"


def _tensor(kind: str, name: str, spec: TensorSpec, batched: bool) -> str:
    sizes = [size if isinstance(size, int) else -1 for size in spec.shape][int(batched) :]
    # Triton wants at least one size: a number for each row is given one, and taken from it again
    shape = f"dims: [ {', '.join(map(str, sizes))} ]" if sizes else "dims: [ 1 ] reshape { shape: [ ] }"
    return f"{kind} [ {{ name: {json.dumps(name)} data_type: TYPE_{DATATYPES[spec.dtype][0]} {shape} }} ]"
