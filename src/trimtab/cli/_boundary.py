"""Turn exceptions and signals of a command into one sentence on standard error and an exit code."""

from __future__ import annotations

import os
import pathlib
import platform
import re
import shlex
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from types import FrameType, TracebackType
from typing import Self

from typer.exceptions import TyperException

from trimtab._internal.serialization import ESCAPED
from trimtab._internal.text import plain
from trimtab.errors import BUG, EXIT_BUG, TrimtabError, UsageError

EXIT_INTERRUPTED = 130
TERMINATION = ("SIGTERM", "SIGHUP")
"""Signals that end a command: from a batch system, a service manager or a closed terminal."""
RESUMABLE = frozenset({"optimize"})
"""Commands that resume their finished work after an interruption."""
PASSWORD = re.compile(r"(://[^:/@]*:).*@")
DEBUG = "TRIMTAB_DEBUG"
"""Environment variable: ``1`` prints the traceback of every error."""


class Boundary:
    """A context that turns an exception into ``error[code]: sentence`` and :attr:`code`.

    ``KeyboardInterrupt`` and ``SystemExit`` pass. Exceptions other than ``TrimtabError`` are bugs; a file gets their
    traceback.
    """

    def __init__(self) -> None:
        self.code = 0
        """The exit code."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
            error = error.__context__  # typer exits on every broken pipe, but our output ignores them (_streams.py)
        if not isinstance(error, Exception):
            return False
        if os.environ.get(DEBUG, "") not in ("", "0"):
            traceback.print_exception(error)
        name, self.code, sentence = _describe(error)
        print(f"error[{name}]: {plain(sentence)}", file=sys.stderr)
        return True


class TerminationSignals:
    """A context in which the signals :data:`TERMINATION` raise ``KeyboardInterrupt``, so that workers and files are cleaned up.

    A second signal ends the process at once. Ignored signals, as under nohup, stay ignored.
    """

    def __init__(self) -> None:
        self.code = EXIT_INTERRUPTED
        """Exit code of an interrupted command: 128 plus the number of the signal; 130 for Ctrl-C."""
        self._handled = list[int]()

    def __enter__(self) -> Self:
        known = [getattr(signal, name) for name in TERMINATION if hasattr(signal, name)]
        if threading.current_thread() is threading.main_thread():
            self._handled = [number for number in known if signal.getsignal(number) is signal.SIG_DFL]
        for number in self._handled:
            signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number in self._handled:
            signal.signal(number, signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.code = 128 + number
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt


def _describe(error: Exception) -> tuple[str, int, str]:
    """The error code, the exit code and the sentence for ``error``."""
    if isinstance(error, TrimtabError):
        return error.code, error.exit_code, str(error)
    if isinstance(error, TyperException):
        words = " ".join(error.format_message().split()).replace("Value error, ", "")
        context = getattr(error, "ctx", None)
        words += "" if words.endswith((".", "?", "!", ")")) else "."
        hint = f" See: {context.command_path} --help" if context is not None else ""
        return UsageError.code, UsageError.exit_code, f"{words}{hint}"
    what = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    saved = _write_traceback(error)
    return (
        BUG,
        EXIT_BUG,
        f"trimtab itself failed: {what} This is a bug in trimtab and not in your model. {saved} {DEBUG}=1 prints it.",
    )


def check_working_directory() -> None:
    """Check that the working directory exists. Without it, relative paths and the imports of new processes fail.

    Raises:
        UsageError: it was deleted.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("The folder that this was started in is gone, perhaps made anew. Change into it again.") from None


def _write_traceback(error: Exception) -> str:
    """Write the traceback of ``error``, the versions and the command to a file. Returns a sentence with its path."""
    where = f"trimtab {version('trimtab')}, Python {platform.python_version()}, {platform.platform()}"
    head = f"{where}\n$ {repeat_command(sys.argv[1:])}\n\n"
    try:
        handle, name = tempfile.mkstemp(prefix="trimtab-bug-", suffix=".txt")
        os.close(handle)
        pathlib.Path(name).write_text(head + "".join(traceback.format_exception(error)), encoding="utf-8", errors=ESCAPED)
    except OSError as reason:
        return f"Its traceback could not be written ({reason})."
    return f"Its traceback is in {name}; please report it with that."


def interruption_sentence(arguments: Sequence[str]) -> str:
    """A sentence that says what an interrupted command has kept, and how to run it again."""
    if RESUMABLE.isdisjoint(arguments[:1]):
        return f"interrupted; nothing was kept. Again: {repeat_command(arguments)}"
    return f"interrupted; what was finished is kept. To go on from it: {repeat_command(arguments)}"


def repeat_command(arguments: Sequence[str]) -> str:
    """The command line that repeats the command with ``arguments``, without ``--fresh`` and without database passwords."""
    return shlex.join(["trimtab", *(PASSWORD.sub(r"\1***@", word) for word in arguments if word != "--fresh")])
