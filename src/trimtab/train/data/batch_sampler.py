"""The examples of each batch: a pure function of seed, epoch, rank and number of ranks.

No data is read and no state is kept, so that an epoch can start at any batch. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trimtab.errors import UsageError

Indices = np.ndarray[Any, np.dtype[np.int64]]
Index = slice | Indices
"""The examples of one batch; a slice if they are consecutive."""

CLASS_WIDTH = 0.125
"""Lengths that differ by less than this share are one length class, so that bucketed batches differ from epoch to epoch.

The cost is padding of at most this share, half of it on average. With classes instead of noise on the lengths, every epoch
has the same number of batches of the same sizes, on which schedules rely.
"""


@dataclasses.dataclass(frozen=True)
class Order:
    """The bounds of the batches of an epoch, for every rank.

    All ranks have the same number of batches. Examples are repeated only if fewer than the number of ranks are left.
    """

    count: int
    """Examples."""
    bounds: Indices
    """Shape (steps, ranks, 2): start and end (exclusive) of each batch in the order of the epoch."""
    classes: Indices | None = None
    """The length class of each example, by which the order of the epoch is sorted."""
    shuffle: bool = True
    seed: int = 0

    def __len__(self) -> int:
        """Batches per rank."""
        return len(self.bounds)

    def epoch(self, epoch: int, rank: int, ranks: int | None = None) -> Epoch:
        """The batches of one epoch for one rank of ``ranks``; the default is the number of ranks of ``bounds``."""
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
        bounds, order = self.bounds, None
        if self.classes is not None or self.shuffle:
            order = generator.permutation(self.count) if self.shuffle else np.arange(self.count)
        if self.classes is not None and order is not None:
            order = order[: self.used]
            order = order[np.argsort(self.classes[order], kind="stable")]
            bounds = bounds[generator.permutation(len(bounds))] if self.shuffle else bounds
        dealt = bounds.reshape(-1, 2)[rank :: ranks or bounds.shape[1]]
        return Epoch(order, dealt, self.count if order is None else len(order))

    @property
    def batches(self) -> int:
        """Batches of all ranks together."""
        return int(self.bounds.shape[0] * self.bounds.shape[1])

    @property
    def used(self) -> int:
        """Examples that one epoch uses; with shuffling, each epoch leaves out others."""
        return min(self.count, int(self.bounds.max()))


@dataclasses.dataclass(frozen=True)
class Epoch(Sequence[Index]):
    """The batches of one epoch on one rank."""

    order: Indices | None
    bounds: Indices
    total: int
    """Examples."""

    def __len__(self) -> int:
        return len(self.bounds)

    def __getitem__(self, index: Any) -> Any:
        """The examples of batch ``index``."""
        start, end = self.bounds[index].tolist()
        if end > self.total:  # the last ranks repeat the first examples
            places = np.arange(start, end) % self.total
            return places if self.order is None else self.order[places]
        return slice(start, end) if self.order is None else self.order[start:end]


def fixed_batches(count: int, batch: int, ranks: int, *, drop_last: bool) -> Indices:
    """The bounds of batches of ``batch`` examples; the rest is divided among the ranks."""
    starts = np.arange(ranks) * batch
    whole = np.arange(count // (batch * ranks))[:, None] * (batch * ranks) + starts
    bounds = np.stack([whole, whole + batch], axis=-1)
    left = 0 if drop_last else count - bounds.size // 2 * batch
    if not left:
        return bounds
    ends = count - left + np.cumsum(_shares(left, ranks))
    return np.concatenate([bounds, np.stack([ends - _shares(left, ranks), ends], axis=-1)[None]])


def token_batches(classes: Indices, batch: int | None, tokens: int, ranks: int) -> Indices:
    """The bounds of batches of similar lengths, in the order of ``classes``, with at most ``tokens`` tokens after padding.

    Ranks get batches of similar length at the same step, so that none waits long. If the number of batches is no multiple of
    the ranks, the largest are halved.
    """
    ends = _fill(np.sort(classes), len(classes) if batch is None else batch, tokens)
    bounds = _halved(np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=-1), -len(ends) % ranks)
    return np.resize(bounds, (-(-len(bounds) // ranks), ranks, 2))


def length_classes(lengths: Indices, most: int | None = None) -> Indices:
    """The length class of each length: the longest length in it. Classes are :data:`CLASS_WIDTH` wide."""
    steps = np.floor(np.log(np.maximum(lengths, 1)) / math.log1p(CLASS_WIDTH)).astype(np.int64)
    bounds = np.zeros(int(steps.max(initial=0)) + 1, np.int64)
    np.maximum.at(bounds, steps, lengths)
    found: Indices = bounds[steps]
    return found if most is None else np.minimum(found, most)


def check_lengths(lengths: Any, count: int, tokens: int | None) -> Indices:
    """The lengths as an array.

    Raises:
        UsageError: ``lengths`` is not one non-negative integer per example, or one is above ``tokens``.
    """
    found = np.asarray(lengths)
    if found.shape != (count,):
        raise UsageError(f"lengths has shape {found.shape}, but the dataset has {count} examples. Give one length for each.")
    if not np.issubdtype(found.dtype, np.integer):
        raise UsageError(f"lengths are of type {found.dtype}, but must be whole numbers, such as len(example['input_ids']).")
    if (found < 0).any():
        raise UsageError(f"lengths[{int(found.argmin())}] is {int(found.min())}; a length cannot be below zero.")
    longest = int(found.argmax())
    if tokens is not None and found[longest] > tokens:
        raise UsageError(
            f"Example {longest} has a length of {int(found[longest])}, more than a whole batch may have (tokens={tokens}). "
            f"Cut it, leave it out, or give tokens={int(found[longest])} or more."
        )
    return found.astype(np.int64)


def _shares(count: int, ranks: int) -> Indices:
    """Examples of ``count`` for each rank; at least one each, repeated if necessary."""
    return np.maximum((count + np.arange(ranks)[::-1]) // ranks, 1)


def _fill(lengths: Indices, batch: int, tokens: int) -> Indices:
    """The ends of batches in the sorted ``lengths``, each with as many examples as fit."""
    ends, start, count = [], 0, len(lengths)
    while start < count:
        guess = min(batch, max(tokens // max(int(lengths[start]), 1), 1), count - start)
        places = lengths[start : start + guess] * np.arange(1, guess + 1)
        start += max(int(np.searchsorted(places, tokens, side="right")), 1)
        ends.append(start)
    return np.array(ends, np.int64)


def _halved(bounds: Indices, more: int) -> Indices:
    """``bounds`` with the ``more`` largest batches halved, as far as they have two examples."""
    for _ in range(more):
        sizes = bounds[:, 1] - bounds[:, 0]
        largest = int(sizes.argmax())
        if sizes[largest] < 2:
            return bounds
        start, end = bounds[largest]
        middle = (start + end) // 2
        bounds = np.concatenate([bounds[:largest], [[start, middle], [middle, end]], bounds[largest + 1 :]])
    return bounds
