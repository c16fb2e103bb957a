"""Where an epoch begins and what comes at its end draw the random numbers that they draw in a run without an interruption."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trimtab.train.feed import Feed, has_workers, set_workers
from trimtab.train.peek import generators_of
from trimtab.train.runtime import random_state, set_random_state

if TYPE_CHECKING:
    from trimtab.train.trainer import Trainer


def begin(trainer: Trainer, feed: Feed) -> None:
    """Start the loader; in mid-epoch where it stood, with the same random numbers to come."""
    resumed, goes_on, batch, loader = trainer.resuming, trainer.goes_on, trainer.position.batch, feed.batches
    trainer.resuming, trainer.goes_on = None, False
    begun: dict[str, Any] = {}
    now: dict[str, Any] = {}
    if resumed is not None:
        begun, now = _own(trainer, resumed["epoch_random"]), _own(trainer, resumed["random"])
    elif batch and not goes_on:  # an earlier run ended there
        begun, now = trainer.epoch_random, random_of(loader)
    if now:
        _begin_as(loader, begun if batch else now)
    if not (batch and goes_on):
        trainer.epoch_random = random_of(loader)
    feed.begin(trainer.position.epoch, 0 if goes_on else batch)
    feed.taken = batch
    if now and batch:
        _set_random_of(loader, now)


@contextlib.contextmanager
def close(trainer: Trainer, feed: Feed) -> Iterator[None]:
    """A block for what comes at the end of an epoch; where it is cut off, it draws the same again in the run that goes on."""
    if trainer.resuming is not None:  # that run
        _begin_as(feed.batches, _own(trainer, trainer.resuming["random"]))
        trainer.resuming = None
    before = random_of(feed.batches)
    try:
        yield
    finally:
        if trainer.position.due:
            _set_random_of(feed.batches, before)


def random_of(batches: Iterable[Any]) -> dict[str, Any]:
    """Every generator that the rest of the run may draw from, those that the loader ``batches`` has for itself too."""
    own = [generator.get_state() for generator in generators_of(batches)]
    return {**random_state(), "loader": own, "workers": has_workers(batches)}


def _set_random_of(batches: Iterable[Any], state: Mapping[str, Any]) -> None:
    """Put back what :func:`random_of` gave."""
    set_random_state(state)
    for generator, kept in zip(generators_of(batches), state.get("loader", ()), strict=False):
        generator.set_state(kept)


def _begin_as(batches: Iterable[Any], state: Mapping[str, Any]) -> None:
    """Have the epoch that begins draw what the one drew that began with ``state``."""
    set_workers(batches, running=state["workers"])  # first, because to start them draws too
    _set_random_of(batches, state)


def _own(trainer: Trainer, states: list[dict[str, Any]]) -> dict[str, Any]:
    """This process's state of what every process has one of; another number of processes makes do with those there are."""
    return states[trainer.world.rank % len(states)]
