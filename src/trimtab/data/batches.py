"""Batches of data as values: what a call is made of, how many rows it has, and how rows are picked, joined and divided."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trimtab.core.capture import Call
from trimtab.core.workload import as_call
from trimtab.tensors.structure import opened

MEASURABLE = "biufc"
"""Kinds of numpy arrays that have a tensor: booleans, integers, floats, complex numbers. Texts and objects have none."""


class Column(list[Any]):
    """A list in a target with an item for each row of its batch; known once, because lengths say less of smaller batches."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """One call's worth of data. ``target`` is ``None`` where there are no labels; ``rows`` is 0 where it must stay whole, and
    ``single`` says that it is one example then, whatever its rows are a part of, or ``examples`` where its owner says along
    which axis they lie."""

    inputs: Any
    target: Any = None
    rows: int = 0
    single: bool = False
    examples: int = 0

    @property
    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs as ``(args, kwargs)``."""
        return as_call(self.inputs)

    def take(self, index: torch.Tensor) -> Batch:
        """The rows at ``index``."""
        return Batch(_picked(self.inputs, index), _picked(self.target, index), len(index))


def pieces(batch: Batch, size: int) -> Iterator[Batch]:
    if batch.rows == size:
        yield batch
        return
    for index in torch.split(torch.arange(batch.rows), size):
        yield batch.take(index)


def rows_of(inputs: Any, target: Any) -> int:
    """How many rows a batch can be taken apart into; 0 where that is not sure of everything in it."""
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors_of(inputs) + tensors_of(target)}
    rows = sizes.pop() if len(sizes) == 1 else 0
    known = all(isinstance(leaf, torch.Tensor) or _is_constant(leaf) for leaf in leaves_of(inputs))
    return rows if known and (target is None or _by_row(target, rows)) else 0


def _by_row(value: Any, rows: int) -> bool | None:
    """Whether ``value``, whose tensors have ``rows``, has a part for every row; ``None`` if something inside leaves it open."""
    if isinstance(value, torch.Tensor) or _is_constant(value):
        return isinstance(value, torch.Tensor)
    inside = opened(value)
    found = {None} if inside is None else {_by_row(part, rows) for part in inside[0]}
    if _is_column(value, rows):
        return None if True in found else True  # columns of a column: either could be the rows
    if None in found or (_is_list(value) and True not in found):  # a list of another length belongs to no row that we know
        return None
    return True in found


def _is_list(value: Any) -> bool:
    """Whether ``value`` is no structure but a list; a DataLoader gives those of strings as tuples."""
    return isinstance(value, list) or (type(value) is tuple and all(isinstance(item, str) for item in value))


def _is_column(value: Any, rows: int) -> bool:
    return _is_list(value) and len(value) == rows and not tensors_of(value)


def marked(value: Any, rows: int) -> Any:
    inside = opened(value)
    if inside is None:
        return value
    return Column(value) if _is_column(value, rows) else inside[1](marked(part, rows) for part in inside[0])


def _is_constant(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def divide(
    batches: Sequence[Batch], share: float, generator: torch.Generator, *, whole: bool
) -> tuple[list[Batch], list[Batch]]:
    """Split at random into about ``share`` and the rest: row by row where batches may be taken apart, else ``whole``."""
    if not batches:
        return [], []
    if whole or any(batch.rows == 0 for batch in batches):
        order = torch.randperm(len(batches), generator=generator).tolist()
        cut = min(max(round(share * len(batches)), 1), len(batches) - 1) if len(batches) > 1 else len(batches)
        return [batches[i] for i in sorted(order[:cut])], [batches[i] for i in sorted(order[cut:])]
    chosen = torch.zeros(count(batches), dtype=torch.bool)
    chosen[torch.randperm(len(chosen), generator=generator)[: round(share * len(chosen))]] = True
    first, rest, start = [], [], 0
    for batch in batches:
        mask = chosen[start : start + batch.rows]
        start += batch.rows
        first += [batch.take(mask.nonzero().flatten())] if mask.any() else []
        rest += [batch.take((~mask).nonzero().flatten())] if not mask.all() else []
    size = max(batch.rows for batch in batches)
    return _merged(first, size), _merged(rest, size)


def _merged(batches: list[Batch], size: int) -> list[Batch]:
    """Neighbours that differ in nothing but their rows joined, up to ``size`` rows, so that splitting does not leave crumbs."""
    joined: list[Batch] = []
    for batch in batches:
        last = joined[-1] if joined else None
        if last is not None and last.rows + batch.rows <= size and _frame(last) == _frame(batch):
            joined[-1] = Batch(_cat(last.inputs, batch.inputs), _cat(last.target, batch.target), last.rows + batch.rows)
        else:
            joined.append(batch)
    return joined


def _frame(batch: Batch) -> tuple[Any, Any]:
    """What all rows of a batch have in common: shapes, constants, structure."""
    return _common(batch.inputs), _common(batch.target)


def _common(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape[1:]
    inside = None if isinstance(value, Column) else opened(value)
    if inside is None:
        return Column if isinstance(value, Column) else value
    return type(value), list(value) if isinstance(value, Mapping) else None, [_common(part) for part in inside[0]]


def count(batches: Sequence[Batch]) -> int:
    return sum(max(batch.rows, 1) for batch in batches)


def with_tensors(value: Any) -> Any:
    """``value`` with its arrays made tensors; arrays of texts or objects, which have none, are made lists."""
    if isinstance(value, Call):
        return Call(with_tensors(value.args), with_tensors(value.kwargs))
    if isinstance(value, (np.ndarray, np.generic)):
        return as_tensor(np.asarray(value)) if value.dtype.kind in MEASURABLE else value.tolist()
    if type(value).__module__ == "numpy" and hasattr(value, "__array__"):
        return torch.as_tensor(value)
    inside = opened(value)
    return value if inside is None else inside[1](map(with_tensors, inside[0]))


def as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor of ``array``, whose values are copied where torch cannot hold them as they lie: in steps backwards, in memory
    that may not be written to, in the byte order of another machine."""
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.require(native, requirements=["C", "W"]))


def leaves_of(value: Any) -> list[Any]:
    inside = opened([value.args, value.kwargs] if isinstance(value, Call) else value)
    return [value] if inside is None else [leaf for part in inside[0] for leaf in leaves_of(part)]


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]


def _picked(value: Any, index: torch.Tensor) -> Any:
    """``value`` with the rows at ``index`` only."""
    if isinstance(value, torch.Tensor):
        return value[index]
    if isinstance(value, Column):
        return Column(value[i] for i in index.tolist())
    if isinstance(value, Call):
        return Call(_picked(value.args, index), _picked(value.kwargs, index))
    inside = opened(value)
    return value if inside is None else inside[1](_picked(part, index) for part in inside[0])


def _cat(first: Any, second: Any) -> Any:
    """Two values of the same frame, joined along their rows."""
    if isinstance(first, torch.Tensor):
        return torch.cat([first, second])
    if isinstance(first, Column):
        return Column([*first, *second])
    mine, yours = opened(first), opened(second)
    if mine is None or yours is None:
        return first
    return mine[1](_cat(a, b) for a, b in zip(mine[0], yours[0], strict=True))
