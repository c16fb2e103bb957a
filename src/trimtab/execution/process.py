"""Run one job in a process of its own, with a time limit, a memory limit and a log."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

import psutil

from trimtab._internal.files import mentions_full_disk
from trimtab._internal.serialization import write_json
from trimtab._internal.user_code import IN_WORKER
from trimtab.errors import StorageError
from trimtab.execution.fork_pool import PARENT_DEATH, Forked, Workers
from trimtab.execution.temporary_folders import remove_temporary_folder, temporary_folder

JOB, RESULT, LOG = "job.json", "result.json", "log.txt"
WORKER = "trimtab.execution.worker"
POLL_S, MEMORY_POLL_S = 0.05, 0.5
"""Seconds between checks of the process, and of its memory. The latter takes milliseconds, which must not disturb timing."""
TAIL = 20_000
"""Bytes at the end of a log that are read for its last lines."""
DISK_FULL = 28
"""Exit code of a worker whose disk was full: ENOSPC."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a worker process ended. ``reason`` is ``None`` if it ended by itself with a result."""

    reason: str | None
    seconds: float
    result: Any = None
    """The job's result; ``None`` without one."""
    error: str | None = None
    """Name of the :mod:`trimtab.errors` class that the job raised, if any; ``reason`` is then its message."""
    traceback: str | None = None
    cut_off: bool = False
    """Whether the study ended the worker because the study has to end; the recipe can be tried again."""
    ended_by: Literal["time", "memory"] | None = None
    """The limit that it exceeded, if it was killed for that; ``memory`` also if the system killed it for lack of memory."""
    limit: float | None = None
    """The exceeded limit, in seconds or megabytes; ``None`` if the system killed it, so that any limit allows another try."""


