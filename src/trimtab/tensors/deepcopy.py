"""Deep copies of models, with hooks and closures bound to the copy."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

T = TypeVar("T")


def copied(model: T) -> T:
    """A deep copy of ``model``, or of a container of models, with hooks and other functions of its modules bound to the copy.

    :func:`copy.deepcopy` shares functions. A shared hook that stores into ``self`` would write to the original, and the copy
    would return what the original had stored when it was copied.
    """
    known: dict[int, Any] = {}
    with _Values():
        found = copy.deepcopy(model, known)
    functions = _Functions(known)
    for part in [each for each in known.values() if isinstance(each, nn.Module)]:
        for held in (vars(part), *vars(part).values()):
            if isinstance(held, (dict, list)):
                functions.rebind(held)
    return found


class _Values(TorchFunctionMode):
    """In this block, deepcopy detaches computed tensors, such as a stored activation: torch refuses to copy tensors that are
    no leaves of a graph."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


class _Functions:
    """Rebinds functions to copies. ``known`` is the memo of :func:`copy.deepcopy`: copies by ``id`` of their originals."""

    def __init__(self, known: Mapping[int, Any]) -> None:
        self._known = known
        self._made: dict[types.FunctionType, types.FunctionType] = {}
        self._cells: dict[int, types.CellType] = {}
        """New closure cells by ``id`` of the original cells; several functions may share one."""

    def rebind(self, held: dict[Any, Any] | list[Any]) -> None:
        """Replace the functions in ``held`` that refer to an original."""
        pairs = held.items() if isinstance(held, dict) else enumerate(held)
        for place, value in list(pairs):
            if isinstance(value, types.FunctionType) and self._refers(value, set()):
                held[place] = self._function(value)

    def _refers(self, value: Any, seen: set[int]) -> bool:
        if isinstance(value, types.FunctionType) and id(value) not in seen:
            seen.add(id(value))  # a function may refer to itself
            return any(self._refers(item, seen) for item in _contents(value))
        return id(value) in self._known or (isinstance(value, types.MethodType) and id(value.__self__) in self._known)

    def _value(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType) and self._refers(value, set()):
            return self._function(value)
        if isinstance(value, types.MethodType) and id(value.__self__) in self._known:
            return types.MethodType(value.__func__, self._known[id(value.__self__)])
        return self._known.get(id(value), value)

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        if function in self._made:
            return self._made[function]
        cells = tuple(self._cells.setdefault(id(cell), types.CellType()) for cell in function.__closure__ or ())
        other = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, cells or None)
        self._made[function] = other
        for old, new in zip(function.__closure__ or (), cells, strict=True):
            if _is_filled(old) and not _is_filled(new):
                new.cell_contents = self._value(old.cell_contents)
        if function.__defaults__ is not None:
            other.__defaults__ = tuple(map(self._value, function.__defaults__))
        if function.__kwdefaults__ is not None:
            other.__kwdefaults__ = {name: self._value(value) for name, value in function.__kwdefaults__.items()}
        other.__dict__.update(function.__dict__)
        other.__qualname__, other.__doc__, other.__module__ = function.__qualname__, function.__doc__, function.__module__
        other.__annotations__ = function.__annotations__
        return other


def _contents(function: types.FunctionType) -> Iterator[Any]:
    """The values of the closure and the defaults of ``function``."""
    yield from (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises if the cell is empty
    except ValueError:
        return False
    return True
