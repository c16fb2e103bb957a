"""Locks on open files, which go with the process that has them, however it ends."""

from __future__ import annotations

import errno

try:
    import fcntl
except ImportError:  # Windows has none, and nobody is kept off there
    fcntl = None  # type: ignore[assignment]


def locked(file: int, *, inherited: bool = True) -> bool:
    """Whether the open ``file`` is locked from now on, until it is closed. It is not where another process has the lock.

    Where it is not ``inherited``, the lock is none of processes that are forked from this one, which may outlive it. It is then
    lost, too, once this process opens the same file again and closes that.

    Raises:
        OSError: the file system has no locks.
    """
    if fcntl is None:
        return True
    try:
        (fcntl.flock if inherited else fcntl.lockf)(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        return False
    return True
