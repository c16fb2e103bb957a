"""Exclusive locks on open files. The system releases a lock when its process ends, for whatever reason."""

from __future__ import annotations

import errno

try:
    import fcntl
except ImportError:  # Windows: no locking, every process may write
    fcntl = None  # type: ignore[assignment]


def locked(file: int, *, inherited: bool = True) -> bool:
    """Try to lock the open ``file`` until it is closed; return False where another process holds the lock.

    ``inherited=True`` (flock): a forked process shares the lock and keeps it when this process ends.
    ``inherited=False`` (lockf): a forked process does not share the lock. This process loses the lock as soon as it closes any
    other handle on the same file.

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
