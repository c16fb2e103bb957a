"""Which lists in a batch have an entry per example.

A list of tensors may be that, as detection's images of several sizes are, or the columns of a batch, as the inputs of a model
that takes two. What lies beside it tells.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from trimtab.errors import WorkloadError


def rows_of(batch: Any) -> list[Any]:
    """The lists in ``batch`` with an entry per example, those within such lists left out."""
    if alone(batch):
        return [batch]
    items = inside(batch)
    found = [item for item in items if _is_rows(item, items)]
    ids = set(map(id, found))
    return found + [row for item in items if id(item) not in ids for row in rows_of(item)]


def length(batch: Any) -> int | None:
    """The number of examples in ``batch``, if anything tells: its first tensor or array, or else a list of examples."""
    if type(batch) in (tuple, list) and batch and isinstance(first := batch[0], torch.Tensor) and first.ndim:
        return len(batch) if type(batch) is list and _ragged(batch) else first.size(0)  # what follows says so, for longer
    if (found := _column(batch)) is not None or alone(batch):
        return len(batch) if found is None else found
    items = inside(batch)
    later = []
    for item in items:
        if alone(item):  # names, say, which need not be those of the examples
            later.append(len(item))
        elif (found := len(item) if _is_rows(item, items) else length(item)) is not None:
            return found
    return next(iter(later), None)


def uneven(batch: Any) -> str | None:
    """The shapes of the tensors in ``batch`` where the first axis of some is not that of its examples.

    Lists with an entry per example are left out.
    """
    count = length(batch)
    columns = list(_columns(batch, {id(row) for row in rows_of(batch) if len(row) == count}))
    if all(_column(column) in (None, count) for column in columns):
        return None
    return ", ".join(
        f"{_column(each)} packed sequences" if isinstance(each, PackedSequence) else _shape(each) for each in columns
    )


def inseparable(batch: Any) -> str | None:
    """What ``batch`` holds of which torch can neither take some rows nor join them, if it does."""
    for column in _columns(batch, set()):
        if isinstance(column, torch.Tensor) and (column.is_nested or column.layout not in (torch.strided, torch.sparse_coo)):
            return "a nested tensor" if column.is_nested else f"a tensor of the layout {column.layout}"
    return None


def alone(item: Any) -> bool:
    """Whether ``item`` is a list of examples, whatever lies beside it: of texts, of mappings, of tensors as of no one batch."""
    if not _is_list(item):
        return False
    first = item[0]
    if isinstance(first, (str, bytes)):
        return all(isinstance(each, (str, bytes)) for each in item)
    if (names := _names(first)) is not None:
        alike = all(_names(each) == names for each in item)
        return alike and not (len(item) == 2 and _one_batch(item))  # inputs and targets may have the same names
    return isinstance(item, list) and _ragged(item)


def inside(batch: Any) -> list[Any]:
    """What a container holds."""
    if type(batch) in (tuple, list):
        return list(batch)
    return [item for _, item in entries(batch)]


def entries(batch: Any) -> list[tuple[Any, Any]]:
    """What a container holds, each with its key, its field's name or its place."""
    if type(batch) in (tuple, list):  # by far the most are, and nothing else is known as quickly
        return list(enumerate(batch))
    if (found := batch if isinstance(batch, Mapping) else fields_of(batch)) is not None:
        return list(found.items())
    return list(enumerate(batch)) if isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence) else []


def fields_of(batch: Any) -> dict[str, Any] | None:
    """What a dataclass holds, by name; ``None`` for anything else."""
    if isinstance(batch, (type, Mapping)) or not dataclasses.is_dataclass(batch):
        return None
    names = [field.name for field in dataclasses.fields(batch)]
    return {name: getattr(batch, name) for name in names if hasattr(batch, name)}


def with_fields(batch: Any, items: Mapping[str, Any]) -> Any:
    """A dataclass like ``batch`` that holds ``items``: as it is, because what its class does with new ones was done already."""
    made = copy.copy(batch)
    for name, item in items.items():
        object.__setattr__(made, name, item)  # those of some are frozen
    return made


