"""Temporary folders that are removed when this process ends, also after an interrupt.

After SIGKILL, the next process that needs a folder removes those of the killed one. A lock file descriptor shows whether the
owner of a folder lives; process ids would not, because they differ between containers.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pathlib
import re
import secrets
import shutil
import tempfile
import time

from trimtab._internal.locks import locked

_PREFIX = "trimtab-"
_NAME = re.compile(rf"{_PREFIX}[0-9a-f]{{12}}")
_NEW_S = 60.0
"""Seconds. A younger folder may not have its lock yet."""

_made: dict[str, int] = {}
"""The folders, and the processes that made them: a fork does not own those of its parent."""
_locks: dict[str, int] = {}
"""The file descriptors that hold the folders' locks."""
_swept = set[str]()
"""Folders in which this process has looked for leftovers of killed ones."""


def temporary_folder(within: str | None = None) -> str:
    """Make a temporary folder ``within`` another, or in the default place; :func:`remove_temporary_folder` removes it.

    An interrupt may come between any two lines, so the folder's name is recorded before it is made and until it is removed.
    """
    place = within or tempfile.gettempdir()
    if place not in _swept:
        _swept.add(place)
        _sweep(place)
    name = os.path.join(place, f"{_PREFIX}{secrets.token_hex(6)}")
    _made[name] = os.getpid()
    os.mkdir(name, 0o700)
    if (lock := _locked(name)) is not None:
        _locks[name] = lock
    return name


def remove_temporary_folder(name: str | pathlib.Path) -> None:
    """Remove a folder of :func:`temporary_folder`."""
    shutil.rmtree(name, ignore_errors=True)
    _made.pop(str(name), None)
    if (lock := _locks.pop(str(name), None)) is not None:
        os.close(lock)


def _locked(name: str) -> int | None:
    """Lock folder ``name`` and return the file descriptor; ``None`` if another process holds the lock, or locking fails."""
    try:
        folder = os.open(name, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0))
    except OSError:  # Windows cannot open folders
        return None
    with contextlib.suppress(OSError):
        if locked(folder):
            return folder
    os.close(folder)
    return None


def _sweep(place: str) -> None:
    """Remove the folders in ``place`` whose owners were killed."""
    with contextlib.suppress(OSError), os.scandir(place) as found:
        for entry in found:
            if not _NAME.fullmatch(entry.name) or time.time() - entry.stat(follow_symlinks=False).st_mtime < _NEW_S:
                continue
            if (lock := _locked(entry.path)) is not None:
                shutil.rmtree(entry.path, ignore_errors=True)
                os.close(lock)


@atexit.register
def _remove_all() -> None:
    for name, owner in list(_made.items()):
        if owner == os.getpid():
            remove_temporary_folder(name)
