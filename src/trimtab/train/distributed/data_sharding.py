"""Shard the data over processes."""

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
    """Every ``size``-th example of an order that is equal in all processes.

    Unlike torch's DistributedSampler it repeats no example: one process may have an example more than another.
    """

    def __init__(self, count: int, rank: int, size: int, *, seed: int | None) -> None:
        self.count, self.rank, self.size, self.seed = count, rank, size, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which the order depends on."""
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
    """The shard of ``batches`` for process ``rank`` of ``size``.

    - A loader that shards by itself is given back: trimtab's own, a DataLoader with a DistributedSampler, and any object with
      an attribute ``sharded = True``.
    - A DataLoader that goes through its dataset in order or at random is rebuilt over the examples of this process, in an order
      that depends on ``seed`` and the epoch. The batch size stays, so that an update is made from ``size`` times the examples.
      A DataLoader whose class has its own ``__iter__`` is not rebuilt.
    - Of a list, every ``size``-th batch.

    Args:
        what: the name of ``batches`` in messages.
        rows: layers are split too, so that several processes have one shard. trimtab's own loader gets ``rank`` and ``size``.

    Raises:
        UsageError: ``batches`` are anything else, which each process would read as a whole, or have a DistributedSampler for
            another number of processes.
    """
    if rows and isinstance(batches, Loader) and batches.size is None:
        sharded = copy.copy(batches)
        sharded.rank, sharded.size = rank, size
        return sharded
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
    """The samplers of a loader, also those within a batch sampler."""
    found = [getattr(batches, name, None) for name in ("sampler", "batch_sampler")]
    return found + [getattr(sampler, "sampler", None) for sampler in found]


def _is_plain(loader: DataLoader[Any]) -> bool:
    """True for a DataLoader that only batches its dataset, in order or at random."""
    stock = type(loader).__iter__ is DataLoader.__iter__ and type(loader.sampler) in (RandomSampler, SequentialSampler)
    return stock and bool(loader.batch_size)


def _remade(loader: DataLoader[Any], rank: int, size: int, seed: int) -> DataLoader[Any]:
    """A copy of ``loader`` over the examples of this process."""
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
