"""Values in an imported ONNX graph: tensors, or small integers as Python numbers, so that shapes stay symbolic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trimtab.errors import UsageError

MAX_HOST_VALUES = 64
"""Integer constants with at most this many entries are kept as Python numbers."""
MAX_COMPUTED_VALUES = 2**16
"""Most entries of values that are computed from such constants."""


class Host:
    """A scalar or vector of int64 as Python numbers, which may be symbolic during an export.

    ONNX computes shapes with tensor operators (Shape, Gather, Concat, Reshape). Exporters would turn such tensors into
    constants or data-dependent sizes; Python numbers stay symbolic.
    """

    def __init__(self, values: list[Any], scalar: bool) -> None:
        if not torch.compiler.is_compiling():  # for symbolic sizes the check would add a guard
            _check_bounds(values)
        self.values = values
        self.scalar = scalar


Value = torch.Tensor | Host


def _check_bounds(values: list[Any]) -> None:
    """Refuse very long lists and integers beyond 64 bits, with which a crafted file could make Python compute without end."""
    if len(values) > MAX_COMPUTED_VALUES or any(isinstance(value, int) and not -(2**63) <= value < 2**63 for value in values):
        raise unsupported("it computes with whole numbers beyond 64 bits, or with very many of them")


def host(values: list[Any], scalar: bool) -> Host:
    """Make a :class:`Host`; a function that a graph can call."""
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
    """``value`` as a list of Python numbers; tensors are read."""
    if isinstance(value, Host):
        return value.values
    if isinstance(value, torch.Tensor):
        return [int(item) for item in value.flatten().tolist()]
    return list(value)


def elementwise(name: str, on_numbers: Callable[..., Any], on_tensors: Callable[..., Any]) -> Callable[..., Any]:
    """A binary function that uses ``on_numbers`` if both arguments are :class:`Host`, and ``on_tensors`` otherwise."""

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
    """The error for a graph that cannot be imported."""
    return UsageError(
        f"The ONNX file cannot be brought back to PyTorch: {what}. Start from the PyTorch model that it was exported from, if "
        "you have it; that gives every technique the most to work with in any case."
    )
