"""What messages end with: the way out."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator

from trimtab.errors import IntegrityError, UsageError

_INTERPRETED = "The following operation failed in the TorchScript interpreter"
"""How TorchScript begins every message of its own; what was raised stands below the places that it went through."""
_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception): ")


def with_fix(sentence: str, fix: str) -> str:
    """``sentence``, which may end in words that are not ours, and ``fix`` behind it."""
    stop = "" if sentence.endswith((".", "!", "?")) else "."
    return f"{sentence}{stop} {fix}"


def raised(text: str) -> str:
    """A message that is not ours without what TorchScript puts around it: all the places that what was raised went through."""
    if not text.startswith(_INTERPRETED):
        return text
    lines = [line.strip() for line in text.splitlines()]
    found = next((line for line in lines if _RAISED.match(line)), lines[0])
    return found.removeprefix("RuntimeError: ")  # which is the type of what carries the message, too


def told(text: str) -> str:
    """The first line of a message that is not ours, without the stop at its end, and the next one if a colon announces it. Of
    TorchScript's the first that says what was raised."""
    lines = [line.strip() for line in raised(text.strip()).splitlines() if line.strip()] or ["no message"]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1]).rstrip(" .!:")


def no_file(path: str | os.PathLike[str], fix: str) -> UsageError:
    """The error for a path at which there is no file."""
    return UsageError(f"There is no file {os.fspath(path)!r} (looked in {pathlib.Path.cwd()}). {fix}")


@contextlib.contextmanager
def mended_by(fix: str) -> Iterator[None]:
    """An :class:`~trimtab.errors.IntegrityError` of the block, or of the function that this decorates, ends with ``fix``: who
    reads a file does not know where it is from, and who asked for it does."""
    try:
        yield
    except IntegrityError as error:
        error.args = (with_fix(str(error), fix),)
        raise
