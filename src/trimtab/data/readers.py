"""Read the data of a workload, in each of its forms, into batches."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Subset, default_collate

from trimtab._internal.text import error_text, of_type, with_fix
from trimtab._internal.user_code import user_code
from trimtab._internal.validation import length_of
from trimtab.core.capture import Call
from trimtab.core.workload import Evaluation, Workload, as_call
from trimtab.data.batch_independence import Judge
from trimtab.data.batches import Batch, arrays_to_tensors, count, marked, rows_of
from trimtab.errors import UsageError
from trimtab.tensors.structure import Structure, flatten, leaves_of, tensors_of

IMAGES = "PIL."
"""First letters of the modules of PIL's image classes."""
MOST_CALIBRATION = 256
"""Most calibration examples; more take time and change a quantizer's ranges little."""


@dataclasses.dataclass(frozen=True)
class Data:
    """Batches. ``stacked``: they were collated here from single examples, along axis 0."""

    batches: list[Batch]
    stacked: bool = False


def labelled(
    data: Any, evaluation: Evaluation, generator: torch.Generator, size: int, notes: list[str], judge: Judge | None = None
) -> Data:
    """The labelled ``data``, up to ``max_examples``. Single examples are collated into batches of ``size``.

    ``notes`` get a sentence if only the first items are used. ``judge`` tells whether the rows of a batch count as examples.

    Raises:
        UsageError: the data has an unknown form, is empty, or has NaN in its inputs.
        WorkloadError: the data raised.
    """
    most, run = evaluation.max_examples, evaluation.run is not None
    if isinstance(data, tuple) and len(data) == 2 and not all(map(_is_pair, data)):
        batches = _batches_of_arrays(data, most, generator, size)
        return Data([dataclasses.replace(batch, rows=0) for batch in batches] if run else batches, stacked=not run)
    what, stacked = "the evaluation data", False
    data = _in_fixed_order(data, generator, notes, what)
    with _reading(what):
        if _is_mapped(data):
            order = torch.randperm(len(data), generator=generator)[:most].tolist()
            stacked = not run
            items = [data[i] for i in order] if run else list(_collated(data, order, size, what))
        elif isinstance(data, Iterable):
            stacked = isinstance(data, Dataset) and not run
            counted: Callable[[Any], int] = (lambda item: 1) if stacked or run else lambda item: _count(_inputs_of(item), judge)
            items, total = list(_first_items(data, most, counted)), length_of(data)
            if sum(map(counted, items)) >= most if total is None else len(items) < total:
                given = f"The first {len(items)}{'' if total is None else f' of {total}'} items of the evaluation data are used"
                notes.append(f"{given}, as max_examples={most} says. If they are sorted, give them in random order.")
            items = list(_in_batches(items, size, what)) if stacked else items
        else:
            raise UsageError(
                f"The evaluation data is {of_type(data)}; give a Dataset, an iterable of batches or (inputs, targets)."
            )
    if not items:
        raise UsageError("The evaluation data is empty. It must yield (inputs, target) pairs.")
    return Data([_labelled(item, number, whole=run) for number, item in enumerate(items)], stacked=stacked)


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """Wrap the errors of the user's ``what``. Images that torch cannot collate get the transform that makes them tensors."""
    with user_code(f"{what[0].upper()}{what[1:]} could not be read", "Go through it yourself once."):
        try:
            yield
        except TypeError as error:
            if IMAGES in error_text(error):
                raise _images_error(what) from error
            raise


def _images_error(where: str) -> UsageError:
    return UsageError(
        f"{where[0].upper()}{where[1:]} holds PIL images, and a model takes tensors. Let the dataset convert them, with "
        "transform=transforms.ToTensor() and what else the model was trained with, or by hand: "
        "torch.as_tensor(numpy.array(image)).permute(2, 0, 1) / 255."
    )


