"""The boundary between trimtab and the code of its user: what that raises is told as his, with where and what to do."""

from __future__ import annotations

import os
import pathlib
import sysconfig
import traceback

from trimtab._disk import out_of_space
from trimtab._fixes import raised, told, with_fix
from trimtab._said import said
from trimtab.errors import CompileError, UsageError, WorkloadError

BY_HAND = "Call the model with these inputs yourself."
"""What to do where the user's model fails."""


IN_WORKER = "TRIMTAB_WORKER"
"""Environment variable that tells the code in a process of ours, and in those that it starts, that it is in one."""
_INSIDE = bool(os.environ.get(IN_WORKER))
"""Whether this is one, whatever becomes of its environment."""


def outside_workers(what: str) -> None:
    """Refuse to start ``what`` in a worker process, where a file that starts it while it is read would start it without end.

    Raises:
        UsageError: this is one.
    """
    if _INSIDE or os.environ.get(IN_WORKER):
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
            exits = isinstance(error, SystemExit)
            words = f"it called sys.exit({error})" if exits else f"{type(error).__name__}: {raised(said(error))}"
            told = f"{self.what}: {words}{_place(error)}"
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


def _place(error: BaseException) -> str:
    """`` (model.py, line 12)``: the line of the user's own code that is nearest to where ``error`` was raised."""
    libraries = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), str(pathlib.Path(__file__).parent))
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(("<", *(library + os.sep for library in libraries)))]
    if not own:
        return ""
    path, here = pathlib.Path(own[-1].filename), pathlib.Path.cwd()
    return f" ({path.relative_to(here) if path.is_relative_to(here) else path}, line {own[-1].lineno})"
