"""Fingerprints of the code that a study's figures belong to: other code can take another time for the same outputs.

Files are hashed as they are, without their ``if __name__ == "__main__"`` blocks. A comment counts as a change.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import pathlib
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from trimtab.core.backend import BACKENDS
from trimtab.core.technique import PASSES

MODEL = "the model's classes"
"""Name of code that is in none of the user's files: an installed package's, a graph's, a notebook's."""
_PROGRAM = re.compile(rb"""^if __name__ == ["']__main__["']:.*(?:\r?\n(?:[ \t].*)?)*""", re.MULTILINE)
"""The block that is skipped when a file is imported."""


def code_of(model: nn.Module, files: Mapping[str, str]) -> dict[str, str]:
    """Sixteen hexadecimal digits of each of ``files``, of each plug-in, and of the classes of ``model``, by name."""
    found = {name: _digest([_read(path)]) for name, path in sorted({**_plugin_files(), **files}.items())}
    return found | {MODEL: _digest(_model_code(model))}


def _plugin_files() -> dict[str, str]:
    """Names and files of the loaded modules of each package that registers passes or backends."""
    classes = [*PASSES.plugins.values(), *BACKENDS.plugins.values()]
    packages = {cls.__module__.partition(".")[0] for cls in classes}
    modules = [(name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items())]
    return {name: file for name, file in modules if file and name.partition(".")[0] in packages and os.path.isfile(file)}


def _model_code(model: nn.Module) -> Iterator[bytes]:
    seen, files = set[Any](), set[str]()
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    for cls in sorted(classes, key=lambda cls: (cls.__module__, cls.__qualname__)):
        if cls.__module__.partition(".")[0] in ("torch", "builtins"):  # torch's version is compared elsewhere
            continue
        yield cls.__qualname__.encode()
        home = sys.modules.get(cls.__module__)
        file = getattr(home, "__file__", None)
        if getattr(home, cls.__qualname__, None) is cls and file is not None and os.path.isfile(file):
            files.add(file)
        else:
            yield from _code_without_file(cls, cls.__module__, seen)
    yield from map(_read, sorted(files))
    for module in model.modules():
        if isinstance(module, (torch.fx.GraphModule, torch.jit.ScriptModule)):
            yield str(getattr(module, "code", "")).encode()


def _code_without_file(value: Any, module: str, seen: set[Any]) -> Iterator[bytes]:
    """Code and constants of a class or function of ``module`` without a file, such as a notebook's, and of what it uses."""
    if isinstance(value, (property, staticmethod, classmethod)):
        value = value.fget if isinstance(value, property) else value.__func__
    if isinstance(value, types.FunctionType):
        value = inspect.unwrap(value)
    if not isinstance(value, (type, types.FunctionType)) or value.__module__ != module or value in seen:
        return
    seen.add(value)
    if isinstance(value, types.FunctionType):
        yield from _code_bytes(value.__code__)
    for _, each in sorted((vars(value) if isinstance(value, type) else value.__globals__).items()):
        yield from _code_without_file(each, module, seen)


def _code_bytes(code: types.CodeType) -> Iterator[bytes]:
    yield repr((code.co_name, code.co_code, code.co_names)).encode()
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _code_bytes(each)
        else:  # a set has another order in each process
            yield repr(sorted(map(repr, each)) if isinstance(each, frozenset) else each).encode("utf-8", "surrogatepass")


def _read(path: str) -> bytes:
    return _PROGRAM.sub(b"", pathlib.Path(path).read_bytes())


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for each in parts:
        digest.update(each + b"\0")
    return digest.hexdigest()
