"""Fork workers from the servers of :mod:`trimtab.execution.forkserver`, which is faster than starting interpreters."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

PARENT_DEATH = str(pathlib.Path(__file__).with_name("parent_death.py"))
FORKSERVER = "trimtab.execution.forkserver"
START_S = 120.0
"""Maximum seconds that a server may take for its imports."""
NUMBER_BYTES = 8
"""Bytes of each of the two numbers that a server sends for a worker: first its process id, at its end its exit status."""


class Workers:
    """Forks workers. A context manager: leaving it ends the servers, and with them every worker.

    Each server can be forked into another that has done more: the first has imported what the jobs need; :meth:`warm` adds one
    that has also imported what the workload imports, and one that has also read the workload. The first starts with the first
    worker. If no server runs, because it was killed or cannot be forked, :meth:`start` returns ``None``, and the caller starts
    a new interpreter instead.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        self._channels: list[socket.socket] = []
        """Sockets of the servers, the plain one first."""
        self._start_s = START_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def start(self, folder: pathlib.Path, log: int, environment: dict[str, str], *, warm: bool) -> Forked | None:
        """A worker for the job in ``folder`` with its output in the file descriptor ``log``; ``None`` if forking fails.

        With ``warm`` it comes from the server that has done most; otherwise it has no imports of the workload.
        """
        if sys.platform != "linux":  # other systems' own libraries do not survive a fork
            return None
        if self._server is None:
            self._launch(environment)
        changed = {name: value for name, value in environment.items() if self._environment.get(name) != value}
        request = {"folder": str(folder), "environment": changed}
        while warm and len(self._channels) > 1:
            if forked := _forked(self._channels[-1], request, [log], self._start_s):
                return forked
            self._channels.pop().close()
        return _forked(self._channels[0], request, [log], START_S) if self._channels else None

    def warm(self, preload: pathlib.Path, *, seconds: float) -> None:
        """Start servers that do what the file ``preload`` lists (:func:`trimtab.execution.preloaded_imports.write_preload`):
        one its imports, and a fork of it that also reads the workload, for which it has ``seconds``. The next warm worker waits
        for them."""
        if len(self._channels) != 1 or not preload.exists():
            return
        self._start_s = START_S + seconds
        for step in ("imports", "workload"):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs, open(os.devnull, "wb") as log:
                request = {"preload": str(preload.absolute()), "step": step}
                forked = _forked(self._channels[-1], request, [log.fileno(), theirs.fileno()], self._start_s)
            if forked is None:
                ours.close()
                return
            self._channels.append(ours)

    def close(self) -> None:
        """End the servers and their forks."""
        for channel in self._channels:
            channel.close()
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
        self._server, self._channels = None, []

    def _launch(self, environment: dict[str, str]) -> None:
        self._environment = environment | {"TMPDIR": tempfile.gettempdir()}  # the first worker's folder is deleted with it
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channels = [ours]
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-X", "faulthandler", PARENT_DEATH, str(os.getpid()), FORKSERVER, str(theirs.fileno())],
                stdin=subprocess.PIPE,  # closing it tells the servers and their forks that this process has ended
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # if the server dies, a worker in a new interpreter dies of the same, and logs it
                start_new_session=True,
                env=self._environment,
                pass_fds=[theirs.fileno()],
            )


def _forked(channel: socket.socket, request: Mapping[str, Any], descriptors: list[int], seconds: float) -> Forked | None:
    """Ask the server behind ``channel`` for a fork; ``None`` if the server is gone or does not answer within ``seconds``."""
    reader, writer = os.pipe()
    try:
        socket.send_fds(channel, [json.dumps(request).encode()], [writer, *descriptors])
    except OSError:
        os.close(reader)
        return None
    finally:
        os.close(writer)
    number = os.read(reader, NUMBER_BYTES) if _readable(reader, seconds) else b""
    if not number:
        os.close(reader)
        return None
    os.set_blocking(reader, False)
    return Forked(int.from_bytes(number, "little", signed=True), reader)


def _readable(descriptor: int, seconds: float | None = None) -> bool:
    """Whether there is something to read within ``seconds``. Uses poll, because ``select`` takes no descriptor above 1023, and
    programs with many open files have these."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(None if seconds is None else 1e3 * seconds))


class Forked:
    """A forked worker, with the methods of :class:`subprocess.Popen` that are needed to watch it."""

    def __init__(self, pid: int, reader: int) -> None:
        self.pid = pid
        self.stdin = None
        self.returncode: int | None = None
        self._reader = reader

    def poll(self) -> int | None:
        """The exit code, or minus the number of the signal that ended the worker; ``None`` while it runs."""
        if self.returncode is not None:
            return self.returncode
        try:
            number = os.read(self._reader, NUMBER_BYTES)
        except BlockingIOError:
            return None
        os.close(self._reader)
        # no status was sent: the server is gone, and its forks end with it
        self.returncode = int.from_bytes(number, "little", signed=True) if number else -signal.SIGKILL
        return self.returncode

    def wait(self) -> int:
        """Wait for the end of the worker; returns its exit code."""
        while self.poll() is None:
            _readable(self._reader)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """Kill the worker."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended, and its server will report that
                os.kill(self.pid, signal.SIGKILL)
