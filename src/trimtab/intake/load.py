"""The one way from a reference to a workload."""

from __future__ import annotations

import os
import re

from trimtab.errors import UsageError
from trimtab.intake.script import read_script
from trimtab.workload import Workload

FORMS = "file.py, file.py:name or package.module:name"


def load_workload(reference: str | os.PathLike[str]) -> Workload:
    """The workload that ``file.py``, ``file.py:name`` or ``package.module:name`` refers to.

    The name may be a :class:`Workload` or a function that returns one; without a name it is ``workload``, or the only workload
    in the file. The file's folder is put on ``sys.path``, as ``python file.py`` does.

    Raises:
        UsageError: no such file, module or name, or it is not a workload.
        WorkloadError: the file raised while it was run; the user's exception is the cause.
    """
    text = os.fspath(reference)
    if re.search(r"\.py(:[A-Za-z_]\w*)?$", text) or re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", text):
        return read_script(text)
    raise UsageError(f"{text!r} is not a workload. Write {FORMS}.")
