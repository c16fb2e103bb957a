"""The processes of a study, found by where their logs lie."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Sequence

import psutil


def workers(folder: pathlib.Path) -> list[psutil.Process]:
    """Those of the study in ``folder``, whose logs lie there: other tests may run beside this one."""

    def ours(process: psutil.Process) -> bool:
        try:
            log = os.readlink(f"/proc/{process.pid}/fd/1")
        except OSError:  # it has just ended, or is somebody else's
            return False
        return log.startswith(str(folder)) and "trimtab.execution" in " ".join(process.info["cmdline"] or [])

    return [process for process in psutil.process_iter(["cmdline"]) if ours(process)]


def workers_that_stay(folder: pathlib.Path) -> list[dict[str, object]]:
    """What workers do that are still there after a while: a busy system takes its time to end processes, and to begin them."""
    deadline = time.monotonic() + 30
    while workers(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    facts = ["pid", "ppid", "status", "cmdline", "create_time", "cpu_times", "num_threads"]
    return [process.as_dict(facts) for process in workers(folder)]


def that_stay(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that still run after half a minute; one that has ended may wait to be asked for by whoever adopted it."""

    def runs(process: psutil.Process) -> bool:
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    deadline, running = time.monotonic() + 30, list(processes)
    while running and time.monotonic() < deadline:
        running = [one for one in running if runs(one)]
        time.sleep(0.05)
    return running
