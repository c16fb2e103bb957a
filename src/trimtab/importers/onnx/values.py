"""Values of an imported ONNX graph: tensors, and small integers that must stay Python numbers so that shapes stay symbolic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trimtab.errors import UsageError

MOST_HOST = 64
"""Integer constants of up to so many entries are kept as Python numbers."""
MOST_VALUES = 2**16
"""Of numbers that are computed from such constants."""


class Host:
    """A scalar or vector of int64 as Python numbers, which may be symbolic while a graph is exported.

    ONNX computes shapes in tensors (Shape, Gather, Concat, Reshape). As tensors they would become constants, or depend on data,
    for every exporter; as numbers they stay what they are.
    """

    def __init__(self, values: list[Any], scalar: bool) -> None:
        if not torch.compiler.is_compiling():  # where sizes are symbols, it would be a condition on them
            _refuse_endless(values)
        self.values = values
        self.scalar = scalar


Value = torch.Tensor | Host


def _refuse_endless(values: list[Any]) -> None:
    """Python's numbers and lists grow without end, which a crafted file could have us wait for; those of ONNX do not."""
    if len(values) > MOST_VALUES or any(isinstance(value, int) and not -(2**63) <= value < 2**63 for value in values):
        raise unsupported("it computes with whole numbers beyond 64 bits, or with very many of them")


def host(values: list[Any], scalar: bool) -> Host:
    """A :class:`Host`, as a function that a graph can call."""
    return Host(list(values), scalar)


def tensor(value: Any) -> torch.Tensor:
    """``value`` as a tensor."""
    if isinstance(value, Host):
        logical = bool(value.values) and all(isinstance(item, bool) for item in value.values)
        dtype = torch.bool if logical else torch.int64
        return torch.tensor(value.values[0] if value.scalar else value.values, dtype=dtype)
    found: torch.Tensor = value
    return found


def ints(value: Any) -> list[Any]:
    """``value`` as Python numbers; reads them out of a tensor where it must."""
    if isinstance(value, Host):
        return value.values
    if isinstance(value, torch.Tensor):
        return [int(item) for item in value.flatten().tolist()]
    return list(value)


def elementwise(name: str, on_numbers: Callable[..., Any], on_tensors: Callable[..., Any]) -> Callable[..., Any]:
    """A function of two values that stays with numbers as long as both are."""

    def function(first: Any, second: Any) -> Any:
        if isinstance(first, Host) and isinstance(second, Host):
            size = max(len(first.values), len(second.values))
            pairs = zip(
                *(part.values * size if len(part.values) == 1 else part.values for part in (first, second)), strict=True
            )
            return Host([on_numbers(a, b) for a, b in pairs], first.scalar and second.scalar)
        return on_tensors(tensor(first), tensor(second))

    function.__name__ = function.__qualname__ = name
    function.__module__ = "trimtab.importers.onnx.operators"
    return function


def unsupported(what: str) -> UsageError:
    """The refusal of a graph."""
    return UsageError(
        f"The ONNX file cannot be brought back to PyTorch: {what}. Start from the PyTorch model that it was exported from, if "
        "you have it; that gives every technique the most to work with in any case."
    )
