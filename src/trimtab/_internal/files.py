"""Paths as they are given, by a person or by a script that may mean something else."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence

from trimtab._internal.text import of_type, said
from trimtab.errors import UsageError


def path_of(value: object, name: str, example: str) -> pathlib.Path:
    """``value``, which was given as ``name``, as a path.

    Raises:
        UsageError: it is no path, or empty, as a variable that was never set is, or holds a character that no path can.
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
    """What reads a path off the command line, which says itself what it was given for."""

    def path(text: str) -> pathlib.Path:
        return path_of(text, "it", example)

    return path


FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the system says where a disk is full, or one's share of it."""
WORDS = re.compile(r"No space left|Disk quota exceeded|PytorchStreamWriter failed writing|unexpected pos \d+")
"""What the system says; and torch, whose writer of archives does not pass on what the system said."""
SHARED = "</torch_"
"""How torch names a piece of shared memory, of which containers have little; no disk is full then."""
SCARCE = {
    errno.EAGAIN: "no more processes can be started (ulimit -u)",
    errno.EMFILE: "one process may open no more files (ulimit -n)",
    errno.ENFILE: "no more files can be opened on this machine",
    errno.ENOMEM: "there is no more memory",
}
"""What there is not enough of, or not enough allowed; no folder is to blame."""
UNLOCKED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system says that knows no locks."""


def out_of_space(error: BaseException | None) -> bool:
    """Whether ``error``, or what it came from, was a full disk. Layers in between may have made another error of it."""
    seen = set[int]()
    while error is not None and id(error) not in seen:  # an error can be its own cause
        seen.add(id(error))
        if (isinstance(error, OSError) and error.errno in FULL) or says_full(said(error)):
            return True
        shown = None if error.__suppress_context__ else error.__context__
        error = shown if error.__cause__ is None else error.__cause__
    return False


def says_full(text: str) -> bool:
    """Whether ``text``, a message or a log, has a line about a full disk."""
    return any(WORDS.search(line) for line in text.splitlines() if SHARED not in line)


def refused(error: OSError, folder: pathlib.Path) -> str:
    """What the system refused a study in run folder ``folder``, and the way out, in a sentence."""
    if error.errno in SCARCE:
        return f"The study in {folder} cannot go on: {SCARCE[error.errno]}. Allow it more, or end what else runs here."
    full = error.errno in FULL
    what = "the disk that holds it is full; free some space" if full else f"{error.strerror or error}; mend that"
    home = pathlib.Path(os.path.abspath(folder))
    named = None if not isinstance(error.filename, str) else pathlib.Path(os.path.abspath(error.filename))
    if named is not None and not named.is_relative_to(home) and not home.is_relative_to(named):
        return f"The study in {folder} cannot go on for want of {named}: {what}."  # a temporary folder, or an interpreter
    return f"The run folder {folder} cannot be written: {what if full else f'{what} or use --out'}."


@contextlib.contextmanager
def set_aside(folder: pathlib.Path, old: Sequence[str], aside: pathlib.Path, new: Collection[str]) -> Iterator[None]:
    """A block in which the entries ``old`` of ``folder`` lie in the empty folder ``aside``, where they stay if it ends well.

    Where it does not, or one of them cannot be moved, all are put back, and nothing is left of the names in ``new``, which are
    those that the block may write in ``folder``. Where that cannot be done either, what is missing is in ``aside``.
    """
    try:
        for name in old:
            os.replace(folder / name, aside / name)
        yield
    except BaseException:
        for name in set(new) - set(old):
            removed(folder / name)
        put_back(aside, folder)
        raise


def put_back(aside: pathlib.Path, folder: pathlib.Path) -> None:
    """Have everything in ``folder`` that was set aside from it, instead of what has its name there; ``aside`` is gone then."""
    for entry in list(aside.iterdir()):
        removed(folder / entry.name)
        os.replace(entry, folder / entry.name)
    aside.rmdir()


def removed(path: pathlib.Path) -> None:
    """Delete a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
