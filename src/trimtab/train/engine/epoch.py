"""Where an epoch begins and what comes at its end draw the random numbers that they draw in a run without an interruption."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from trimtab.errors import WorkloadError
from trimtab.train.data.loader import Loader
from trimtab.train.data.loader_position import Seekable, is_stateful
from trimtab.train.data.micro_batches import MicroBatcher, draws_here, has_workers, hears_epochs, keeps_workers, set_workers
from trimtab.train.data.peek import first_batches
from trimtab.train.loss.adapter import Batch
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.random_generators import generators_of, generators_within, set_states, states_of
from trimtab.train.runtime.torch_settings import random_state, set_random_state
from trimtab.train.runtime.world import NOTHING

_WORKERS = (
    "No checkpoint holds the random generators of the loader's worker processes: if the dataset draws from them, a resumed run "
    "sees other random augmentations than this one. Use trimtab.train.Loader, or torch's DataLoader without "
    "persistent_workers=True, whose augmentations are the same after a resumption."
)
_HERE = (
    "If the loader draws from torch's own generator in the middle of an epoch, as the model does, a resumed run may see other "
    "random augmentations, some examples twice, and others not at all. Give its shuffling a generator to itself, such as "
    "DataLoader(generator=torch.Generator()), or use trimtab.train.Loader, or a loader with state_dict() and load_state_dict()."
)


def begin(context: RunContext, feed: MicroBatcher) -> None:
    """Start the loader; in mid-epoch where it stood, with the same random numbers to come."""
    resumed, goes_on, batch, loader = context.resuming, context.fit.goes_on, context.position.batch, feed.batches
    context.resuming, context.fit.goes_on = None, False
    begun: dict[str, Any] = {}
    now: dict[str, Any] = {}
    if resumed is not None:
        begun, now = _own(context, resumed["epoch_random"]), _own(context, resumed["random"])
    elif batch and not goes_on:  # an earlier run ended there
        begun, now = context.epoch_random, random_of(context, loader)
    state = _state_at(context, feed, resumed)
    if now:
        _begin_as(context, loader, begun if batch else now)
        if state is not None:
            feed.load(context.position.epoch, state)
            _set_random_of(context, loader, begun if batch else now)
    if context.checkpoints is not None or (batch and not goes_on):
        context.note_once(_doubt(loader))
    if not (batch and goes_on):
        context.epoch_random = random_of(context, loader)
    _tell_who_began(context, loader)
    _start(context, feed, 0 if goes_on else batch)
    if batch and not goes_on and all(context.world.gathered(feed.short)) and not isinstance(loader, Iterator):
        context.note(other_length(batch, "fewer batches"))
        context.position.batch = batch = 0
        _tell_who_began(context, loader)
        _set_random_of(context, loader, now)
        context.epoch_random = random_of(context, loader)
        feed.begin(context.position.epoch)
    feed.taken = batch
    if now and batch:
        _set_random_of(context, loader, now)


def take_back(context: RunContext, feed: MicroBatcher) -> None:
    """Where no update of the epoch was made, the run that goes on begins it, and draws what this one drew for that."""
    if not context.position.batch:
        _set_random_of(context, feed.batches, context.epoch_random)


def _start(context: RunContext, feed: MicroBatcher, skip: int) -> None:
    """Start the epoch after its first ``skip`` batches, unless a signal has ended the loader's workers too."""
    try:
        feed.begin(context.position.epoch, skip)
    except WorkloadError:
        if not context.ending:
            raise
        take_back(context, feed)
        feed.cut = True
        context.world.stopping(True)


def _tell_who_began(context: RunContext, loader: Any) -> None:
    """Have a loader whose batches depend on the number of processes make those with which the epoch was begun."""
    if not context.position.batch:
        context.position.begun_by = None
    if isinstance(loader, Loader):
        loader.begun_by = context.position.begun_by


def other_length(batch: int, now: str) -> str:
    """What is told where data is not what an epoch was begun with that stood after ``batch``."""
    return f"The run before ended after batch {batch} of an epoch of other data, and this has {now}: the epoch begins again."


@contextlib.contextmanager
def close(context: RunContext, feed: MicroBatcher) -> Iterator[None]:
    """A block for what comes at the end of an epoch; where it is cut off, it draws the same again in the run that goes on."""
    if context.resuming is not None:  # that run
        if (state := _state_at(context, feed, context.resuming)) is not None:
            feed.load(context.position.epoch, state)
        _begin_as(context, feed.batches, _own(context, context.resuming["random"]))
        context.resuming = None
    feed.finish()
    before = random_of(context, feed.batches)
    try:
        yield
    finally:
        if context.position.due:
            _set_random_of(context, feed.batches, before)


