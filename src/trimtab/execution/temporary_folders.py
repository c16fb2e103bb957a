"""Folders for temporary files that are gone when this process ends, whatever interrupts it on the way.

Nothing is told of SIGKILL: the next process that needs a folder removes what one left that was ended by it. Whether the owner
of a folder lives is told by a lock, which goes with it: numbers of processes differ from container to container.
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
"""A folder that is younger may not have its lock yet."""

_made: dict[str, int] = {}
"""The folders, and the processes that made them: a forked one has no claim on those of its parent."""
_locks: dict[str, int] = {}
"""The open files that hold the folders' locks."""
_swept = set[str]()
"""Where this process has looked for what others left."""


def temporary_folder(within: str | None = None) -> str:
    """A new folder ``within`` another, or where temporary files belong; for :func:`no_longer` to remove.

    An interrupt may come between any two lines, also of the function that removes it, so it is known by name before it is made
    and until it is gone.
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


def no_longer(name: str | pathlib.Path) -> None:
    """Remove a folder of :func:`temporary_folder`."""
    shutil.rmtree(name, ignore_errors=True)
    _made.pop(str(name), None)
    if (lock := _locks.pop(str(name), None)) is not None:
        os.close(lock)


def _locked(name: str) -> int | None:
    """The open file that holds the lock of folder ``name`` from now on; ``None`` if another process has it, or nobody can."""
    try:
        folder = os.open(name, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0))
    except OSError:  # Windows opens no folders
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
            no_longer(name)
