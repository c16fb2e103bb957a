"""torch, imported when one of its names is first used.

Modules that a server's process imports use ``late_torch`` in place of torch, so that a process with a model of ONNX Runtime or
OpenVINO starts, and runs, without torch. For types, they import torch itself under ``TYPE_CHECKING``.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # the import system looks up such names
        raise AttributeError(name)
    value = getattr(importlib.import_module("torch"), name)
    if isinstance(value, type):  # classes are looked up in every call
        globals()[name] = value
    return value
