"""The boundary between trimtab and the code of its user: what that raises is told as his, with where and what to do."""

from __future__ import annotations

import os
import pathlib
import re
import sysconfig
import traceback
from collections.abc import Iterable

from trimtab._internal.files import out_of_space
from trimtab._internal.text import raised, said, told, with_fix
from trimtab.errors import CompileError, UsageError, WorkloadError

BY_HAND = "Call the model with these inputs yourself."
"""What to do where the user's model fails."""


IN_WORKER = "TRIMTAB_WORKER"
"""Environment variable that tells the code in a process of ours, and in those that it starts, that it is in one."""
_TRACEBACK = "Traceback (most recent call last):\n"
_FRAME = re.compile(r'File "(.*)", line (\d+)')
_INSIDE = bool(os.environ.get(IN_WORKER))
"""Whether this is one, whatever becomes of its environment."""


def in_worker() -> bool:
    """Whether this is a process of ours that runs the user's code, or one that such a process started."""
    return _INSIDE or bool(os.environ.get(IN_WORKER))


def outside_workers(what: str) -> None:
    """Refuse to start ``what`` in a worker process, where a file that starts it while it is read would start it without end.

    Raises:
        UsageError: this is one.
    """
    if in_worker():
        raise UsageError(
            f"{what} is called by the very file that a worker process of trimtab reads. Put the call under "
            'if __name__ == "__main__": so that reading the file does not make it.'
        )


class user_code:
    """Turns whatever the user's code raises into a :class:`WorkloadError` that carries it as its cause, and says where and what
    to do (``fix``)."""

    def __init__(self, what: str, fix: str | None = None) -> None:
        self.what, self.fix = what, fix

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (Exception, SystemExit)) and not isinstance(error, (UsageError, WorkloadError)):
            told = f"{self.what}: {_words(error)}"
            raise WorkloadError(told if self.fix is None else with_fix(told, self.fix)) from error


class writing:
    """Turns whatever a backend raises while it writes its files into a :class:`CompileError`, but for what a disk has to say,
    which no backend did."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        own = isinstance(error, (Exception, SystemExit)) and not isinstance(error, (CompileError, OSError))
        if error is not None and own and not out_of_space(error):
            raise CompileError(f"Writing it failed: {type(error).__name__}: {told(said(error))}{_place(error)}.") from error


def _words(error: BaseException) -> str:
    """What ``error`` says, and where in the user's code it was raised."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({error}){_place(error)}"
    text = said(error)
    if f"\nOriginal {_TRACEBACK}" not in text:
        return f"{type(error).__name__}: {raised(text)}{_place(error)}"
    # What torch carries from a process of its own, as a worker of a loader is, has the tracebacks before it, each of which was
    # the cause of the next.
    lines = text.rpartition(_TRACEBACK)[2].rstrip().splitlines()
    first = next((index for index, line in enumerate(lines) if not line.startswith(" ")), 0)
    frames = [(match[1], int(match[2])) for match in _FRAME.finditer("\n".join(lines[:first]))]
    return "\n".join(lines[first:]) + _nearest(frames)


def _place(error: BaseException) -> str:
    """`` (model.py, line 12)``: the line of the user's own code that is nearest to where ``error`` was raised."""
    return _nearest([(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)])


def _nearest(frames: Iterable[tuple[str, int]]) -> str:
    """The last of ``frames``, files and lines in them, that is of the user's own code."""
    libraries = (
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        str(pathlib.Path(__file__).parents[1]),
    )
    own = [each for each in frames if not each[0].startswith(("<", *(library + os.sep for library in libraries)))]
    if not own:
        return ""
    path, here = pathlib.Path(own[-1][0]), pathlib.Path.cwd()
    return f" ({path.relative_to(here) if path.is_relative_to(here) else path}, line {own[-1][1]})"
