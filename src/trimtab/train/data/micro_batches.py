"""Reads a loader: batches on the device, cut into micro-batches, one group per update, resumable within an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from trimtab._internal.text import counted, of_type
from trimtab.core.workload import user_code
from trimtab.errors import UsageError, WorkloadError
from trimtab.train.data.batch_structure import split, united
from trimtab.train.data.device_prefetch import Transfer
from trimtab.train.data.loader_position import Seekable, is_stateful, load_state, state_of
from trimtab.train.loss.adapter import Batch
from trimtab.train.runtime.memory_errors import final
from trimtab.train.runtime.random_generators import datasets_of
from trimtab.train.runtime.step_clock import Clock

_READING, _END = user_code("The loader raised"), object()
_MOVING = final(
    "A batch has no room on its device ({words}). Make the loader's batches smaller; "
    "Settings(accumulate=...) keeps the update as it is."
)


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
