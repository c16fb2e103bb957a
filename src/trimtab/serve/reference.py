"""The process of a shadow: ``python -m trimtab.serve.reference FD SETTINGS``.

It loads the original model of an artifact, or another artifact, and compares its outputs with those that were served. It runs
with one thread, at the lowest priority.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

import torch

from trimtab._internal.user_code import user_code
from trimtab.artifact.artifact import Artifact, load, open_artifact
from trimtab.artifact.padded_batches import PaddedExecutable
from trimtab.artifact.test_vectors import output_error
from trimtab.core.backend import Executable
from trimtab.core.signature import Dim, Signature
from trimtab.errors import TrimtabError, UsageError
from trimtab.serve.instance.load import joinable
from trimtab.serve.instance.load_torch import tensors_of
from trimtab.serve.instance.wire import Array, arrays_in, codes_of, frames, send
from trimtab.tensors.comparison import is_discrete
from trimtab.tensors.structure import flatten, unflatten


class Caller:
    """Calls an executable with flat tensors. A batch that its runtime does not take is split and padded."""

    def __init__(self, executable: Executable, signature: Signature) -> None:
        self._executable, self._signature = executable, signature
        self._padded = PaddedExecutable(executable, _any_batch(signature) if joinable(signature) else signature)

    def __call__(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The outputs."""
        with user_code("The model failed"):
            if self._signature.fits(leaves):
                return self._executable.run(leaves)
            args, kwargs = unflatten(self._signature.input_structure, leaves)
            return flatten(self._padded(*args, **kwargs), "the output")[0]


def _any_batch(signature: Signature) -> Signature:
    """``signature`` with a batch dimension of any size, for which the executable's batches are split and padded."""
    dims = tuple(Dim(dim.name) if dim.name == signature.batch else dim for dim in signature.dims)
    return dataclasses.replace(signature, dims=dims)


class Reference:
    """The reference model, whose outputs are taken as correct.

    Raises:
        UsageError: the original model does not travel with the artifact, or ``other`` has another signature.
        TrimtabError: a folder cannot be loaded.
    """

    def __init__(self, path: str, other: str | None, *, trust: bool) -> None:
        self._artifact = open_artifact(path)
        signature = self._artifact.manifest.signature
        self._specs = (*signature.inputs, *signature.outputs)
        self._codes = codes_of(self._specs)
        self._inputs = len(signature.inputs)
        self._call = _original(self._artifact) if other is None else _substitute(self._artifact, open_artifact(other), trust)

    def description(self) -> dict[str, Any]:
        """The names of the outputs, and their relative tolerances; for integers the share of values that may differ."""
        golden = self._artifact.manifest.golden
        pairs = zip(golden.tolerance, golden.scale, strict=True)
        names = self._artifact.manifest.signature.output_names
        return {"outputs": names, "tolerances": [most / scale if scale else most for most, scale in pairs]}

    def compare(self, body: Array, shapes: Sequence[Sequence[int]]) -> list[float | None] | None:
        """The relative error of each output that was served; ``None`` for one that is not finite or has another shape. ``None``
        for all if the reference itself is not finite. ``body`` holds the inputs and the outputs that were served.

        Raises:
            TrimtabError: the reference does not take these inputs.
        """
        leaves = tensors_of(arrays_in(body, shapes, self._codes), self._specs)
        wanted = self._call(leaves[: self._inputs])
        if not all(is_discrete(want.dtype) or bool(want.isfinite().all()) for want in wanted):
            return None
        scales = self._artifact.manifest.golden.scale
        errors = [
            output_error(got, want, scale) / (scale or 1.0)
            for got, want, scale in zip(leaves[self._inputs :], wanted, scales, strict=True)
        ]
        return [error if math.isfinite(error) else None for error in errors]


def _original(artifact: Artifact) -> Caller:
    baseline, manifest = artifact.load_baseline(), artifact.manifest
    if baseline is None or manifest.baseline is None:
        raise UsageError(
            f"--shadow needs the original model, which does not travel with {artifact.path}: {manifest.baseline_reason} Name "
            "an artifact of the same signature as the reference: --shadow-from ARTIFACT."
        )
    return Caller(baseline, manifest.baseline.signature)


def _substitute(artifact: Artifact, other: Artifact, trust: bool) -> Caller:
    ours, theirs = artifact.manifest.signature, other.manifest.signature
    if _specs_without_sizes(ours) != _specs_without_sizes(theirs):
        raise UsageError(
            f"--shadow-from {other.path} has the signature {theirs.describe()}; {artifact.path} has {ours.describe()}. Give an "
            "artifact of the same signature."
        )
    return Caller(load(other.path, trust=trust, threads=1), theirs)


def _specs_without_sizes(signature: Signature) -> list[list[tuple[str, int, str]]]:
    """Name, rank and dtype of each input and output. Sizes may differ: the reference splits and pads batches."""
    return [[(spec.name, len(spec.shape), spec.dtype) for spec in specs] for specs in (signature.inputs, signature.outputs)]


def _lower_priority() -> None:
    """Run at the lowest priority: only on idle CPU time."""
    os.nice(19)
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main(descriptor: int, settings: dict[str, Any]) -> None:
    """Load, and compare until the front process closes the connection."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    torch.set_num_threads(1)
    try:
        reference = Reference(settings["path"], settings["other"], trust=settings["trust"])
    except TrimtabError as error:
        send(connection, {"refused": type(error).__name__, "message": str(error)})
        return
    _lower_priority()
    send(connection, {"ready": reference.description()})
    for head, body in frames(connection):
        try:
            errors = reference.compare(body, head["shapes"])
        except TrimtabError:
            errors = None
        send(connection, {"id": head["id"], "errors": errors})


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the front process has ended
        main(int(sys.argv[1]), json.loads(sys.argv[2]))
    os._exit(0)  # without the teardown of runtimes, which can crash
