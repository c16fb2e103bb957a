"""A workload's training, tried under other settings: from the same parameters, on the same batches, in this process."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import itertools
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from trimtab.candidate import Candidate, Settings
from trimtab.errors import CompileError, UsageError, WorkloadError
from trimtab.measure.timer import BLOCK_S, pace, synchronizer
from trimtab.recipe import Recipe
from trimtab.train.adjust import workers_of
from trimtab.train.auto import OFF
from trimtab.train.clock import Clock, HostClock
from trimtab.train.double import candidate, rounded
from trimtab.train.events import Event, Progressed
from trimtab.train.feed import Seekable
from trimtab.train.losses import Written
from trimtab.train.objective import Batch, examples, tensors
from trimtab.train.schedule import ENDLESS
from trimtab.train.trainer import Trainer
from trimtab.train.world import World
from trimtab.workload import Training, Workload, user_code

SHAKEN = (11, 12)
"""Seeds of the runs whose parameters are shaken."""
SHAKE = 1e-6
"""How much, relative to each value: some units in the last place of a float32."""
REPEATS = 0.01
"""Relative difference between the first losses of two runs from the same seed that no rounding explains."""
EPOCHS_APART = 1000
"""Between the batches of one seed and those of the next, for a loader whose order is that of the epoch."""
WAITED = 0.1
"""Share of an update that waiting for data takes where its batches were not there yet."""
PATIENT = 4
"""How many times as many batches as are read ahead no update has waited for, where the loader is taken to be fast enough."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSubject:
    """A training workload made ready to be tried."""

    workload: Workload
    training: Training
    settings: Settings
    """As written; what was ``"auto"`` is off, because whether it pays is what is to be found out."""
    batches: Sequence[Batch]
    """Of the first updates, in the order of the workload's seed."""
    updates: int
    """How many these are."""
    candidate: Candidate
    """What passes look at: the loss of the first batch as a model of its tensors, with the settings as written."""
    notes: tuple[str, ...]

    @property
    def examples(self) -> float:
        """Examples per update, on average."""
        return sum(map(examples, self.batches)) / self.updates

    def trainer(self, settings: Settings, seed: int, **more: Any) -> Trainer:
        """A new run from the parameters of ``seed``."""
        return _trainer(self.workload, self.training, settings, seed, **more)

    def settings_of(self, recipe: Recipe) -> Settings:
        """The settings that the passes of ``recipe`` make of those as written.

        Raises:
            CompileError: a pass cannot be used on what the ones before it made.
        """
        now = self.candidate
        for step in recipe.passes:
            if reason := step.blocked(now):
                raise CompileError(reason)
            now = step.apply(now)
        return now.settings

    def losses(self, settings: Settings, *, seed: int, shake: int | None = None) -> list[float]:
        """The loss of each of the first updates under ``settings``; ``shake`` is the seed of a shake of the parameters.

        Raises:
            WorkloadError: the model or the loss failed, or is not finite.
        """
        found: list[float] = []

        def collect(trainer: Trainer, event: Event) -> None:
            if isinstance(event, Progressed):
                found.append(event.loss)

        trainer = self.trainer(settings, seed, callbacks=[collect], log_every=1)
        if shake is not None:
            shaken(trainer.model, shake)
        seeded(seed)
        with user_code("The training failed"):
            trainer.fit(self.batches, steps=self.updates)
        return found

    def rounded(self, settings: Settings, limit: float) -> str | None:
        """Why outputs in the precision of ``settings`` cannot come close to the targets of the first batch, in a sentence."""
        trainer = self.trainer(settings, self.workload.seed)
        with user_code("The training failed"):
            return rounded(trainer.model, trainer.objective, settings, self.batches[0], limit)

    def written(self, *, seed: int) -> Written:
        """The losses as written, and how far rounding alone would move them.

        Raises:
            WorkloadError: a run differs from another by more, from the very first update on.
        """
        losses = self.losses(self.settings, seed=seed)
        others = [self.losses(self.settings, seed=seed, shake=s) for s in SHAKEN]
        for other in others:
            if abs(other[0] - losses[0]) > REPEATS * abs(losses[0]):
                raise WorkloadError(
                    f"Two runs from the same seed begin with different losses, {losses[0]:.6g} and {other[0]:.6g}, so nothing "
                    "can be said of other settings. Something is kept from run to run, or has a generator of its own: make "
                    "the model, the loss and the data anew in the functions that give them."
                )
        return Written.of(losses, others)


def prepared(workload: Workload, updates: int, *, seed: int | None = None) -> TrainingSubject:
    """Build the model and the loader, and take the batches of the first ``updates`` in the order of ``seed``.

    Raises:
        UsageError: the workload does not say how it is trained.
        WorkloadError: the user's own code raised, or the loader gives nothing.
    """
    training = workload.training
    if training is None:
        raise UsageError(
            f"The workload {workload.name!r} does not say how it is trained. Give it training=trimtab.Training(data=..., "
            "optimizer=..., loss=...)."
        )
    settings, notes = decided(training.settings)
    seeded(workload.seed if seed is None else seed)
    with user_code("The workload's data could not be loaded", "Go through the loader yourself once."):
        apart = 0 if seed is None else EPOCHS_APART * abs(seed - workload.seed)
        batches = first(loader(training), updates * settings.accumulate, epoch=apart)
    with user_code("The workload's model, loss or optimizer failed", "Make an update with them yourself."):
        known = candidate(_trainer(workload, training, settings, workload.seed), settings, batches[0])
    return TrainingSubject(
        workload=workload,
        training=training,
        settings=settings,
        batches=batches,
        updates=updates,
        candidate=dataclasses.replace(known, settings=settings),
        notes=(*workload.notes, *notes),
    )


