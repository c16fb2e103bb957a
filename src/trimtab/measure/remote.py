"""A runner in another process, over a UNIX socket.

Messages are JSON in :mod:`multiprocessing.connection`'s frames, after mutual authentication by a shared key. Nothing is
pickled: ``send`` and ``recv`` of a connection, which pickle, are not used.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from types import TracebackType
from typing import Any, Self

from trimtab._internal.text import error_text, shortened
from trimtab.errors import MeasurementError, TrimtabError
from trimtab.measure.timer import MAX_CALLS, ParallelRunner, Runner, Sample, SampledRunner

LONGEST_PATH = 107
"""Maximum bytes of the path of a UNIX socket on Linux."""
LONGEST_REQUEST = 4096
LONGEST_ANSWER = 64 * MAX_CALLS
_DISCONNECTED = (EOFError, OSError, AuthenticationError)
_FAILURES = (RuntimeError, ValueError, TypeError, ArithmeticError, LookupError, OSError, MemoryError, AssertionError)
"""Exceptions of a runner that are sent to the peer, besides trimtab's own errors."""


def serve(runner: Runner, address: str | os.PathLike[str], authkey: bytes) -> None:
    """Time blocks of ``runner`` for peers that connect to the socket ``address`` with ``authkey``, one after the other.

    If a peer disconnects, dies or sends invalid messages, the next one is accepted, because a baseline outlives many trials.
    Returns when a peer sends stop. An exception of the runner is sent to the peer, and the server goes on.
    Raises:
        MeasurementError: the address cannot be listened on.
    """
    path = os.fspath(address)
    _check_address(path)
    with listening(path, authkey) as listener:
        while True:
            try:
                peer = listener.accept()
            except (EOFError, ConnectionError, AuthenticationError):
                continue  # a peer without the key, or one that left during the handshake
            with peer, contextlib.suppress(*_DISCONNECTED):
                if _serve_peer(peer, runner):
                    return


