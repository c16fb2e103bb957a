"""The inside of a worker process: ``python -m trimtab.study.worker FOLDER`` runs the job that lies in the folder."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import traceback
from typing import Any

from trimtab._disk import out_of_space
from trimtab._fixes import with_fix
from trimtab._json import write_json
from trimtab.errors import TrimtabError, WorkloadError
from trimtab.study.jobs import JOBS
from trimtab.study.process import DISK_FULL, JOB, LOG, RESULT
from trimtab.study.train_jobs import TRAINING


def main(folder: pathlib.Path) -> int:
    """Run the job in ``folder`` and write its result there; an error of ours is a result too, a full disk an exit code."""
    code, here = 1, pathlib.Path.cwd()  # which the workload may change
    try:
        job = json.loads((folder / JOB).read_text(encoding="utf-8"))
        write_json(folder / RESULT, _result(job, folder, folder.relative_to(here) if folder.is_relative_to(here) else folder))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        raise
    finally:
        # at once: threads of the user's would be waited for, and runtimes that crash while they are torn down spoil a result
        with contextlib.suppress(OSError, ValueError):  # the log lies on a disk too, and may have been closed
            if (raised := sys.exception()) is not None:
                traceback.print_exc()
                code = DISK_FULL if out_of_space(raised) else code
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _result(job: dict[str, Any], folder: pathlib.Path, shown: pathlib.Path) -> Any:
    try:
        return (TRAINING if job.get("mode") == "train" else JOBS)[job["kind"]](job, folder)
    except TrimtabError as error:
        if out_of_space(error):
            raise
        traceback.print_exc()
        message = str(error)
        if job["kind"] == "prepare" and isinstance(error, WorkloadError) and error.__cause__ is not None:
            message = with_fix(message, f"The traceback is in {shown / LOG}.")  # that of the user's own code
        return {"error": type(error).__name__, "message": message, "traceback": traceback.format_exc()}


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
