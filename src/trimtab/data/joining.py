"""Values of several batches as one, for metrics of the whole set: joined where they have a part for every example."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from trimtab._internal.user_code import user_code
from trimtab.errors import UsageError, WorkloadError
from trimtab.tensors.structure import Record, opened

Pick = Callable[[torch.Tensor | None], Any]
"""Gives the joined values of the examples at some positions, of all of them for ``None``, to somebody who may write to them."""


def spared(value: Any) -> Any:
    """A copy of ``value`` for code that may write to it; ``value`` itself where that cannot be copied."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    # a copy of a view would be one of all that it is a view of
    known = {id(leaf): leaf.detach().clone() for leaf in _leaves(value) if isinstance(leaf, torch.Tensor)}
    try:
        with user_code("What is judged cannot be copied"):
            return copy.deepcopy(value, known)
    except (UsageError, WorkloadError):
        return value


def example_counts(outputs: Sequence[Any], targets: Sequence[Any], rows: Sequence[int]) -> list[int]:
    """How many examples each batch holds.

    That is its ``rows``. A batch that must stay whole, with rows 0, holds as many as the first sizes of its output and target
    say; where these contradict each other in any such batch, the batch itself is the example.
    """
    leads = [_lead(output) for output in outputs]
    agreed = all(n or lead == _lead(target) for lead, target, n in zip(leads, targets, rows, strict=True))
    return [n or (lead if agreed else 1) for n, lead in zip(rows, leads, strict=True)]


def joined(values: Sequence[Any], counts: Sequence[int]) -> Pick:
    """The ``values`` of batches that hold ``counts`` examples, leaf by leaf in the structure of the first.

    Tensors whose first axis is the examples are concatenated, and lists with an item for every example are strung together.
    What all batches have in common stays as it is; anything else becomes a list with the value of every batch. Dataclasses
    and mappings with attributes come back as :class:`~trimtab.tensors.structure.Record`.

    Raises:
        WorkloadError: tensors cannot be concatenated, because their other sizes differ.
    """
    if all(isinstance(value, torch.Tensor) for value in values):
        return _tensors(values, counts)
    if dataclasses.is_dataclass(values[0]) and not isinstance(values[0], (type, Mapping)):
        values = [_shallow(value) for value in values]
    if _is_column(values, counts):
        return _sequence([item for value in values for item in value])
    inside = [opened(value) for value in values]
    if inside[0] is None:
        return _constants(values, counts)
    parts = [found[0] for found in inside if found is not None]
    if len(parts) < len(values) or len({_shape(value) for value in values}) > 1:
        return _each(values, counts)
    close, picks = inside[0][1], [joined(same, counts) for same in zip(*parts, strict=True)]
    return lambda index: close([pick(index) for pick in picks])


def _tensors(values: Sequence[torch.Tensor], counts: Sequence[int]) -> Pick:
    if any((len(value) if value.dim() else 1) != count for value, count in zip(values, counts, strict=True)):
        return _each(values, counts)
    try:
        whole = torch.cat([value if value.dim() else value[None] for value in values])
    except RuntimeError as error:
        raise WorkloadError(
            f"The outputs or targets of the batches cannot be joined for the metric: {error}. Pad them to one size, or use "
            "score=... per example."
        ) from error
    return lambda index: whole.clone() if index is None else whole[index]  # it may be written to, and is asked for again


def _constants(values: Sequence[Any], counts: Sequence[int]) -> Pick:
    if all(value is None for value in values):
        return lambda index: None
    if set(counts) == {1} and all(isinstance(value, (bool, int, float)) for value in values):
        return _tensors([torch.as_tensor(value) for value in values], counts)
    if set(counts) != {1} and all(isinstance(value, (bool, int, float, str)) and value == values[0] for value in values):
        return lambda index: values[0]
    return _each(values, counts)


def _each(values: Sequence[Any], counts: Sequence[int]) -> Pick:
    """A list with the value of every batch; where each batch is one example, these are picked too."""
    return _sequence(values) if set(counts) == {1} else lambda index: list(map(spared, values))


def _sequence(items: Sequence[Any]) -> Pick:
    """A list of copies, each item's own though it be picked twice: tensors are copied where they are picked."""
    return lambda index: [spared(items[i]) for i in (range(len(items)) if index is None else index.tolist())]


def _is_column(values: Sequence[Any], counts: Sequence[int]) -> bool:
    """Whether ``values`` are lists with an item for every example, and not structures whose tensors lead with the examples.

    A tuple is a structure, unless it holds strings: those of a batch are what a DataLoader makes a tuple of.
    """
    for value, count in zip(values, counts, strict=True):
        texts = type(value) is tuple and all(isinstance(item, str) for item in value)
        if not (isinstance(value, list) or texts) or len(value) != count:
            return False
    leaves = ((leaf, count) for value, count in zip(values, counts, strict=True) for leaf in _leaves(value))
    led = [leaf.dim() > 0 and len(leaf) == count for leaf, count in leaves if isinstance(leaf, torch.Tensor)]
    return not led or not all(led)


def _shallow(value: Any) -> Any:
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    return Record.of(type(value).__name__, ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value)))


def _shape(value: Any) -> tuple[Any, ...]:
    """What containers must have in common for their parts to belong together."""
    return (isinstance(value, Mapping), *(value if isinstance(value, Mapping) else range(len(value))))


def _lead(value: Any) -> int:
    """The first size of the first tensor in ``value``; where there is none, the length of a list, and 1 of anything else."""
    tensor = next((leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor)), None)
    if tensor is not None:
        return len(tensor) if tensor.dim() else 1
    return len(value) if isinstance(value, (tuple, list)) else 1


def _leaves(value: Any) -> Iterator[Any]:
    found = opened(_shallow(value))
    return iter([value]) if found is None else itertools.chain.from_iterable(map(_leaves, found[0]))
