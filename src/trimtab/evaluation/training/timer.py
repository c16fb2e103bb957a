"""A runner whose call is one training update; runs under different settings take turns in the trial's processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

import torch

from trimtab.core.settings import Settings
from trimtab.errors import WorkloadError
from trimtab.evaluation.training.workload import TrainingSubject, loader, refuse_split_batches, seed_all
from trimtab.measure.host import waits
from trimtab.measure.timer import BLOCK_S, LocalRunner, Sample, gc_disabled, pace, synchronizer
from trimtab.train.autotune.auto_settings import shapes
from trimtab.train.autotune.online_tuning import workers_of
from trimtab.train.loss.adapter import Batch
from trimtab.train.optim.schedules import ENDLESS
from trimtab.train.runtime.step_clock import Clock, HostClock
from trimtab.train.runtime.world import World

WAITED = 0.1
"""An update counts as waiting if waiting for data takes this share of it."""
SAMPLED_S = 0.3
"""Longest update that is timed alone: dozens of them are needed."""
DRAIN_FACTOR = 4
"""The loader is no bottleneck if no update waits while this many times its read-ahead batches are used."""


class _Timed(World):
    """A world of one process that keeps the clock of its run."""

    clock: Clock = HostClock()

    def timed(self, clock: Clock) -> None:
        """Keep the run's clock."""
        self.clock = clock


class Updates:
    """A runner whose call is one update: waiting for data, the schedule and the meter included.

    A block returns the mean of its updates for each of them. If a loader with workers is the bottleneck, batches come in
    bursts, and the median of single updates would be faster than any epoch. Then a block consists of whole bursts, and begins
    once the batches that were read ahead during the other side's turn are used up.

    On a GPU the other side shares the memory. So a block ends by releasing cached memory, and begins with an unrecorded update
    that allocates it again.

    Raises:
        WorkloadError: there is no memory for whole batches beside the other side; a block may raise it, too.
    """

    def __init__(self, subject: TrainingSubject, settings: Settings, *, seed: int) -> None:
        self.pid = os.getpid()
        self._wait: Callable[[], None] = synchronizer(settings.device)
        self._on_gpu = torch.device(settings.device).type == "cuda"
        self._world = _Timed()
        self._trainer = trainer = subject.trainer(settings, seed, world=self._world)
        seed_all(seed)
        begun = time.perf_counter()
        batches = loader(subject.training)
        self._burst = -(-(workers_of(batches) or 0) // settings.data.accumulate)
        """Updates that a burst of batches is enough for: one batch from each worker."""
        self._read_ahead = self._burst * _prefetch_factor(batches)
        """Updates for which batches may be ready when a block begins; 0 if the loader is no bottleneck."""
        self._updates = trainer.updates(batches, steps=ENDLESS)
        self._update()
        self._wait()
        self.first_s = time.perf_counter() - begun
        """Seconds of the first update, set-up and compilation included."""
        self.notes = tuple(trainer.notes)
        refuse_split_batches(trainer)
        alone = not (self._on_gpu or self._burst) and len(shapes(subject.batches)) == 1
        quick = alone and waits(self.pid) and self.block(1)[0] <= 1e9 * SAMPLED_S
        self.threads = torch.get_num_threads() if quick else None
        """Threads that compute an update. ``None`` if single updates are not alike or not computed by this process alone, if
        they take longer than :data:`SAMPLED_S`, or if the system does not count how long threads wait for a core."""

    def block(self, calls: int) -> list[int]:
        """Nanoseconds per update, over ``calls`` updates."""
        with gc_disabled():
            if self._read_ahead:
                self._drain()
            elif self._on_gpu:
                self._update()
            made = -(-calls // self._burst) * self._burst if self._read_ahead else calls
            self._wait()
            begun = time.perf_counter_ns()
            for _ in range(made):
                self._update()
            self._wait()
            taken = time.perf_counter_ns() - begun
        refuse_split_batches(self._trainer)
        if self._on_gpu:
            torch.cuda.empty_cache()
        return [taken // made] * calls

    def samples(self, count: int, calls: int) -> list[Sample]:
        """``count`` samples of ``calls`` updates each, with the share of time in which threads waited for a core."""
        found = LocalRunner(self._update).samples(count, calls)
        refuse_split_batches(self._trainer)
        return found

    def _update(self) -> None:
        """Make the next update.

        Raises:
            WorkloadError: the training has ended.
        """
        try:
            next(self._updates)
        except StopIteration as ended:
            why = f" {ended.value.ended}" if ended.value else ""  # empty if it had ended before
            raise WorkloadError(
                f"The training ended while its updates were timed.{why} Let it go on, for example with "
                "OptimizerSettings(nonfinite='skip')."
            ) from None

    def _drain(self) -> None:
        """Make updates until one waits for data. If none does, the loader is no bottleneck and is not tested again.

        A single short wait is not counted: for tiny updates, handing over a batch that is ready looks like waiting.
        """
        clock, begun = self._world.clock, time.perf_counter()
        for made in range(1, DRAIN_FACTOR * self._read_ahead + 1):
            clock.take()
            self._update()
            spent = clock.take()
            waited = spent["data"] > WAITED * sum(spent.values())
            if waited and (made >= self._read_ahead or time.perf_counter() - begun > BLOCK_S):
                return
        self._read_ahead = 0

    def pace(self) -> int:
        """Nanoseconds of the fixed piece of work on this core."""
        return pace()


def _prefetch_factor(batches: Iterable[Batch]) -> int:
    """Batches that each worker of a loader reads ahead."""
    return getattr(batches, "prefetch_factor", None) or getattr(batches, "prefetch", None) or 2
