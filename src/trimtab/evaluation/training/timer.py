"""Updates of a training as something to be timed, in this process, while those under other settings take turns with them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

import torch

from trimtab.core.settings import Settings
from trimtab.errors import WorkloadError
from trimtab.evaluation.training.workload import TrainingSubject, loader, refuse_parts, seeded
from trimtab.measure.timer import BLOCK_S, pace, synchronizer, uncollected
from trimtab.train.autotune.online_tuning import workers_of
from trimtab.train.loss.adapter import Batch
from trimtab.train.optim.schedules import ENDLESS
from trimtab.train.runtime.step_clock import Clock, HostClock
from trimtab.train.runtime.world import World

WAITED = 0.1
"""Share of an update that waiting for data takes where its batches were not there yet."""
PATIENT = 4
"""How many times as many batches as are read ahead no update has waited for, where the loader is taken to be fast enough."""


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

    On a GPU the other side shares the memory, so that a block ends by giving back what is held but not used, and begins with an
    update that takes it again.

    Raises:
        WorkloadError: there is no memory for whole batches beside the other side; a block may raise it, too.
    """

    def __init__(self, subject: TrainingSubject, settings: Settings, *, seed: int) -> None:
        self.pid = os.getpid()
        self._wait: Callable[[], None] = synchronizer(settings.device)
        self._on_gpu = torch.device(settings.device).type == "cuda"
        self._world = _Timed()
        self._trainer = trainer = subject.trainer(settings, seed, world=self._world)
        seeded(seed)
        begun = time.perf_counter()
        batches = loader(subject.training)
        self._workers = -(-(workers_of(batches) or 0) // settings.data.accumulate)
        """Updates that a burst of batches is enough for: one batch from each worker."""
        self._ahead = self._workers * _prefetched(batches)
        """Updates for which batches may be ready when a block begins; 0 where that is nothing unusual."""
        self._updates = trainer.updates(batches, steps=ENDLESS)
        self._update()
        self._wait()
        self.first_s = time.perf_counter() - begun
        """What the first update took, with everything that had to be set up or compiled for it."""
        self.notes = tuple(trainer.notes)
        refuse_parts(trainer)

    def block(self, calls: int) -> list[int]:
        """Nanoseconds per update, over ``calls`` of them."""
        with uncollected():
            if self._ahead:
                self._drain()
            elif self._on_gpu:
                self._update()
            made = -(-calls // self._workers) * self._workers if self._ahead else calls
            self._wait()
            begun = time.perf_counter_ns()
            for _ in range(made):
                self._update()
            self._wait()
            taken = time.perf_counter_ns() - begun
        refuse_parts(self._trainer)
        if self._on_gpu:
            torch.cuda.empty_cache()
        return [taken // made] * calls

    def _update(self) -> None:
        """Make the next one.

        Raises:
            WorkloadError: the training has come to an end.
        """
        try:
            next(self._updates)
        except StopIteration as ended:
            why = f" {ended.value.ended}" if ended.value else ""  # nothing where it had ended before
            raise WorkloadError(
                f"The training ended while its updates were timed.{why} Let it go on, for example with "
                "OptimizerSettings(nonfinite='skip')."
            ) from None

    def _drain(self) -> None:
        """Make updates until one has to wait for data. Where none has to, the loader is no bottleneck, and is not asked again.

        What takes no time is not believed at once: for tiny updates it is a wait to be handed a batch that is there.
        """
        clock, begun = self._world.clock, time.perf_counter()
        for made in range(1, PATIENT * self._ahead + 1):
            clock.take()
            self._update()
            spent = clock.take()
            waited = spent["data"] > WAITED * sum(spent.values())
            if waited and (made >= self._ahead or time.perf_counter() - begun > BLOCK_S):
                return
        self._ahead = 0

    def pace(self) -> int:
        """How fast the core is now."""
        return pace()


def _prefetched(batches: Iterable[Batch]) -> int:
    """Batches that each worker of a loader reads ahead."""
    return getattr(batches, "prefetch_factor", None) or getattr(batches, "prefetch", None) or 2
