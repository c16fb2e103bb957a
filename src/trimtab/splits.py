"""The workload's data, read once and split three ways: calibration, selection, test. Never mixed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset

from trimtab._tree import Record
from trimtab.capture import Call
from trimtab.errors import UsageError, WorkloadError
from trimtab.workload import Evaluation, Workload, as_call, user_code

MOST_CALIBRATION = 256
"""More examples than this change a quantizer's ranges little and cost much time."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """One call's worth of data. ``target`` is ``None`` where there are no labels; ``rows`` is 0 where it must stay whole."""

    inputs: Any
    target: Any = None
    rows: int = 0

    @property
    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs as ``(args, kwargs)``."""
        return as_call(self.inputs)

    def take(self, index: torch.Tensor) -> Batch:
        """The rows at ``index``."""
        return Batch(_map(self.inputs, lambda t: t[index]), _map(self.target, lambda t: t[index]), len(index))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Splits:
    """Calibration for quantizers, selection for the search, test for the winner; and what the split cost, in sentences."""

    calibration: tuple[Batch, ...] = ()
    selection: tuple[Batch, ...] = ()
    test: tuple[Batch, ...] = ()
    labelled: bool = False
    notes: tuple[str, ...] = ()

    def examples(self) -> dict[str, int]:
        """How many each part has; stand-ins for data are none."""
        parts = {"calibration": self.calibration, "selection": self.selection, "test": self.test}
        return {name: _count(batches) for name, batches in parts.items()}


def split(workload: Workload) -> Splits:
    """Read and split the data of ``workload``, the same way every time.

    Raises:
        UsageError: the data is not made of ``(inputs, target)`` pairs, is empty, or holds NaN.
        WorkloadError: the user's dataset raised.
    """
    generator = torch.Generator().manual_seed(workload.seed)
    calibration = _unlabelled(workload.calibration)
    if workload.evaluation is None:
        return _without_labels(calibration, generator)
    data = _labelled(workload.evaluation.data, workload.evaluation, generator)
    notes = []
    if not calibration:
        share = min(0.2, MOST_CALIBRATION / max(_count(data), 1))
        first, data = _divide(data, share, generator)
        calibration = [Batch(batch.inputs, None, batch.rows) for batch in first]
        notes.append(f"No calibration data was given: {_words(first)} with labels were set aside for it and are not scored.")
    if workload.evaluation.test is not None:
        selection, test = data, _labelled(workload.evaluation.test, workload.evaluation, generator)
    else:
        selection, test = _divide(data, 0.5, generator)
        notes.append(
            f"One labelled set was given: {_words(selection)} select and {_count(test)} test, so each verdict rests "
            "on half of them. Give Evaluation(test=...) to use all."
        )
    if not selection or not test:
        raise UsageError(f"The evaluation data holds {_count(data)} examples, too few to split. Give at least a dozen.")
    return Splits(
        calibration=tuple(calibration), selection=tuple(selection), test=tuple(test), labelled=True, notes=tuple(notes)
    )


def _without_labels(calibration: list[Batch], generator: torch.Generator) -> Splits:
    if not calibration:
        note = "No data was given: outputs are compared on the example inputs and on resampled copies of them only."
        return Splits(notes=(note,))
    kept, rest = _divide(calibration, 0.5, generator)
    selection, test = _divide(rest, 0.5, generator)
    note = "No labels were given: lossy recipes are judged by how far their outputs are from the original's, not by a score."
    return Splits(calibration=tuple(kept), selection=tuple(selection), test=tuple(test), notes=(note,))


def _labelled(data: Any, evaluation: Evaluation, generator: torch.Generator) -> list[Batch]:
    with user_code("The evaluation data could not be read"):
        items = _items(data, evaluation, generator)
    if not items:
        raise UsageError("The evaluation data is empty. It must yield (inputs, target) pairs.")
    batches = []
    for number, item in enumerate(items):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            what = f"{type(item).__name__} of {len(item)}" if isinstance(item, Sequence) else type(item).__name__
            raise UsageError(f"Item {number} of the evaluation data is a {what}; each must be a pair (inputs, target).")
        batches.append(
            _batch(item[0], item[1], whole=evaluation.run is not None, where=f"Item {number} of the evaluation data")
        )
    return batches


def _unlabelled(data: Any) -> list[Batch]:
    if data is None:
        return []
    with user_code("The calibration data could not be read"):
        if isinstance(data, torch.Tensor):
            items: list[Any] = list(torch.split(data, 32))
        elif isinstance(data, Dataset):
            items = list(DataLoader(data, batch_size=32))
        else:
            items = _first(data, MOST_CALIBRATION)
    if not items:
        raise UsageError("The calibration data is empty. Give some batches of inputs, or leave calibration=None.")
    batches = [_batch(item, None, whole=False, where=f"Item {i} of the calibration data") for i, item in enumerate(items)]
    kept, rows = [], 0
    for batch in batches:
        if rows >= MOST_CALIBRATION:
            break
        kept.append(batch)
        rows += max(batch.rows, 1)
    return kept


