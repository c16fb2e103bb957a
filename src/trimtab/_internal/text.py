"""What an exception says, whoever made it: it may have no text at all, or more than anybody reads."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import traceback
from collections.abc import Iterator

from trimtab.errors import IntegrityError, UsageError

MOST = 4000
"""Characters of a message; what is cut out of a longer one stands in its log."""

LONGEST = 40_000
"""Of a traceback."""

_VOWEL = re.compile(r"[AEFHILMNORSX][A-Z]|(?!one|One)[aeioAEIO]|[Uu]n(?!i)")
"""How a noun begins that is spoken with a vowel first; capitals are spelled."""


def said(error: BaseException) -> str:
    """The text of ``error``; of one that fails to make its text, that it does."""
    return str(traceback.TracebackException(type(error), error, None, compact=True))


def shortened(text: str, most: int = MOST) -> str:
    """``text``, without its middle where it has more than ``most`` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters more ...] {text[-half:]}"


def counted(number: int, noun: str) -> str:
    """``1 example``, ``2 examples``, ``3 batches``, ``4 axes``."""
    stem = noun[:-2] if noun.endswith("is") else noun
    plural = f"{stem}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def an(noun: str) -> str:
    """``noun`` with its article: ``a Linear``, ``an OrderedDict``, ``an LSTM``."""
    return f"{'an' if _VOWEL.match(noun) else 'a'} {noun}"


def of_type(value: object) -> str:
    """What ``value`` is an instance of: ``an int``; ``None`` is itself."""
    return "None" if value is None else an(type(value).__name__)


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


_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def plain(text: str) -> str:
    """``text`` without the codes that colour a terminal and without other control characters, except line ends and tabs."""
    return _CONTROL.sub("", text.replace("\r\n", "\n"))
