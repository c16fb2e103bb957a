"""Standard output and error that ignore closed pipes, closed terminals and full disks."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any

from trimtab.errors import StorageError

GONE = (errno.EPIPE, errno.EIO, errno.ENOSPC)
"""Error numbers of a closed pipe, a closed terminal and a full disk."""


class _TolerantFile(io.FileIO):
    """A file descriptor that discards writes once its reader is gone (``| head``, a closed terminal) or its disk is full.

    It raises nothing. typer and rich would turn a broken pipe into exit code 1, which here means that limits are not met, and
    the result of a search is in the run folder anyway. :func:`check` reports a full disk at the end.
    """

    full = False

    def write(self, data: Any, /) -> int:
        """Write ``data``, or discard it."""
        try:
            while (written := super().write(data)) is None:  # the descriptor may be non-blocking
                select.select([], [self], [])
            return written
        except OSError as error:
            if error.errno not in GONE:
                raise
            self.full = self.full or error.errno == errno.ENOSPC
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())  # child processes inherit the descriptor
            os.close(null)
            return len(data)


def prepare() -> None:
    """Make both streams ignore the errors above, and accept any text."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        stream.reconfigure(errors="replace")  # the terminal may lack characters of names and reasons
        if isinstance(
            getattr(stream.buffer, "raw", stream.buffer), io.FileIO
        ):  # neither a stream of a test nor the console of Windows
            setattr(sys, name, _tolerant(stream))


def check() -> None:
    """Flush standard output.

    Raises:
        StorageError: the disk is full, so that the output is incomplete.
    """
    if sys.stdout is not None:  # None if the shell closed it: >&-
        sys.stdout.flush()
    if getattr(getattr(getattr(sys.stdout, "buffer", None), "raw", None), "full", False):
        raise StorageError(
            "What the command printed was cut short: the disk that its output leads to is full. Free some space and run it"
            " again; what the run folder holds is whole."
        )


def _tolerant(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_TolerantFile(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering or stream.write_through,
    )