def _in_fixed_order(data: Any, generator: torch.Generator, notes: list[str], what: str) -> Any:
    """A ``DataLoader(shuffle=True)`` as one of the same batches in an order of ``generator``, because several processes read it
    and must see the same data; anything else as it is."""
    if (
        not isinstance(data, DataLoader)
        or type(data.sampler) is not RandomSampler
        or type(data.batch_sampler) is not BatchSampler
    ):
        return data
    sampler, items = data.sampler, cast(Sized, data.dataset)
    if sampler.replacement or sampler.num_samples != len(items):
        return data
    order = torch.randperm(len(items), generator=generator).tolist()
    notes.append(f"The DataLoader of {what} shuffles; it is read in one random order, given by the workload's seed.")
    return DataLoader(
        data.dataset, data.batch_size, sampler=order, collate_fn=data.collate_fn, drop_last=data.drop_last,
        num_workers=data.num_workers, timeout=data.timeout, worker_init_fn=data.worker_init_fn,
        multiprocessing_context=data.multiprocessing_context,
    )  # fmt: skip


def _labelled(item: Any, number: int, *, whole: bool) -> Batch:
    if not _is_pair(item):
        what = f"{type(item).__name__} of {len(item)}" if isinstance(item, Sequence) else type(item).__name__
        raise UsageError(f"Item {number} of the evaluation data is a {what}; each must be a pair (inputs, target).")
    return _batch(item[0], item[1], whole=whole, where=f"Item {number} of the evaluation data")


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def _batches_of_arrays(data: tuple[Any, Any], most: int, generator: torch.Generator, size: int) -> list[Batch]:
    """Random batches from inputs and targets that hold all examples."""
    inputs, targets = arrays_to_tensors(data[0]), arrays_to_tensors(data[1])
    given, wanted = _lengths(inputs), _lengths(targets)
    if len(given) != 1 or len(wanted) != 1 or given != wanted:
        counts = [" and ".join(map(str, sorted(found))) or "no" for found in (given, wanted)]
        raise UsageError(
            f"The evaluation data has inputs for {counts[0]} examples but targets for {counts[1]}. Give one for each."
        )
    if given == {0}:
        raise UsageError("The evaluation data is empty: its inputs and targets have no rows. Give some examples.")
    whole = _batch(inputs, targets, whole=False, where="The evaluation data")
    if not whole.rows:
        raise UsageError(
            "The evaluation data is a pair of inputs and targets, of which not everything has a part for each example. Give "
            "a list of batches, each a pair (inputs, target)."
        )
    picked = torch.randperm(whole.rows, generator=generator)[:most]
    return [whole.take(index) for index in torch.split(picked, size)]


def _lengths(value: Any) -> set[int]:
    """The sizes along axis 0 of the tensors in ``value``; without tensors, the length of a list or tuple."""
    found = {len(tensor) if tensor.dim() else 0 for tensor in tensors_of(value)}
    return found or ({len(value)} if isinstance(value, (list, tuple)) else set())


def unlabelled(workload: Workload, size: int, generator: torch.Generator, notes: list[str], judge: Judge | None = None) -> Data:
    """The calibration data, at most :data:`MOST_CALIBRATION` examples; ``notes`` get a sentence if there are more.

    Raises:
        UsageError: the data is empty, has NaN, or has labels.
        WorkloadError: the data raised.
    """
    what = "the calibration data"
    if workload.calibration is None:
        return Data([])
    data: Any = _in_fixed_order(workload.calibration, generator, notes, what)
    total: int | None = None
    with _reading(what):
        if isinstance(data, torch.Tensor) or _is_mapped(data):
            total = len(data)
            order = torch.randperm(total, generator=generator)[:MOST_CALIBRATION]
            if isinstance(data, torch.Tensor):
                items: Iterator[Any] = iter(torch.split(data[order], size))
            else:
                _refuse_labels(workload, (data[i] for i in order[:1].tolist()))
                items = _collated(data, order.tolist(), size, what)
        elif isinstance(data, Dataset):
            items = _in_batches(_first_items(cast(Iterable[Any], data), MOST_CALIBRATION, lambda item: 1), size, what)
        else:
            items = _first_items(data, MOST_CALIBRATION, lambda item: _count(item, judge))
        found: list[Any] = []
        for item in items:
            if not found:
                _refuse_labels(workload, [item])
            found.append(item)
    if not found:
        raise UsageError("The calibration data is empty. Give some batches of inputs, or leave calibration=None.")
    batches = [_batch(item, None, whole=False, where=f"Item {i} of the calibration data") for i, item in enumerate(found)]
    if total is not None and total > MOST_CALIBRATION:
        notes.append(f"The calibration data has {total} examples; {MOST_CALIBRATION} of them, drawn at random, are used.")
    stacked = isinstance(data, (torch.Tensor, Dataset))
    used = count(batches) if stacked else len(found)
    if total is None and (items_given := length_of(data)) is not None and used < items_given:
        notes.append(f"The calibration data has {items_given} items; the first {used} are used.")
    return Data(batches, stacked=stacked)


