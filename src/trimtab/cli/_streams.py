"""Standard output and error as the commands have them: they outlive whoever reads them."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any

from trimtab.errors import StorageError

GONE = (errno.EPIPE, errno.EIO, errno.ENOSPC)
"""What a pipe, a terminal and a disk say that take nothing any more."""


class _Lasting(io.FileIO):
    """A file descriptor that leads nowhere once its reader has gone, as `head` does when it has enough and a terminal that is
    closed, or once the disk that it leads to is full.

    Nothing is raised: typer and rich make exit code 1 of a broken pipe, which means something else here, and a search that is
    under way is worth its result, which lies in the run folder too. That a disk is full is told in the end (:func:`check`).
    """

    full = False

    def write(self, data: Any, /) -> int:
        """Write, or pretend to."""
        try:
            while (written := super().write(data)) is None:  # what else leads there has made it one that never waits
                select.select([], [self], [])
            return written
        except OSError as error:
            if error.errno not in GONE:
                raise
            self.full = self.full or error.errno == errno.ENOSPC
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # so that child processes are spared it too
            os.close(nowhere)
            return len(data)


def prepare() -> None:
    """Make both streams last, and take any text."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        stream.reconfigure(errors="replace")  # names and reasons are the user's, and may not fit an old terminal
        if isinstance(getattr(stream.buffer, "raw", stream.buffer), io.FileIO):  # no test's, and not Windows's console
            setattr(sys, name, _lasting(stream))


def check() -> None:
    """Flush standard output.

    Raises:
        StorageError: it was cut short, because the disk that it leads to is full.
    """
    if sys.stdout is not None:  # as it is where the shell closed it: >&-
        sys.stdout.flush()
    if getattr(getattr(getattr(sys.stdout, "buffer", None), "raw", None), "full", False):
        raise StorageError(
            "What the command printed was cut short: the disk that its output leads to is full. Free some space and run it"
            " again; what the run folder holds is whole."
        )


def _lasting(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Lasting(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering or stream.write_through,
    )
