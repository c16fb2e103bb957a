"""Which axis counts the examples of a batch. One rule for every room:

- A tensor or numpy array has an entry per example along axis 0. A nested tensor or packed sequence has its sequences.
- A list with as many items as the batch has examples has an item per example.
- Everything else is a constant of the whole batch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from trimtab.errors import WorkloadError
from trimtab.tensors.structure import is_flat, items_of, leaves_of, map_items, opened, tensors_of

IsColumn = Callable[[Any], bool]
"""True for a value that is no tensor and has an item per example."""

_TENSOR, _MAPPINGS, _LISTED_TENSOR, _TEXTS = range(4)
"""Sources of the number of examples, the most certain first."""
_OTHER_FORM = "Batches that hold different things cannot be joined: give all the same items, tensors in the same places."
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))
"""Constants that are compared by value."""


@dataclasses.dataclass(frozen=True)
class BatchAxis:
    """The batch axis of one batch."""

    count: int | None
    """Examples; ``None`` if the batch holds no tensor, array, or list of texts or mappings."""
    mappings: bool = False
    """Whether the batch holds a list of mappings with an item per example, such as the targets of object detection."""

    @classmethod
    def of(cls, batch: Any) -> BatchAxis:
        """The batch axis of ``batch``.

        The number of examples is that of the first tensor or array outside of lists; if there is none, of the first list of
        mappings or dataclasses with equal keys; then of the first tensor in a list; then of the first list of texts.
        """
        found = list(_counts(batch))
        if set(found) == {(_MAPPINGS, 2)}:  # only pairs give a count, as the two sides of a comparison
            found = list(_counts(batch, pairs=True)) or found
        count = min(found, key=lambda each: each[0])[1] if found else None
        return cls(count, (_MAPPINGS, count) in found)

    def is_column(self, value: Any) -> bool:
        """True for an array, list or tuple with an item per example.

        A list or tuple of tensors or arrays is one if none of them has ``count`` entries along axis 0, or if the batch holds a
        list of mappings as long. A list of containers is one if these are mappings.
        """
        if isinstance(value, np.ndarray):
            return value.ndim > 0 and self.count in (None, len(value))
        if not _is_list(value) or self.count not in (None, len(value)):
            return False
        if _are_mappings(value):
            return self.mappings
        leads = [lead(item) for item in value if isinstance(item, (torch.Tensor, np.ndarray))]
        plain = len(leads) in (0, len(value)) and not any(map(opened, value))
        return plain and (self.mappings or self.count not in leads)


def lead(value: Any) -> int | None:
    """The number of examples in a tensor, array or packed sequence; ``None`` for anything else and without axes."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    if isinstance(value, torch.Tensor):
        return value.size(0) if value.ndim else None  # not shape, which nested tensors need not have
    return len(value) if isinstance(value, np.ndarray) and value.ndim else None


def length(batch: Any) -> int | None:
    """The number of examples in ``batch``; ``None`` if it is unknown."""
    if is_flat(batch) and batch and batch[0].ndim:  # called for each micro-batch
        return int(batch[0].size(0))
    certain = next((count for source, count in _counts(batch) if source == _TENSOR), None)
    return BatchAxis.of(batch).count if certain is None else certain


def uneven(batch: Any) -> str | None:
    """The shapes of the tensors in ``batch``, if some have not as many entries along axis 0 as there are examples."""
    axis = BatchAxis.of(batch)
    leaves = leaves_of(batch, lambda value: isinstance(value, PackedSequence) or axis.is_column(value))
    found = [leaf for leaf in leaves if isinstance(leaf, (torch.Tensor, PackedSequence))]
    if all(lead(tensor) in (None, axis.count) for tensor in found):
        return None
    return ", ".join(map(_shape, found))


def is_column(values: Sequence[Any], counts: Sequence[int]) -> bool:
    """True if the ``values`` of several batches are lists with an item for each of their ``counts`` examples.

    For labelled data, where a tuple is a structure unless it holds texts: a DataLoader gives the texts of a batch as a tuple.
    Lists whose tensors all have an entry per example along axis 0 are structures too.
    """
    pairs = list(zip(values, counts, strict=True))
    if not all(is_list(value) and len(value) == count for value, count in pairs):
        return False
    leads = [lead(tensor) == count for value, count in pairs for tensor in tensors_of(value)]
    return not leads or not all(leads)


def is_list(value: Any) -> bool:
    """True for a list, and for a plain tuple of texts."""
    return isinstance(value, list) or (type(value) is tuple and all(isinstance(item, str) for item in value))


