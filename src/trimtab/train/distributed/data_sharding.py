"""Every process its part of the data."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from trimtab._internal.text import of_type
from trimtab.errors import UsageError
from trimtab.train.data.loader import Loader


class Share(Sampler[int]):
    """Every ``size``-th example of an order that all processes know; no example twice, and none left out.

    Unlike torch's DistributedSampler it fills nothing up: one process may have an example more than another.
    """

    def __init__(self, count: int, rank: int, size: int, *, seed: int | None) -> None:
        self.count, self.rank, self.size, self.seed = count, rank, size, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The order is another one in each epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        """Indices of this process's examples."""
        if self.seed is None:
            return iter(range(self.rank, self.count, self.size))
        random = torch.Generator().manual_seed((self.seed + self._epoch) % 2**63)
        return iter(torch.randperm(self.count, generator=random)[self.rank :: self.size].tolist())

    def __len__(self) -> int:
        return len(range(self.rank, self.count, self.size))


def share(batches: Iterable[Any], what: str, rank: int, size: int, seed: int, *, rows: bool = False) -> Iterable[Any]:
    """The part of ``batches`` that is for process ``rank`` of ``size``, or, with ``rows``, for several, which split layers.

    - A loader that shares out by itself is left alone: trimtab's own, a DataLoader with a DistributedSampler, and whatever has
      an attribute ``sharded = True``. With ``rows`` trimtab's own is told of them.
    - A DataLoader that goes through its dataset in order or at random is made anew over this process's examples, in an order
      that depends on ``seed`` and the epoch. Its batches stay as large as they are, so an update stands for ``size`` as many.
      One whose class has an ``__iter__`` of its own is not, because only that class knows what it gives.
    - Of a list every ``size``-th batch.

    Raises:
        UsageError: it is anything else, which each process would go through as a whole, or shares out among other processes.
    """
    if rows and isinstance(batches, Loader) and batches.size is None:
        told = copy.copy(batches)
        told.rank, told.size = rank, size
        return told
    for sampler in _samplers(batches):
        if isinstance(sampler, DistributedSampler) and (sampler.num_replicas != size or (rows and sampler.rank != rank)):
            raise UsageError(
                f"{what} has a DistributedSampler for process {sampler.rank} of {sampler.num_replicas}, but the data is shared "
                f"out to {size}, of which this is {rank}. Make it with num_replicas={size} and rank={rank}: the size and rank "
                "of what join() gives."
            )
    if _is_shared(batches):
        return batches
    if isinstance(batches, DataLoader) and _is_plain(batches):
        return _remade(batches, rank, size, seed)
    if isinstance(batches, Sequence):
        return batches[rank::size]
    raise UsageError(
        f"{what} is {of_type(batches)}, and with {size} processes each would train on all of it. Give a "
        "trimtab.train.Loader, a DataLoader with a DistributedSampler, or, if it already gives each process its own part, set "
        f"{what}.sharded = True."
    )


def _is_shared(batches: Any) -> bool:
    own = getattr(batches, "sharded", None)
    if own is not None:
        return bool(own)
    return any(isinstance(sampler, DistributedSampler) for sampler in _samplers(batches))


def _samplers(batches: Any) -> list[Any]:
    """What a loader draws its places from, in whichever of torch's forms."""
    found = [getattr(batches, name, None) for name in ("sampler", "batch_sampler")]
    return found + [getattr(sampler, "sampler", None) for sampler in found]


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Whether it does nothing but go through its dataset, in batches, in order or at random."""
    stock = type(loader).__iter__ is DataLoader.__iter__ and type(loader.sampler) in (RandomSampler, SequentialSampler)
    return stock and bool(loader.batch_size)


def _remade(loader: DataLoader[Any], rank: int, size: int, seed: int) -> DataLoader[Any]:
    """The same loader over this process's share."""
    given = loader.sampler
    count = len(given)  # type: ignore[arg-type]
    if isinstance(given, RandomSampler) and (given.replacement or count != len(given.data_source)):
        raise UsageError(
            "The DataLoader draws with replacement, or only some examples, which cannot be shared out between processes. Give "
            "it a DistributedSampler."
        )
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=Share(count, rank, size, seed=seed if isinstance(given, RandomSampler) else None),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
        generator=loader.generator,
        in_order=loader.in_order,
    )
