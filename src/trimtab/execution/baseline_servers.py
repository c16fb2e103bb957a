"""Server processes that hold a recipe ready, so that a trial can take turns with it."""

from __future__ import annotations

import json
import os
import pathlib
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from trimtab import errors
from trimtab.core.recipe import Recipe
from trimtab.errors import ArtifactError, MeasurementError, UsageError, WorkloadError
from trimtab.execution.fork_pool import Workers
from trimtab.execution.jobs.inference import READY
from trimtab.execution.process import POLL_S, RESULT, WorkerProcess
from trimtab.execution.temporary_folders import remove_temporary_folder, temporary_folder
from trimtab.execution.workload_transfer import AUTHKEY
from trimtab.measure.remote import LONGEST_PATH

NAMES, SHORT = 40, "/tmp"
"""Bytes reserved for the names of the socket folder and of a socket; folder used if the usual path is too long for a socket."""


class BaselineServers:
    """Named server processes, forked by ``workers`` if given. A context manager: leaving it ends them all."""

    def __init__(self, job: Mapping[str, Any], folder: pathlib.Path, workers: Workers | None = None) -> None:
        self._job = dict(job)
        self._workers = workers
        self._folder = folder
        self._processes: dict[str, WorkerProcess] = {}
        self._sockets = _short_folder()
        self.authkey = bytes.fromhex(os.environ.setdefault(AUTHKEY, secrets.token_hex(32)))
        """The key of their sockets, passed in their environment."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name in list(self._processes):
            self.stop(name)
        remove_temporary_folder(self._sockets)

    @property
    def addresses(self) -> dict[str, str]:
        """The socket address of each server."""
        return {name: str(self._sockets / name) for name in self._processes}

    def start(self, name: str, recipe: Recipe, *, fresh: bool) -> None:
        """Start to build ``recipe`` in a process of its own; :meth:`ready` waits for it."""
        self.start_job(name, {"recipe": recipe.to_json(), "fresh": fresh})

    def start_job(self, name: str, what: Mapping[str, Any]) -> None:
        """Start to serve ``what`` (see :func:`trimtab.execution.jobs.inference.serve_job`) in a process of its own."""
        address = self._sockets / name
        address.unlink(missing_ok=True)
        folder = self._folder / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / READY).unlink(missing_ok=True)
        job = {**self._job, **what, "kind": "serve", "address": str(address)}
        self._processes[name] = WorkerProcess(job, folder, self._workers, warm=True)

    def ready(self, name: str, *, seconds: float, interrupted: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Wait until the server answers; returns what it states about itself.

        Raises:
            MeasurementError: it ended, was interrupted, or took longer than ``seconds``.
            StorageError: its disk was full.
        """
        process, folder = self._processes[name], self._folder / name
        deadline = time.monotonic() + seconds
        while process.alive and time.monotonic() < deadline and not interrupted():
            if (folder / READY).exists() and (self._sockets / name).exists():
                facts: dict[str, Any] = json.loads((folder / READY).read_text(encoding="utf-8"))
                return facts
            time.sleep(POLL_S)
        if not process.alive:
            process.wait(seconds=None, memory_mb=None)  # raises if the disk was full
        if (folder / RESULT).exists():
            result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
            kind = getattr(errors, result.get("error", ""), MeasurementError)
            message = result.get("message", "no message")
            users = issubclass(kind, (UsageError, WorkloadError, ArtifactError))  # their messages need no prefix
            raise kind(message if users else f"The process that holds {name} ended: {message}")
        state = "did not get ready in time" if process.alive else "ended"
        raise MeasurementError(f"The process that holds {name} {state}; its last words were:\n{process.log_tail(8)}")

    def ensure(
        self, name: str, recipe: Recipe, *, fresh: bool, seconds: float, interrupted: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """Wait for a server as :meth:`ready` does, after starting it if it does not run. If it dies, try once more.

        Raises:
            MeasurementError: it died twice, or was interrupted.
        """
        if not self.alive(name):
            self.start(name, recipe, fresh=fresh)
        try:
            return self.ready(name, seconds=seconds, interrupted=interrupted)
        except MeasurementError:
            if interrupted():
                raise
        self.start(name, recipe, fresh=fresh)
        return self.ready(name, seconds=seconds, interrupted=interrupted)

    def alive(self, name: str) -> bool:
        """Whether the server runs."""
        return name in self._processes and self._processes[name].alive

    def stop(self, name: str) -> None:
        """End one server."""
        self._processes.pop(name).kill()


def _short_folder() -> pathlib.Path:
    """A new folder for sockets, whose paths are limited to fewer bytes than run folders or a batch system's TMPDIR may have."""
    place = tempfile.gettempdir()
    if len(os.fsencode(place)) + NAMES > LONGEST_PATH and os.path.isdir(SHORT):
        place = SHORT
    return pathlib.Path(temporary_folder(place))
