"""Cut batches into micro-batches and join batches into one, by the rule of :mod:`trimtab.tensors.batch_axis`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import PackedSequence

from trimtab.errors import WorkloadError
from trimtab.tensors.batch_axis import BatchAxis, concatenate, take, uneven
from trimtab.tensors.structure import leaves_of
from trimtab.train.loss.adapter import Batch, examples


def split(batch: Batch, size: int) -> list[Batch]:
    """``batch`` in parts of at most ``size`` examples whose sizes differ by one at most.

    Even parts, because BatchNorm cannot train on one example. Constants go to every part.

    Raises:
        WorkloadError: tensors differ in their first axis, cannot be sliced, or may be examples as well as columns.
    """
    count = examples(batch)
    if count <= size:
        return [batch]
    reason = _why_whole(batch)
    if isinstance(batch, list) and 2 < len(batch) > count and all(isinstance(each, torch.Tensor) for each in batch):
        reason = (
            f"it is a list of {len(batch)} tensors, which may be {len(batch)} examples, or columns of {count} each; stack "
            "examples, and give columns in a tuple"
        )
    if reason is not None:
        raise WorkloadError(
            f"A batch cannot be taken apart into micro-batches of {size}: {reason}. Make the loader's batches smaller and set "
            "accumulate instead."
        )
    number, is_column = -(-count // size), BatchAxis.of(batch).is_column
    ends = list(itertools.accumulate(count // number + (part < count % number) for part in range(number)))
    return [take(batch, slice(*bounds), is_column) for bounds in zip([0, *ends], ends, strict=False)]


def join(batches: Sequence[Batch]) -> Batch:
    """One batch that trains as all ``batches`` do, which may differ in their examples only.

    Raises:
        WorkloadError: tensors differ in an axis, in dtype or cannot be joined; a constant differs; or batches differ in
            structure.
    """
    for batch in batches:
        if (reason := _why_whole(batch)) is not None:
            raise WorkloadError(f"A batch cannot be joined with others: {reason}. Give tensors, padded alike.")
    return concatenate(batches, [BatchAxis.of(batch).is_column for batch in batches], equal=True)


def _why_whole(batch: Batch) -> str | None:
    """Why examples can be neither taken from ``batch`` nor added to it; ``None`` if they can."""
    for leaf in leaves_of(batch, lambda value: isinstance(value, PackedSequence)):
        if isinstance(leaf, PackedSequence):
            return "it holds a packed sequence, of which torch takes no rows"
        if isinstance(leaf, torch.Tensor) and leaf.is_nested:
            return "it holds a nested tensor, of which torch takes no rows"
        if isinstance(leaf, torch.Tensor) and leaf.layout not in (torch.strided, torch.sparse_coo):
            return f"it holds a tensor of the layout {leaf.layout}, of which torch takes no rows"
    shapes = uneven(batch)
    return None if shapes is None else f"its tensors differ in their first axis ({shapes})"
