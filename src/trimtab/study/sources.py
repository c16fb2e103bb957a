"""Of which code a study's figures are: equal weights and outputs may come of code that takes another time.

What is compared is what Python makes of the code, so that comments and layout may change, and so may what a file does only
where it is run as a program.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import pathlib
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from trimtab.contracts import BACKENDS, PASSES

MODEL = "the model's classes"
"""What the code that lies in no file of the user's is called: an installed package's, a graph's, a notebook's."""


def code_of(model: nn.Module, files: Mapping[str, str]) -> dict[str, str]:
    """Sixteen hexadecimal digits of the code in each of ``files`` and of the plug-ins, by name, and of that of the classes of
    ``model``."""
    found = {name: _digest(_of_file(pathlib.Path(path))) for name, path in sorted({**_of_plugins(), **files}.items())}
    return found | {MODEL: _digest(_of_model(model))}


def _of_plugins() -> dict[str, str]:
    """Names and files of the modules that are loaded of each package which brings passes or backends."""
    classes = [*PASSES.plugins.values(), *BACKENDS.plugins.values()]
    packages = {cls.__module__.partition(".")[0] for cls in classes}
    modules = [(name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items())]
    return {name: file for name, file in modules if file and name.partition(".")[0] in packages and os.path.isfile(file)}


def _of_file(path: pathlib.Path) -> Iterator[str]:
    text = path.read_bytes()
    try:
        tree = ast.parse(text)
        tree.body = [item for item in tree.body if not _is_program(item)]
        yield from _words(compile(tree, path.name, "exec", dont_inherit=True))
    except (SyntaxError, ValueError):  # an extension that is no Python
        yield text.hex()


def _is_program(item: ast.stmt) -> bool:
    """Whether it is the block ``if __name__ == "__main__"``, which is not run where a file is read."""
    return isinstance(item, ast.If) and ast.unparse(item.test) == "__name__ == '__main__'" and not item.orelse


def _of_model(model: nn.Module) -> Iterator[str]:
    seen = set[Any]()
    for cls in sorted({type(module) for module in model.modules()}, key=lambda cls: (cls.__module__, cls.__qualname__)):
        for each in cls.__mro__:
            yield from _of_class(each, seen)
    for module in model.modules():
        if isinstance(module, (torch.fx.GraphModule, torch.jit.ScriptModule)):
            yield str(getattr(module, "code", ""))


def _of_class(cls: type, seen: set[Any]) -> Iterator[str]:
    if cls in seen or cls.__module__.partition(".")[0] in ("torch", "builtins"):  # whose version is compared anyway
        return
    seen.add(cls)
    yield cls.__qualname__
    for name, value in sorted(vars(cls).items()):
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if inspect.isroutine(function):
            yield name
            yield from _of_function(inspect.unwrap(function), seen)


def _of_function(function: Any, seen: set[Any]) -> Iterator[str]:
    """What a function does, with what it calls in its own module: that of a notebook has no file."""
    if not isinstance(function, types.FunctionType) or function in seen:
        return
    seen.add(function)
    yield from _words(function.__code__)
    for name in sorted(_names(function.__code__)):
        used = function.__globals__.get(name)
        if getattr(used, "__module__", None) != function.__module__:
            continue
        yield from _of_class(used, seen) if isinstance(used, type) else _of_function(used, seen)


def _names(code: types.CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _words(code: types.CodeType) -> Iterator[str]:
    """What the code does, without the places where it stands."""
    yield code.co_code.hex()
    yield repr((code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags))
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _words(each)
        else:
            yield _steady(each)


def _steady(value: object) -> str:
    """``value`` in words that are the same in every process: a set has no order."""
    if isinstance(value, frozenset):
        return f"frozenset({sorted(map(_steady, value))})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_steady, value))})"
    return repr(value)


def _digest(words: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for each in words:
        digest.update(each.encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    return digest.hexdigest()