def rebuilt(batch: Any, change: Callable[[Any], Any]) -> Any:
    """``batch`` with ``change`` made to everything in it; a leaf that is no tensor stays as it is."""
    if isinstance(batch, Mapping):
        changed = {key: change(item) for key, item in batch.items()}
        return changed if type(batch) is dict else _like(batch, changed)
    if (found := fields_of(batch)) is not None:
        return with_fields(batch, {name: change(item) for name, item in found.items()})
    if isinstance(batch, tuple):
        items = [change(item) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    if isinstance(batch, list):
        return [change(item) for item in batch]
    return batch


def _like(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """A mapping of the kind of ``batch``, such as transformers' BatchEncoding, that also answers to attributes."""
    try:
        return type(batch)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def _is_rows(item: Any, beside: list[Any]) -> bool:
    """Whether ``item``, which lies ``beside`` others and itself, has an entry per example."""
    if alone(item):
        return True
    if not _is_list(item) or not all(isinstance(each, torch.Tensor) for each in item):
        return False
    count, axes = len(item), {_column(each) for each in item}
    others = [other for other in beside if other is not item and _is_list(other) and len(other) == count]
    if any(_names(other[0]) is not None and alone(other) for other in others):
        return True
    if axes == {count}:
        return False
    if any(alone(other) for other in others):
        return True
    columns = {_column(other) for other in beside}
    if count in columns:
        return not axes & columns
    tensors = [other for other in others if all(isinstance(each, torch.Tensor) for each in other)]
    return bool(tensors) and len(axes.union(*({_column(each) for each in other} for other in tensors))) > 1


def _columns(batch: Any, rows: set[int]) -> Iterator[torch.Tensor | PackedSequence]:
    """The tensors and packed sequences in ``batch`` that are in none of ``rows``."""
    if isinstance(batch, (torch.Tensor, PackedSequence)):
        yield batch
    elif id(batch) not in rows:
        for item in inside(batch):
            yield from _columns(item, rows)


def _column(item: Any) -> int | None:
    """How many examples a tensor or an array is of; a packed sequence has a row for every step."""
    if isinstance(item, PackedSequence):
        return int(item.batch_sizes[0])
    if isinstance(item, torch.Tensor):
        return item.size(0) if item.ndim else None  # not shape, which nested tensors need not have
    return len(item) if isinstance(item, np.ndarray) and item.ndim else None


def _shape(tensor: torch.Tensor) -> str:
    return f"{tensor.size(0)} nested tensors" if tensor.is_nested else str(tuple(tensor.shape))


def _names(item: Any) -> Any:
    """Under which names a mapping or a dataclass holds something."""
    found = item if isinstance(item, Mapping) else fields_of(item)
    return None if found is None else found.keys()


def _is_list(item: Any) -> bool:
    return isinstance(item, (list, tuple)) and bool(item) and not hasattr(item, "_fields")


def _one_batch(items: Any) -> bool:
    """Whether the tensors in mappings are all as long as each other, as those of a batch are."""
    axes = {_column(value) for item in items for value in inside(item)}
    return len(axes) == 1 and None not in axes


def _ragged(items: list[Any]) -> bool:
    """Whether these are tensors of one kind that differ in length alone."""
    if not all(isinstance(each, torch.Tensor) and each.dim() for each in items):
        return False
    return len({(each.dtype, each.shape[1:]) for each in items}) == 1 < len({each.shape[0] for each in items})


def packed_part(packed: PackedSequence, start: int, end: int) -> PackedSequence:
    """The sequences from ``start`` to before ``end``, in the order in which they were packed."""
    kept = unpack_sequence(packed)[start:end]
    return pack_sequence(kept, enforce_sorted=packed.sorted_indices is None)  # some of sorted ones in a row are sorted too


def packed_joined(batches: Sequence[PackedSequence]) -> PackedSequence:
    """The sequences of all ``batches``, one after the other.

    Raises:
        WorkloadError: their elements differ in shape or type.
    """
    if len({(batch.data.dtype, batch.data.shape[1:]) for batch in batches}) > 1:
        shapes = ", ".join(f"{tuple(batch.data.shape[1:])} of {batch.data.dtype}" for batch in batches)
        raise WorkloadError(f"Packed sequences can be joined that are of one kind, but the elements of these are {shapes}.")
    rows = [row for batch in batches for row in unpack_sequence(batch)]
    return pack_sequence(rows, enforce_sorted=False)