def take(value: Any, index: slice | torch.Tensor, is_column: IsColumn) -> Any:
    """The examples at ``index`` of every tensor and column in ``value``. Slices of strided tensors are views."""
    if isinstance(value, torch.Tensor):
        if value.is_sparse and value.dim() and isinstance(index, slice):  # torch has no slices of sparse tensors
            index = torch.arange(index.start, index.stop, device=value.device)
            return value.index_select(0, index)
        return value[index] if value.dim() else value
    if is_column(value):
        return value[index] if isinstance(index, slice) else type(value)([value[place] for place in index.tolist()])
    return map_items(value, lambda item: take(item, index, is_column))


def concatenate(values: Sequence[Any], are_columns: Sequence[IsColumn], *, equal: bool = False, place: str = "batch") -> Any:
    """The tensors and columns of several batches one after another; constants are those of the first batch.

    Args:
        equal: whether constants must be equal in all batches.
        place: the name of the whole in errors.

    Raises:
        WorkloadError: tensors differ in dtype or in another axis than the first, constants differ, or the batches differ in
            structure.
    """
    first = values[0]
    if len({isinstance(value, torch.Tensor) for value in values}) > 1:
        raise WorkloadError(_OTHER_FORM)
    if isinstance(first, torch.Tensor) and len({(value.dtype, value.dim(), value.shape[1:]) for value in values}) > 1:
        shapes = ", ".join(f"{tuple(value.shape)} of {value.dtype}" for value in values)
        raise WorkloadError(
            f"Tensors can be joined that have one type and differ in the first axis alone, but these are {shapes}. Pad them "
            "alike."
        )
    if isinstance(first, torch.Tensor) and first.dim():
        return torch.cat(list(values))
    if all(is_column(value) for value, is_column in zip(values, are_columns, strict=True)):
        return np.concatenate(values) if isinstance(first, np.ndarray) else type(first)(itertools.chain(*values))
    found = [opened(value) for value in values]
    items = [{} if each is None else dict(zip(each.keys, each.items, strict=True)) for each in found]
    if any(each.keys() != items[0].keys() for each in items):
        raise WorkloadError(_OTHER_FORM)
    if found[0] is not None:
        keyed = ((f"{place}[{key!r}]", [each[key] for each in items]) for key in items[0])
        return found[0].rebuild([concatenate(parts, are_columns, equal=equal, place=name) for name, parts in keyed])
    if equal and any(_constant(value) != _constant(first) for value in values):
        raise WorkloadError(
            f"{place} goes for a whole batch, and is not the same in the next. Give it for each example, as a tensor with as "
            "many rows."
        )
    return first


def _constant(value: Any) -> Any:
    """``value`` as something that can be compared; an object of an unknown class is equal to itself only."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.tolist()
    return value if isinstance(value, _PLAIN) else id(value)


def _counts(value: Any, *, outside: bool = True, top: bool = True, pairs: bool = False) -> Iterator[tuple[int, int]]:
    """Pairs of a source, such as :data:`_TENSOR`, and the number of examples that it gives.

    Args:
        outside: no list, except the batch itself, contains ``value``.
        top: ``value`` is the batch itself.
        pairs: two mappings whose tensors have one length are inputs and targets at any depth, not two examples. Otherwise they
            are so only at the ``top``, or with two rows each.
    """
    if (count := lead(value)) is not None:
        yield _TENSOR if outside else _LISTED_TENSOR, count
    elif _are_texts(value):
        yield _TEXTS, len(value)
    elif _are_mappings(value) and not (_is_pair(value) and (top or pairs or _common_lead(value) == 2)):
        yield _MAPPINGS, len(value)
    else:
        for item in items_of(value):
            yield from _counts(item, outside=top or not _is_list(value), top=False, pairs=pairs)


def _shape(tensor: torch.Tensor | PackedSequence) -> str:
    if isinstance(tensor, PackedSequence):
        return f"{lead(tensor)} packed sequences"
    return f"{tensor.size(0)} nested tensors" if tensor.is_nested else str(tuple(tensor.shape))


def _is_list(value: Any) -> bool:
    """True for a list, and for a tuple that is no named tuple."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")


def _are_texts(value: Any) -> bool:
    return _is_list(value) and bool(value) and all(isinstance(item, (str, bytes)) for item in value)


def _are_mappings(value: Any) -> bool:
    """True for a list of mappings or dataclasses with equal keys."""
    if not _is_list(value):
        return False
    found = [opened(item) for item in value if isinstance(item, Mapping) or dataclasses.is_dataclass(item)]
    keys = [set(each.keys) for each in found if each is not None]
    return 0 < len(keys) == len(value) and all(each == keys[0] for each in keys)


def _is_pair(batch: Any) -> bool:
    """True for two mappings whose tensors have one length: inputs and targets, and not two examples."""
    return len(batch) == 2 and _common_lead(batch) is not None


def _common_lead(mappings: Any) -> int | None:
    """The length of all tensors in ``mappings``; ``None`` if they differ in it."""
    leads = {lead(item) for each in mappings for item in items_of(each)}
    return leads.pop() if len(leads) == 1 else None