class WorkerProcess:
    """A worker that runs the job in ``folder`` (:mod:`trimtab.execution.worker`), and ends when this process ends.

    ``workers`` forks it, if given, ``warm`` with the workload's imports; otherwise it is a new interpreter.

    It has its own process group and no terminal, so that Ctrl-C reaches only this process, and everything that the worker
    started can be killed with it. :mod:`trimtab.execution.parent_death` ends it with this process.
    """

    def __init__(
        self, job: Mapping[str, Any], folder: pathlib.Path, workers: Workers | None = None, *, warm: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULT).unlink(missing_ok=True)
        write_json(folder / JOB, job)
        self.folder = folder
        self.started = time.monotonic()
        # files that runtimes unpack and build there are deleted with it, however the worker ends
        temporary = temporary_folder()
        self._remove_temporary = weakref.finalize(self, remove_temporary_folder, temporary)
        own = environment() | {"TMPDIR": temporary}
        with (folder / LOG).open("ab") as log:
            self._earlier = log.tell()  # end of the output of earlier workers in this folder
            forked = None if workers is None else workers.start(folder.absolute(), log.fileno(), own, warm=warm)
            self._process: Forked | subprocess.Popen[bytes] = forked or subprocess.Popen(
                [sys.executable, "-P", "-X", "faulthandler", PARENT_DEATH, str(os.getpid()), WORKER, str(folder.absolute())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=own,
            )

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it is running."""
        return self._process.poll() is None

    def wait(
        self, *, seconds: float | None, memory_mb: float | None, interrupted: Callable[[], bool] = lambda: False
    ) -> Outcome:
        """Wait for the end of the job, and kill the worker at a limit.

        ``interrupted`` is polled; if it returns ``True``, the worker is killed and the outcome is ``cut_off``.

        Raises:
            StorageError: its disk was full, which says nothing about the job.
        """
        checked = 0.0
        while self.alive:
            time.sleep(POLL_S)
            elapsed = time.monotonic() - self.started
            if interrupted():
                return self._end("It was cut off because the study had to end.", cut_off=True)
            if seconds is not None and elapsed > seconds:
                ended = self._end(
                    f"It still ran after its time limit of {seconds:.0f} s and was killed; see its log for where it hung, or "
                    "give it longer with --trial-time (in Python, trial_seconds=...)."
                )
                return dataclasses.replace(ended, ended_by="time", limit=seconds)
            if memory_mb is None or elapsed - checked < MEMORY_POLL_S:
                continue
            checked = elapsed
            if (used := _tree_mb(self.pid)) > memory_mb:
                ended = self._end(
                    f"It used {used:.0f} MB, more than its memory limit of {memory_mb:.0f} MB, and was killed; "
                    "give it more with --worker-memory (in Python, worker_memory_mb=...), make the model or batch smaller, or "
                    "have less data read: Evaluation(max_examples=...)."
                )
                return dataclasses.replace(ended, ended_by="memory", limit=memory_mb)
        return self._exit_outcome()

    def kill(self) -> None:
        """Kill the worker and everything that it started."""
        if not self._remove_temporary.alive:  # killed before; its process id may belong to another process by now
            return
        if self.alive:
            end_descendants(self.pid)  # processes in groups of their own cannot be found once the worker has ended
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._remove_temporary()

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of its log."""
        with (self.folder / LOG).open("rb") as log:
            log.seek(max(self._earlier, log.seek(0, os.SEEK_END) - TAIL))
            text = log.read().decode("utf-8", "replace")
        return "\n".join(text.splitlines()[-lines:])

    def _exit_outcome(self) -> Outcome:
        path = self.folder / RESULT
        code, log = self._process.wait(), self.log_tail(lines=1000)
        outcome = self._end(_reason(code, path.exists(), log))
        if code == DISK_FULL or (code < 0 and (mentions_full_disk(log) or not shutil.disk_usage(self.folder).free)):
            # torch aborts if it cannot write to the end, and its message may not fit into the log
            raise StorageError(
                f"What belongs into {self.folder} could not be written: the disk is full, or that of temporary files. Free "
                "some space; what is finished is kept, and the same command goes on from it."
            )
        if code == -signal.SIGKILL:  # not from us: the process that used the memory may be gone when the study is resumed
            return dataclasses.replace(outcome, ended_by="memory", limit=0.0)
        if outcome.reason is not None:
            return outcome
        result = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(result, dict) and "error" in result:
            failure = {"reason": result["message"], "error": result["error"], "traceback": result["traceback"]}
            return dataclasses.replace(outcome, **failure)
        return dataclasses.replace(outcome, result=result)

    def _end(self, reason: str | None, *, cut_off: bool = False) -> Outcome:
        self.kill()
        return Outcome(reason=reason, seconds=time.monotonic() - self.started, cut_off=cut_off)


def environment() -> dict[str, str]:
    """The environment of a worker: no compile processes that outlive it, and packages check their inputs."""
    return {
        **os.environ,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a pool of compile processes would outlive the worker that started it
        "TORCHINDUCTOR_CACHE_DIR": _compiled_code(),  # shared; by default it would be in the worker's temporary folder
        "AOTI_RUNTIME_CHECK_INPUTS": "1",  # otherwise an AOTInductor package accepts inputs that it was not built for
        "PYTHONUNBUFFERED": "1",
        IN_WORKER: "1",
    }


def _compiled_code() -> str:
    """Torch's cache folder for compiled code: the value of its ``cache_dir()``, whose import takes seconds."""
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):  # a user without a name, as in some containers
        user = f"uid_{os.getuid()}"
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return named or os.path.join(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def end_descendants(pid: int) -> None:
    """Kill all descendants of process ``pid``, in whichever groups and sessions they are."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()


def _tree_mb(pid: int) -> float:
    total = 0
    try:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            total += process.memory_info().rss
    except psutil.Error:
        return total / 1e6  # it has just ended; its exit code will be read later
    return total / 1e6


def _reason(code: int, has_result: bool, log: str) -> str | None:
    if code == 0 and has_result:
        return None
    if code < 0:
        name = signal.Signals(-code).name
        if name == "SIGKILL":
            return "It was killed (SIGKILL), most likely by the system for want of memory; the same command tries it again."
        words = {
            "SIGSEGV": "It crashed with a segmentation fault (SIGSEGV)",
            "SIGABRT": "It aborted (SIGABRT)",
            "SIGILL": "It met an instruction that this CPU does not have (SIGILL)",
            "SIGBUS": "It crashed on a bad memory access (SIGBUS), perhaps for want of disk or shared memory",
            "SIGFPE": "It crashed on an arithmetic error (SIGFPE)",
        }.get(name, f"It was ended by {name}")
        return f"{words}; its log has the stack."
    if code == 0:
        return "It left without a result, as if the code called os._exit(0); remove that call."
    if code == 1 and "Traceback (most recent call last)" in log:
        return f"It raised {log.splitlines()[-1]}; its log has the traceback."
    return f"It exited with code {code} without a result, as if the code called os._exit or sys.exit; see its log."
