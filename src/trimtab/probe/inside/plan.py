"""The plan of this process, and its role: rank, worker, watched thread.

``PLAN`` is the JSON of the environment variable ``TRIMTAB_PLAN``:

=============  ====================================================================================================
``mode``       ``observe``, ``turns``, ``losses``, ``trace`` or ``run``
``anchor``     what ends a step, ``{"kind", "site", "index"}``; ``null``: decided in the process, as when observing
``settings``   JSON form of :class:`~trimtab.core.script_settings.ScriptSettings`
``steps``      number of steps to measure
``seconds``    time limit after which the process ends
``key``        secret of the connection to the driver, in mode ``turns``
``out``        folder for the output files that the driver reads
``folder``     of the script; sites are relative to it
``watch``      seconds between two measurements of the split of a step in mode ``run``; ``null``: none
``guard``      whether writes to files that exist end the process, where they cannot be kept apart
=============  ====================================================================================================
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

PLAN: dict[str, Any] = json.loads(os.environ.get("TRIMTAB_PLAN") or "{}")

CREATED = "made.txt"
"""File in ``PLAN["out"]`` of the paths that a guarded script makes, a JSON string per line."""
READING = "reading.jsonl"
"""File in ``PLAN["out"]`` for the records of loader workers."""

MAIN: int = threading.get_ident()
"""The watched thread: the one that imported torch."""
MAIN_NATIVE: int = threading.get_native_id()
"""Id of that thread in the operating system."""

IS_WORKER: bool = any(
    "multiprocessing" in word and ("spawn" in word or "forkserver" in word or "fork" in word) for word in sys.orig_argv
)
"""Whether multiprocessing started this interpreter: a worker of a loader, or a rank of ``torch.multiprocessing.spawn``."""


def process_age_s() -> float:
    """Seconds since this process was started."""
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime", encoding="ascii") as file:
            return float(file.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.process_time()


def rank() -> int:
    """Rank of this process in distributed training; 0 without it."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(os.environ.get("RANK") or 0)


def write_out(name: str, data: dict[str, Any]) -> None:
    """Write ``data`` atomically as JSON to the file ``name`` in ``PLAN["out"]``, for the driver."""
    path = os.path.join(PLAN["out"], name)
    with open(f"{path}~", "w", encoding="utf-8") as file:
        json.dump(data, file)
    os.replace(f"{path}~", path)
