"""Handing a workload to worker processes."""

from __future__ import annotations

import os
import pathlib
import pickle
import sys

import cloudpickle

from trimtab.errors import UsageError
from trimtab.workload import Workload


def handed(workload: Workload | str, folder: pathlib.Path) -> dict[str, str]:
    """What a worker finds ``workload`` by (:func:`trimtab.study.jobs.read_workload`): its reference, or a pickle in ``folder``.

    Raises:
        UsageError: it is neither, or something in it cannot be pickled.
    """
    if isinstance(workload, str):
        return {"reference": workload}
    if not isinstance(workload, Workload):
        raise UsageError(f"A study needs a trimtab.Workload or a reference to one, not a {type(workload).__name__}.")
    path = folder / "workload.pkl"
    try:
        path.write_bytes(cloudpickle.dumps(workload))
    except (TypeError, AttributeError, RuntimeError, pickle.PicklingError) as error:
        reason = " ".join(str(error).split()).rstrip(".!")
        raise UsageError(
            f"The workload cannot be handed to worker processes: {reason}. Put it into a file and give its reference, such as "
            "'model.py:workload', or give model= a function that builds it."
        ) from error
    return {"pickle": str(path.resolve()), "path": os.pathsep.join(map(os.path.abspath, sys.path))}
