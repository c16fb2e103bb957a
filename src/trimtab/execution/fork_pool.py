"""Starts workers that are forked, which takes no time; see :mod:`trimtab.execution.forkserver` for what they are forks of."""

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

LIFELINE = str(pathlib.Path(__file__).with_name("parent_death.py"))
FORKSERVER = "trimtab.execution.forkserver"
START_S = 120.0
"""Longest time that a server may take to import what it has to."""
WORD = 8
"""Bytes of the two numbers that a server writes about a worker: its process id, and in the end how it ended."""


class Workers:
    """Forks workers. A context: leaving it ends the servers, and with them every worker that is left.

    There are two servers: one has imported what the jobs themselves need, and after :meth:`warm` another has also imported
    what the workload does. The first starts with the first worker. Where they cannot run, or have been killed, :meth:`start`
    gives ``None``, and whoever asked starts an interpreter instead.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        self._plain: socket.socket | None = None
        self._warm: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def start(self, folder: pathlib.Path, log: int, environment: dict[str, str], *, warm: bool) -> Forked | None:
        """A worker for the job in ``folder`` that writes to the file descriptor ``log``; ``None`` if none can be forked.

        It is a ``warm`` one, where there are any, or has nothing of the workload's in it.
        """
        if sys.platform != "linux":  # elsewhere the system's own libraries do not stand a fork
            return None
        if self._server is None:
            self._launch(environment)
        changed = {name: value for name, value in environment.items() if self._environment.get(name) != value}
        request = {"folder": str(folder), "environment": changed}
        if warm and self._warm is not None:
            if forked := _forked(self._warm, request, [log]):
                return forked
            self._warm.close()
            self._warm = None
        return None if self._plain is None else _forked(self._plain, request, [log])

    def warm(self, imported: pathlib.Path) -> None:
        """Begin to make a server that has imported what the file ``imported`` lists; the next warm worker waits for it."""
        if self._plain is None or self._warm is not None or not imported.exists():
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(os.devnull, "wb") as log:
            forked = _forked(self._plain, {"imported": str(imported.absolute())}, [log.fileno(), theirs.fileno()])
        if forked is None:
            ours.close()
            return
        self._warm = ours

    def close(self) -> None:
        """End the servers and what they forked."""
        for channel in (self._plain, self._warm):
            if channel is not None:
                channel.close()
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
        self._server = self._plain = self._warm = None

    def _launch(self, environment: dict[str, str]) -> None:
        self._environment = environment | {"TMPDIR": tempfile.gettempdir()}  # not that of the first worker, with which it goes
        self._plain, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-X", "faulthandler", LIFELINE, str(os.getpid()), FORKSERVER, str(theirs.fileno())],
                stdin=subprocess.PIPE,  # its end tells the servers and their forks that we are gone
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # if it dies, an interpreter of the worker's own dies of the same, and logs it
                start_new_session=True,
                env=self._environment,
                pass_fds=[theirs.fileno()],
            )


def _forked(channel: socket.socket, request: Mapping[str, Any], descriptors: list[int]) -> Forked | None:
    """Ask the server behind ``channel`` for a fork; ``None`` if it is gone, or does not answer."""
    told, tells = os.pipe()
    try:
        socket.send_fds(channel, [json.dumps(request).encode()], [tells, *descriptors])
    except OSError:
        os.close(told)
        return None
    finally:
        os.close(tells)
    number = os.read(told, WORD) if _readable(told, START_S) else b""
    if not number:
        os.close(told)
        return None
    os.set_blocking(told, False)
    return Forked(int.from_bytes(number, "little", signed=True), told)


def _readable(descriptor: int, seconds: float | None = None) -> bool:
    """Whether there is something to read, waited for so long. Not with ``select``, which takes no number above 1023, as a
    program with many open files has them."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(None if seconds is None else 1e3 * seconds))


class Forked:
    """A forked worker, with as much of :class:`subprocess.Popen` as it takes to watch one."""

    def __init__(self, pid: int, told: int) -> None:
        self.pid = pid
        self.stdin = None
        self.returncode: int | None = None
        self._told = told

    def poll(self) -> int | None:
        """Its exit code, or minus the number of the signal that ended it; ``None`` while it runs."""
        if self.returncode is not None:
            return self.returncode
        try:
            number = os.read(self._told, WORD)
        except BlockingIOError:
            return None
        os.close(self._told)
        # without a word the server is gone, and its end is that of its forks
        self.returncode = int.from_bytes(number, "little", signed=True) if number else -signal.SIGKILL
        return self.returncode

    def wait(self) -> int:
        """Wait for its end; gives its exit code."""
        while self.poll() is None:
            _readable(self._told)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """End it."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended, and its server is about to tell
                os.kill(self.pid, signal.SIGKILL)
