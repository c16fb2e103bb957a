"""Hand a workload to worker processes, and the key of their sockets."""

from __future__ import annotations

import functools
import os
import pathlib
import sys
from typing import Any

import cloudpickle
from torch import nn

from trimtab._internal.text import of_type
from trimtab.core.candidate import MODEL_ERRORS
from trimtab.core.workload import Workload
from trimtab.errors import UsageError

AUTHKEY = "TRIMTAB_AUTHKEY"
"""Environment variable with the key of the study's sockets, set for its workers only."""


def workload_source(workload: Workload | str, folder: pathlib.Path) -> dict[str, Any]:
    """How a worker finds ``workload`` (:func:`trimtab.execution.jobs.inference.read_workload`): its reference, or a pickle in
    ``folder``.

    Raises:
        UsageError: it is neither, or cannot be pickled.
    """
    if isinstance(workload, str):
        return {"reference": workload}
    if not isinstance(workload, Workload):
        raise UsageError(f"A study needs a trimtab.Workload or a reference to one, not {of_type(workload)}.")
    if isinstance(workload.model, nn.Module) and any(map(_compiled, workload.model.modules())):
        raise UsageError(
            "The model was compiled in place, with its compile(), which does not reach worker processes: as written would be "
            "slower there than it is. Give model= a function that builds and compiles it, or leave compile() out, as "
            "torch.compile is tried anyway."
        )
    path = folder / "workload.pkl"
    try:
        path.write_bytes(cloudpickle.dumps(workload))
    except MODEL_ERRORS as error:
        reason = " ".join(str(error).split()).rstrip(".!")
        raise UsageError(
            f"The workload cannot be handed to worker processes: {reason}. Put it into a file and give its reference, such as "
            "'model.py:workload', or give model= a function that builds it."
        ) from error
    return {"pickle": str(path.resolve()), "path": [*map(os.path.abspath, sys.path)]}


def _compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


@functools.cache
def authkey() -> bytes:
    """The key of this study's sockets, in one of its workers. Read before the workload may change its environment."""
    return bytes.fromhex(os.environ[AUTHKEY])
