"""One copy of a model in a process of its own: ``python -m trimtab.serve.instance FD SETTINGS``.

It loads the artifact, replays its test vectors, warms up, says that it is ready, and answers frames until its socket closes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from trimtab._internal.user_code import user_code
from trimtab.artifact.artifact import Artifact, load, open_artifact, replay
from trimtab.artifact.padded_batches import PaddedExecutable
from trimtab.artifact.templates import LABELS
from trimtab.core.backend import Executable
from trimtab.core.signature import Dim, Signature, TensorSpec
from trimtab.errors import IntegrityError, TrimtabError, UsageError
from trimtab.serve.frames import PREFIX, aligned, pack
from trimtab.serve.protocol import DATATYPES
from trimtab.tensors.structure import flatten, unflatten

WARM_CALLS = 2
"""Calls with the largest batch before an instance is ready."""


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


class Served:
    """A loaded artifact that answers calls with flat tensors.

    Raises:
        TrimtabError: the artifact cannot be served, or its outputs on the test vectors are wrong.
    """

    def __init__(self, path: str, *, trust: bool, threads: int | None) -> None:
        self.artifact = open_artifact(path)
        self.signature = self.artifact.manifest.signature
        refuse_signature(self.signature)
        self.executable: Executable = load(path, trust=trust, threads=threads)
        self.call = Caller(self.executable, self.signature)
        self._dtypes = dtypes_of(self.signature.inputs)

    def prove(self) -> None:
        """Replay the test vectors. Raises ``IntegrityError`` if an output is out of its tolerance."""
        parity = replay(self.executable, self.artifact.golden(), self.artifact.manifest)
        if not parity.ok:
            raise IntegrityError(f"{self.artifact.path} is not served: {parity.reason} Make one on this machine.")

    def rows_of_example(self, rows: int) -> list[torch.Tensor]:
        """The artifact's first test vector, repeated or cut to ``rows`` rows."""
        leaves = [tensor.clone() for tensor in self.artifact.golden().cases[0].inputs]
        if not joinable(self.signature):
            return leaves
        return [leaf.index_select(0, torch.arange(rows) % leaf.shape[0]) for leaf in leaves]

    def tensors(self, body: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The inputs in a received body, without copies."""
        return tensors_in(body, shapes, self._dtypes)

    def description(self) -> dict[str, Any]:
        """What the front process must know about the model."""
        manifest, signature = self.artifact.manifest, self.signature
        names = {"inputs": [spec.name for spec in signature.inputs], "outputs": output_names(signature)}
        specs = {"inputs": signature.inputs, "outputs": signature.outputs}
        facts: dict[str, Any] = {
            kind: [
                {"name": name, "dtype": spec.dtype, "shape": spec.shape}
                for name, spec in zip(names[kind], specs[kind], strict=True)
            ]
            for kind in names
        }
        example = [torch.flatten(leaf)[:1024].tolist() for leaf in self.rows_of_example(1)]
        shapes = [list(leaf.shape) for leaf in self.rows_of_example(1)]
        return facts | {
            "dims": {dim.name: (dim.min, dim.max, dim.step) for dim in signature.dims},
            "batch": signature.batch,
            "joinable": joinable(signature),
            "platform": f"trimtab_{manifest.recipe['backend']['name']}",
            "threads": self.executable.settings.threads,
            "example": {"shapes": shapes, "data": example},
            "known": self._known(),
            "card": _card(self.artifact),
        }

    def _known(self) -> list[dict[str, float] | None]:
        """Range, mean and standard deviation of the finite values of each input over all test vectors."""
        cases = self.artifact.golden().cases
        whole = [torch.cat([case.inputs[i].flatten() for case in cases]) for i in range(len(self.signature.inputs))]
        values = [leaf.double()[leaf.double().isfinite()] for leaf in whole]
        return [
            {"low": float(v.min()), "high": float(v.max()), "mean": float(v.mean()), "std": float(v.std(correction=0))}
            if v.numel()
            else None
            for v in values
        ]

    def rate(self, rows: int, seconds: float) -> float:
        """Rows per second of calls with ``rows`` rows one after another for ``seconds``."""
        leaves = self.rows_of_example(rows)
        self.call(leaves)
        start, calls = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - start) < seconds or calls < 3:
            self.call(leaves)
            calls += 1
        return rows * calls / elapsed


def dtypes_of(specs: Iterable[TensorSpec]) -> list[torch.dtype]:
    """torch's dtypes of ``specs``."""
    return [getattr(torch, spec.dtype) for spec in specs]


def tensors_in(body: torch.Tensor, shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """The tensors in a received body, without copies."""
    found, offset = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        size = dtype.itemsize
        for length in shape:
            size *= length
        found.append(body[offset : offset + size].view(dtype).reshape(tuple(shape)))
        offset += aligned(size)
    return found


def output_names(signature: Signature) -> list[str]:
    """The names of the outputs: ``logits`` for the tensor ``output.logits`` of a dict."""
    names = [spec.name for spec in signature.outputs]
    short = [name.removeprefix("output.") for name in names]
    return names if any(name.isdigit() for name in short) or len(set(short)) < len(short) else short


def _card(artifact: Artifact) -> dict[str, Any]:
    """The facts that the page shows."""
    manifest = artifact.manifest
    names = ("speedup", "against_tuned", "baseline_speedup", "latency_ms", "throughput", "baseline_score", "score", "drop")
    evidence = {
        name: manifest.evidence[name] for name in (*names, "size_mb", "peak_mb") if manifest.evidence.get(name) is not None
    }
    limits = {} if manifest.limits is None else dataclasses.asdict(manifest.limits)
    return {
        "workload": manifest.workload,
        "recipe": manifest.recipe_text,
        "created": manifest.created,
        "trimtab": manifest.trimtab,
        "cpu": manifest.environment.cpu,
        "evidence": evidence,
        "labels": {name: LABELS.get(name, name) for name in evidence},
        "limits": {name: value for name, value in limits.items() if value is not None},
        "test_vectors": manifest.golden.cases,
        "tolerance": manifest.golden.tolerance,
        "signature": manifest.signature.describe(),
        "notes": manifest.notes,
        "settings": str(manifest.settings),
    }


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
    names = [spec.name for spec in signature.inputs]
    if not names:
        raise UsageError("This model takes no tensors; there is nothing to send to it.")


def joinable(signature: Signature) -> bool:
    """Whether the batch is the first axis of every input and output, and of no other axis."""
    batch = signature.batch
    shapes = [spec.shape for spec in (*signature.inputs, *signature.outputs)]
    return batch is not None and all(shape[:1] == (batch,) and batch not in shape[1:] for shape in shapes)


def _any_batch(signature: Signature) -> Signature:
    """``signature`` with a batch dimension of any size, for which the executable's batches are split and padded."""
    dims = tuple(Dim(dim.name) if dim.name == signature.batch else dim for dim in signature.dims)
    return Signature(
        **{name: getattr(signature, name) for name in ("inputs", "outputs", "input_structure", "output_structure")},
        parameters=signature.parameters,
        dims=dims,
    )


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The values of ``tensor`` in memory order, without a copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def send(connection: socket.socket, head: dict[str, Any], tensors: Sequence[torch.Tensor] = ()) -> None:
    """Send a frame."""
    parts = [[as_bytes(tensor)] for tensor in tensors]
    buffers = [part for part in pack(head, parts) if len(part)]
    while buffers:
        sent = connection.sendmsg(buffers[:512])
        while buffers and sent >= len(buffers[0]):
            sent -= len(buffers.pop(0))
        if sent:
            buffers[0] = memoryview(buffers[0])[sent:]


def _receive(connection: socket.socket, target: memoryview) -> bool:
    """Fill ``target``; false if the other side has closed."""
    while len(target):
        count = connection.recv_into(target)
        if not count:
            return False
        target = target[count:]
    return True


def frames(connection: socket.socket) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """Heads and bodies until the front process closes the connection. A body is valid until the next one is asked for."""
    prefix, room = bytearray(PREFIX.size), torch.empty(1 << 16, dtype=torch.uint8)
    while _receive(connection, memoryview(prefix)):
        length, size = PREFIX.unpack(prefix)
        text = bytearray(length)
        if size > room.numel():
            room = torch.empty(size, dtype=torch.uint8)
        if not _receive(connection, memoryview(text)) or not _receive(connection, room.numpy().data[:size]):
            return
        yield json.loads(text), room


def serve(connection: socket.socket, served: Served) -> None:
    """Answer frames until the front process closes the connection."""
    for head, room in frames(connection):
        if "rows" in head:
            send(connection, {"id": head["id"], "rate": served.rate(head["rows"], head["seconds"])})
            continue
        start = time.perf_counter()
        try:
            outputs = served.call(served.tensors(room, head["shapes"]))
        except TrimtabError as error:
            send(connection, {"id": head["id"], "error": str(error), "input": isinstance(error, UsageError)})
            continue
        took = time.perf_counter() - start
        send(connection, {"id": head["id"], "compute": took, "shapes": [list(tensor.shape) for tensor in outputs]}, outputs)


def main(descriptor: int, settings: dict[str, Any]) -> None:
    """Load, prove, warm up and serve."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the front process closes the connection when it is time
    connection = socket.socket(fileno=descriptor)
    if settings["cores"] is not None:
        os.sched_setaffinity(0, settings["cores"])
    try:
        served = Served(settings["path"], trust=settings["trust"], threads=settings["threads"])
        served.prove()
        leaves = served.rows_of_example(settings["rows"])
        for _ in range(WARM_CALLS):
            served.call(leaves)
    except TrimtabError as error:
        send(connection, {"refused": type(error).__name__, "message": str(error)})
        return
    send(connection, {"ready": served.description()})
    serve(connection, served)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the front process has ended
        main(int(sys.argv[1]), json.loads(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # without the teardown of runtimes, which can crash
