"""Trim padding: cut columns that are padding in every row before a call of a module, and pad its outputs again."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree

KEEPS = frozenset({"attention_mask", "mask"})
"""Names of masks that are 0 at the padding."""
DROPS = frozenset({"key_padding_mask", "src_key_padding_mask", "padding_mask", "pad_mask"})
"""Names of masks that are 1 at the padding."""
Restore = Callable[[Any], Any]


def trimmed(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Restore | None]:
    """Arguments without the columns that are padding in every row, and a function that pads outputs with zeros to their width.

    Columns at the end are cut; those at the beginning only where ``position_ids`` are given, because their number is the
    position otherwise. The function is ``None`` if nothing was cut.
    """
    outside = excluded(module, args, kwargs)
    if outside is None:
        return args, kwargs, None
    rows, width = outside.shape
    real = (~outside).any(0).nonzero().flatten()
    first, last = (int(real[0]), int(real[-1]) + 1) if len(real) else (0, 1)
    first = first if "position_ids" in _named(module, args, kwargs) else 0
    if last - first == width:
        return args, kwargs, None

    def cut(value: Any) -> Any:
        fits = isinstance(value, torch.Tensor) and value.dim() >= 2 and tuple(value.shape[:2]) == (rows, width)
        return value[:, first:last] if fits else value

    def padded(value: Any) -> Any:
        fits = isinstance(value, torch.Tensor) and value.dim() >= 2 and tuple(value.shape[:2]) == (rows, last - first)
        return functional.pad(value, [0, 0] * (value.dim() - 2) + [first, width - last]) if fits else value

    return _pytree.tree_map(cut, args), _pytree.tree_map(cut, kwargs), functools.partial(_pytree.tree_map, padded)


def excluded(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Mask of shape (rows, columns), true at padding: from a mask argument, or from ``padding_idx`` of the embedding;
    ``None`` if the module has neither."""
    named = _named(module, args, kwargs)
    tensors: dict[str, torch.Tensor] = {
        name: value for name, value in named.items() if isinstance(value, torch.Tensor) and value.dim() == 2
    }
    for name, value in tensors.items():
        if name in KEEPS:
            return torch.eq(value, 0)
        if name in DROPS:
            return torch.ne(value, 0)
    place = _padding_value(module)
    for value in tensors.values() if place is not None else ():
        if value.dtype in (torch.int64, torch.int32):
            return torch.eq(value, place or 0)
    return None


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(_names(type(module).forward), args, strict=False)) | kwargs


@functools.cache
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def _padding_value(module: nn.Module) -> int | None:
    """``padding_idx`` of the module's embedding."""
    if module not in _values:
        found = (each.padding_idx for each in module.modules() if isinstance(each, nn.Embedding))
        _values[module] = next((place for place in found if place is not None), None)
    return _values[module]


_values: weakref.WeakKeyDictionary[nn.Module, int | None] = weakref.WeakKeyDictionary()
