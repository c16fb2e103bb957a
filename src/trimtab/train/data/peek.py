"""Read the first batches of a loader without consuming them."""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Iterable, Iterator

import torch

from trimtab._internal.user_code import user_code
from trimtab.train.data.loader_position import is_seekable, load_state, state_of
from trimtab.train.data.micro_batches import set_workers
from trimtab.train.loss.adapter import Batch
from trimtab.train.runtime.random_generators import generators_of, set_states, states_of
from trimtab.train.runtime.torch_settings import random_state, set_random_state

PATIENCE_S = 2.0
"""Seconds after which no further batch is read."""


def first_batches(loader: Iterable[Batch], count: int, what: str = "The loader raised") -> tuple[list[Batch], Iterable[Batch]]:
    """Up to ``count`` first batches of ``loader``, fewer if it is slow, and a loader that still has them all.

    Random generators, global ones and those of the loader and its samplers, are restored, and so is the position of a stateful
    loader. An iterator gets its batches chained in front.

    Raises:
        WorkloadError: reading them failed; the message begins with ``what``.
    """
    with peeking(loader, what) as peeked:
        batches = _read(iter(peeked), count)
    return batches, itertools.chain(batches, loader) if isinstance(loader, Iterator) else loader


@contextlib.contextmanager
def peeking(loader: Iterable[Batch], what: str = "The loader raised") -> Iterator[Iterable[Batch]]:
    """A loader for a block, from the first batch on; random generators and position are restored afterwards.

    Raises:
        WorkloadError: reading them failed; the message begins with ``what``.
    """
    generators = generators_of(loader)
    before = states_of(generators)
    with preserved_random_state():
        state = state_of(loader)
        peeked = copy.copy(loader) if isinstance(loader, torch.utils.data.DataLoader) and state is None else loader
        if peeked is not loader:
            set_workers(peeked, running=False)  # the copy starts its own: the generators of running workers must not advance
        try:
            with user_code(what):
                if is_seekable(loader):
                    loader.seek(0, 0)
                yield peeked
        finally:
            if state is not None:
                load_state(loader, state)
            set_states(generators, before)


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore the global random generators after a block."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


def _read(batches: Iterator[Batch], count: int) -> list[Batch]:
    begun, found = time.monotonic(), []
    for batch in itertools.islice(batches, count):
        found.append(batch)
        if time.monotonic() - begun > PATIENCE_S:
            break
    return found
