"""The workload's data, read once and split three ways: calibration, selection, test. Never mixed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset

from trimtab._tree import opened
from trimtab.capture import Call
from trimtab.errors import UsageError
from trimtab.workload import Evaluation, Workload, as_call, user_code

MOST_CALIBRATION = 256
"""More examples than this change a quantizer's ranges little and cost much time."""


class Column(list[Any]):
    """A list in a target with an item for each row of its batch; known once, because lengths say less of smaller batches."""


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
        return Batch(_picked(self.inputs, index), _picked(self.target, index), len(index))


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


def split(workload: Workload, rows: int | None = None) -> Splits:
    """Read and split the data of ``workload``, the same way every time.

    Where the model takes just so many ``rows`` at a time, batches stay whole, and those of another size are left out. Batches
    of more rows than the workload states that a call may have are cut.

    Raises:
        UsageError: the data is not made of ``(inputs, target)`` pairs, is empty, holds NaN, or fits the model nowhere.
        WorkloadError: the user's dataset raised.
    """
    generator, whole, most = torch.Generator().manual_seed(workload.seed), rows is not None, rows or _most_rows(workload)
    notes: list[str] = []
    calibration = _fitting(_unlabelled(workload.calibration, rows or _within(32, most)), rows, most, "calibration", notes)
    if workload.evaluation is None:
        return _without_labels(calibration, generator, notes, whole=whole)
    size = rows or _within(workload.evaluation.batch_size, most)
    read = _labelled(workload.evaluation.data, workload.evaluation, generator, size)
    data = _fitting(read, rows, most, "evaluation", notes)
    given = _count(data)
    if not calibration:
        share = min(0.2, MOST_CALIBRATION / max(_count(data), 1))
        first, data = _divide(data, share, generator, whole=whole)
        calibration = [Batch(batch.inputs, None, batch.rows) for batch in first]
        notes.append(f"No calibration data was given: {_words(first)} with labels were set aside for it and are not scored.")
    if workload.evaluation.test is not None:
        read = _labelled(workload.evaluation.test, workload.evaluation, generator, size)
        selection, test = data, _fitting(read, rows, most, "test", notes)
    else:
        selection, test = _divide(data, 0.5, generator, whole=whole)
        notes.append(
            f"One labelled set was given: {_words(selection)} select and {_count(test)} test, so each verdict rests "
            "on half of them. Give Evaluation(test=...) to use all."
        )
    if not selection or not test:
        least = "a dozen" if rows is None else f"three batches of {rows}, better a dozen"
        raise UsageError(f"The evaluation data holds {given} examples, too few to split. Give at least {least}.")
    return Splits(
        calibration=tuple(calibration), selection=tuple(selection), test=tuple(test), labelled=True, notes=tuple(notes)
    )


def _most_rows(workload: Workload) -> int | None:
    """The most rows that a call may have, where the workload bounds what leads its inputs."""
    stated = (axes[0].max for axes in (workload.stated_dims or {}).values() if 0 in axes)
    return min((most for most in stated if most is not None), default=None)


def _within(size: int, most: int | None) -> int:
    return size if most is None else min(size, most)


def _fitting(batches: list[Batch], rows: int | None, most: int | None, what: str, notes: list[str]) -> list[Batch]:
    """Those of ``batches`` that have ``rows``, where the model takes no other number; else all, in pieces of ``most`` rows."""
    if rows is None:
        return [piece for batch in batches for piece in _pieces(batch, _within(batch.rows, most))]
    kept = [batch for batch in batches if batch.rows in (0, rows)]
    if batches and not kept:
        found = ", ".join(map(str, sorted({batch.rows for batch in batches})))
        raise UsageError(
            f"The model takes {rows} examples at a time, but the batches of the {what} data have {found}. Give batches of "
            f"{rows}, or let the batch be dynamic."
        )
    if left := _count(batches) - _count(kept):
        notes.append(f"{left} examples of the {what} data are left out: they do not fill a batch of {rows}, which is fixed.")
    return kept


def _pieces(batch: Batch, size: int) -> Iterator[Batch]:
    if batch.rows == size:
        yield batch
        return
    for index in torch.split(torch.arange(batch.rows), size):
        yield batch.take(index)


def _without_labels(calibration: list[Batch], generator: torch.Generator, notes: list[str], *, whole: bool) -> Splits:
    if not calibration:
        note = "No data was given: outputs are compared on the example inputs and on resampled copies of them only."
        return Splits(notes=(note,))
    kept, rest = _divide(calibration, 0.5, generator, whole=whole)
    selection, test = _divide(rest, 0.5, generator, whole=whole)
    note = "No labels were given: lossy recipes are judged by how far their outputs are from the original's, not by a score."
    return Splits(calibration=tuple(kept), selection=tuple(selection), test=tuple(test), notes=(note, *notes))


def _labelled(data: Any, evaluation: Evaluation, generator: torch.Generator, size: int) -> list[Batch]:
    with user_code("The evaluation data could not be read", "Go through it yourself once."):
        items = _items(data, evaluation, generator, size)
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


def _unlabelled(data: Any, size: int) -> list[Batch]:
    if data is None:
        return []
    with user_code("The calibration data could not be read", "Go through it yourself once."):
        if isinstance(data, torch.Tensor):
            items: list[Any] = list(torch.split(data, size))
        elif isinstance(data, Dataset):
            items = list(DataLoader(data, batch_size=size))
        else:
            items = _first(data, MOST_CALIBRATION, whole=False)
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


