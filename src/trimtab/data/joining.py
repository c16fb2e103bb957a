"""The outputs or targets of several batches as one, for metrics over the whole set."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trimtab._internal.user_code import user_code
from trimtab.errors import UsageError, WorkloadError
from trimtab.tensors.batch_axis import is_column
from trimtab.tensors.structure import opened, tensors_of

Pick = Callable[[torch.Tensor | None], Any]
"""Returns a copy of the joined values of the examples at some positions, or of all examples for ``None``."""


def defensive_copy(value: Any) -> Any:
    """A deep copy of ``value`` for code that may write to it; ``value`` itself if it cannot be copied."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    # deepcopy of a view copies all of its storage
    known = {id(tensor): tensor.detach().clone() for tensor in tensors_of(value)}
    try:
        with user_code("What is judged cannot be copied"):
            return copy.deepcopy(value, known)
    except (UsageError, WorkloadError):
        return value


def example_counts(outputs: Sequence[Any], targets: Sequence[Any], rows: Sequence[int]) -> list[int]:
    """The number of examples in each batch.

    That is its ``rows``. A batch that must stay whole has 0 ``rows``: it counts by the first axis of its first tensor if output
    and target agree on that in all such batches, else as one.
    """
    sizes = [_first_size(output) for output in outputs]
    agreed = all(n or size == _first_size(target) for size, target, n in zip(sizes, targets, rows, strict=True))
    return [n or (size if agreed else 1) for n, size in zip(rows, sizes, strict=True)]


def joined(values: Sequence[Any], counts: Sequence[int]) -> Pick:
    """The ``values`` of batches that hold ``counts`` examples, in the structure of the first.

    Tensors with an entry per example along axis 0, and lists with an item per example, are concatenated. A constant that is
    equal in all batches stays; anything else becomes a list with the value of each batch.

    Raises:
        WorkloadError: tensors differ in another axis than the first.
    """
    if all(isinstance(value, torch.Tensor) for value in values):
        return _tensors(values, counts)
    if is_column(values, counts):
        return _sequence([item for value in values for item in value])
    inside = [opened(value) for value in values]
    first = inside[0]
    if first is None:
        return _constants(values, counts)
    parts = [found.items for found in inside if found is not None]
    shapes = {(isinstance(value, Mapping), *found.keys) for value, found in zip(values, inside, strict=True) if found}
    if len(parts) < len(values) or len(shapes) > 1:
        return _per_batch(values, counts)
    picks = [joined(items, counts) for items in zip(*parts, strict=True)]
    return lambda index: first.rebuild([pick(index) for pick in picks])


def _tensors(values: Sequence[torch.Tensor], counts: Sequence[int]) -> Pick:
    if any((len(value) if value.dim() else 1) != count for value, count in zip(values, counts, strict=True)):
        return _per_batch(values, counts)
    try:
        whole = torch.cat([value if value.dim() else value[None] for value in values])
    except RuntimeError as error:
        raise WorkloadError(
            f"The outputs or targets of the batches cannot be joined for the metric: {error}. Pad them to one size, or use "
            "score=... per example."
        ) from error
    return lambda index: whole.clone() if index is None else whole[index]  # the metric may write to it


def _constants(values: Sequence[Any], counts: Sequence[int]) -> Pick:
    if all(value is None for value in values):
        return lambda index: None
    if set(counts) == {1} and all(isinstance(value, (bool, int, float)) for value in values):
        return _tensors([torch.as_tensor(value) for value in values], counts)
    if set(counts) != {1} and all(isinstance(value, (bool, int, float, str)) and value == values[0] for value in values):
        return lambda index: values[0]
    return _per_batch(values, counts)


def _per_batch(values: Sequence[Any], counts: Sequence[int]) -> Pick:
    """A list with the value of each batch. It has an item per example if each batch is one example."""
    return _sequence(values) if set(counts) == {1} else lambda index: list(map(defensive_copy, values))


def _sequence(items: Sequence[Any]) -> Pick:
    """A list of copies of the picked items; an item that is picked twice is copied twice."""
    return lambda index: [defensive_copy(items[i]) for i in (range(len(items)) if index is None else index.tolist())]


def _first_size(value: Any) -> int:
    """Entries along axis 0 of the first tensor in ``value``; without tensors, the length of a list or tuple, else 1."""
    tensors = tensors_of(value)
    if tensors:
        return len(tensors[0]) if tensors[0].dim() else 1
    return len(value) if isinstance(value, (tuple, list)) else 1
