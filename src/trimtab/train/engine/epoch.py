"""Begin and end an epoch with saved random states, so that a resumed run is bit-identical to an uninterrupted one."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from trimtab.errors import WorkloadError
from trimtab.train.data.loader import Loader
from trimtab.train.data.loader_position import is_seekable, is_stateful
from trimtab.train.data.micro_batches import MicroBatcher, draws_locally, has_set_epoch, has_workers, keeps_workers, set_workers
from trimtab.train.data.peek import first_batches
from trimtab.train.loss.adapter import Batch
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.random_generators import generators_of, generators_within, set_states, states_of
from trimtab.train.runtime.torch_settings import random_state, set_random_state
from trimtab.train.runtime.world import NO_OP

_DRAWS_IN_WORKERS = (
    "No checkpoint holds the random generators of the loader's worker processes: if the dataset draws from them, a resumed run "
    "sees other random augmentations than this one. Use trimtab.train.Loader, or torch's DataLoader without "
    "persistent_workers=True, whose augmentations are the same after a resumption."
)
_DRAWS_IN_PROCESS = (
    "If the loader draws from torch's own generator in the middle of an epoch, as the model does, a resumed run may see other "
    "random augmentations, some examples twice, and others not at all. Give its shuffling a generator to itself, such as "
    "DataLoader(generator=torch.Generator()), or use trimtab.train.Loader, or a loader with state_dict() and load_state_dict()."
)


def begin(context: RunContext, feed: MicroBatcher) -> None:
    """Start the loader. In the middle of an epoch, restore its position and all random states."""
    resumed, continues, batch, loader = context.resuming, context.fit.continues_iterator, context.position.batch, feed.batches
    context.resuming, context.fit.continues_iterator = None, False
    begun: dict[str, Any] = {}
    now: dict[str, Any] = {}
    if resumed is not None:
        begun, now = _state_of_process(context, resumed["epoch_random"]), _state_of_process(context, resumed["random"])
    elif batch and not continues:  # an earlier call of fit ended there
        now = random_of(context, loader)
        begun = context.epoch_random or now
    state = _state_at(context, feed, resumed)
    if now:
        _restore_start(context, loader, begun if batch else now)
        if state is not None:
            feed.load(context.position.epoch, state)
            _set_random_of(context, loader, begun if batch else now)
    if context.checkpoints is not None or (batch and not continues):
        context.note_once(_resume_warning(loader))
    if not (batch and continues):
        context.epoch_random = _random_at_begin(context, loader)
    _set_begun_by(context, loader)
    _start(context, feed, 0 if continues else batch)
    if batch and not continues and all(context.world.gathered(feed.short)) and not isinstance(loader, Iterator):
        context.note(other_length(batch, "fewer batches"))
        context.position.batch = batch = 0
        _set_begun_by(context, loader)
        _set_random_of(context, loader, now)
        context.epoch_random = _random_at_begin(context, loader)
        feed.begin(context.position.epoch)
    feed.taken = batch
    if now and batch:
        _set_random_of(context, loader, now)


def restore_random(context: RunContext, feed: MicroBatcher) -> None:
    """Restore the random states from before the epoch if it made no update, because the resumed run begins it again."""
    if not context.position.batch and context.epoch_random:
        _set_random_of(context, feed.batches, context.epoch_random)


def _random_at_begin(context: RunContext, loader: Any) -> dict[str, Any]:
    """The random states at the start of the epoch; empty if no checkpoint will hold them and no batch depends on them.

    Reading them takes a tenth of a millisecond, most of it for numpy's.
    """
    ordered = is_seekable(loader) or isinstance(loader, (list, tuple))
    return {} if ordered and context.checkpoints is None else random_of(context, loader)


def _start(context: RunContext, feed: MicroBatcher, skip: int) -> None:
    """Start the epoch after its first ``skip`` batches; end it at once if a signal also ended the loader's workers."""
    try:
        feed.begin(context.position.epoch, skip)
    except WorkloadError:
        if not context.ending:
            raise
        restore_random(context, feed)
        feed.interrupted = True
        context.world.stopping(True)


def _set_begun_by(context: RunContext, loader: Any) -> None:
    """Set ``begun_by`` of a loader whose batches depend on the number of processes that began the epoch."""
    if not context.position.batch:
        context.position.begun_by = None
    if isinstance(loader, Loader):
        loader.begun_by = context.position.begun_by


def other_length(batch: int, now: str) -> str:
    """The note for an epoch that stopped after ``batch`` and cannot continue on other data."""
    return f"The run before ended after batch {batch} of an epoch of other data, and this has {now}: the epoch begins again."


@contextlib.contextmanager
def close(context: RunContext, feed: MicroBatcher, *, draws: bool) -> Iterator[None]:
    """A block for the end of an epoch; ``draws`` if a validation in it draws random numbers.

    If the block is interrupted, random states are restored, because the resumed run repeats the block.
    """
    if context.resuming is not None:  # the checkpoint was written at the end of an epoch
        if (state := _state_at(context, feed, context.resuming)) is not None:
            feed.load(context.position.epoch, state)
        _restore_start(context, feed.batches, _state_of_process(context, context.resuming["random"]))
        context.resuming = None
    feed.finish()
    before = random_of(context, feed.batches) if draws else None
    try:
        yield
    finally:
        if before is not None and context.position.due:
            _set_random_of(context, feed.batches, before)


