"""Batches for training: their order is known in advance, so that they can be read fast, ahead, and again from anywhere."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import distributed
from torch.utils.data import DataLoader

from trimtab._internal.text import counted
from trimtab.core.workload import user_code
from trimtab.errors import UsageError, WorkloadError
from trimtab.train.data.batch_sampler import Epoch, Order, check_lengths, fixed, length_classes, within_budget
from trimtab.train.data.batch_structure import inside, rebuilt
from trimtab.train.data.collate import Collate
from trimtab.train.data.readers import Job, Reader, seeded, source_of
from trimtab.train.loss.adapter import Batch
from trimtab.train.runtime.random_generators import datasets_of

BATCH = 32
"""Examples per batch where nothing is said."""


class Loader:
    """Batches of ``dataset``, gone through once per epoch.

    The order is a function of seed, epoch, rank and the number of ranks, and nothing else: :meth:`seek` begins anywhere without
    reading what was before. Random numbers that the dataset draws from torch's (CPU), numpy's or Python's global generators
    depend on seed, epoch, batch and rank only, so that an augmentation repeats after a resumption, and is the same for any
    number of workers; the generators of the caller are left alone. Generators that the dataset keeps to itself are not seen to.

    Args:
        dataset: examples, read by place. Arrays are read a batch at a time: a tensor, a tuple or a mapping of tensors, numpy
            arrays (also memory-mapped ones) or :class:`~trimtab.train.data.memory_mapped.MappedTensors`, a ``TensorDataset``
            or a part of
            one; a mapping may hold lists too, as tokenizers give them. So is a dataset with ``__getitems__``, whose answer
            is joined if it is a list and else is the batch itself. Of everything else, such as a list, each ``dataset[i]`` is
            an example.
        batch: examples per batch and rank; 32, or with ``tokens`` as many as fit.
        shuffle: whether each epoch has an order of its own.
        seed: what order and augmentation depend on.
        drop_last: whether the last batch is left out where it is smaller. Otherwise what is left is divided among the ranks,
            and examples are repeated only where fewer are left than there are ranks. With ``tokens`` it changes nothing,
            because no batch is incomplete.
        workers: processes that read; 0 reads in this one.
        prefetch: batches that each worker reads ahead.
        pin: whether batches lie in page-locked memory, which GPUs copy from without waiting; ``None``: if there is a GPU.
        persistent: whether workers live on after an epoch; not if the dataset has a ``set_epoch()``, which they would not hear,
            nor once it has grown.
        in_order: whether batches come in the order of the epoch. Otherwise whichever is ready comes first, and a resumption
            in mid-epoch may leave out a few batches and repeat others.
        collate: joins a list of examples; :class:`~trimtab.train.data.collate.Collate` if not given.
        lengths: of each example: an array, or a function of an example. Batches are then made of examples of similar length
            (within an eighth), mixed anew in each epoch; every epoch has the same number of batches.
        tokens: most tokens per batch, padding included: the number of examples times the length of the longest. Needs
            ``lengths``.
        rank: of this process among those that share the data; from ``torch.distributed`` if not given, or 0.
        size: how many processes share the data.

    Raises:
        UsageError: the dataset is empty or cannot be read by place, columns or lengths differ in number, an example is longer
            than ``tokens``, or a number makes no sense.
        WorkloadError: when gone through: the dataset raised, a worker died, or examples cannot be joined.
    """

    sharded: ClassVar[bool] = True
    """It divides the data among processes by itself."""

    def __init__(
        self,
        dataset: Any,
        batch: int | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        workers: int = 0,
        prefetch: int = 2,
        pin: bool | None = None,
        persistent: bool = True,
        in_order: bool = True,
        collate: Callable[[list[Any]], Batch] | None = None,
        lengths: Sequence[int] | np.ndarray[Any, Any] | torch.Tensor | Callable[[Any], int] | None = None,
        tokens: int | None = None,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        _check_numbers(batch=batch, tokens=tokens, prefetch=prefetch, size=size)
        _check_numbers(0, seed=seed, workers=workers, rank=rank)
        self.dataset, self.batch, self.shuffle, self.seed = dataset, batch, shuffle, seed
        self.drop_last, self.workers, self.prefetch, self.pin = drop_last, workers, prefetch, pin
        self.persistent, self.in_order, self.tokens, self.rank, self.size = persistent, in_order, tokens, rank, size
        self._source = source_of(dataset, collate)
        self._reader = Reader(self._source)
        if not len(self._source):
            raise UsageError("The dataset is empty. Check where its examples come from.")
        with seeded((seed,)):
            self.lengths = self._lengths(lengths, collate)
        if self.batch is None and tokens is None:
            self.batch = BATCH
        self.begun_by: int | None = None
        """How many processes have begun the epoch that is sought next, where that was another number: which examples make up
        which batch then stays what it was."""
        self._orders: dict[tuple[int, int], Order] = {}
        self._next = (0, 0)
        self._turn = 0
        self._pool: DataLoader[Batch] | None = None
        self._started: tuple[int, int, bool, int] | None = None
        self._jobs = _Jobs([])
        self._order(self._place()[1])

    def __len__(self) -> int:
        """Batches per epoch on this rank; the same in every epoch and on every rank, but for one that others have begun."""
        rank, size = self._place()
        return len(range(rank, self._order(self.begun_by or size).batches, size))

    def seek(self, epoch: int, batch: int) -> None:
        """Make the next iteration begin at that batch of that epoch; those that follow take the next epochs."""
        _check_numbers(0, epoch=epoch, batch=batch)
        self._next = (epoch, batch)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the next epoch, or from where :meth:`seek` said."""
        (epoch, start), (rank, size) = self._next, self._place()
        self._next, self._turn = (epoch + 1, 0), self._turn + 1
        jobs = _Jobs(self._order(self.begun_by or size).epoch(epoch, rank, size), start, (self.seed, epoch, rank))
        if self.workers:
            return self._elsewhere(jobs, self._turn)
        self._pool = None
        return self._here(jobs)

    def retune(self, *, workers: int | None = None, prefetch: int | None = None, pin: bool | None = None) -> None:
        """Read in another way from the next iteration on; the batches stay the same."""
        _check_numbers(0, workers=workers)
        _check_numbers(prefetch=prefetch)
        self.workers = self.workers if workers is None else workers
        self.prefetch = self.prefetch if prefetch is None else prefetch
        self.pin = self.pin if pin is None else pin
        self.close()

    def close(self) -> None:
        """End the workers; the next iteration starts new ones."""
        self._turn += 1
        self._pool = None  # its iterator ends the processes when it goes

    def _here(self, jobs: _Jobs) -> Iterator[Batch]:
        """Read in this process."""
        pinned = self._pins()
        for job in jobs:
            batch = self._reader[job]
            yield _pinned(batch) if pinned else batch

    def _elsewhere(self, jobs: _Jobs, turn: int) -> Iterator[Batch]:
        """Have the workers read."""
        self._jobs.become(jobs)
        now = (self.workers, self.prefetch, self._pins(), len(self._source))
        told = any(hasattr(dataset, "set_epoch") for dataset in datasets_of(self))  # of which workers have copies
        if self._pool is None or not self.persistent or told or self._started != now:
            self._pool, self._started = self._start(), now
        batches = iter(self._pool)
        while True:
            if turn != self._turn:
                raise UsageError("This Loader was begun anew, or closed, meanwhile. Go through it once at a time, or make two.")
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:  # the latter two where it died as its batch was on its way
                raise self._died(error) from error
            if isinstance(batch, _Failure):
                self.close()
                del batches  # ends the workers now, and not when the traceback goes, in an order in which they cannot be told
                raise batch.error()
            yield batch

    def _start(self) -> DataLoader[Batch]:
        return DataLoader(
            _Guarded(self._reader),
            sampler=self._jobs,
            batch_size=None,  # what the sampler gives is a whole batch already
            collate_fn=_same,
            num_workers=self.workers,
            prefetch_factor=self.prefetch,
            pin_memory=self._pins(),
            persistent_workers=self.persistent,
            in_order=self.in_order,
            generator=torch.Generator(),  # it would draw a seed from the caller's
        )

    def _died(self, error: Exception) -> WorkloadError:
        self.close()
        return WorkloadError(
            f"A process that reads data died: {error}. The system kills processes for want of memory; give fewer workers (now "
            f"{self.workers}) or less prefetch (now {self.prefetch}), or see what happens in this process with workers=0."
        )

    def _pins(self) -> bool:
        return torch.cuda.is_available() if self.pin is None else self.pin

    def _place(self) -> tuple[int, int]:
        """This process's rank, and how many there are."""
        together = distributed.is_available() and distributed.is_initialized()
        size = self.size if self.size is not None else distributed.get_world_size() if together else 1
        rank = self.rank if self.rank is not None else distributed.get_rank() if together and self.size is None else 0
        if rank >= size:
            raise UsageError(f"rank is {rank}, but with size={size} ranks go from 0 to {size - 1}. Give both.")
        return rank, size

    def _order(self, size: int) -> Order:
        count = len(self._source)
        if (key := (size, count)) not in self._orders:
            if self.lengths is not None and len(self.lengths) != count:
                raise UsageError(
                    f"The dataset has {counted(count, 'example')} now, and had {len(self.lengths)} when their lengths were "
                    "taken. Make a "
                    "new Loader."
                )
            classes = None if self.lengths is None else length_classes(self.lengths, self.tokens)
            if classes is not None and self.tokens is not None:
                bounds = within_budget(classes, self.batch, self.tokens, size)
            else:
                bounds = fixed(count, self.batch or BATCH, size, drop_last=self.drop_last)
            if not len(bounds):
                raise UsageError(
                    f"With drop_last, {counted(count, 'example')} cannot make a batch of {self.batch} for each of {size} "
                    "processes. Give a "
                    "smaller batch, or drop_last=False."
                )
            kept = {other: made for other, made in self._orders.items() if other[1] == count}
            self._orders = {**kept, key: Order(count, bounds, classes, self.shuffle, self.seed)}
        return self._orders[key]

    def _lengths(self, lengths: Any, collate: Any) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """The length that each example has once it is padded to a multiple."""
        if lengths is None:
            if self.tokens is not None:
                raise UsageError("tokens=... needs lengths=..., an array or a function such as lambda x: len(x['input_ids']).")
            return None
        if callable(lengths):
            lengths = [self._length(lengths, place) for place in range(len(self._source))]
        multiple = collate.multiple if isinstance(collate, Collate) else 1
        found = check_lengths(lengths, len(self._source), self.tokens)
        return check_lengths(-(-found // multiple) * multiple, len(self._source), self.tokens)

    def _length(self, function: Callable[[Any], int], place: int) -> int:
        """What the user's function says of the example at ``place``."""
        example = self._source.example(place)
        with user_code(f"lengths raised on example {place}"):
            return function(example)

    def __getstate__(self) -> dict[str, Any]:
        """Without the running workers, which stay with this process."""
        return {**self.__dict__, "_pool": None, "_jobs": _Jobs([])}


class _Jobs:
    """The batches of an epoch from one of them on; what a DataLoader takes for a sampler."""

    def __init__(self, epoch: Epoch | Sequence[Any], start: int = 0, seed: tuple[int, ...] = ()) -> None:
        self.epoch, self.start, self.seed = epoch, start, seed

    def __len__(self) -> int:
        return max(len(self.epoch) - self.start, 0)

    def __iter__(self) -> Iterator[Job]:
        return (Job((*self.seed, place), self.epoch[place]) for place in range(self.start, len(self.epoch)))

    def become(self, other: _Jobs) -> None:
        """Persistent workers keep their sampler, so it is the sampler that changes."""
        self.epoch, self.start, self.seed = other.epoch, other.start, other.seed


class _Failure(NamedTuple):
    """What went wrong in a worker. As a value it crosses whole; torch would put the traceback into the message."""

    message: str
    trace: str

    def error(self) -> WorkloadError:
        """The error to raise here; its note holds the worker's traceback."""
        error = WorkloadError(self.message)
        error.add_note(f"In the process that read the data:\n{self.trace}")
        return error


class _Guarded(Reader):
    """A reader in a worker, whose errors are answers.

    What is read is put into shared memory here: where that is left to the batch's way out and there is too little of it,
    nobody is told, and the batch is waited for without end.
    """

    def __init__(self, reader: Reader) -> None:
        super().__init__(reader.source)

    def __getitem__(self, job: Job) -> Batch:
        try:
            batch = super().__getitem__(job)
            _share(batch)
            return batch
        except (WorkloadError, UsageError) as error:
            return _Failure(str(error), "".join(traceback.format_exception(error)))


def _check_numbers(least: int = 1, **numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise UsageError(f"{name} is {value!r}; it must be a whole number of at least {least}.")


def _same(batch: Batch) -> Batch:
    return batch


def _share(batch: Batch) -> None:
    """Put the tensors of ``batch`` into shared memory.

    Raises:
        WorkloadError: there is too little.
    """
    if type(batch) is not torch.Tensor:
        for item in inside(batch):
            _share(item)
    elif batch.is_cpu and batch.layout == torch.strided and not batch.is_nested and batch.untyped_storage().nbytes():
        try:
            batch.share_memory_()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise WorkloadError(
                f"A batch cannot be handed over: {error}. The shared memory of this machine (/dev/shm) is full, or a process "
                "may open no more files. Give more of it, as docker run --shm-size=2g does, fewer workers, or less prefetch."
            ) from error


def _pinned(batch: Batch) -> Batch:
    if not isinstance(batch, torch.Tensor):
        return rebuilt(batch, _pinned)
    return batch.pin_memory() if batch.device.type == "cpu" and batch.layout == torch.strided else batch
