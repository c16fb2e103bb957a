"""Load an artifact for a process that serves it: without torch where its runtime needs none."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from safetensors.numpy import load_file

from trimtab._internal.text import with_remedy
from trimtab.artifact.manifest import GOLDEN, MANIFEST, MODEL, REMEDY, Manifest, check_files, read_manifest, version_mismatch
from trimtab.artifact.parity import LOAD_ERRORS, Parities, array_error, check_case, parities, read_vectors, worst_errors
from trimtab.backends.common.array_models import ARRAY_MODELS
from trimtab.core.signature import Signature
from trimtab.errors import IntegrityError, TrimtabError, UsageError
from trimtab.hardware import system
from trimtab.serve.instance.wire import Array
from trimtab.serve.protocol import DATATYPES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model that is called with numpy arrays, in the order of the signature."""

    path: pathlib.Path
    manifest: Manifest
    threads: int | None
    run: Callable[[Sequence[Array]], Sequence[Array]]
    parities: Callable[[], Parities]
    """Replays the test vectors."""
    examples: Sequence[Sequence[Array]]
    """The inputs of the test vectors."""


def load_artifact(path: pathlib.Path, *, trust: bool, threads: int | None) -> Loaded:
    """Load the artifact in ``path``. The module for artifacts whose runtime is torch is imported for those only.

    Raises:
        TrimtabError: the artifact cannot be loaded, or the protocol cannot carry its tensors.
    """
    manifest = read_manifest(path)
    refuse_signature(manifest.signature)
    threads = threads or manifest.settings.threads
    backend = manifest.recipe["backend"]
    if not isinstance(backend, Mapping) or backend.get("name") not in ARRAY_MODELS:
        module = importlib.import_module("trimtab.serve.instance.load_torch")
        found: Loaded = module.load_tensors(path, manifest, trust=trust, threads=threads)
        return found
    return _load_arrays(path, manifest, backend, threads)


@with_remedy(REMEDY)
def _load_arrays(path: pathlib.Path, manifest: Manifest, backend: Mapping[str, Any], threads: int | None) -> Loaded:
    """The artifact of a runtime that takes numpy arrays."""
    check_files(path, manifest)
    if manifest.settings.memory.keep_freed:
        system.keep_freed_memory()
    signature = manifest.signature
    if manifest.native_code:
        raise IntegrityError(f"{MANIFEST} is wrong about whether {backend['name']} files are machine code.")
    try:
        run = ARRAY_MODELS[backend["name"]](path / MODEL, backend, signature, threads)
    except IntegrityError as error:
        if (explained := version_mismatch(error, manifest.packages, manifest.environment)) is None:
            raise
        raise explained from error
    except TrimtabError:
        raise
    except LOAD_ERRORS as error:
        raise IntegrityError(f"{backend['name']} cannot read the files in {path / MODEL}: {str(error)[:300]}") from error
    counts = manifest.golden.cases, len(signature.inputs), len(signature.outputs)
    vectors = read_vectors(path / GOLDEN, load_file, *counts)
    for inputs, outputs in vectors:
        check_case(inputs, outputs, manifest)
    measure = functools.partial(worst_errors, vectors, run, manifest.golden.scale, array_error)
    return Loaded(
        path=path,
        manifest=manifest,
        threads=threads,
        run=run,
        parities=lambda: parities(measure, manifest),
        examples=[inputs for inputs, _ in vectors],
    )


def refuse_signature(signature: Signature) -> None:
    """Raise ``UsageError`` for a signature that the protocol cannot carry."""
    for spec in (*signature.inputs, *signature.outputs):
        if spec.dtype not in DATATYPES:
            raise UsageError(
                f"The tensor {spec.name!r} has the dtype {spec.dtype}, which the Open Inference Protocol does not have. Return "
                "real and imaginary parts: torch.view_as_real."
            )
    if signature.writes:
        raise UsageError(
            f"A call of this model writes to its input {signature.writes[0]!r}, which stays with the caller; a server cannot "
            "hand it back. Return the new value as an output, and optimize again."
        )
    if not signature.inputs:
        raise UsageError("This model takes no tensors; there is nothing to send to it.")


def joinable(signature: Signature) -> bool:
    """Whether the batch is the first axis of every input and output, and of no other axis."""
    batch = signature.batch
    shapes: list[Any] = [spec.shape for spec in (*signature.inputs, *signature.outputs)]
    return batch is not None and all(shape[:1] == (batch,) and batch not in shape[1:] for shape in shapes)
