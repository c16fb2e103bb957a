"""Reads a loader: batches on the device, cut into micro-batches, one group per update, resumable within an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from trimtab._internal.text import counted, of_type
from trimtab._internal.user_code import user_code
from trimtab._internal.validation import length_of
from trimtab.errors import UsageError, WorkloadError
from trimtab.train.data.batch_structure import join, split
from trimtab.train.data.device_prefetch import Transfer
from trimtab.train.data.loader_position import is_seekable, is_stateful, load_state, state_of
from trimtab.train.loss.adapter import Batch
from trimtab.train.runtime.memory_errors import no_retry
from trimtab.train.runtime.random_generators import datasets_of
from trimtab.train.runtime.step_clock import Clock

_READING, _END = user_code("The loader raised"), object()
_COPYING = no_retry(
    "A batch has no room on its device ({words}). Make the loader's batches smaller; "
    "DataSettings(accumulate=...) keeps the update as it is."
)


class MicroBatcher:
    """Groups of micro-batches, one group per update.

    Args:
        batches: an iterable, iterated once per epoch.
        accumulate: batches per group.
        clock: measures the time of reading and of copying.
        move: copies a batch to the device.
        micro: most examples per micro-batch; larger batches are split.
        joined: join the batches of a group into one if possible.
        exact: raise if they cannot be joined, for exact BatchNorm.
        transfer: moves batches to the device; by default with ``move``, one at a time.
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
        """The value of :attr:`micro` before :meth:`attempt`, until a batch has been split."""
        self.taken = 0
        """Batches of this epoch that were read or skipped."""
        self.short = False
        """Whether the loader had fewer batches than :meth:`begin` was to skip."""
        self.interrupted = False
        """Whether a signal ended the loader's workers in this epoch."""
        self.limit: int | None = None
        """Most batches of an epoch."""
        self._loaded = False
        """Whether :meth:`load` has set the loader's position for the next :meth:`begin`."""
        self._at_boundary = False
        """Whether the loader is between two groups, so that its position can be saved."""
        self._reported = False
        """Whether :meth:`short_epoch_note` has reported a loader that ends early."""
        self._transfer = transfer or Transfer(move)
        self._running: Iterator[Any] = iter(())

    def begin(self, epoch: int, skip: int = 0) -> None:
        """Start epoch ``epoch`` after its first ``skip`` batches.

        Persistent workers hold copies of the dataset that ``set_epoch()`` does not reach: if it has one, they are renewed.
        """
        self.clock.enter("data")
        batches = self.batches
        self.taken, self.interrupted, self.short, self._at_boundary = skip, False, False, False
        self._running = iter(())  # drop the iterator of the epoch before, which holds the workers
        if self._loaded:
            skip = 0
        else:
            _set_epoch(batches, epoch)
            if has_set_epoch(batches):
                set_workers(batches, running=False)
        self._loaded = False
        if is_seekable(batches):
            batches.seek(epoch, skip)
            skip = 0
        with _READING:
            running = iter(batches)
            self.short = sum(1 for _ in itertools.islice(running, skip)) < skip
        self._running = self._transfer.start(_read(running), ahead=_may_read_ahead(batches))
        self._at_boundary = True

    def finish(self) -> None:
        """Exhaust the iterator of a stateful loader, so that its saved position is the end of the epoch."""
        if is_stateful(self.batches):
            next(self._running, _END)

    def state(self) -> dict[str, Any] | None:
        """The position of a :class:`~trimtab.train.data.loader_position.Stateful` loader; ``None`` within a group."""
        return state_of(self.batches) if self._at_boundary else None

    def load(self, epoch: int, state: dict[str, Any]) -> None:
        """Restore a position of :meth:`state` in epoch ``epoch``; the next :meth:`begin` skips nothing."""
        self._running = iter(())
        _set_epoch(self.batches, epoch)
        load_state(self.batches, state)
        self._loaded = self._at_boundary = True

    def length(self) -> int | None:
        """Groups left in the epoch; ``None`` if the loader has no length."""
        if (batches := length_of(self.batches)) is None:
            return None
        return -(-((batches if self.limit is None else min(batches, self.limit)) - self.taken) // self.accumulate)

    def short_epoch_note(self) -> str | None:
        """A sentence at the end of an epoch if the loader gave fewer batches than its length; returned once."""
        if self._reported or (self.length() or 0) <= 0:
            return None
        self._reported = True
        return (
            f"The loader gave {counted(self.taken, 'batch')} in an epoch, but its len() says {len(self.batches)}. "  # type: ignore[arg-type]
            "Schedules go by that. A StopIteration that its dataset raises ends an epoch too, and leaves out the rest."
        )

    def groups(self) -> Iterator[list[Batch]]:
        """The groups left in the epoch.

        Raises:
            WorkloadError: the epoch has no batch.
        """
        while group := self._group():
            yield group
        if not self.taken:
            raise WorkloadError(f"The loader gave no batch. {_why_empty(self.batches)}")

    def _group(self) -> list[Batch]:
        group: list[Batch] = []
        while len(group) < self.accumulate and (self.limit is None or self.taken < self.limit):
            self.clock.enter("data")
            try:
                coming = next(self._running, _END)
                if coming is _END:
                    break
                self.taken, self._at_boundary = self.taken + 1, False
                if not self._transfer.is_identity:
                    self.clock.enter("copy")
                    coming = self._transfer.receive(coming)
                group.append(coming)
            except BaseException as error:
                _COPYING.explain(error)
                raise
        self._at_boundary = True
        self.clock.enter("other")
        if self.joined and len(group) > 1:
            try:
                group = [join(group)]
            except WorkloadError as error:
                if self.exact:
                    raise WorkloadError(f"exact_batchnorm runs the batches of an update as one. {error}") from error
        if self.micro is None:
            return group
        try:
            return self.split_group(group)
        except WorkloadError:
            if self.fallback is None:
                raise
            (self.micro,), self.fallback = self.fallback, None  # an attempt must not end the run
            return self.split_group(group)

    def split_group(self, group: list[Batch]) -> list[Batch]:
        """The batches of ``group``, split into micro-batches."""
        return group if self.micro is None else [part for batch in group for part in split(batch, self.micro)]

    def attempt(self, micro: int) -> None:
        """Split into ``micro`` examples from now on; if a batch cannot be split, return to the size before."""
        self.fallback, self.micro = (self.micro,), micro


def _read(running: Iterator[Batch]) -> Iterator[Batch]:
    """The batches of ``running``; its errors are reported as errors of the loader."""
    with _READING:
        for batch in running:  # noqa: UP028  # yield from would close a generator that a later run continues
            yield batch


def _set_epoch(batches: Any, epoch: int) -> None:
    """Call ``set_epoch()`` of the loader, its samplers and its datasets."""
    groups = getattr(batches, "batch_sampler", None)
    places = [batches, getattr(batches, "sampler", None), groups, getattr(groups, "sampler", None), *datasets_of(batches)]
    for place in {id(place): place for place in places}.values():
        set_epoch = getattr(place, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)


def _may_read_ahead(batches: Any) -> bool:
    """True if reading a batch early draws no random numbers in this process and changes no position that is saved."""
    return is_seekable(batches) or (bool(getattr(batches, "num_workers", 0)) and not is_stateful(batches))


def draws_locally(batches: Any) -> bool:
    """True if reading may draw random numbers in this process during the epoch, and not only at its start."""
    streams = isinstance(getattr(batches, "dataset", None), torch.utils.data.IterableDataset)
    return isinstance(batches, Iterator) or (streams and not getattr(batches, "num_workers", 0))


def has_set_epoch(batches: Any) -> bool:
    """True if a dataset of the loader has a ``set_epoch()``."""
    return any(hasattr(dataset, "set_epoch") for dataset in datasets_of(batches))


def keeps_workers(batches: Any) -> bool:
    """True for a DataLoader with persistent workers."""
    return isinstance(batches, torch.utils.data.DataLoader) and batches.persistent_workers


def has_workers(batches: Any) -> bool:
    """True if persistent workers are running. Starting them draws a random number; later epochs draw none."""
    return keeps_workers(batches) and batches._iterator is not None


def set_workers(batches: Any, *, running: bool) -> None:
    """Start or end persistent workers, so that a resumed epoch draws the same random numbers."""
    if not keeps_workers(batches) or has_workers(batches) == running:
        return
    if running:
        with _READING:
            iter(batches)
    else:
        batches._iterator = None


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
