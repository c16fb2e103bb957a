"""Imports of a workload, recorded so that a fork server can make them once for all workers."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trimtab._internal.serialization import write_json
from trimtab._internal.text import counted
from trimtab.core.backend import BACKENDS

IMPORTED, PRELOAD, PRELOADED = "imported.json", "preload.json", "preloaded.json"
"""Files: what the dry run imported; what servers do before they fork; how long reading the workload took there, and the reason
if they cannot fork after it."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_SEEN = {name: os.environ.get(name) for name in THREADS}
"""Values of the thread variables when torch was imported, which reads them only then."""


@contextlib.contextmanager
def record_imports(folder: pathlib.Path, also: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """Write to ``folder`` which installed packages the block imports, in order, and how it changes the environment. ``also``
    are further imports of workers.

    The user's own files are left out, because importing them may do anything. Runtimes are left out, because a cold start
    includes their import. Yields names and paths of the user's own modules, complete once the block ends.
    """
    modules, environment, own = set(sys.modules), dict(os.environ), dict[str, str]()
    yield own
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    roots = tuple({os.path.realpath(place) + os.sep for place in (*places, site.getusersitepackages())})
    runtimes = {package for backend in BACKENDS.values() for package in backend.requires}
    found = []
    for name, module in list(sys.modules.items()):
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        if name in modules or origin is None or name.partition(".")[0] in runtimes:
            continue
        if os.path.realpath(origin).startswith(roots):
            found.append(name)
        elif name.partition(".")[0] != "trimtab" and os.path.isfile(origin):
            own[name] = os.path.abspath(origin)
    changed = {name: value for name, value in os.environ.items() if environment.get(name) != value}
    write_json(folder / IMPORTED, {"modules": [*found, *also], "environment": changed})


def write_preload(folder: pathlib.Path, workload: Mapping[str, Any], threads: int, weights: Mapping[str, str]) -> pathlib.Path:
    """Write to ``folder`` what servers do before they fork, and return the path of that file: the imports of the dry run, whose
    list is in ``folder``, and reading ``workload``, whose model has ``weights``. Forks compute with ``threads``."""
    imported = json.loads((folder / IMPORTED).read_text(encoding="utf-8"))
    write_json(folder / PRELOAD, {**imported, "workload": workload, "threads": threads, "weights": weights})
    return folder / PRELOAD


def ignored_thread_settings(threads: int) -> list[str]:
    """A note if the workload sets a number of threads other than ``threads`` in the environment: its own program may do so
    before torch is imported, but here it comes too late."""
    asked = {name: os.environ.get(name, "") for name in THREADS if os.environ.get(name) != _SEEN[name]}
    for name, value in asked.items():
        if value.isdecimal() and int(value) not in (0, threads):
            return [
                f"The workload sets {name} to {value}, which torch does not see here, where it is imported before: it computes "
                f"with {counted(threads, 'thread')}. Write torch.set_num_threads({value}) into the workload, or set {name} "
                "where the "
                "command is started."
            ]
    return []