def random_of(context: RunContext, batches: Iterable[Any]) -> dict[str, Any]:
    """Every generator that the rest of the run may draw from, those that the loader ``batches``, model and loss have too."""
    return {**random_state(), "loader": states_of(_generators(context, batches)), "workers": has_workers(batches)}


def _generators(context: RunContext, batches: Iterable[Any]) -> dict[str, Any]:
    model, loss = generators_within("model", context.model), generators_within("loss", context.objective.loss)
    return {**generators_of(batches), **model, **loss}


def place_of(context: RunContext, feed: MicroBatcher) -> dict[str, Any] | None:
    """The position of a loader that can tell it, and the batch of the epoch that it belongs to."""
    batch = context.position.batch
    state = feed.state() if batch in (0, feed.taken) else None
    return None if state is None else {"batch": batch, "state": state}


def _state_at(context: RunContext, feed: MicroBatcher, resumed: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The state of the loader to begin with, from a checkpoint or the run before, if it belongs to the batch that is next."""
    kept, context.loader_place = context.loader_place, None
    if resumed is not None:
        places, world = resumed.get("loader", ()), context.world
        kept = places[world.index] if len(places) == world.processes else None
    fits = kept is not None and kept["batch"] == context.position.batch and is_stateful(feed.batches)
    return kept["state"] if kept is not None and fits else None


def _doubt(loader: Any) -> str | None:
    """Why a resumed run may see something else of ``loader`` than a run without the interruption."""
    if isinstance(loader, Seekable):
        return None
    if (keeps_workers(loader) and not hears_epochs(loader)) or (is_stateful(loader) and getattr(loader, "num_workers", 0) > 0):
        return _WORKERS
    return _HERE if draws_here(loader) and not is_stateful(loader) else None


def _set_random_of(context: RunContext, batches: Iterable[Any], state: Mapping[str, Any]) -> None:
    """Put back what :func:`random_of` gave."""
    set_random_state(state)
    set_states(_generators(context, batches), state["loader"])


def _begin_as(context: RunContext, batches: Iterable[Any], state: Mapping[str, Any]) -> None:
    """Have the epoch that begins draw what the one drew that began with ``state``."""
    set_workers(batches, running=state["workers"])  # first, because to start them draws too
    _set_random_of(context, batches, state)


def _own(context: RunContext, states: list[dict[str, Any]]) -> dict[str, Any]:
    """This process's state of what every process has one of; another number of processes makes do with those there are."""
    world = context.world
    if len(states) == world.processes:
        return states[world.index]
    own = states[world.rank % len(states)]
    return own if world.rank < len(states) else _other(own, world.rank)


def _other(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """``state``, with torch's generators where no process was before: another one has taken up theirs."""
    seed = hashlib.sha256(state["torch"].numpy().tobytes() + rank.to_bytes(8, "big")).digest()
    own = int.from_bytes(seed[:7], "big")
    gpus = [torch.Generator(f"cuda:{place}") for place in range(len(state["cuda"]) and torch.cuda.device_count())]
    host, *others = (generator.manual_seed(own).get_state() for generator in (torch.Generator(), *gpus))
    return {**state, "torch": host, "cuda": others}


def rounds(context: RunContext, feed: MicroBatcher, saving: contextlib.AbstractContextManager[None]) -> Iterator[list[Batch]]:
    """The batches of each update that is left of the epoch, for as long as any process has some left.

    A process that trains alone reads them in ``saving``, because the loader may fail. Of several processes the others may be in
    an update by then, which does not come to its end: there nothing can be saved.
    """
    updates = context.world.rounds(_until_cut(context, feed), feed.length(), functools.partial(_again, feed))
    alone = context.world.processes == 1
    while True:
        with saving if alone else NOTHING:
            batches = next(updates, None)
        if batches is None:
            return
        yield batches


def _until_cut(context: RunContext, feed: MicroBatcher) -> Iterator[list[Batch]]:
    """What is left of the epoch, or of it before a signal has ended the loader's workers too.

    Ctrl-C in a terminal goes to a whole group of processes, and so does what torchrun sends to end its own.
    """
    taken = feed.taken
    try:
        for group in feed.groups():
            taken = feed.taken
            yield group
    except WorkloadError:
        if not context.ending:  # what its end looks like depends on what the worker was doing
            raise
        feed.cut, feed.taken = True, taken
        context.world.stopping(True)  # so that the others hear of it in this very update


def _again(feed: MicroBatcher) -> list[Batch] | None:
    """A group of the data, for a process that has used up its share; what has only once been there is gone."""
    if isinstance(feed.batches, Iterator):
        return None
    batches, _ = first_batches(feed.batches, 1)
    return feed.apart([feed.move(batch) for batch in batches]) or None