class RemoteRunner:
    """Client for the runner that :func:`serve` offers at ``address``.

    Connecting is retried for ``connect_s`` seconds, because the server may still be starting or busy with another peer.
    ``timeout_s`` is the maximum duration of one block in seconds.

    Raises:
        MeasurementError: nobody listens or answers in time, the key is wrong, or the server died; says which.
    """

    def __init__(
        self, address: str | os.PathLike[str], authkey: bytes, *, connect_s: float = 30.0, timeout_s: float = 300.0
    ) -> None:
        self._address = os.fspath(address)
        self.timeout_s = timeout_s
        _check_address(self._address)
        self._connection: Connection | None = _connect(self._address, authkey, connect_s)
        hello = self._ask({"do": "hello"}, connect_s)
        self.pid = int(hello["pid"])
        self.threads: int | None = hello["threads"]

    def block(self, calls: int) -> list[int]:
        """Nanoseconds of each of ``calls`` calls in the other process."""
        answer = self._ask({"do": "block", "calls": calls}, self.timeout_s)
        return [int(ns) for ns in answer["ns"]]

    def samples(self, count: int, calls: int) -> list[Sample]:
        """``count`` samples of ``calls`` calls each in the other process."""
        answer = self._ask({"do": "samples", "count": count, "calls": calls}, self.timeout_s)
        return [Sample(ns, waited) for ns, waited in answer["samples"]]

    def pace(self) -> int:
        """Nanoseconds of the fixed piece of work on the core of the other process."""
        return int(self._ask({"do": "pace"}, self.timeout_s)["ns"])

    def fork_join(self) -> int | None:
        """Nanoseconds of a small parallel operation in the other process; ``None`` if that does not tell of its calls."""
        ns: int | None = self._ask({"do": "fork_join"}, self.timeout_s)["ns"]
        return ns

    def change(self, settings: Mapping[str, Any]) -> None:
        """Make a script that serves its steps (:mod:`trimtab.probe.inside.turns`) use ``settings`` from its next step on."""
        self._ask({"do": "set", "settings": settings}, self.timeout_s)

    def stop(self) -> None:
        """Ask the server to end, and disconnect."""
        with contextlib.suppress(MeasurementError):
            self._ask({"do": "stop"}, self.timeout_s)
        self.close()

    def close(self) -> None:
        """Disconnect; the server waits for the next peer."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        if self._connection is None:
            raise MeasurementError(f"The connection to the other process at {self._address} is closed; connect to it again.")
        try:
            self._connection.send_bytes(json.dumps(request).encode())
            if not self._connection.poll(seconds):
                self.close()  # a late answer must not be read as that to the next request
                raise MeasurementError(
                    f"The other process of the comparison (at {self._address}) did not answer within {seconds:.0f} s. It "
                    "hangs, or one block takes longer than that; see its log."
                )
            answer: dict[str, Any] = json.loads(self._connection.recv_bytes(LONGEST_ANSWER))
        except (EOFError, OSError, ValueError) as error:
            self.close()
            raise MeasurementError(
                f"The other process of the comparison (at {self._address}{self._pid_text()}) is gone: {_describe(error)}. It "
                "crashed or was killed; see its log, and measure again."
            ) from error
        if "error" in answer:
            raise MeasurementError(f"The other process of the comparison could not run its side: {answer['error']}")
        return answer

    def _pid_text(self) -> str:
        return f", process {self.pid}" if hasattr(self, "pid") else ""


def _serve_peer(peer: Connection, runner: Runner) -> bool:
    """Answer one peer. Raises when it leaves, returns ``True`` on stop and ``False`` on an invalid message."""
    while True:
        try:
            request = json.loads(peer.recv_bytes(LONGEST_REQUEST))
            verb = request["do"]
            calls, count = int(request.get("calls", 1)), int(request.get("count", 1))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return False
        if verb == "stop":
            peer.send_bytes(b"{}")
            return True
        peer.send_bytes(json.dumps(_answer(runner, verb, calls, count)).encode())


def _answer(runner: Runner, verb: str, calls: int, count: int) -> dict[str, Any]:
    if verb == "hello":
        return {"pid": runner.pid, "threads": runner.threads if isinstance(runner, SampledRunner) else None}
    if verb == "pace":
        return {"ns": runner.pace()}
    if verb == "fork_join":
        return {"ns": runner.fork_join() if isinstance(runner, ParallelRunner) else None}
    known = verb == "block" or (verb == "samples" and isinstance(runner, SampledRunner))
    if not known or not 1 <= calls <= MAX_CALLS or not 1 <= count <= MAX_CALLS:
        return {
            "error": f"There is no request {verb!r} for {count} x {calls} calls; ask for hello, pace, fork_join, stop, or a "
            f"block or samples of 1 to {MAX_CALLS}."
        }
    try:
        if isinstance(runner, SampledRunner) and verb == "samples":
            return {"samples": [(each.ns, each.waited) for each in runner.samples(count, calls)]}
        return {"ns": runner.block(calls)}
    except (TrimtabError, *_FAILURES) as error:
        return {"error": _describe(error)}


@contextlib.contextmanager
def listening(path: str, authkey: bytes) -> Iterator[Listener]:
    """A listener on the socket ``path`` that only this user can connect to. The path exists as long as it listens.

    Raises:
        MeasurementError: the socket cannot be made.
    """
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)  # left behind by a server that was killed
    # bound under a temporary name first, so that the socket is visible only when it listens and has our permissions
    hidden = f"{path}~"
    pathlib.Path(hidden).unlink(missing_ok=True)
    try:
        listener = Listener(hidden, family="AF_UNIX", backlog=8, authkey=authkey)
    except OSError as error:
        raise MeasurementError(
            f"A socket cannot be made at {path}: {error}. Name one in a folder that can be written."
        ) from error
    # the finalizer of the listener would fail to remove the name that the socket was bound to
    getattr(listener, "_listener")._unlink.cancel()  # noqa: B009 - the attribute is private
    try:
        os.chmod(hidden, stat.S_IRUSR | stat.S_IWUSR)
        os.rename(hidden, path)
        yield listener
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener.close()


def _connect(path: str, authkey: bytes, seconds: float) -> Connection:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _handshake(path, authkey, deadline)
        except AuthenticationError as error:
            raise MeasurementError(
                f"The process at {path} has another key; both sides of a comparison need the same."
            ) from error
        except (EOFError, OSError) as error:
            if time.monotonic() > deadline:
                raise MeasurementError(
                    f"No other process could be reached at {path} within {seconds:.0f} s: {_describe(error)}. It did not "
                    "start, ended, or is busy with another comparison; see its log."
                ) from error
            time.sleep(0.05)


def _handshake(path: str, authkey: bytes, deadline: float) -> Connection:
    """Connect in a thread, because authentication waits without limit for a server that is busy with another peer."""
    done: queue.SimpleQueue[Connection | BaseException] = queue.SimpleQueue()
    given_up = threading.Event()

    def work() -> None:
        try:
            connection = Client(path, family="AF_UNIX", authkey=authkey)
        except _DISCONNECTED as error:
            done.put(error)
            return
        if given_up.is_set():
            connection.close()
        done.put(connection)

    threading.Thread(target=work, daemon=True).start()
    try:
        found = done.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        given_up.set()
        raise TimeoutError("it accepts no connection") from None
    if isinstance(found, BaseException):
        raise found
    return found


def _check_address(path: str) -> None:
    if len(os.fsencode(path)) >= LONGEST_PATH:
        raise MeasurementError(
            f"The socket path {path!r} is {len(os.fsencode(path))} bytes long, and the system allows {LONGEST_PATH}; use a "
            "shorter folder, such as one made by tempfile.mkdtemp()."
        )


def _describe(error: BaseException) -> str:
    words = shortened(error_text(error))
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
