"""Whether a disk is full, whoever met it first: Python, a runtime written in C++ or Rust, a compiler."""

from __future__ import annotations

import errno
import re

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the system says where a disk is full, or one's share of it."""
WORDS = re.compile(r"No space left|Disk quota exceeded|PytorchStreamWriter failed writing|unexpected pos \d+")
"""What the system says; and torch, whose writer of archives does not pass on what the system said."""
SHARED = "</torch_"
"""How torch names a piece of shared memory, of which containers have little; no disk is full then."""


def out_of_space(error: BaseException | None) -> bool:
    """Whether ``error``, or what it came from, was a full disk. Layers in between may have made another error of it."""
    seen = set[int]()
    while error is not None and id(error) not in seen:  # an error can be its own cause
        seen.add(id(error))
        if (isinstance(error, OSError) and error.errno in FULL) or says_full(str(error)):
            return True
        shown = None if error.__suppress_context__ else error.__context__
        error = shown if error.__cause__ is None else error.__cause__
    return False


def says_full(text: str) -> bool:
    """Whether ``text``, a message or a log, has a line about a full disk."""
    return any(WORDS.search(line) for line in text.splitlines() if SHARED not in line)