def _items(data: Any, evaluation: Evaluation, generator: torch.Generator, size: int) -> list[Any]:
    """The items of ``data`` in any of the forms that an Evaluation takes, up to ``max_examples``, in batches of ``size``."""
    most = evaluation.max_examples
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, torch.Tensor) for part in data):
        if len(data[0]) != len(data[1]):
            raise UsageError(
                f"The evaluation data has {len(data[0])} inputs but {len(data[1])} targets. Give one target per input."
            )
        picked = torch.randperm(len(data[0]), generator=generator)[:most]
        return list(zip(*(torch.split(part[picked], size) for part in data), strict=True))
    if isinstance(data, Dataset) and hasattr(data, "__len__"):
        count = len(data)
        order: list[int] = torch.randperm(count, generator=generator)[:most].tolist()
        if evaluation.run is not None:
            return [data[i] for i in order]
        return list(DataLoader(Subset(data, order), batch_size=size))
    if isinstance(data, Iterable):
        return _first(data, most, whole=evaluation.run is not None)
    raise UsageError(
        f"The evaluation data is a {type(data).__name__}; give a Dataset, an iterable of batches or (inputs, targets)."
    )


def _first(data: Iterable[Any], most: int, *, whole: bool) -> list[Any]:
    """Items until they hold about ``most`` examples; an item that stays ``whole`` is one."""
    items, seen = [], 0
    for item in data:
        items.append(item)
        seen += 1 if whole else _examples(item)
        if seen >= most:
            break
    return items


def _examples(item: Any) -> int:
    """How many examples an item of the data holds: the first size of the first tensor or array anywhere in its inputs."""
    inputs = item[0] if isinstance(item, (tuple, list)) and item else item
    tensors = [] if isinstance(inputs, Call) else _tensors(_with_tensors(inputs))
    return max(len(tensors[0]), 1) if tensors and tensors[0].dim() else 1


def _batch(inputs: Any, target: Any, *, whole: bool, where: str) -> Batch:
    inputs, target = _with_tensors(inputs), _with_tensors(target)
    for tensor in _tensors(inputs) + _tensors(target):
        wrong = torch.isnan if isinstance(inputs, Call) else _not_finite  # inside a program, masks of -inf are no mistake
        if tensor.is_floating_point() and (bad := int(wrong(tensor).sum())):
            raise UsageError(f"{where} holds {bad} values that are NaN or infinite. Clean the data first.")
    rows = 0 if whole or isinstance(inputs, Call) else _rows(inputs, target)
    return Batch(inputs, _marked(target, rows) if rows else target, rows)


def _rows(inputs: Any, target: Any) -> int:
    """How many rows a batch can be taken apart into; 0 where that is not sure of everything in it."""
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in _tensors(inputs) + _tensors(target)}
    rows = sizes.pop() if len(sizes) == 1 else 0
    known = all(isinstance(leaf, torch.Tensor) or _is_constant(leaf) for leaf in _leaves(inputs))
    return rows if known and (target is None or (_tensors(target) and _by_row(target, rows))) else 0


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
    return _is_list(value) and len(value) == rows and not _tensors(value)


def _marked(value: Any, rows: int) -> Any:
    inside = opened(value)
    if inside is None:
        return value
    return Column(value) if _is_column(value, rows) else inside[1](_marked(part, rows) for part in inside[0])


def _is_constant(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _not_finite(tensor: torch.Tensor) -> torch.Tensor:
    return ~torch.isfinite(tensor)


def _divide(
    batches: Sequence[Batch], share: float, generator: torch.Generator, *, whole: bool
) -> tuple[list[Batch], list[Batch]]:
    """Split at random into about ``share`` and the rest: row by row where batches may be taken apart, else ``whole``."""
    if not batches:
        return [], []
    if whole or any(batch.rows == 0 for batch in batches):
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


def _count(batches: Sequence[Batch]) -> int:
    return sum(max(batch.rows, 1) for batch in batches)


def _words(batches: Sequence[Batch]) -> str:
    """``400 examples``, or ``22 items`` where batches must stay whole."""
    return f"{_count(batches)} {'examples' if all(batch.rows for batch in batches) else 'items'}"


def _with_tensors(value: Any) -> Any:
    """``value`` with its arrays made tensors."""
    if isinstance(value, Call):
        return Call(_with_tensors(value.args), _with_tensors(value.kwargs))
    if type(value).__module__ == "numpy" and hasattr(value, "__array__"):
        return torch.as_tensor(value)
    inside = opened(value)
    return value if inside is None else inside[1](map(_with_tensors, inside[0]))


def _leaves(value: Any) -> list[Any]:
    inside = opened([value.args, value.kwargs] if isinstance(value, Call) else value)
    return [value] if inside is None else [leaf for part in inside[0] for leaf in _leaves(part)]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor)]


def _picked(value: Any, index: torch.Tensor) -> Any:
    """``value`` with the rows at ``index`` only."""
    if isinstance(value, torch.Tensor):
        return value[index]
    if isinstance(value, Column):
        return Column(value[i] for i in index.tolist())
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
