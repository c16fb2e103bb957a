"""Folders for temporary files that are gone when this process ends, whatever interrupts it on the way."""

from __future__ import annotations

import atexit
import os
import pathlib
import secrets
import shutil
import tempfile

_PREFIX = "trimtab-"

_made: dict[str, int] = {}
"""The folders, and the processes that made them: a forked one has no claim on those of its parent."""


def temporary_folder(within: str | None = None) -> str:
    """A new folder ``within`` another, or where temporary files belong; for :func:`no_longer` to remove.

    An interrupt may come between any two lines, also of the function that removes it, so it is known by name before it is made
    and until it is gone.
    """
    name = os.path.join(within or tempfile.gettempdir(), f"{_PREFIX}{secrets.token_hex(6)}")
    _made[name] = os.getpid()
    os.mkdir(name, 0o700)
    return name


def no_longer(name: str | pathlib.Path) -> None:
    """Remove a folder of :func:`temporary_folder`."""
    shutil.rmtree(name, ignore_errors=True)
    _made.pop(str(name), None)


@atexit.register
def _remove_all() -> None:
    for name, owner in list(_made.items()):
        if owner == os.getpid():
            no_longer(name)
