"""The servers that workers are forked from: interpreters that have done the imports of a job and nothing else.

Importing torch takes seconds, importing what a workload uses up to a quarter of a minute, and a search starts two processes for
every trial. A server has computed with one thread at most, so it has no OpenMP threads, no runtime and no device, and its fork
is as clean as a new interpreter but for one thing: all forks inherit one memory layout, which makes a program faster or slower.
So each fork shifts its allocations by a random size.

``python -P parent_death.py PARENT trimtab.execution.forkserver FD`` is the plain server; requests arrive through the socket
``FD``. Further servers, which have also imported what the workload imports, or have read the workload, are forks of it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import pathlib
import secrets
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import psutil
import torch

from trimtab._internal.serialization import write_json
from trimtab.core.candidate import MODEL_ERRORS
from trimtab.errors import TrimtabError
from trimtab.execution import worker
from trimtab.execution.fork_pool import NUMBER_BYTES
from trimtab.execution.jobs.inference import preload as preload_workload
from trimtab.execution.parent_death import end_with_parent
from trimtab.execution.preloaded_imports import PRELOADED
from trimtab.execution.process import end_descendants

LONGEST_REQUEST = 1 << 16
SERVER_THREADS = 1 if sys.platform == "linux" else 2
"""Python threads in a server: the main one and, if the kernel does not watch the parent, the one that does."""
COMPUTE_S = 10.0
"""Maximum seconds that a fork may take for a sum and a product; it takes milliseconds, or it hangs."""
GAP, SHIFT_PAGES, SHIFT_BLOCKS = 1 << 28, 2048, 512
"""Bytes of address space that are reserved without memory, and maximum pages and heap blocks, by which the memory of a fork is
shifted."""
READ_ERRORS: tuple[type[BaseException], ...] = (TrimtabError, SystemExit, *MODEL_ERRORS)
"""Errors that reading a workload may raise."""
_threads: list[int] = [torch.get_num_threads()]
"""The last is torch's number of threads in a fork: the default, or the number that the workload sets."""
_reserved: list[mmap.mmap | bytearray] = []
"""Reservations that shift the memory of this process, kept as long as it lives."""


def serve(channel: socket.socket) -> pathlib.Path | None:
    """Fork a worker for each request. Returns the job's folder in each worker, and ``None`` in the server once the other end of
    the socket is closed."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    running: dict[int, int] = {}
    server = os.getpid()
    waiting = select.poll()  # select takes no descriptor above 1023, and the channel's is inherited
    waiting.register(channel, select.POLLIN)
    waiting.register(wake_read, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in waiting.poll()]
        if wake_read in ready:
            os.read(wake_read, LONGEST_REQUEST)
            _reap(running)
        if channel.fileno() not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(channel, LONGEST_REQUEST, 3)
        if not message:
            return None
        exit_pipe, log, *others = descriptors
        request = json.loads(message)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (channel.detach(), wake_read, wake_write, exit_pipe, *running.values()):
                os.close(inherited)
            _isolate(log, server)
            if "preload" in request:
                return _serve_warm(pathlib.Path(request["preload"]), request["step"], socket.socket(fileno=others[0]))
            os.environ.update(request["environment"])
            torch.set_num_threads(_threads[-1])
            tempfile.tempdir = None  # cached in the server, but another folder in each fork
            return pathlib.Path(request["folder"])
        os.setpgid(pid, pid)  # before the worker is announced, so that its group can be killed from the start
        for descriptor in (log, *others):
            os.close(descriptor)
        os.write(exit_pipe, pid.to_bytes(NUMBER_BYTES, "little", signed=True))
        running[pid] = exit_pipe


def _serve_warm(preload: pathlib.Path, step: str, channel: socket.socket) -> pathlib.Path | None:
    """Import what the workload's dry run imported, under the environment that the dry run had made, or read the workload; then
    serve.

    There is no such server if it then has threads, which forks would lack, or OpenMP threads, which do not survive a fork, or
    if a GPU driver was initialized, which then fails in forks. So the workload is read with one thread.
    """
    known, begun, reason = json.loads(preload.read_text(encoding="utf-8")), time.monotonic(), None
    if step == "imports":
        os.environ.update(known["environment"])
        for name in known["modules"]:
            # the worker that needs the import will repeat it and report the error
            with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
                importlib.import_module(name)
        _threads.append(torch.get_num_threads())
    else:
        torch.set_num_threads(1)
        _threads.append(known["threads"])
        reason = _read_workload(known)
    if threading.active_count() > SERVER_THREADS:
        reason = "reading it starts threads, which other processes would lack"
    elif reason is None and not _computes():
        reason = "what it computes leaves threads or a GPU behind, which other processes cannot use"
    if reason is not None or step == "workload":
        result = {"seconds": time.monotonic() - begun, "reason": reason}
        write_json(preload.with_name(PRELOADED), result)
    return None if reason else serve(channel)


def _read_workload(known: Mapping[str, Any]) -> str | None:
    """Read the workload; returns why that failed."""
    with open(os.devnull, "w", encoding="utf-8") as nothing, warnings.catch_warnings(action="ignore"):
        try:
            with contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
                preload_workload(known["workload"], known["weights"])
        except READ_ERRORS as error:  # a worker that reads it reports the error
            return f"it cannot be read twice ({type(error).__name__}: {error})"
    return None


def _computes() -> bool:
    """Whether a fork of this process can compute, on several threads and on a GPU."""
    pid = os.fork()
    if pid == 0:
        if torch.cuda._is_in_bad_fork():
            os._exit(1)
        torch.set_num_threads(_threads[-1])
        torch.ones(1 << 20).sum()
        torch.ones(256, 256) @ torch.ones(256, 256)
        np.ones((256, 256)) @ np.ones((256, 256))
        os._exit(0)
    deadline = time.monotonic() + COMPUTE_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def _isolate(log: int, server: int) -> None:
    """Make this fork like a new interpreter: its own process group, log, random numbers, and exit."""
    os.setpgid(0, 0)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    end_with_parent(server)
    _shift_memory()
    np.random.seed()  # the only generator that is seeded at import and not again by a fork


def _shift_memory() -> None:
    """Reserve a random number of pages and heap blocks, so that later allocations have other addresses in each fork, as in new
    interpreters (Mytkowicz et al., "Producing wrong data without doing anything obviously wrong!", 2009)."""
    pages = GAP // mmap.PAGESIZE + secrets.randbelow(SHIFT_PAGES)  # larger than any gap between mappings that it could fill
    _reserved.append(mmap.mmap(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0))
    _reserved.extend(bytearray(1024 + secrets.randbelow(4096)) for _ in range(secrets.randbelow(SHIFT_BLOCKS)))


def _reap(running: dict[int, int]) -> None:
    """Send the exit status of each ended fork, after its orphans, now children of this process, have ended too."""
    with contextlib.suppress(ChildProcessError):  # there are no children left
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            exit_pipe = running.pop(ended[0], None)
            if exit_pipe is None:
                continue
            for orphan in psutil.Process().children():
                if orphan.pid not in running:
                    end_descendants(orphan.pid)
                    orphan.kill()
            os.write(exit_pipe, os.waitstatus_to_exitcode(ended[1]).to_bytes(NUMBER_BYTES, "little", signed=True))
            os.close(exit_pipe)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)  # watches parent
    found = serve(socket.socket(fileno=int(sys.argv[1])))
    if found is not None:
        worker.main(found)
