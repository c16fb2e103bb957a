"""Whether a disk is full, whoever met it first: Python, a runtime written in C++ or Rust, a compiler; and what else the system
refuses."""

from __future__ import annotations

import errno
import os
import pathlib
import re

from trimtab._said import said

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
