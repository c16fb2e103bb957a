"""Batches of labelled or calibration data: count their rows, take rows, divide them at random. A row is an example."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from trimtab.core.workload import as_call
from trimtab.errors import WorkloadError
from trimtab.tensors.batch_axis import concatenate, is_column, is_list, take
from trimtab.tensors.structure import leaves_of, map_items, opened, tensors_of

MEASURABLE = "biufc"
"""Kinds of numpy dtypes that torch has too: booleans, integers, floats, complex numbers."""


class Column(list[Any]):
    """A list in a target with an item per row. It is marked when the batch is read; later, lengths may agree by chance."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """The inputs and targets of one call of the model."""

    inputs: Any
    target: Any = None
    """``None`` without labels."""
    rows: int = 0
    """Rows that may be taken from it; 0 if it must stay whole."""
    single: bool = False
    """Whether a batch that must stay whole is one example."""
    examples: int = 0
    """Examples along the axis that the workload names as the batch axis; 0 if it names none."""

    @property
    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs as ``(args, kwargs)``."""
        return as_call(self.inputs)

    def take(self, index: torch.Tensor) -> Batch:
        """The rows at ``index``."""
        inputs, target = take((self.inputs, self.target), index, _is_marked)
        return Batch(inputs, target, len(index))


def _is_marked(value: Any) -> bool:
    return isinstance(value, Column)


def pieces(batch: Batch, size: int) -> Iterator[Batch]:
    """``batch`` in parts of at most ``size`` rows."""
    if batch.rows == size:
        yield batch
        return
    for index in torch.split(torch.arange(batch.rows), size):
        yield batch.take(index)


def rows_of(inputs: Any, target: Any) -> int:
    """The number of rows that may be taken from a batch; 0 if it must stay whole.

    All tensors must have the same number of entries along axis 0, the inputs must hold tensors and constants only, and the
    target must have a part for each row and no list of another length.
    """
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors_of(inputs) + tensors_of(target)}
    rows = sizes.pop() if len(sizes) == 1 else 0
    known = all(isinstance(leaf, torch.Tensor) or _is_constant(leaf) for leaf in leaves_of(inputs))
    return rows if known and (target is None or _by_row(target, rows)) else 0


def _by_row(value: Any, rows: int) -> bool | None:
    """Whether ``value`` has a part for every row; ``None`` if that is not certain."""
    if isinstance(value, torch.Tensor) or _is_constant(value):
        return isinstance(value, torch.Tensor)
    inside = opened(value)
    found = {None} if inside is None else {_by_row(part, rows) for part in inside.items}
    if is_column([value], [rows]):
        return None if True in found else True  # a column of columns: either axis could be the rows
    if None in found or (is_list(value) and True not in found):  # a list of another length
        return None
    return True in found


def marked(value: Any, rows: int) -> Any:
    """``value`` with its lists that have an item for each of ``rows`` made a :class:`Column`."""
    return Column(value) if is_column([value], [rows]) else map_items(value, lambda item: marked(item, rows))


def _is_constant(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def divide(
    batches: Sequence[Batch], share: float, generator: torch.Generator, *, whole: bool
) -> tuple[list[Batch], list[Batch]]:
    """Split at random into ``share`` of the rows and the rest; of the batches if ``whole`` or if one must stay whole."""
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
    """Join neighbouring batches with equal shapes and constants up to ``size`` rows, because the parts of a split are small."""
    found: list[Batch] = []
    for batch in batches:
        both = joined([found[-1], batch]) if found and found[-1].rows + batch.rows <= size else None
        if both is None:
            found.append(batch)
        else:
            found[-1] = both
    return found


def joined(batches: Sequence[Batch]) -> Batch | None:
    """All rows in one batch; ``None`` if structures, shapes or constants differ."""
    try:
        pairs = [(batch.inputs, batch.target) for batch in batches]
        inputs, target = concatenate(pairs, [_is_marked] * len(pairs), equal=True)
    except WorkloadError:
        return None
    return Batch(inputs, target, sum(batch.rows for batch in batches))


def count(batches: Sequence[Batch]) -> int:
    """The number of rows; a batch that must stay whole counts as one."""
    return sum(max(batch.rows, 1) for batch in batches)


def arrays_to_tensors(value: Any) -> Any:
    """``value`` with tensors for its arrays, and lists for arrays of texts or objects, which torch does not have."""
    if isinstance(value, (np.ndarray, np.generic)):
        return as_tensor(np.asarray(value)) if value.dtype.kind in MEASURABLE else value.tolist()
    if type(value).__module__ == "numpy" and hasattr(value, "__array__"):
        return torch.as_tensor(value)
    return map_items(value, arrays_to_tensors)


def as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor with the values of ``array``. They are copied if torch cannot share them: negative strides, read-only memory,
    foreign byte order."""
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.require(native, requirements=["C", "W"]))
