"""An instance as the front process sees it: process, socket, and the batch in progress."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

from trimtab.execution import parent_death
from trimtab.serve.batcher import Item
from trimtab.serve.frames import Bytes, Reader, pack
from trimtab.serve.shared_memory import SHARED_BYTES, SharedMemory

INSTANCE = "trimtab.serve.instance"
GRACE_S = 5.0
"""Grace period in seconds between the close of the socket and SIGKILL."""

State = Literal["starting", "ready", "closed"]


class StartError(Exception):
    """An instance did not become ready. ``kind`` is the name of a class of :mod:`trimtab.errors`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Instance(asyncio.Protocol):
    """One process that serves one copy of a model, one batch at a time. ``module`` is the Python module that the process runs.

    ``on_reply(instance, head, body)`` gets each answer, ``on_close(instance)`` the end of the process. The process ends with
    this one, also if this one is killed (:mod:`trimtab.execution.parent_death`).
    """

    def __init__(
        self,
        settings: dict[str, Any],
        on_reply: Callable[[Instance, dict[str, Any], memoryview], None],
        on_close: Callable[[Instance], None],
        module: str | None = None,
    ) -> None:
        self.settings, self._module = settings, module or INSTANCE
        self.state: State = "starting"
        self.batch: list[Item] = []
        self.since = 0.0
        """The last change between busy and free: when the instance became ready, the batch was sent, or the last one ended."""
        self.free_s = 0.0
        """Seconds that the instance was free before it got its batch."""
        self.description: dict[str, Any] = {}
        self.example = b""
        """The inputs of an example request, as the body of a frame."""
        self._reader, self._on_reply, self._on_close = Reader(), on_reply, on_close
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._calls = dict[int, asyncio.Future[dict[str, Any]]]()
        self._number = 0
        self._shared: tuple[SharedMemory, SharedMemory] | None = None
        """Shared memory for large bodies: of requests, and of answers."""
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start the process and wait until it is ready.

        Raises:
            StartError: it refused the artifact, or ended.
        """
        ours, theirs = socket.socketpair()
        threads = self.settings["threads"]
        environment = os.environ if threads is None else os.environ | {"OMP_NUM_THREADS": str(threads)}
        watcher = str(pathlib.Path(str(parent_death.__file__)).resolve())
        requests, answers = SharedMemory.create(), SharedMemory.create()
        self._shared = (requests, answers) if requests is not None and answers is not None else None
        inherited = [] if self._shared is None else [memory.descriptor for memory in self._shared]
        settings = json.dumps(self.settings | {"shared": inherited})
        arguments = [watcher, str(os.getpid()), self._module, str(theirs.fileno()), settings]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-X", "faulthandler", *arguments],
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno(),
            pass_fds=[theirs.fileno(), *inherited],
            start_new_session=True,
            env=environment,
        )
        theirs.close()
        ours.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=ours)
        await self._ready

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self._process.pid if self._process is not None else 0

    @property
    def free(self) -> bool:
        """Whether it can take a batch."""
        return self.state == "ready" and not self.batch

    def send(self, batch: list[Item], now: float) -> None:
        """Send ``batch``, joined along the first axis."""
        self.batch, self.free_s, self.since = batch, now - self.since, now
        shapes = [list(shape) for shape in batch[0].call.shapes]
        parts: list[Sequence[Bytes]] = [[tensor] for tensor in batch[0].call.tensors]
        if len(batch) > 1:
            rows = sum([item.call.rows for item in batch])
            for shape in shapes:
                shape[0] = rows
            parts = list(zip(*[item.call.tensors for item in batch], strict=True))
        if self._shared is not None and sum(len(part) for buffers in parts for part in buffers) >= SHARED_BYTES:
            self._write({"id": 0, "shapes": shapes, "shared": self._shared[0].write(parts)})
        else:
            self._write({"id": 0, "shapes": shapes}, parts)

    async def ask(self, head: dict[str, Any], parts: Sequence[Sequence[Bytes]] = ()) -> dict[str, Any]:
        """Send a frame that is not a batch. Returns the head of its answer; ``{"error": ...}`` if the process ended."""
        self._number += 1
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[self._number] = future
        self._write({"id": self._number, **head}, parts)
        return await future

    async def stop(self) -> None:
        """Close the socket, wait for the end of the process, and kill it if it does not end."""
        self.state = "closed"
        if self._transport is not None:
            self._transport.close()
        for _ in range(round(GRACE_S / 0.01)):
            if self._process is None or self._process.poll() is not None:
                break
            await asyncio.sleep(0.01)
        self.kill()

    def kill(self) -> None:
        """End the process and everything that it started, at once."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        for memory in self._shared or ():
            memory.close()
        self._shared = None

    def _write(self, head: dict[str, Any], parts: Sequence[Sequence[Bytes]] = ()) -> None:
        if self._transport is not None:
            self._transport.writelines(pack(head, parts))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """Handle complete frames: start-up, answers to :meth:`ask`, and batches."""
        for head, body in self._reader.feed(data):
            if "ready" in head:
                self.description, self.example, self.state = head["ready"], bytes(body), "ready"
                self.since = asyncio.get_running_loop().time()
                self._ready.set_result(None)
            elif "refused" in head:
                self._ready.set_exception(StartError(head["refused"], head["message"]))
            elif head["id"]:
                if not (future := self._calls.pop(head["id"])).done():
                    future.set_result(head)
            else:
                if "shared" in head:
                    if self._shared is None:  # it was killed; its requests are tried again
                        return
                    body = memoryview(bytes(self._shared[1].view(head["shared"])))  # the next answer overwrites it
                self._on_reply(self, head, body)

    def connection_lost(self, error: Exception | None) -> None:
        """The process has ended, or closes."""
        closing, self.state = self.state == "closed", "closed"
        if closing:
            return
        self.kill()
        if not self._ready.done():
            code = 0 if self._process is None else self._process.returncode
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            text = f"An instance of {self.settings['path']} ended with {how} before it was ready; its last words are above."
            self._ready.set_exception(StartError("ArtifactError", text))
        for future in self._calls.values():
            if not future.done():
                future.set_result({"error": "The instance ended."})
        self._on_close(self)