def _items(data: Any, evaluation: Evaluation, generator: torch.Generator) -> list[Any]:
    """The items of ``data`` in any of the forms that an Evaluation takes, no more than ``max_examples``."""
    most, size = evaluation.max_examples, evaluation.batch_size
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, torch.Tensor) for part in data):
        if len(data[0]) != len(data[1]):
            raise UsageError(f"The evaluation data has {len(data[0])} inputs but {len(data[1])} targets.")
        picked = torch.randperm(len(data[0]), generator=generator)[:most]
        return list(zip(*(torch.split(part[picked], size) for part in data), strict=True))
    if isinstance(data, Dataset) and hasattr(data, "__len__"):
        count = len(data)
        order: list[int] = torch.randperm(count, generator=generator)[:most].tolist()
        if evaluation.run is not None:
            return [data[i] for i in order]
        return list(DataLoader(Subset(data, order), batch_size=size))
    if isinstance(data, Iterable):
        return _first(data, most)
    raise UsageError(
        f"The evaluation data is a {type(data).__name__}; give a Dataset, an iterable of batches or (inputs, targets)."
    )


def _first(data: Iterable[Any], most: int) -> list[Any]:
    """Items until they hold about ``most`` examples."""
    items, seen = [], 0
    for item in data:
        items.append(item)
        lead = item[0] if isinstance(item, (tuple, list)) and item else item
        seen += len(lead) if isinstance(lead, torch.Tensor) and lead.dim() else 1
        if seen >= most:
            break
    return items


def _batch(inputs: Any, target: Any, *, whole: bool, where: str) -> Batch:
    whole = whole or isinstance(inputs, Call)
    inputs, target = _map(inputs, lambda t: t), _map(target, lambda t: t)
    tensors = _tensors(inputs) + _tensors(target)
    for tensor in tensors:
        wrong = torch.isnan if isinstance(inputs, Call) else _not_finite  # inside a program, masks of -inf are no mistake
        if tensor.is_floating_point() and (bad := int(wrong(tensor).sum())):
            raise UsageError(f"{where} holds {bad} values that are NaN or infinite. Clean the data first.")
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
    divisible = not whole and len(sizes) == 1 and 0 not in sizes and (target is None or bool(_tensors(target)))
    return Batch(inputs, target, sizes.pop() if divisible else 0)


def _not_finite(tensor: torch.Tensor) -> torch.Tensor:
    return ~torch.isfinite(tensor)


def _divide(batches: Sequence[Batch], share: float, generator: torch.Generator) -> tuple[list[Batch], list[Batch]]:
    """Split at random into about ``share`` and the rest: row by row where batches may be taken apart, else whole items."""
    if not batches:
        return [], []
    if any(batch.rows == 0 for batch in batches):
        order = torch.randperm(len(batches), generator=generator).tolist()
        cut = min(max(round(share * len(batches)), 1), len(batches) - 1) if len(batches) > 1 else len(batches)
        return [batches[i] for i in sorted(order[:cut])], [batches[i] for i in sorted(order[cut:])]
    chosen = torch.zeros(_count(batches), dtype=torch.bool)
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
    """Neighbours with the same shapes joined, up to ``size`` rows, so that splitting does not leave crumbs."""
    joined: list[Batch] = []
    for batch in batches:
        last = joined[-1] if joined else None
        if last is not None and last.rows + batch.rows <= size and _shape(last) == _shape(batch):
            joined[-1] = Batch(_cat(last.inputs, batch.inputs), _cat(last.target, batch.target), last.rows + batch.rows)
        else:
            joined.append(batch)
    return joined


def _shape(batch: Batch) -> list[tuple[Any, ...]]:
    return [(t.dtype, *t.shape[1:]) for t in _tensors(batch.inputs) + _tensors(batch.target)]


def _count(batches: Sequence[Batch]) -> int:
    return sum(max(batch.rows, 1) for batch in batches)


def _words(batches: Sequence[Batch]) -> str:
    """``400 examples``, or ``22 items`` where batches must stay whole."""
    return f"{_count(batches)} {'examples' if all(batch.rows for batch in batches) else 'items'}"


def _map(value: Any, function: Any) -> Any:
    """``value`` with ``function`` applied to its tensors; arrays become tensors on the way."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value).__module__ == "numpy" and hasattr(value, "__array__"):
        return function(torch.as_tensor(value))
    if isinstance(value, Call):
        return Call(_map(value.args, function), _map(value.kwargs, function))
    if isinstance(value, Mapping):
        items = {key: _map(item, function) for key, item in value.items()}
        return Record.of(value.class_name, items.items()) if isinstance(value, Record) else items
    if isinstance(value, (tuple, list)):
        return type(value)(_map(item, function) for item in value) if type(value) in (tuple, list) else value
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Call):
        return _tensors(value.args) + _tensors(value.kwargs)
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _cat(first: Any, second: Any) -> Any:
    if isinstance(first, torch.Tensor):
        return torch.cat([first, second])
    if isinstance(first, Mapping):
        return {key: _cat(first[key], second[key]) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(_cat(a, b) for a, b in zip(first, second, strict=True))
    return first


def concatenate(values: Sequence[Any]) -> Any:
    """Outputs or targets of several batches joined along their first axis, in the structure of one.

    Raises:
        WorkloadError: they cannot be joined, because their other sizes differ.
    """
    first = values[0]
    try:
        if isinstance(first, torch.Tensor):
            return torch.cat([value if value.dim() else value[None] for value in values])
        if isinstance(first, Mapping):
            return {key: concatenate([value[key] for value in values]) for key in first}
        if isinstance(first, tuple):
            return tuple(concatenate(list(parts)) for parts in zip(*values, strict=True))
        if isinstance(first, list):
            return [item for value in values for item in value]
        return torch.as_tensor(values)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise WorkloadError(
            f"The outputs or targets of the batches cannot be joined for the metric: {error}. Pad them to one size, or use "
            "score=... per example."
        ) from error
