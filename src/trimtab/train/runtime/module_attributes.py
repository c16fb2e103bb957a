"""What modules hold in plain attributes, such as a state that is carried from batch to batch, to be put back later."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

_OF_TORCH = frozenset(vars(nn.Module()))
"""Parameters, buffers, submodules, hooks and the mode: whoever changes these sees to them."""


class Attributes:
    """The attributes of ``modules`` that are tensors or lists, dicts and tuples of such, now or later.

    What holds none, such as a number of calls, goes on counting, and what other objects hold is their own affair. Modules that
    their first forward pass is yet to make are left alone.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        found = [vars(module) for module in modules if not isinstance(module, LazyModuleMixin)]
        self._held = [(held, _own(held)) for held in found]
        known: dict[int, tuple[Any, Any]] = {}
        for _, own in self._held:
            for value in own.values():
                _keep(value, known)
        self._contents = list(known.values())

    def put_back(self) -> None:
        """Each module has the attributes that it had, with what was in them; those that are as they were are not touched."""
        for held, own in self._held:
            for name in held.keys() - own.keys() - _OF_TORCH:
                if _of_tensors(held[name]):
                    del held[name]
            for name, value in own.items():
                now = held.get(name)
                if now is not value and (_of_tensors(value) or _of_tensors(now)):
                    held[name] = value
        for value, kept in self._contents:
            if isinstance(value, torch.Tensor):
                if not same(value, kept):
                    value.copy_(kept)
            elif _of_tensors(value) or _of_tensors(kept):
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(kept)


def _own(held: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in held.items() if name not in _OF_TORCH}


def _of_tensors(value: Any, depth: int = 4) -> bool:
    """Whether it is a tensor, or holds one not far below."""
    return isinstance(value, torch.Tensor) or (depth > 0 and any(_of_tensors(item, depth - 1) for item in _inside(value)))


def _keep(value: Any, known: dict[int, tuple[Any, Any]]) -> None:
    """Note ``value`` and what it holds, each with a copy, under its ``id``."""
    if id(value) in known:
        return
    if type(value) is torch.Tensor:
        if value.layout == torch.strided and not (value.is_nested or value.is_meta):
            known[id(value)] = (value, value.detach().clone())
        return
    if isinstance(value, (list, dict)):
        known[id(value)] = (value, copy.copy(value))
    for item in _inside(value):
        _keep(item, known)


def _inside(value: Any) -> Iterable[Any]:
    """What is in a list, a dict or a tuple."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a tensor is what its copy is, not-a-numbers included."""
    if a.layout != torch.strided:  # torch compares no sparse ones
        a, b = a.detach().to_dense(), b.to_dense()
    a = a.detach()
    return torch.equal(a, b) or bool(torch.all((a == b) | ((a != a) & (b != b))))
