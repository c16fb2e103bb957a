"""Text for people: messages of exceptions, plurals, articles, and text without control codes."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import traceback
from collections.abc import Iterator, Sequence

from trimtab.errors import IntegrityError, UsageError

MAX_MESSAGE = 4000
"""Most characters of a message; longer messages are cut in the middle, and their log has the whole text."""

MAX_TRACEBACK = 40_000
"""Most characters of a traceback."""


def error_text(error: BaseException) -> str:
    """The message of ``error``. An error whose ``__str__`` raises gives a placeholder."""
    return str(traceback.TracebackException(type(error), error, None, compact=True))


def message_line(error: BaseException) -> str:
    """The first line of the message of ``error`` that is not blank, of a TorchScript error that of the original message; the
    type of ``error`` if there is none."""
    text = original_message(error_text(error).strip())
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)


def shortened(text: str, most: int = MAX_MESSAGE) -> str:
    """``text``, with its middle cut out if it has more than ``most`` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters more ...] {text[-half:]}"


def counted(number: int, noun: str) -> str:
    """``1 example``, ``2 examples``, ``3 batches``, ``4 axes``."""
    stem = noun[:-2] if noun.endswith("is") else noun
    plural = f"{stem}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def listed(items: Sequence[object], most: int = 3) -> str:
    """``a, b, c``, or ``a, b, c and 2 more`` where there are more than ``most``."""
    return ", ".join(map(str, items[:most])) + (f" and {len(items) - most} more" if len(items) > most else "")


def clock(seconds: float) -> str:
    """``seconds`` as ``1:02`` or ``1:02:03``."""
    minutes, rest = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def of_type(value: object) -> str:
    """The type of ``value`` with its article, such as ``an int``; ``None`` gives ``None``."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


_INTERPRETED = "The following operation failed in the TorchScript interpreter"
"""First words of an error of the TorchScript interpreter; the original message stands below its trace."""
_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception): ")


def with_fix(sentence: str, fix: str) -> str:
    """``sentence``, closed by a full stop if it has none, followed by ``fix``."""
    stop = "" if sentence.endswith((".", "!", "?")) else "."
    return f"{sentence}{stop} {fix}"


def original_message(text: str) -> str:
    """The original message inside an error text of the TorchScript interpreter; any other text is returned unchanged."""
    if not text.startswith(_INTERPRETED):
        return text
    lines = [line.strip() for line in text.splitlines()]
    found = next((line for line in lines if _RAISED.match(line)), lines[0])
    return found.removeprefix("RuntimeError: ")  # the wrapping error has that type too


def summary_line(text: str) -> str:
    """The first line of a library's error message, without final punctuation. If that line ends with a colon, the second
    line is added. Of a TorchScript error it is the line with the original message."""
    lines = [line.strip() for line in original_message(text.strip()).splitlines() if line.strip()] or ["no message"]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1]).rstrip(" .!:")


def no_file(path: str | os.PathLike[str], fix: str) -> UsageError:
    """The error for a missing file, with remedy ``fix``."""
    return UsageError(f"There is no file {os.fspath(path)!r} (looked in {pathlib.Path.cwd()}). {fix}")


@contextlib.contextmanager
def with_remedy(fix: str) -> Iterator[None]:
    """Append ``fix`` to the message of an :class:`~trimtab.errors.IntegrityError` that the block raises. The code that reads
    a file does not know where the file is from; its caller does. Works as a decorator too."""
    try:
        yield
    except IntegrityError as error:
        error.args = (with_fix(str(error), fix),)
        raise


_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def plain(text: str) -> str:
    """``text`` without terminal escape sequences and control characters. Line ends and tabs stay."""
    return _CONTROL.sub("", text.replace("\r\n", "\n"))
