"""Main program of a worker process: ``python -m trimtab.execution.worker FOLDER`` runs the job in the folder."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pathlib
import sys
import traceback
from typing import Any

from trimtab._internal.files import out_of_space
from trimtab._internal.serialization import write_json
from trimtab._internal.text import MAX_TRACEBACK, shortened, with_fix
from trimtab.errors import TrimtabError, WorkloadError
from trimtab.execution.jobs import compression, inference, training
from trimtab.execution.process import DISK_FULL, JOB, LOG, RESULT, end_descendants
from trimtab.execution.workload_transfer import AUTHKEY, authkey

PRELOADED = (inference, training, compression)
"""Job tables that are imported before a server forks; a job names its own."""


def main(folder: pathlib.Path) -> int:
    """Run the job in ``folder`` and write its result there. A trimtab error is a result too; a full disk is an exit code."""
    code, here = 1, pathlib.Path.cwd()  # the workload may change the working folder
    # reading from standard input must fail at once: nobody answers, and the pipe behind it watches the parent
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    try:
        job = json.loads((folder / JOB).read_text(encoding="utf-8"))
        if AUTHKEY in os.environ:
            authkey()  # read now: the workload may clear its environment
        write_json(folder / RESULT, _result(job, folder, folder.relative_to(here) if folder.is_relative_to(here) else folder))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        raise
    finally:
        # without cleanup: threads of the user would be waited for, and runtimes that crash in teardown would spoil a result
        try:
            if (raised := sys.exception()) is not None:
                code = DISK_FULL if out_of_space(raised) else code
                _log_traceback()
            end_descendants(os.getpid())
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # whatever streams the workload has installed
            os._exit(code)


def _log_traceback() -> None:
    """Write the traceback to the log, even if the workload redirects standard error; not if that is closed or the disk full."""
    with contextlib.suppress(OSError, ValueError):
        traceback.print_exc(file=sys.__stderr__)


def _result(job: dict[str, Any], folder: pathlib.Path, shown: pathlib.Path) -> Any:
    try:
        table = importlib.import_module(job.get("jobs", inference.__name__)).JOBS
        return table[job["kind"]](job, folder)
    except TrimtabError as error:
        if out_of_space(error):
            raise
        _log_traceback()
        message = shortened(str(error))
        if job["kind"] == "prepare" and isinstance(error, WorkloadError) and error.__cause__ is not None:
            message = with_fix(message, f"The traceback is in {shown / LOG}.")  # the traceback of the user's own code
        # the reader knows only trimtab's error classes, and a workload may have derived its own
        kind = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == TrimtabError.__module__)
        return {"error": kind, "message": message, "traceback": shortened(traceback.format_exc(), MAX_TRACEBACK)}


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
