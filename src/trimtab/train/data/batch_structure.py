"""Cut batches into micro-batches and join batches into one, by the rule of :mod:`trimtab.tensors.batch_axis`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from trimtab.errors import WorkloadError
from trimtab.tensors.batch_axis import BatchAxis, concatenate, take, uneven
from trimtab.tensors.structure import items_of, opened
from trimtab.train.loss.adapter import Batch, examples

_AS_ONE = "exact_batchnorm runs the batches of an update as one"
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))
"""Constants that are compared by value."""


def split(batch: Batch, size: int) -> list[Batch]:
    """``batch`` in parts of at most ``size`` examples whose sizes differ by one at most.

    Even parts, because BatchNorm cannot train on one example. Constants go to every part.

    Raises:
        WorkloadError: tensors differ in their first axis, cannot be sliced, or may be examples as well as columns.
    """
    count = examples(batch)
    if count <= size:
        return [batch]
    refused = f"A batch cannot be taken apart into micro-batches of {size}: "
    if what := _inseparable(batch):
        raise WorkloadError(
            f"{refused}it holds {what}, of which torch takes no rows. Make the loader's batches smaller and set accumulate "
            "instead."
        )
    if shapes := uneven(batch):
        raise WorkloadError(
            f"{refused}its tensors differ in their first axis ({shapes}). Make the loader's batches smaller and set accumulate "
            "instead."
        )
    if isinstance(batch, list) and 2 < len(batch) > count and all(isinstance(each, torch.Tensor) for each in batch):
        raise WorkloadError(
            f"{refused}it is a list of {len(batch)} tensors, which may be {len(batch)} examples, or columns of {count} each. "
            "Stack examples, and give columns in a tuple."
        )
    number, is_column = -(-count // size), BatchAxis.of(batch).is_column
    ends = list(itertools.accumulate(count // number + (part < count % number) for part in range(number)))
    return [take(batch, slice(*bounds), is_column) for bounds in zip([0, *ends], ends, strict=False)]


def join(batches: Sequence[Batch]) -> Batch:
    """One batch with the examples of all ``batches`` and the constants of the first.

    Raises:
        WorkloadError: tensors differ in dtype or in another axis than the first, cannot be joined, or batches differ in
            structure.
    """
    for batch in batches:
        if what := _inseparable(batch):
            raise WorkloadError(f"Batches cannot be joined that hold {what}. Give tensors, padded alike.")
    return concatenate(batches, [BatchAxis.of(batch).is_column for batch in batches])


def united(batches: Sequence[Batch]) -> Batch:
    """One batch that trains as all ``batches`` do, which may differ in their examples only.

    Raises:
        WorkloadError: as :func:`join`; a constant differs; or the tensors of a batch differ in their first axis.
    """
    for batch in batches:
        if what := _inseparable(batch):
            raise WorkloadError(f"{_AS_ONE}, but these hold {what}, which torch does not join.")
        if shapes := uneven(batch):
            raise WorkloadError(f"{_AS_ONE}, but nothing tells how to join tensors that differ in their first axis: {shapes}.")
    first, *others = [dict(_constants(batch, BatchAxis.of(batch))) for batch in batches]
    for other in others:
        if differing := [place for place in {**first, **other} if (place, first.get(place, ...)) not in other.items()]:
            raise WorkloadError(
                f"{_AS_ONE}, but {differing[0]} goes for a whole batch, and is not the same in the next. Give it for each "
                "example, as a tensor with as many rows."
            )
    try:
        return join(batches)
    except WorkloadError as error:
        raise WorkloadError(f"{_AS_ONE}. {error}") from error


def _constants(value: Any, axis: BatchAxis, place: str = "batch") -> Iterator[tuple[str, Any]]:
    """The constants of a batch by place; the type instead of the value of a tensor or column."""
    if isinstance(value, torch.Tensor):
        yield place, torch.Tensor if value.dim() else value.item()
    elif axis.is_column(value):
        yield place, type(value)
    elif (found := opened(value)) and found.items:
        for key, item in zip(found.keys, found.items, strict=True):
            yield from _constants(item, axis, f"{place}[{key!r}]")
    else:
        yield place, value if isinstance(value, _PLAIN) else value.tolist() if isinstance(value, np.ndarray) else id(value)


def _inseparable(value: Any) -> str | None:
    """The first value in a batch from which torch cannot take examples; ``None`` if there is none."""
    if isinstance(value, PackedSequence):
        return "a packed sequence"
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return "a nested tensor"
        return None if value.layout in (torch.strided, torch.sparse_coo) else f"a tensor of the layout {value.layout}"
    return next(filter(None, map(_inseparable, items_of(value))), None)
