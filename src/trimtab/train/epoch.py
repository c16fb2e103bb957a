"""Where an epoch begins and what comes at its end draw the random numbers that they draw in a run without an interruption."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trimtab.train.draws import datasets_of, draws_in_workers, generators_of, set_states, states_of
from trimtab.train.feed import Feed, has_workers, keeps_workers, set_workers
from trimtab.train.runtime import random_state, set_random_state

if TYPE_CHECKING:
    from trimtab.train.trainer import Trainer


_WORKERS = (
    "The loader's workers stay, and what they draw goes on from epoch to epoch, where no checkpoint can reach it. So they are "
    "started anew for each epoch. trimtab.train.Loader keeps its workers."
)
_UNTOLD = (
    "The dataset has a set_epoch(), of which workers that stay would not hear: each has a copy of the dataset. So they are "
    "started anew for each epoch."
)
_DREW = (
    "The loader draws from torch's random numbers in the middle of an epoch, as the model does, so going through it again may "
    "give other batches than before: some examples may come twice, and others not at all. Give its shuffling a generator of "
    "its own, such as DataLoader(generator=torch.Generator()), or use trimtab.train.Loader."
)


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
    if _renewed(trainer, feed):
        feed.renew()
    if not (batch and goes_on):
        trainer.epoch_random = random_of(loader)
    feed.begin(trainer.position.epoch, 0 if goes_on else batch)
    if batch and not goes_on and all(trainer.world.gathered(feed.short)) and not isinstance(loader, Iterator):
        trainer.note(other_length(batch, "fewer batches"))
        trainer.position.batch = batch = 0
        _set_random_of(loader, now)
        trainer.epoch_random = random_of(loader)
        feed.begin(trainer.position.epoch)
    feed.taken, feed.drew = batch, bool(batch) and trainer.position.drew
    if feed.drew and not goes_on:
        trainer.note(_DREW)
    if now and batch:
        _set_random_of(loader, now)


def other_length(batch: int, now: str) -> str:
    """What is told where data is not what an epoch was begun with that stood after ``batch``."""
    return f"The run before ended after batch {batch} of an epoch of other data, and this has {now}: the epoch begins again."


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
    return {**random_state(), "loader": states_of(generators_of(batches)), "workers": has_workers(batches)}


def _renewed(trainer: Trainer, feed: Feed) -> bool:
    """Whether workers that stay are started anew for this epoch: another run must draw the same, and they know no epoch."""
    if feed.renewed is None:
        why = _why_renewed(trainer, feed.batches) if keeps_workers(feed.batches) else None
        if why is not None and why not in trainer.notes:
            trainer.note(why)
        feed.renewed = why is not None
    return feed.renewed


def _why_renewed(trainer: Trainer, loader: Any) -> str | None:
    if any(hasattr(dataset, "set_epoch") for dataset in datasets_of(loader)):
        return _UNTOLD
    return _WORKERS if trainer.checkpoints is not None and draws_in_workers(loader) else None


def _set_random_of(batches: Iterable[Any], state: Mapping[str, Any]) -> None:
    """Put back what :func:`random_of` gave."""
    set_random_state(state)
    set_states(generators_of(batches), state["loader"])


def _begin_as(batches: Iterable[Any], state: Mapping[str, Any]) -> None:
    """Have the epoch that begins draw what the one drew that began with ``state``."""
    set_workers(batches, running=state["workers"])  # first, because to start them draws too
    _set_random_of(batches, state)


def _own(trainer: Trainer, states: list[dict[str, Any]]) -> dict[str, Any]:
    """This process's state of what every process has one of; another number of processes makes do with those there are."""
    world = trainer.world
    return states[world.index if len(states) == world.processes else world.rank % len(states)]
