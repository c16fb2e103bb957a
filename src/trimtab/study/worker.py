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
    job = json.loads((folder / JOB).read_text(encoding="utf-8"))
    try:
        write_json(folder / RESULT, _result(job, folder))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        if out_of_space(sys.exception()):
            with contextlib.suppress(OSError):  # the log lies on a disk too
                traceback.print_exc()
            os._exit(DISK_FULL)
    os._exit(0)  # runtimes that crash while they are torn down must not spoil a result that is complete


def _result(job: dict[str, Any], folder: pathlib.Path) -> Any:
    try:
        return (TRAINING if job.get("mode") == "train" else JOBS)[job["kind"]](job, folder)
    except TrimtabError as error:
        if out_of_space(error):
            raise
        traceback.print_exc()
        message = str(error)
        if job["kind"] == "prepare" and isinstance(error, WorkloadError) and error.__cause__ is not None:
            message = with_fix(message, f"The traceback is in {folder / LOG}.")  # that of the user's own code
        return {"error": type(error).__name__, "message": message, "traceback": traceback.format_exc()}


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
