"""Load an artifact whose runtime is torch. Arrays are tensors that share their memory; bfloat16 is held as uint16."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import torch

from trimtab.artifact.artifact import Artifact, load, replay
from trimtab.artifact.manifest import Manifest
from trimtab.core.signature import TensorSpec
from trimtab.serve.instance.load import Loaded
from trimtab.serve.instance.wire import Array


def load_tensors(path: pathlib.Path, manifest: Manifest, *, trust: bool, threads: int | None) -> Loaded:
    """The artifact of a runtime that takes tensors.

    Raises:
        TrimtabError: as :func:`trimtab.artifact.artifact.load`.
    """
    executable = load(path, trust=trust, threads=threads)
    golden = Artifact(path, manifest).golden()

    def run(arrays: Sequence[Array]) -> list[Array]:
        return [array_of(tensor) for tensor in executable.run(tensors_of(arrays, manifest.signature.inputs))]

    return Loaded(
        path=path,
        manifest=manifest,
        threads=executable.settings.threads,
        run=run,
        parities=lambda: replay(executable, golden, manifest),
        examples=[[array_of(tensor) for tensor in case.inputs] for case in golden.cases],
    )


def tensors_of(arrays: Sequence[Array], specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Tensors of the dtypes of ``specs`` that share the memory of ``arrays``."""
    pairs = zip(arrays, specs, strict=True)
    return [torch.from_numpy(array).view(getattr(torch, spec.dtype)) for array, spec in pairs]


def array_of(tensor: torch.Tensor) -> Array:
    """An array that shares the memory of ``tensor``, if that is contiguous and on the CPU."""
    plain = tensor.detach().contiguous()
    return (plain.view(torch.uint16) if plain.dtype is torch.bfloat16 else plain).numpy(force=True)
