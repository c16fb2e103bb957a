"""What a call is given, kept so that a second call sees it as it was: the objects are copied, the tensors in them are not."""

from __future__ import annotations

import copy
import types
from collections import UserDict
from typing import Any

import torch
from torch import nn

_SHARED = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
    types.FunctionType,
    types.ModuleType,
    torch.Tensor,
    nn.Module,
)


def apart(value: Any) -> Any:
    """``value``, in containers and objects of its own, to which nothing is added that is added to those of ``value``.

    Tensors, modules, functions and everything that has no attributes, or whose class sees to its own copies or its end, are the
    same.
    """
    return value if isinstance(value, _SHARED) else _apart(value, {})


def _apart(value: Any, known: dict[int, Any]) -> Any:
    """The same; what was met before is ``known``, by its ``id``."""
    if isinstance(value, _SHARED):
        return value
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, tuple):
        items = [_apart(item, known) for item in value]
        if all(ours is theirs for ours, theirs in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, (list, dict, UserDict)):
        made: Any = copy.copy(value)
        known[id(value)] = made
        for key, item in enumerate(value) if isinstance(value, list) else value.items():
            if (ours := _apart(item, known)) is not item:  # some that cannot be changed refuse any
                made[key] = ours
        return made
    if not _plain(value):
        return value
    made = copy.copy(value)
    known[id(value)] = made
    vars(made).update({name: _apart(item, known) for name, item in vars(value).items()})
    return made


def _plain(value: Any) -> bool:
    """Whether an object is its attributes, so that a copy of it is one with the same.

    One without any is most often known by its identity, as a mark for what was not given; one that lets go of something when it
    is gone would do so twice.
    """
    kind = type(value)
    own = any(hasattr(kind, name) for name in ("__copy__", "__setstate__", "__del__")) or any(
        vars(k).get("__slots__") for k in kind.__mro__
    )
    ways = ("__reduce__", "__reduce_ex__", "__getstate__", "__new__")
    return bool(getattr(value, "__dict__", None)) and not own and all(getattr(kind, n) is getattr(object, n) for n in ways)
