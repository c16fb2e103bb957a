"""The process of a shadow: ``python -m trimtab.serve.reference FD SETTINGS``.

It loads the original model of an artifact, or another artifact, and compares its outputs with those that were served. It runs
with one thread, at the lowest priority.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

import torch

from trimtab.artifact.artifact import Artifact, load, open_artifact
from trimtab.artifact.test_vectors import output_error
from trimtab.core.signature import Signature
from trimtab.errors import TrimtabError, UsageError
from trimtab.serve.instance import Caller, dtypes_of, frames, output_names, send, tensors_in
from trimtab.tensors.comparison import is_discrete


class Reference:
    """The model whose outputs count as right.

    Raises:
        UsageError: the original model does not travel with the artifact, or ``other`` has another signature.
        TrimtabError: a folder cannot be loaded.
    """

    def __init__(self, path: str, other: str | None, *, trust: bool) -> None:
        self._artifact = open_artifact(path)
        signature = self._artifact.manifest.signature
        self._dtypes = dtypes_of((*signature.inputs, *signature.outputs))
        self._inputs = len(signature.inputs)
        self._call = _original(self._artifact) if other is None else _other(self._artifact, open_artifact(other), trust)

    def description(self) -> dict[str, Any]:
        """The names of the outputs, and their relative tolerances; for integers the share of values that may differ."""
        golden = self._artifact.manifest.golden
        pairs = zip(golden.tolerance, golden.scale, strict=True)
        names = output_names(self._artifact.manifest.signature)
        return {"outputs": names, "tolerances": [most / scale if scale else most for most, scale in pairs]}

    def compare(self, body: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[float | None] | None:
        """The relative error of each output that was served; ``None`` for one that is not finite or has another shape. ``None``
        for all if the reference itself is not finite. ``body`` holds the inputs and the outputs that were served.

        Raises:
            TrimtabError: the reference does not take these inputs.
        """
        leaves = tensors_in(body, shapes, self._dtypes)
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


def _other(artifact: Artifact, other: Artifact, trust: bool) -> Caller:
    ours, theirs = artifact.manifest.signature, other.manifest.signature
    if _kinds(ours) != _kinds(theirs):
        raise UsageError(
            f"--shadow-from {other.path} has the signature {theirs.describe()}; {artifact.path} has {ours.describe()}. Give an "
            "artifact of the same signature."
        )
    return Caller(load(other.path, trust=trust, threads=1), theirs)


def _kinds(signature: Signature) -> list[list[tuple[str, int, str]]]:
    """Name, rank and dtype of each input and output. Sizes may differ: the reference splits and pads batches."""
    return [[(spec.name, len(spec.shape), spec.dtype) for spec in specs] for specs in (signature.inputs, signature.outputs)]


def _yield_to_others() -> None:
    """Take CPU time only when nothing else wants it."""
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
    _yield_to_others()
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
