"""Files: check paths given by users, name disk errors, and move existing files aside while new ones are written."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence

from trimtab._internal.text import error_text, of_type
from trimtab.errors import UsageError


def path_of(value: object, name: str, example: str) -> pathlib.Path:
    """Return ``value`` as a path. Error messages call it ``name`` and show ``example``.

    Raises:
        UsageError: ``value`` is not a path, is empty, or holds a NUL character.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise UsageError(f"{name} is {of_type(value)}; give a path, such as {example!r}.")
    text = os.fsdecode(value)
    if not text:
        raise UsageError(f"{name} is empty; give a path, such as {example!r}. '.' is the folder this runs in.")
    if "\0" in text:
        raise UsageError(f"{name} is {text!r}, and no path can hold the character NUL. Give another.")
    return pathlib.Path(text)


def typed(example: str) -> Callable[[str], pathlib.Path]:
    """Return an argparse type for paths. argparse adds the option's name to the error message."""

    def path(text: str) -> pathlib.Path:
        return path_of(text, "it", example)

    return path


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk and of an exceeded disk quota."""
DISK_FULL_MESSAGES = re.compile(r"No space left|Disk quota exceeded|PytorchStreamWriter failed writing|unexpected pos \d+")
"""Messages about a full disk. torch's archive writer does not pass on the system's own message."""
SHARED_MEMORY = "</torch_"
"""Prefix of torch's shared memory segments. A message with it is about ``/dev/shm`` and not about a disk."""
RESOURCE_LIMITS = {
    errno.EAGAIN: "no more processes can be started (ulimit -u)",
    errno.EMFILE: "one process may open no more files (ulimit -n)",
    errno.ENFILE: "no more files can be opened on this machine",
    errno.ENOMEM: "there is no more memory",
}
"""Errors of the system that are about a resource limit and not about a folder."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Error numbers of a file system without file locks."""


def out_of_space(error: BaseException | None) -> bool:
    """Whether ``error``, or an error in its chain of causes, is about a full disk."""
    seen = set[int]()
    while error is not None and id(error) not in seen:  # an error can be its own cause
        seen.add(id(error))
        if (isinstance(error, OSError) and error.errno in DISK_FULL) or mentions_full_disk(error_text(error)):
            return True
        shown = None if error.__suppress_context__ else error.__context__
        error = shown if error.__cause__ is None else error.__cause__
    return False


def mentions_full_disk(text: str) -> bool:
    """Whether ``text``, a message or a log, has a line about a full disk."""
    return any(DISK_FULL_MESSAGES.search(line) for line in text.splitlines() if SHARED_MEMORY not in line)


def os_reason(error: OSError, folder: pathlib.Path) -> str:
    """One sentence for the user: what the system refused to the study in run folder ``folder``, and the remedy."""
    if error.errno in RESOURCE_LIMITS:
        return f"The study in {folder} cannot go on: {RESOURCE_LIMITS[error.errno]}. Allow it more, or end what else runs here."
    full = error.errno in DISK_FULL
    what = "the disk that holds it is full; free some space" if full else f"{error.strerror or error}; mend that"
    home = pathlib.Path(os.path.abspath(folder))
    named = None if not isinstance(error.filename, str) else pathlib.Path(os.path.abspath(error.filename))
    if named is not None and not named.is_relative_to(home) and not home.is_relative_to(named):
        return f"The study in {folder} cannot go on for want of {named}: {what}."  # a temporary folder, or an interpreter
    return f"The run folder {folder} cannot be written: {what if full else f'{what} or use --out'}."


@contextlib.contextmanager
def set_aside(folder: pathlib.Path, old: Sequence[str], aside: pathlib.Path, new: Collection[str]) -> Iterator[None]:
    """Move the entries ``old`` of ``folder`` into the empty folder ``aside`` while the block runs.

    If the block succeeds, they stay in ``aside``. If the block or a move fails, everything that the block wrote (the names in
    ``new``) is deleted and ``old`` is restored. If restoring fails too, the missing entries are in ``aside``.
    """
    try:
        for name in old:
            os.replace(folder / name, aside / name)
        yield
    except BaseException:
        for name in set(new) - set(old):
            delete(folder / name)
        put_back(aside, folder)
        raise


def put_back(aside: pathlib.Path, folder: pathlib.Path) -> None:
    """Move every entry of ``aside`` back into ``folder``, replacing entries of equal name, and delete ``aside``."""
    for entry in list(aside.iterdir()):
        delete(folder / entry.name)
        os.replace(entry, folder / entry.name)
    aside.rmdir()


def delete(path: pathlib.Path) -> None:
    """Delete ``path``, a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sha256(path: pathlib.Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