class _Timed(World):
    """One process, that remembers the clock of its run."""

    clock: Clock = HostClock()

    def timed(self, clock: Clock) -> None:
        """Take note of it."""
        self.clock = clock


class Updates:
    """A runner whose call is one update, with all that belongs to it: waiting for data, the schedule, the meter.

    A block gives the mean of its updates for each of them: where a loader with workers is the bottleneck batches come in
    bursts, and the median of single updates would tell of a speed that no epoch has. A block then has whole bursts, and begins
    when nothing is left of what the workers have read ahead while the other side had its turn: in an epoch nobody waits for
    them.
    """

    def __init__(self, subject: TrainingSubject, settings: Settings, *, seed: int) -> None:
        self.pid = os.getpid()
        self._wait: Callable[[], None] = synchronizer(settings.device) or _nothing
        self._world = _Timed()
        trainer = subject.trainer(settings, seed, world=self._world)
        seeded(seed)
        begun = time.perf_counter()
        batches = loader(subject.training)
        self._workers = -(-(workers_of(batches) or 0) // settings.accumulate)
        """Updates that a burst of batches is enough for: one batch from each worker."""
        self._ahead = self._workers * _prefetched(batches)
        """Updates for which batches may be ready when a block begins; 0 where that is nothing unusual."""
        self._updates = trainer.updates(batches, steps=ENDLESS)
        next(self._updates)
        self._wait()
        self.first_s = time.perf_counter() - begun
        """What the first update took, with everything that had to be set up or compiled for it."""
        self.notes = tuple(trainer.notes)

    def block(self, calls: int) -> list[int]:
        """Nanoseconds per update, over ``calls`` of them."""
        with _uncollected():
            if self._ahead:
                self._drain()
            made = -(-calls // self._workers) * self._workers if self._ahead else calls
            begun = time.perf_counter_ns()
            for _ in range(made):
                next(self._updates)
            self._wait()
            return [(time.perf_counter_ns() - begun) // made] * calls

    def _drain(self) -> None:
        """Make updates until one has to wait for data. Where none has to, the loader is no bottleneck, and is not asked again.

        What takes no time is not believed at once: for tiny updates it is a wait to be handed a batch that is there.
        """
        clock, begun = self._world.clock, time.perf_counter()
        for made in range(1, PATIENT * self._ahead + 1):
            clock.take()
            next(self._updates)
            spent = clock.take()
            waited = spent["data"] > WAITED * sum(spent.values())
            if waited and (made >= self._ahead or time.perf_counter() - begun > BLOCK_S):
                return
        self._ahead = 0

    def pace(self) -> int:
        """How fast the core is now."""
        return pace()


def decided(settings: Settings) -> tuple[Settings, list[str]]:
    """``settings`` with everything off that would decide itself, and a sentence if there was any."""
    off = {**OFF, "batch": None}
    auto = {name: value for name, value in off.items() if getattr(settings, name) == "auto"}
    if settings.adjust:
        auto["adjust"] = False
    if not auto:
        return settings, []
    names = ", ".join(sorted(auto))
    return dataclasses.replace(settings, **auto), [f"What would decide itself is off in the settings as written: {names}."]


def loader(training: Training) -> Iterable[Batch]:
    """The loader; made anew if there is a function for it."""
    made: Iterable[Batch] = training.data() if callable(training.data) else training.data
    return made


def _prefetched(batches: Iterable[Batch]) -> int:
    """Batches that each worker of a loader reads ahead."""
    return getattr(batches, "prefetch_factor", None) or getattr(batches, "prefetch", None) or 2


def first(batches: Iterable[Batch], count: int, *, epoch: int = 0) -> list[Batch]:
    """The first ``count`` batches from the beginning of ``epoch`` on, over as many epochs as that takes.

    A loader whose order depends on the epoch alone is told it; the order of any other comes from the random generators.

    Raises:
        WorkloadError: an epoch has none.
    """
    found: list[Batch] = []
    while len(found) < count:
        if isinstance(batches, Seekable):
            batches.seek(epoch, 0)
            epoch += 1
        some = list(itertools.islice(iter(batches), count - len(found)))
        if not some:
            raise WorkloadError(
                f"The loader gave {len(found)} batches and then no more, but {count} are needed. Give one that can be gone "
                "through again and again, or a function that makes it."
            )
        found += some
    if not any(tensors(batch) for batch in found):
        raise WorkloadError(
            f"The loader's batches hold no tensor: the first is a {type(found[0]).__name__}. Let them hold tensors."
        )
    return found


def _trainer(workload: Workload, training: Training, settings: Settings, seed: int, **more: Any) -> Trainer:
    seeded(seed)
    return Trainer(
        built(workload),
        loss=copy.deepcopy(training.loss) if isinstance(training.loss, nn.Module) else training.loss,  # it may learn, too
        optimizer=training.optimizer,
        schedule=training.schedule,
        settings=settings,
        **more,
    )


def built(workload: Workload) -> nn.Module:
    """A model of one's own, to be trained."""
    model = workload.build_model()
    if model is not workload.model:
        return model
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError, AttributeError, NotImplementedError) as error:
        raise WorkloadError(f"The model cannot be copied: {error}. Give a function that builds it instead.") from error


@torch.no_grad()
def shaken(model: nn.Module, seed: int) -> None:
    """Move every trained value of ``model`` by some units in the last place."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.mul_(1 + SHAKE * noise.to(parameter.device, parameter.dtype))


def seeded(seed: int) -> None:
    """Set every generator that a model, a loader or an augmentation may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """A block without the garbage collector, whose turn would come in one side's block and not in the other's."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _nothing() -> None:
    return None
