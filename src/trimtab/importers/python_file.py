"""Workloads from Python code: ``file.py``, ``file.py:name``, ``package.module:name``."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pathlib
import re
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

from trimtab._internal.text import no_file, of_type
from trimtab._internal.user_code import user_code
from trimtab.core.workload import Workload
from trimtab.errors import UsageError

MAX_NAMES = 12
"""Most names of a file that an error message lists."""


def read_script(text: str) -> Workload:
    """The workload that the reference ``text`` names. Like ``python file.py``, adds the file's folder to ``sys.path``.

    Raises:
        UsageError: the file, module or name does not exist, or is not a workload.
        WorkloadError: the file raised an error, which is the cause.
    """
    place, _, name = text.rpartition(":") if re.search(r":[A-Za-z_]\w*$", text) else (text, "", "")
    module = _run_file(pathlib.Path(place)) if place.endswith(".py") else _import(place)
    with _script_argv(text):
        return _as_workload(_pick(module, name, text), text)


def _run_file(path: pathlib.Path) -> types.ModuleType:
    if not os.path.isfile(path):  # False for a forbidden folder, where pathlib's is_file raises
        raise no_file(path, "Check the path, or write a file to start from: trimtab init.")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    with user_code(f"{path} could not be run", _remedy(path)), _script_argv(str(path)):
        spec.loader.exec_module(module)
    return module


def _remedy(path: pathlib.Path) -> str:
    """The remedy for a file that fails. A file in a package may fail because of relative imports."""
    folders, names = path.resolve().parents, [path.stem]
    for folder in folders:
        if not (folder / "__init__.py").is_file():
            break
        names.insert(0, folder.name)
    if len(names) == 1:
        return f"Try it alone: python {path}"
    return f"It lies in a package: where it imports with a leading dot, write {'.'.join(names)}:NAME, in the folder {folder}."


@contextlib.contextmanager
def _script_argv(*found: str) -> Iterator[None]:
    """Set ``sys.argv`` to ``found`` in the block, so that a script does not parse trimtab's arguments."""
    before = sys.argv
    sys.argv = list(found)
    try:
        yield
    finally:
        sys.argv = before


def _import(name: str) -> types.ModuleType:
    sys.path.insert(0, os.getcwd())
    with user_code(f"The module {name} could not be imported", f"Try it alone: python -c 'import {name}'"), _script_argv(name):
        try:
            found = importlib.util.find_spec(name)  # runs the parent packages
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            found = None
        if found is None:
            raise UsageError(f"There is no module {name!r} on the path. For a file, write its path with .py.")
        return importlib.import_module(name)


def _pick(module: types.ModuleType, name: str, text: str) -> Any:
    if name:
        if not hasattr(module, name):
            raise UsageError(f"{text!r}: the file has no {name!r}. It has: {', '.join(_public(module)) or 'nothing'}.")
        return getattr(module, name)
    if hasattr(module, "workload"):
        return module.workload
    found = _workloads(module)
    if len(found) == 1:
        return getattr(module, found[0])
    if not found:
        raise UsageError(
            f"{text!r} defines no workload. `trimtab init` writes a file to start from; if one of its functions makes one, say "
            f"which: {text}:NAME (it has: {', '.join(_public(module)) or 'nothing'})."
        )
    raise UsageError(
        f"{text!r} defines {len(found)} workloads. Name one of them `workload`, or say which: {text}:NAME "
        f"(they are: {', '.join(_workloads(module)[:MAX_NAMES])})."
    )


def _as_workload(found: Any, text: str) -> Workload:
    if not isinstance(found, Workload) and callable(found) and not isinstance(found, type):
        with user_code(f"{text!r} raised while it made the workload", "Call it yourself to see why."):
            found = found()
    if not isinstance(found, Workload):
        raise UsageError(f"{text!r} is {of_type(found)}; it must be a trimtab.Workload or a function that returns one.")
    return found


def _workloads(module: types.ModuleType) -> Sequence[str]:
    return [name for name, value in vars(module).items() if isinstance(value, Workload)]


def _public(module: types.ModuleType) -> Sequence[str]:
    """Names to suggest in an error: workloads, and callables that may make one."""
    makers = [name for name, value in vars(module).items() if not name.startswith("_") and callable(value)]
    return [*_workloads(module), *makers][:MAX_NAMES]
