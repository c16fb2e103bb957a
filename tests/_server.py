"""One server of workers for all studies that a process of tests runs: each of its own would import torch once more."""

from __future__ import annotations

import os
import subprocess
import types
from typing import Any

from trimtab.execution.fork_pool import Workers

_LAUNCH = Workers._launch
_kept: dict[tuple[Any, ...], Workers] = {}
"""Servers by what their forks inherit of the process that starts them."""


def launch_once(workers: Workers, environment: dict[str, str]) -> None:
    """Stands in for ``Workers._launch``: a real server, which goes on to serve when ``workers`` are closed."""
    passing = {"PYTEST_CURRENT_TEST", "TMPDIR"}  # which every worker is told anew
    key = (os.getcwd(), *sorted(item for item in environment.items() if item[0] not in passing))
    if key not in _kept or _ended(_kept[key]._server):
        _kept[key] = Workers()
        _LAUNCH(_kept[key], environment)
    kept = _kept[key]
    workers._environment, workers._channels = kept._environment, [kept._channels[0].dup()]
    workers._server = types.SimpleNamespace(kill=lambda: None, communicate=lambda: None)  # type: ignore[assignment]


def _ended(server: subprocess.Popen[bytes] | None) -> bool:
    return server is None or server.poll() is not None