@contextlib.contextmanager
def keep_random(context: RunContext, feed: MicroBatcher) -> Iterator[None]:
    """A block after which all random generators are as before."""
    before = random_of(context, feed.batches)
    try:
        yield
    finally:
        _set_random_of(context, feed.batches, before)


def random_of(context: RunContext, batches: Iterable[Any]) -> dict[str, Any]:
    """The states of all random generators: global ones, and those in the loader ``batches``, the model and the loss."""
    return {**random_state(), "loader": states_of(_generators(context, batches)), "workers": has_workers(batches)}


def _generators(context: RunContext, batches: Iterable[Any]) -> dict[str, Any]:
    model, loss = generators_within("model", context.model), generators_within("loss", context.objective.loss)
    return {**generators_of(batches), **model, **loss}


def position_of_loader(context: RunContext, feed: MicroBatcher) -> dict[str, Any] | None:
    """The position of a loader with ``state_dict()``, and its batch of the epoch; ``None`` for other loaders."""
    batch = context.position.batch
    state = feed.state() if batch in (0, feed.taken) else None
    return None if state is None else {"batch": batch, "state": state}


def _state_at(context: RunContext, feed: MicroBatcher, resumed: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The loader's state from the checkpoint or the last run, if it is the state before the next batch."""
    kept, context.loader_place = context.loader_place, None
    if resumed is not None:
        places, world = resumed.get("loader", ()), context.world
        kept = places[world.index] if len(places) == world.processes else None
    fits = kept is not None and kept["batch"] == context.position.batch and is_stateful(feed.batches)
    return kept["state"] if kept is not None and fits else None


def _resume_warning(loader: Any) -> str | None:
    """Why a resumed run may get other batches from ``loader`` than an uninterrupted run; ``None`` if it cannot."""
    if is_seekable(loader):
        return None
    if (keeps_workers(loader) and not has_set_epoch(loader)) or (is_stateful(loader) and getattr(loader, "num_workers", 0) > 0):
        return _DRAWS_IN_WORKERS
    return _DRAWS_IN_PROCESS if draws_locally(loader) and not is_stateful(loader) else None


def _set_random_of(context: RunContext, batches: Iterable[Any], state: Mapping[str, Any]) -> None:
    """Restore the states that :func:`random_of` returned."""
    set_random_state(state)
    set_states(_generators(context, batches), state["loader"])


def _restore_start(context: RunContext, batches: Iterable[Any], state: Mapping[str, Any]) -> None:
    """Restore the random states that an epoch began with."""
    set_workers(batches, running=state["workers"])  # first, because starting workers draws a random number
    _set_random_of(context, batches, state)


def _state_of_process(context: RunContext, states: list[dict[str, Any]]) -> dict[str, Any]:
    """This process's state, from one state per process. If the number of processes changed, states are reused by rank."""
    world = context.world
    if len(states) == world.processes:
        return states[world.index]
    own = states[world.rank % len(states)]
    return own if world.rank < len(states) else _reseeded(own, world.rank)


def _reseeded(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """``state`` with torch's generators seeded anew for ``rank``, because another process continues with that state."""
    seed = hashlib.sha256(state["torch"].numpy().tobytes() + rank.to_bytes(8, "big")).digest()
    own = int.from_bytes(seed[:7], "big")
    gpus = [torch.Generator(f"cuda:{place}") for place in range(len(state["cuda"]) and torch.cuda.device_count())]
    host, *others = (generator.manual_seed(own).get_state() for generator in (torch.Generator(), *gpus))
    return {**state, "torch": host, "cuda": others}


def rounds(context: RunContext, feed: MicroBatcher, saving: contextlib.AbstractContextManager[None]) -> Iterator[list[Batch]]:
    """The batches of each update that is left in the epoch, until no process has any.

    A process that trains alone reads them in ``saving``, because the loader may fail. With several processes nothing can be
    saved then: the others may be in the middle of an update.
    """
    updates = context.world.rounds(_until_interrupted(context, feed), feed.length(), functools.partial(_repeated_group, feed))
    alone = context.world.processes == 1
    while True:
        with saving if alone else NO_OP:
            batches = next(updates, None)
        if batches is None:
            return
        yield batches


def _until_interrupted(context: RunContext, feed: MicroBatcher) -> Iterator[list[Batch]]:
    """The updates that are left of the epoch, up to a signal that also ends the loader's workers.

    Ctrl-C in a terminal goes to the whole process group, and so does the signal with which torchrun ends its processes.
    """
    taken = feed.taken
    try:
        for group in feed.groups():
            taken = feed.taken
            yield group
    except WorkloadError:
        if not context.ending:  # the error of a worker that was killed differs from case to case
            raise
        feed.interrupted, feed.taken = True, taken
        context.world.stopping(True)  # the other processes learn of it in this update


def _repeated_group(feed: MicroBatcher) -> list[Batch] | None:
    """The first batches again, for a process that has none left while others have; ``None`` for an iterator."""
    if isinstance(feed.batches, Iterator):
        return None
    batches, _ = first_batches(feed.batches, 1)
    return feed.split_group([feed.move(batch) for batch in batches]) or None