def _refuse_labels(workload: Workload, items: Iterable[Any]) -> None:
    """Refuse pairs of which the first half has the structure of the model's inputs."""
    wanted = _call_structure(workload.inputs)
    for item in items:
        if wanted is not None and _is_pair(item) and _call_structure(item) != wanted and _call_structure(item[0]) == wanted:
            raise UsageError(
                "The calibration data is made of pairs, of which the first half is what the model takes. Give the inputs "
                "without labels."
            )


def _call_structure(inputs: Any) -> Structure | None:
    """The structure of a call; ``None`` if ``inputs`` are no valid call."""
    try:
        return flatten(as_call(arrays_to_tensors(inputs)), "inputs")[1]
    except UsageError:
        return None


def _collated(data: Any, order: Sequence[int], size: int, what: str) -> Iterator[Any]:
    """Batches of the examples of a Dataset in ``order``."""
    chosen = Subset(data, order)
    for start in range(0, len(order), size):
        yield _collate(chosen.__getitems__(list(range(start, min(start + size, len(order))))), what)


def _in_batches(examples: Iterable[Any], size: int, what: str) -> Iterator[Any]:
    """Batches of ``examples`` as they come."""
    rest = iter(examples)
    while some := list(itertools.islice(rest, size)):
        yield _collate(some, what)


def _collate(examples: Any, what: str) -> Any:
    try:
        return default_collate(examples)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        if IMAGES in error_text(error):
            raise _images_error(what) from error
        problem = f"The examples of {what} cannot be put together into batches: {error}"
        raise UsageError(with_fix(problem, "Give a DataLoader with your own collate_fn.")) from error


def _is_mapped(data: Any) -> bool:
    """True for a map-style dataset. A stream may have a length too."""
    return isinstance(data, Dataset) and not isinstance(data, IterableDataset) and isinstance(data, Sized)


def _first_items(data: Iterable[Any], most: int, examples: Callable[[Any], int]) -> Iterator[Any]:
    """The first items, up to the one with which they hold ``most`` examples."""
    seen = 0
    for item in data:
        yield item
        seen += examples(item)
        if seen >= most:
            break


def _count(inputs: Any, judge: Judge | None = None) -> int:
    """The number of examples in the ``inputs`` of an item: axis 0 of the first tensor or array; 1 if the judge finds that axis
    0 does not count examples."""
    if isinstance(inputs, Call):
        return 1
    inputs = arrays_to_tensors(inputs)
    tensors = tensors_of(inputs)
    if judge is not None and (rows := rows_of(inputs, None)) > 1 and not judge(Batch(inputs, None, rows)).independent:
        return 1
    return max(len(tensors[0]), 1) if tensors and tensors[0].dim() else 1


def _inputs_of(item: Any) -> Any:
    """The inputs of a labelled item."""
    return item[0] if isinstance(item, (tuple, list)) and item else item


def _batch(inputs: Any, target: Any, *, whole: bool, where: str) -> Batch:
    inputs, target = arrays_to_tensors(inputs), arrays_to_tensors(target)
    if any(type(leaf).__module__.startswith(IMAGES) for leaf in leaves_of(inputs)):
        raise _images_error(where)
    for tensor in tensors_of(inputs):  # -inf may be a mask, and NaN in targets may mean unknown
        if tensor.is_floating_point() and (bad := int(torch.isnan(tensor).sum())):
            raise UsageError(f"{where} holds NaN: {bad} of {tensor.numel()} values. Clean the data first.")
    rows = 0 if whole or isinstance(inputs, Call) else rows_of(inputs, target)
    return Batch(inputs, marked(target, rows) if rows else target, rows)
