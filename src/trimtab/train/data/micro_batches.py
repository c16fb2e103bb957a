"""From the loader to the step: batches in groups, taken apart, on the device, and found again after an interruption."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from trimtab._internal.text import counted, of_type
from trimtab.core.workload import user_code
from trimtab.errors import UsageError, WorkloadError
from trimtab.train.data import batch_structure
from trimtab.train.data.batch_structure import entries, fields_of, inseparable, length, rebuilt, rows_of, uneven
from trimtab.train.data.device_prefetch import Transfer
from trimtab.train.data.loader_position import Seekable, is_stateful, load_state, state_of
from trimtab.train.loss.adapter import Batch, examples
from trimtab.train.runtime.memory_errors import final
from trimtab.train.runtime.random_generators import datasets_of
from trimtab.train.runtime.step_clock import Clock

_READING, _END = user_code("The loader raised"), object()
_MOVING = final(
    "A batch has no room on its device ({words}). Make the loader's batches smaller; "
    "DataSettings(accumulate=...) keeps the update as it is."
)
_AS_ONE = "exact_batchnorm runs the batches of an update as one"
_OTHER_FORM = "Batches that hold different things cannot be joined: give all the same items, tensors in the same places."
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))


class MicroBatcher:
    """Groups of micro-batches, one group per update.

    Args:
        batches: anything that can be iterated over once per epoch.
        accumulate: batches per group.
        clock: told of waiting and copying.
        move: puts a batch on the device.
        micro: examples per micro-batch; larger batches are taken apart.
        joined: whether the batches of a group become one.
        exact: whether it is an error that they cannot; for exact BatchNorm. Else they stay apart.
        transfer: how batches get to the device; with ``move``, when their turn comes, if not given.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        accumulate: int,
        clock: Clock,
        move: Callable[[Batch], Batch],
        *,
        micro: int | None = None,
        joined: bool = False,
        exact: bool = False,
        transfer: Transfer | None = None,
    ) -> None:
        self.batches, self.accumulate, self.clock, self.move = batches, accumulate, clock, move
        self.micro, self.joined, self.exact = micro, joined, exact
        self.fallback: tuple[int | None] | None = None
        """What :attr:`micro` was before an attempt that a batch may still put an end to."""
        self.taken = 0
        """Batches of the running epoch that were given out, or skipped."""
        self.short = False
        """Whether the loader had fewer batches than were to be skipped."""
        self.cut = False
        """Whether a signal has ended the loader's workers in the running epoch."""
        self._loaded = False
        """Whether the loader was put where the next epoch goes on."""
        self._between = False
        """Whether the loader stands between two groups: it was begun, and none was read in part."""
        self._told = False
        """Whether it was told that the loader ends early."""
        self._transfer = transfer or Transfer(move)
        self._running: Iterator[Any] = iter(())

    def begin(self, epoch: int, skip: int = 0) -> None:
        """Start epoch ``epoch`` after its first ``skip`` batches.

        Persistent workers have copies of the dataset, which hear no ``set_epoch()``: if it has one, others are started.
        """
        self.clock.enter("data")
        batches = self.batches
        self.taken, self.cut, self.short, self._between = skip, False, False, False
        self._running = iter(())  # of the epoch before: it is not gone on with if this one fails, and it holds the workers
        if self._loaded:
            skip = 0
        else:
            _set_epoch(batches, epoch)
            if hears_epochs(batches):
                set_workers(batches, running=False)
        self._loaded = False
        if isinstance(batches, Seekable):
            batches.seek(epoch, skip)
            skip = 0
        with _READING:
            running = iter(batches)
            self.short = sum(1 for _ in itertools.islice(running, skip)) < skip
        self._running = self._transfer.start(_read(running), ahead=_may_run_ahead(batches))
        self._between = True

    def finish(self) -> None:
        """Have a loader that keeps its position see the end of the epoch, if its length alone has told it so far."""
        if is_stateful(self.batches):
            next(self._running, _END)

    def state(self) -> dict[str, Any] | None:
        """The position of a :class:`~trimtab.train.data.loader_position.Stateful` loader, if it is :attr:`taken` batches into
        the epoch."""
        return state_of(self.batches) if self._between else None

    def load(self, epoch: int, state: dict[str, Any]) -> None:
        """Put the loader where :meth:`state` was asked, in epoch ``epoch``; the next :meth:`begin` skips nothing."""
        self._running = iter(())
        _set_epoch(self.batches, epoch)
        load_state(self.batches, state)
        self._loaded = self._between = True

    def length(self) -> int | None:
        """How many groups are left of the epoch, where the loader can say."""
        try:
            return -(-(len(self.batches) - self.taken) // self.accumulate)  # type: ignore[arg-type]
        except TypeError:
            return None

    def missing(self) -> str | None:
        """At the end of an epoch: a sentence where the loader had said that it has more; once."""
        if self._told or (self.length() or 0) <= 0:
            return None
        self._told = True
        return (
            f"The loader gave {counted(self.taken, 'batch')} in an epoch, but its len() says {len(self.batches)}. "  # type: ignore[arg-type]
            "Schedules go by that. A StopIteration that its dataset raises ends an epoch too, and leaves out the rest."
        )

    def groups(self) -> Iterator[list[Batch]]:
        """What is left of the epoch.

        Raises:
            WorkloadError: there is no batch in the whole epoch.
        """
        while group := self._group():
            yield group
        if not self.taken:
            raise WorkloadError(f"The loader gave no batch. {_why_empty(self.batches)}")

    def _group(self) -> list[Batch]:
        group: list[Batch] = []
        while len(group) < self.accumulate:
            self.clock.enter("data")
            with _MOVING:
                coming = next(self._running, _END)
                if coming is _END:
                    break
                self.taken, self._between = self.taken + 1, False
                self.clock.enter("copy")
                group.append(self._transfer.arrive(coming))
        self._between = True
        self.clock.enter("other")
        if self.joined and len(group) > 1:
            try:
                group = [united(group)]
            except WorkloadError:
                if self.exact:
                    raise
        try:
            return self.apart(group)
        except WorkloadError:
            if self.fallback is None:
                raise
            (self.micro,), self.fallback = self.fallback, None  # what was only attempted must not end the run
            return self.apart(group)

    def apart(self, group: list[Batch]) -> list[Batch]:
        """The batches of ``group`` in the micro-batches of this run."""
        return group if self.micro is None else [part for batch in group for part in split(batch, self.micro)]

    def attempt(self, micro: int) -> None:
        """Take batches apart into ``micro`` examples from now on; if one cannot be, all are taken apart as before again."""
        self.fallback, self.micro = (self.micro,), micro


def _read(running: Iterator[Batch]) -> Iterator[Batch]:
    """``running``, whose errors are told as those of the loader: what fails on a batch's way to the device is none of them."""
    while True:
        with _READING:
            batch = next(running, _END)
        if batch is _END:
            return
        yield batch


def _set_epoch(batches: Any, epoch: int) -> None:
    """Tell the loader, its samplers, what its batch sampler draws from, and its dataset, which epoch begins."""
    groups = getattr(batches, "batch_sampler", None)
    places = [batches, getattr(batches, "sampler", None), groups, getattr(groups, "sampler", None), *datasets_of(batches)]
    for place in {id(place): place for place in places}.values():
        set_epoch = getattr(place, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)


def _may_run_ahead(batches: Any) -> bool:
    """Whether a batch can be read before its turn: that draws no random numbers here, and moves no position that is saved."""
    return isinstance(batches, Seekable) or (bool(getattr(batches, "num_workers", 0)) and not is_stateful(batches))


def draws_here(batches: Any) -> bool:
    """Whether batches may be drawn in this process when their turn comes, and not as the epoch begins."""
    streams = isinstance(getattr(batches, "dataset", None), torch.utils.data.IterableDataset)
    return isinstance(batches, Iterator) or (streams and not getattr(batches, "num_workers", 0))


def hears_epochs(batches: Any) -> bool:
    """Whether its dataset, or a part of it, has a ``set_epoch()``."""
    return any(hasattr(dataset, "set_epoch") for dataset in datasets_of(batches))


def keeps_workers(batches: Any) -> bool:
    """Whether this is a DataLoader whose workers stay from epoch to epoch."""
    return isinstance(batches, torch.utils.data.DataLoader) and batches.persistent_workers


def has_workers(batches: Any) -> bool:
    """Whether workers that stay run already: to start them draws a random number, which the epochs after that do not draw."""
    return keeps_workers(batches) and batches._iterator is not None


def set_workers(batches: Any, *, running: bool) -> None:
    """Start the workers that stay, or let go of them, so that what begins now draws as what began then."""
    if not keeps_workers(batches) or has_workers(batches) == running:
        return
    if running:
        with _READING:
            iter(batches)
    else:
        batches._iterator = None


def split(batch: Batch, size: int) -> list[Batch]:
    """``batch`` in parts of at most ``size`` examples, as even as can be: BatchNorm has no use for a last one of one example.

    Cut are the first axis of every tensor as long as the batch, packed sequences, and lists with an entry per example; whatever
    else there is goes to every part.

    Raises:
        WorkloadError: its tensors differ in their first axis, or it may be a list of examples or of columns.
    """
    count = examples(batch)
    if count <= size:
        return [batch]
    if what := inseparable(batch):
        raise WorkloadError(
            f"A batch cannot be taken apart into micro-batches of {size}: it holds {what}, of which torch takes no rows. Make "
            "the loader's batches smaller and set accumulate instead."
        )
    rows = {id(row) for row in rows_of(batch) if len(row) == count}
    if shapes := uneven(batch):
        raise WorkloadError(
            f"A batch cannot be taken apart into micro-batches of {size}: its tensors differ in their first axis ({shapes}). "
            "Make the loader's batches smaller and set accumulate instead."
        )
    if isinstance(batch, list) and 2 < len(batch) > count and all(isinstance(each, torch.Tensor) for each in batch):
        raise WorkloadError(
            f"A batch cannot be taken apart into micro-batches of {size}: it is a list of {len(batch)} tensors, which may be "
            f"{len(batch)} examples, or columns of {count} each. Stack examples, and give columns in a tuple."
        )
    number = -(-count // size)
    ends = list(itertools.accumulate(count // number + (part < count % number) for part in range(number)))
    return [_part(*bounds, count, rows)(batch) for bounds in zip([0, *ends], ends, strict=False)]


def united(batches: Sequence[Batch]) -> Batch:
    """One batch that is worth all of ``batches``, which differ in their examples alone.

    Raises:
        WorkloadError: a number, a name or whatever else goes for a whole batch is another in the next, or their tensors differ
            in more than the first axis.
    """
    for batch in batches:
        if what := inseparable(batch):
            raise WorkloadError(f"{_AS_ONE}, but these hold {what}, which torch does not join.")
        if shapes := uneven(batch):
            raise WorkloadError(f"{_AS_ONE}, but nothing tells how to join tensors that differ in their first axis: {shapes}.")
    first, *others = [dict(_constants(batch, length(batch), set(map(id, rows_of(batch))))) for batch in batches]
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


def _constants(item: Any, count: int | None, rows: set[int], place: str = "batch") -> Iterator[tuple[str, Any]]:
    """What a batch holds, and where: values that go for all of it, the type of those with one per example."""
    if isinstance(item, torch.Tensor):
        yield place, torch.Tensor if item.dim() else item.item()
    elif isinstance(item, PackedSequence) or _per_example(item, count, rows):
        yield place, type(item)
    elif items := entries(item):
        for key, each in items:
            yield from _constants(each, count, rows, f"{place}[{key!r}]")
    else:
        yield place, item if isinstance(item, _PLAIN) else item.tolist() if isinstance(item, np.ndarray) else id(item)


def join(batches: Sequence[Batch]) -> Batch:
    """One batch with the examples of all; what is no tensor or list with a value per example is that of the first.

    Raises:
        WorkloadError: their tensors differ in more than the first axis, or they hold different things.
    """
    rows = {id(row) for batch in batches for row in rows_of(batch)}
    return _joined(batches, [length(batch) for batch in batches], rows)


def _joined(batches: Sequence[Batch], counts: Sequence[int | None], rows: set[int]) -> Batch:
    first = batches[0]
    if len({isinstance(batch, torch.Tensor) for batch in batches}) > 1:
        raise WorkloadError(_OTHER_FORM)
    if isinstance(first, torch.Tensor):
        if len({(batch.dtype, batch.shape[1:]) for batch in batches}) > 1:
            shapes = ", ".join(f"{tuple(batch.shape)} of {batch.dtype}" for batch in batches)
            raise WorkloadError(
                f"Tensors can be joined that have one type and differ in the first axis alone, but these are {shapes}. Pad "
                "them alike."
            )
        return torch.cat(list(batches)) if first.dim() else first
    if isinstance(first, PackedSequence):
        return batch_structure.packed_joined(batches)
    if all(_per_example(batch, count, rows) for batch, count in zip(batches, counts, strict=True)):
        return np.concatenate(batches) if isinstance(first, np.ndarray) else type(first)(itertools.chain(*batches))
    items = [dict(entries(batch)) for batch in batches]
    if any(each.keys() != items[0].keys() for each in items):
        raise WorkloadError(_OTHER_FORM)
    keys = iter(items[0])  # in the order in which the first is rebuilt

    def of_all(_: Batch) -> Batch:
        key = next(keys)
        return _joined([each[key] for each in items], counts, rows)

    return rebuilt(first, of_all)


def _part(start: int, end: int, count: int, rows: set[int]) -> Callable[[Batch], Batch]:
    def part(item: Batch) -> Batch:
        if isinstance(item, PackedSequence):
            return batch_structure.packed_part(item, start, end)
        if isinstance(item, torch.Tensor) and item.is_sparse and item.dim():  # of which torch takes no slices
            return item.index_select(0, torch.arange(start, end, device=item.device))
        whole = isinstance(item, torch.Tensor) and item.dim()
        return item[start:end] if whole or _per_example(item, count, rows) else rebuilt(item, part)

    return part


def _per_example(item: Any, count: int | None, rows: set[int]) -> bool:
    """Whether ``item`` is no tensor, but has one value for each of so many examples; of any number where none is known."""
    if isinstance(item, np.ndarray):
        return item.ndim > 0 and count in (None, len(item))
    if not isinstance(item, (list, tuple)) or hasattr(item, "_fields") or count not in (None, len(item)):
        return False
    kinds = (torch.Tensor, np.ndarray, Mapping, list, tuple)
    return id(item) in rows or not any(isinstance(each, kinds) or fields_of(each) is not None for each in item)


def _why_empty(batches: Any) -> str:
    if isinstance(batches, Iterator):
        return "It is an iterator, which can be gone through only once. Give a list, a Dataset's loader, or fewer epochs."
    try:
        size = len(batches.dataset)
    except (AttributeError, TypeError):
        return "Check that it has data, and that drop_last does not leave out the only batch."
    drops = getattr(batches, "drop_last", False)
    return f"Its dataset has {size} examples" + (
        f", fewer than one batch of {getattr(batches, 'batch_size', '?')}, and drop_last=True." if drops else "."
    )


def check_loader(batches: Any, what: str) -> None:
    """Refuse at once what cannot be iterated over.

    Raises:
        UsageError: it is no iterable, or a dataset where a loader is meant.
    """
    if isinstance(batches, torch.utils.data.Dataset) and not hasattr(batches, "__iter__"):
        raise UsageError(f"{what} is {of_type(batches)}, a dataset; wrap it: trimtab.train.Loader(dataset, batch=32).")
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise UsageError(f"{what} is {of_type(batches)}, which cannot be iterated over. Give a loader of batches.")
