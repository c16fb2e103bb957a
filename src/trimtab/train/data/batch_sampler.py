"""Which examples make up which batch: a pure function of the seed, the epoch, the rank and the number of ranks.

Nothing here reads data or keeps a state, so that an epoch can be taken up at any batch without what was before it.
Imports no torch.
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
"""The examples of one batch; a slice where they lie beside each other."""

CLASS_WIDTH = 0.125
"""Lengths that differ by less than this share count as equal, so that bucketed batches are mixed anew in each epoch.

What it costs is padding of at most that share, half of it on average. With classes, and not with noise upon the lengths, every
epoch has the same number of batches of the same sizes, which schedules rely on.
"""


@dataclasses.dataclass(frozen=True)
class Order:
    """Where the batches of an epoch begin and end, for every rank.

    All ranks have the same number of batches. Examples are repeated only where fewer are left than there are ranks, and then
    fewer than there are ranks.
    """

    count: int
    """Examples."""
    bounds: Indices
    """``(steps, ranks, 2)``: first and last place (exclusive) of each batch in the order of the epoch."""
    classes: Indices | None = None
    """The class of each example's length, by which the order of the epoch is sorted."""
    shuffle: bool = True
    seed: int = 0

    def __len__(self) -> int:
        """Batches per rank."""
        return len(self.bounds)

    def epoch(self, epoch: int, rank: int, ranks: int | None = None) -> Epoch:
        """The batches of one epoch for one rank, of ``ranks`` if those that this is the order of have begun it for others."""
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
        """Of all ranks together."""
        return int(self.bounds.shape[0] * self.bounds.shape[1])

    @property
    def used(self) -> int:
        """The examples that one epoch goes through; the others differ from epoch to epoch if shuffled."""
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
        if end > self.total:  # where the last ranks would have had nothing, they have the first examples again
            places = np.arange(start, end) % self.total
            return places if self.order is None else self.order[places]
        return slice(start, end) if self.order is None else self.order[start:end]


def fixed(count: int, batch: int, ranks: int, *, drop_last: bool) -> Indices:
    """The bounds of batches of ``batch`` examples each; what is left in the end is divided among the ranks."""
    starts = np.arange(ranks) * batch
    whole = np.arange(count // (batch * ranks))[:, None] * (batch * ranks) + starts
    bounds = np.stack([whole, whole + batch], axis=-1)
    left = 0 if drop_last else count - bounds.size // 2 * batch
    if not left:
        return bounds
    ends = count - left + np.cumsum(_shares(left, ranks))
    return np.concatenate([bounds, np.stack([ends - _shares(left, ranks), ends], axis=-1)[None]])


def within_budget(classes: Indices, batch: int | None, tokens: int, ranks: int) -> Indices:
    """The bounds of batches of similar lengths, in the order of ``classes``: at most ``tokens`` tokens when padded.

    The batches that the ranks have at the same time are neighbours in length, so that none waits long for the others. Where the
    number of batches is no multiple of the ranks, the largest are cut in two.
    """
    ends = _fill(np.sort(classes), len(classes) if batch is None else batch, tokens)
    bounds = _halved(np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=-1), -len(ends) % ranks)
    return np.resize(bounds, (-(-len(bounds) // ranks), ranks, 2))


def length_classes(lengths: Indices, most: int | None = None) -> Indices:
    """For each length, an upper bound that it shares with those that are less than :data:`CLASS_WIDTH` shorter."""
    steps = np.floor(np.log(np.maximum(lengths, 1)) / math.log1p(CLASS_WIDTH)).astype(np.int64)
    bounds = np.zeros(int(steps.max(initial=0)) + 1, np.int64)
    np.maximum.at(bounds, steps, lengths)
    found: Indices = bounds[steps]
    return found if most is None else np.minimum(found, most)


def check_lengths(lengths: Any, count: int, tokens: int | None) -> Indices:
    """The lengths as an array.

    Raises:
        UsageError: they are not one whole number above zero for each example, or one is above the budget.
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
    """How many of ``count`` examples each rank gets; at least one, even if it has to be repeated."""
    return np.maximum((count + np.arange(ranks)[::-1]) // ranks, 1)


def _fill(lengths: Indices, batch: int, tokens: int) -> Indices:
    """Where batches end in ``lengths``, which are sorted, if each takes as many as fit."""
    ends, start, count = [], 0, len(lengths)
    while start < count:
        guess = min(batch, max(tokens // max(int(lengths[start]), 1), 1), count - start)
        places = lengths[start : start + guess] * np.arange(1, guess + 1)
        start += max(int(np.searchsorted(places, tokens, side="right")), 1)
        ends.append(start)
    return np.array(ends, np.int64)


def _halved(bounds: Indices, more: int) -> Indices:
    """``bounds`` with the ``more`` batches of most examples cut in two, as far as they have more than one."""
    for _ in range(more):
        sizes = bounds[:, 1] - bounds[:, 0]
        largest = int(sizes.argmax())
        if sizes[largest] < 2:
            return bounds
        start, end = bounds[largest]
        middle = (start + end) // 2
        bounds = np.concatenate([bounds[:largest], [[start, middle], [middle, end]], bounds[largest + 1 :]])
    return bounds
