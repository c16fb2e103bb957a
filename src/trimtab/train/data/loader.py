"""A data loader whose order is a function of seed and epoch, so that a run resumes within an epoch to the bit."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import distributed
from torch.utils.data import DataLoader

from trimtab._internal.text import counted, of_type
from trimtab._internal.user_code import user_code
from trimtab.errors import UsageError, WorkloadError
from trimtab.tensors.structure import leaves_of, map_tensors
from trimtab.train.data.batch_sampler import Epoch, Order, check_lengths, fixed_batches, length_classes, token_batches
from trimtab.train.data.collate import Collate
from trimtab.train.data.example_cache import ExampleCache
from trimtab.train.data.readers import Examples, Job, Reader, seeded, source_of
from trimtab.train.loss.adapter import Batch
from trimtab.train.runtime.random_generators import datasets_of

BATCH = 32
"""Default number of examples per batch."""
_PICKLING = (pickle.PickleError, TypeError, AttributeError, ValueError, RuntimeError, OSError, LookupError)
"""Errors of pickling. A DataLoader passes on any other that a user's ``__reduce__`` raises."""


class Loader:
    """Batches of a dataset. Each iteration is one epoch.

    The order depends on seed, epoch, rank and number of ranks only. :meth:`seek` starts at any batch without reading those
    before it. While an example is read, the global random generators of torch (CPU), numpy and Python are seeded from seed,
    epoch, batch and rank, and restored afterwards: augmentation is the same after a resume and for any number of workers.
    Generators that the dataset owns are not seeded.

    Example:
        >>> inputs, labels = torch.randn(10, 3), torch.arange(10)
        >>> loader = Loader((inputs, labels), batch=4, seed=1)
        >>> [tuple(x.shape) for x, y in loader]
        [(4, 3), (4, 3), (2, 3)]
        >>> loader.seek(epoch=1, batch=2)  # as a resumed run does
        >>> len(list(loader))
        1

    Args:
        dataset: one of

            - columns, read a batch at a time: a tensor, a tuple or mapping of tensors, numpy arrays (memory-mapped ones too) or
              :class:`~trimtab.train.data.memory_mapped.MappedTensors`, a ``TensorDataset`` or a ``Subset`` of one. A mapping
              may hold lists, as those of tokenizers do;
            - a dataset with ``__getitems__``. A list that it returns is collated; anything else is the batch;
            - any other dataset or list, where each ``dataset[i]`` is an example.
        batch: examples per batch and rank; 32, or with ``tokens`` as many as fit.
        shuffle: whether to draw a new order in each epoch.
        seed: seed of the order and of augmentation.
        drop_last: leave out an incomplete last batch. Otherwise its examples are divided among the ranks; examples are repeated
            only if there are fewer than ranks. No effect with ``tokens``, which leaves no incomplete batch.
        workers: reader processes; 0 reads in this process.
        prefetch: batches that each worker reads ahead.
        pin: put batches into page-locked memory, from which copies to a GPU are asynchronous; ``None``: if there is a GPU.
        persistent: keep workers after an epoch. They are renewed if the dataset has a ``set_epoch()``, which would not reach
            them, or has grown.
        in_order: yield batches in the order of the epoch. Otherwise they come as they are ready, and a run that resumes within
            an epoch may skip a few batches and repeat others.
        collate: makes a batch of a list of examples; default :class:`~trimtab.train.data.collate.Collate`.
        lengths: the length of each example: an array, or a function of an example. Examples of a batch then have similar
            lengths (within an eighth); batches are drawn anew in each epoch, always the same number.
        tokens: most tokens per batch with padding: examples times the longest length. Needs ``lengths``.
        cache: keeps decoded examples: ``"2GB"`` of memory, or a folder, which later runs use too. The dataset must not draw
            random numbers then.
        transform: what is done with each example after it was read, or found in the cache, such as an augmentation that draws.
        rank: rank of this process among those that share the data; default that of ``torch.distributed``, or 0.
        size: number of processes that share the data.

    Raises:
        UsageError: the dataset is empty or has no ``dataset[i]``, columns or lengths differ in number, an example is longer
            than ``tokens``, or a number is out of range.
        WorkloadError: in an iteration: the dataset raised, examples cannot be collated, a worker died, or a batch cannot be
            pickled by a worker.
    """

    sharded: ClassVar[bool] = True
    """The loader divides the data among processes itself."""

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
        cache: str | os.PathLike[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        _check_numbers(batch=batch, tokens=tokens, prefetch=prefetch, size=size)
        _check_numbers(0, seed=seed, workers=workers, rank=rank)
        self.dataset, self.batch, self.shuffle, self.seed = dataset, batch, shuffle, seed
        self.drop_last, self.workers, self.prefetch, self.pin = drop_last, workers, prefetch, pin
        self.persistent, self.in_order, self.tokens, self.rank, self.size = persistent, in_order, tokens, rank, size
        self._source = source_of(dataset, collate)
        if cache is not None or transform is not None:
            self._configure_examples(cache, transform)
        self._reader = Reader(self._source)
        if not len(self._source):
            raise UsageError("The dataset is empty. Check where its examples come from.")
        with seeded((seed,)):
            self.lengths = self._lengths(lengths, collate)
        if self.batch is None and tokens is None:
            self.batch = BATCH
        self.begun_by: int | None = None
        """The number of processes that began the next epoch, if another number continues it: its batches do not change then."""
        self._orders: dict[tuple[int, int], Order] = {}
        self._next = (0, 0)
        self._iteration = 0
        self._pool: DataLoader[Batch] | None = None
        self._started: tuple[int, int, bool, int] | None = None
        self._jobs = _Jobs([])
        self._order(self._rank_and_size()[1])

    def __len__(self) -> int:
        """Batches per epoch on this rank, equal on all ranks; another number only in an epoch that other ranks began."""
        rank, size = self._rank_and_size()
        return len(range(rank, self._order(self.begun_by or size).batches, size))

    def seek(self, epoch: int, batch: int) -> None:
        """Start the next iteration at this batch of this epoch, both from 0. Later iterations are the epochs after it."""
        _check_numbers(0, epoch=epoch, batch=batch)
        self._next = (epoch, batch)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the next epoch, or from the place of :meth:`seek`."""
        (epoch, start), (rank, size) = self._next, self._rank_and_size()
        self._next, self._iteration = (epoch + 1, 0), self._iteration + 1
        jobs = _Jobs(self._order(self.begun_by or size).epoch(epoch, rank, size), start, (self.seed, epoch, rank))
        if self.workers:
            return self._read_in_workers(jobs, self._iteration)
        self._pool = None
        return self._read_in_process(jobs)

    def retune(self, *, workers: int | None = None, prefetch: int | None = None, pin: bool | None = None) -> None:
        """Change how batches are read from the next iteration on. The batches stay the same."""
        _check_numbers(0, workers=workers)
        _check_numbers(prefetch=prefetch)
        self.workers = self.workers if workers is None else workers
        self.prefetch = self.prefetch if prefetch is None else prefetch
        self.pin = self.pin if pin is None else pin
        self.close()

    def close(self) -> None:
        """End the workers; the next iteration starts new ones."""
        self._iteration += 1
        self._pool = None  # freeing its iterator ends the processes

    def _configure_examples(self, cache: str | os.PathLike[str] | None, transform: Callable[[Any], Any] | None) -> None:
        """Set the cache and the transform of the source."""
        name = "cache" if cache is not None else "transform"
        if not isinstance(self._source, Examples):
            raise UsageError(
                f"{name} is for a dataset that reads one example after the other, and this one has its arrays in memory or in "
                "mapped files. Leave it out; collate= changes batches."
            )
        if transform is not None and not callable(transform):
            raise UsageError(f"transform is {of_type(transform)}; give a function of an example.")
        self._source.transform = transform
        self._source.draws = self._source.draws or transform is not None
        if cache is not None:
            self._source.cache = ExampleCache(cache, self.dataset, self.workers)

    def _read_in_process(self, jobs: _Jobs) -> Iterator[Batch]:
        """Batches that this process reads."""
        pinned = self._pins()
        for job in jobs:
            batch = self._reader[job]
            yield map_tensors(batch, _pinned) if pinned else batch

    def _read_in_workers(self, jobs: _Jobs, iteration: int) -> Iterator[Batch]:
        """Batches that workers read."""
        self._jobs.replace(jobs)
        now = (self.workers, self.prefetch, self._pins(), len(self._source))
        stale = any(hasattr(dataset, "set_epoch") for dataset in datasets_of(self))  # workers have copies without the new epoch
        if self._pool is None or not self.persistent or stale or self._started != now:
            self._pool, self._started = self._start(), now
        batches = iter(self._pool)
        while True:
            if iteration != self._iteration:
                raise UsageError("This Loader was begun anew, or closed, meanwhile. Go through it once at a time, or make two.")
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:  # the last two if the worker died while it sent a batch
                raise self._worker_died(error) from error
            if isinstance(batch, _Failure):
                self.close()
                del batches  # ends the workers now; the traceback would keep them alive
                raise batch.error()
            yield batch

    def _start(self) -> DataLoader[Batch]:
        return DataLoader(
            _WorkerReader(self._reader),
            sampler=self._jobs,
            batch_size=None,  # the sampler gives whole batches
            collate_fn=_identity,
            num_workers=self.workers,
            prefetch_factor=self.prefetch,
            pin_memory=self._pins(),
            persistent_workers=self.persistent,
            in_order=self.in_order,
            generator=torch.Generator(),  # the default draws a seed from the global generator
        )

    def _worker_died(self, error: Exception) -> WorkloadError:
        self.close()
        return WorkloadError(
            f"A process that reads data died: {error}. The system kills processes for want of memory; give fewer workers (now "
            f"{self.workers}) or less prefetch (now {self.prefetch}), or see what happens in this process with workers=0."
        )

    def _pins(self) -> bool:
        return torch.cuda.is_available() if self.pin is None else self.pin

    def _rank_and_size(self) -> tuple[int, int]:
        """The rank of this process, and the number of ranks."""
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
                bounds = token_batches(classes, self.batch, self.tokens, size)
            else:
                bounds = fixed_batches(count, self.batch or BATCH, size, drop_last=self.drop_last)
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
        """The length of each example, rounded up to the collate function's multiple."""
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
        """The length of the example at ``place`` by the user's function."""
        example = self._source.example(place)
        with user_code(f"lengths raised on example {place}"):
            return function(example)

    def __getstate__(self) -> dict[str, Any]:
        """The state without workers, which belong to this process."""
        return {**self.__dict__, "_pool": None, "_jobs": _Jobs([])}


class _Jobs:
    """The sampler of the inner DataLoader: one job per batch of an epoch, from batch ``start`` on."""

    def __init__(self, epoch: Epoch | Sequence[Any], start: int = 0, seed: tuple[int, ...] = ()) -> None:
        self.epoch, self.start, self.seed = epoch, start, seed

    def __len__(self) -> int:
        return max(len(self.epoch) - self.start, 0)

    def __iter__(self) -> Iterator[Job]:
        return (Job((*self.seed, place), self.epoch[place]) for place in range(self.start, len(self.epoch)))

    def replace(self, other: _Jobs) -> None:
        """Take the jobs of ``other``: a DataLoader with persistent workers keeps its sampler object."""
        self.epoch, self.start, self.seed = other.epoch, other.start, other.seed


class _Failure(NamedTuple):
    """An error in a worker, sent as a value. As an exception, torch would put its traceback into the message."""

    message: str
    trace: str

    def error(self) -> WorkloadError:
        """The error to raise in this process, with the worker's traceback as a note."""
        error = WorkloadError(self.message)
        error.add_note(f"In the process that read the data:\n{self.trace}")
        return error


class _WorkerReader(Reader):
    """A reader in a worker, which returns its errors as values and pickles its batches itself.

    A DataLoader pickles batches in a thread of the worker. If that fails, as for an object without pickle support or without
    room in shared memory, the batch is never sent, and the parent process waits for it for ever.
    """

    def __init__(self, reader: Reader) -> None:
        super().__init__(reader.source)

    def __getitem__(self, job: Job) -> Batch:
        try:
            return _Pickled(super().__getitem__(job))
        except (WorkloadError, UsageError) as error:
            return _Failure(str(error), "".join(traceback.format_exception(error)))


class _Pickled:
    """A batch as bytes; its tensors are in shared memory. It unpickles as the batch.

    Raises:
        WorkloadError: the batch cannot be pickled, or there is no room in shared memory.
    """

    def __init__(self, batch: Batch) -> None:
        try:
            self.content = bytes(ForkingPickler.dumps(batch))
        except _PICKLING as error:
            raise WorkloadError(_why_unsent(batch, error)) from error

    def __reduce__(self) -> Any:
        return pickle.loads, (self.content,)


def _why_unsent(batch: Batch, error: Exception) -> str:
    """Why a worker cannot send ``batch``, and what to do."""
    if isinstance(error, OSError) or (isinstance(error, RuntimeError) and str(error).startswith("unable to ")):
        return (
            f"A batch cannot be handed over: {error}. The shared memory of this machine (/dev/shm) is full, or a process "
            "may open no more files. Give more of it, as docker run --shm-size=2g does, fewer workers, or less prefetch."
        )
    found = next((leaf for leaf in leaves_of(batch) if not _picklable(leaf)), batch)
    return (
        f"A batch holds {of_type(found)}, which a worker cannot send to this process: {type(error).__name__}: {error}. Leave "
        "it out of the batch, make it picklable, or read in this process with workers=0."
    )


def _picklable(leaf: Any) -> bool:
    """True if ``leaf`` can be pickled. Tensors count as picklable unless they carry gradients: trying it would share them."""
    if isinstance(leaf, torch.Tensor):
        return not leaf.requires_grad or leaf.is_leaf
    try:
        ForkingPickler.dumps(leaf)
    except _PICKLING:
        return False
    return True


def _check_numbers(least: int = 1, **numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise UsageError(f"{name} is {value!r}; it must be a whole number of at least {least}.")


def _identity(batch: Batch) -> Batch:
    return batch


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" and tensor.layout == torch.strided else tensor
