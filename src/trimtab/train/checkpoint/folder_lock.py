"""That one run at a time writes checkpoints into a folder: each would take the other's unfinished ones for leftovers."""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform
from typing import IO

from trimtab._internal.locks import locked
from trimtab.errors import UsageError

NAME = ".in-use"


def hold(folder: pathlib.Path) -> IO[str] | None:
    """A file whose lock says that this process writes into ``folder``, for :func:`let_go`; ``None`` where there are no locks.

    The lock goes with the process, however that ends, and is none of those that it has forked, as loaders' workers are, which
    may outlive it. It goes, too, where this process opens and closes the file again, as who copies the folder does.

    Raises:
        UsageError: another process has it.
        OSError: the file cannot be made.
    """
    held = (folder / NAME).open("a+", encoding="utf-8")
    try:
        free = locked(held.fileno(), inherited=False)
    except OSError:  # as where a network's file system has no locks
        held.close()
        return None
    if not free:
        held.seek(0)
        by = held.read(200).strip()
        held.close()
        raise UsageError(
            f"Another run writes its checkpoints into {folder} now{f' ({by})' if by else ''}. Wait for it, end it with Ctrl-C "
            "there, or give another checkpoint folder."
        )
    if not os.fstat(held.fileno()).st_nlink:  # who had it has removed it meanwhile, and the next run would make another
        held.close()
        return hold(folder)
    held.truncate(0)
    held.write(f"process {os.getpid()} of {platform.node()}")
    held.flush()
    return held


def let_go(folder: pathlib.Path, held: IO[str] | None) -> None:
    """Another run may write into ``folder``."""
    if held is not None:
        with held, contextlib.suppress(OSError):  # the folder may have become unwritable, which the run's own error tells
            (folder / NAME).unlink(missing_ok=True)
