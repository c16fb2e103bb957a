"""Looking at the first batches of a loader without using them up."""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from trimtab.train.feed import Seekable
from trimtab.train.objective import Batch
from trimtab.train.runtime import random_state, set_random_state

PATIENCE_S = 2.0
"""After so many seconds no further batch is waited for."""


def first_batches(loader: Iterable[Batch], count: int) -> tuple[list[Batch], Iterable[Batch]]:
    """Up to ``count`` batches from the beginning of ``loader``, fewer where it is slow, and a loader that still has them all.

    Generators of random numbers, torch's own and those of the loader and its samplers, are put back, so that the run draws what
    it would have drawn. What can be gone through only once gets its batches put back in front.
    """
    if isinstance(loader, Iterator):
        with kept_random():
            batches = _some(loader, count)
        return batches, itertools.chain(batches, loader)
    if isinstance(loader, torch.utils.data.DataLoader):
        peeked: Iterable[Batch] = copy.copy(loader)  # with workers of its own: random numbers of those that stay go on
        with kept_random(), _kept_generators(loader):
            return _some(iter(peeked), count), loader
    with kept_random(), _kept_generators(loader):
        if isinstance(loader, Seekable):
            loader.seek(0, 0)
        return _some(iter(loader), count), loader


@contextlib.contextmanager
def kept_random() -> Iterator[None]:
    """A block whose random numbers leave no trace."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators of ``loader``, its sampler and its batch sampler, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = {id(g): g for holder in holders if isinstance(g := getattr(holder, "generator", None), torch.Generator)}
    return list(found.values())


@contextlib.contextmanager
def _kept_generators(loader: Any) -> Iterator[None]:
    """A block after which the generators of ``loader``, its sampler and its batch sampler stand where they stood."""
    found = generators_of(loader)
    before = [generator.get_state() for generator in found]
    try:
        yield
    finally:
        for generator, state in zip(found, before, strict=True):
            generator.set_state(state)


def _some(batches: Iterator[Batch], count: int) -> list[Batch]:
    begun, found = time.monotonic(), []
    for batch in itertools.islice(batches, count):
        found.append(batch)
        if time.monotonic() - begun > PATIENCE_S:
            break
    return found
