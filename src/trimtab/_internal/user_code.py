"""The boundary between trimtab and the user's code: wrap the errors of that code, with their place and a remedy."""

from __future__ import annotations

import os
import pathlib
import re
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from trimtab._internal import tensor_text
from trimtab._internal.files import out_of_space
from trimtab._internal.text import error_text, original_message, summary_line, with_fix
from trimtab.errors import CompileError, UsageError, WorkloadError

BY_HAND = "Call the model with these inputs yourself."
"""Remedy for a user's model that fails."""


IN_WORKER = "TRIMTAB_WORKER"
"""Environment variable that is set in trimtab's worker processes and inherited by the processes that they start."""
_TRACEBACK = "Traceback (most recent call last):\n"
_FRAME = re.compile(r'File "(.*)", line (\d+)')
_LIBRARIES = (
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    str(pathlib.Path(__file__).parents[1]),
)
_INSIDE = bool(os.environ.get(IN_WORKER))
"""Value of :data:`IN_WORKER` at import time; user code may change the environment later."""


def in_worker() -> bool:
    """Whether this process is a worker of trimtab, or was started by one."""
    return _INSIDE or bool(os.environ.get(IN_WORKER))


def refuse_in_worker(what: str) -> None:
    """Refuse to start ``what`` in a worker process: a script that starts it on import would start workers without end.

    Raises:
        UsageError: this process is a worker.
    """
    if in_worker():
        raise UsageError(
            f"{what} is called by the very file that a worker process of trimtab reads. Put the call under "
            'if __name__ == "__main__": so that reading the file does not make it.'
        )


class explaining:
    """Base of context managers that may replace an error of their block by another."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.explain(error)

    def explain(self, error: BaseException) -> None:
        """Raise the error that replaces ``error``; return if none does. Call it from ``except`` where ``with`` is too slow."""
        raise NotImplementedError


class user_code(explaining):
    """Context manager that turns an error of the user's code into a :class:`WorkloadError`. The message names the place in the
    user's code and ends with ``fix``; the original error is its cause.

    An error about shapes or dtypes is followed by those of ``values``, by name; without ``values``, by those of the innermost
    call of a module or of the user's code.
    """

    def __init__(self, what: str, fix: str | None = None, values: Mapping[str, Any] | None = None) -> None:
        self.what, self.fix, self.values = what, fix, values

    def explain(self, error: BaseException) -> None:
        """Raise the error that replaces ``error``; return if none does."""
        if isinstance(error, (Exception, SystemExit)) and not isinstance(error, (UsageError, WorkloadError)):
            message = f"{self.what}: {_description(error, self._tensors(error))}"
            raise WorkloadError(message if self.fix is None else with_fix(message, self.fix)) from error

    def _tensors(self, error: BaseException) -> str:
        if not tensor_text.is_shape_error(error):
            return ""
        return tensor_text.call_tensors(error, _is_own) if self.values is None else tensor_text.described(self.values)


class save_errors(explaining):
    """Context manager that turns an error of a backend that saves its files into a :class:`CompileError`. Disk errors
    pass unchanged."""

    def explain(self, error: BaseException) -> None:
        """Raise the error that replaces ``error``; return if none does."""
        own = isinstance(error, (Exception, SystemExit)) and not isinstance(error, (CompileError, OSError))
        if own and not out_of_space(error):
            text = summary_line(error_text(error))
            raise CompileError(f"Writing it failed: {type(error).__name__}: {text}{_place(error)}.") from error


def _description(error: BaseException, tensors: str) -> str:
    """The message of ``error``, and in brackets the line of the user's code that raised it, and the ``tensors`` of the call."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error}){_place(error)}"
    text = error_text(error)
    if f"\nOriginal {_TRACEBACK}" not in text:
        place = _place(error)
        where = f"{place[:-1]}; {tensors})" if place and tensors else place or (tensors and f" ({tensors})")
        return f"{type(error).__name__}: {original_message(text)}{where}"
    # An error that torch passes on from a DataLoader worker contains the tracebacks of its causes first; the last one counts.
    lines = text.rpartition(_TRACEBACK)[2].rstrip().splitlines()
    first = next((index for index, line in enumerate(lines) if not line.startswith(" ")), 0)
    frames = [(match[1], int(match[2])) for match in _FRAME.finditer("\n".join(lines[:first]))]
    return "\n".join(lines[first:]) + _nearest(frames)


def _place(error: BaseException) -> str:
    """`` (model.py, line 12)``: the innermost line of the user's own code in the traceback of ``error``."""
    return _nearest([(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)])


def _nearest(frames: Iterable[tuple[str, int]]) -> str:
    """The last of ``frames`` (file, line) that lies neither in trimtab nor in an installed library."""
    own = [each for each in frames if _is_own(each[0])]
    if not own:
        return ""
    path, here = pathlib.Path(own[-1][0]), pathlib.Path.cwd()
    return f" ({path.relative_to(here) if path.is_relative_to(here) else path}, line {own[-1][1]})"


def _is_own(file: str) -> bool:
    """Whether ``file`` lies neither in trimtab nor in an installed library."""
    return not file.startswith(("<", *(library + os.sep for library in _LIBRARIES)))
