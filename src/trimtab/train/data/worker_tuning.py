"""Tune the number of workers of a loader by timing it with the step that consumes its batches."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trimtab.core.measurement import Interval
from trimtab.errors import UsageError
from trimtab.hardware.system import usable_cores
from trimtab.measure.stats import median_interval
from trimtab.train.data.loader import Loader
from trimtab.train.loss.adapter import Batch

BLOCK_S = 0.1
"""Seconds of one sample; three batches if these take longer."""
NEGLIGIBLE = 0.02
"""Share of a step spent waiting for data below which no worker is tried."""
CLOSE = 1.03
"""Ratio to the fastest time within which the way with the fewest processes is chosen."""
MOST_ROUNDS = 15


@dataclasses.dataclass(frozen=True, order=True)
class Way:
    """One way to read. Ways sort by cost."""

    workers: int
    prefetch: int = 2

    def __str__(self) -> str:
        """Words for a person."""
        many = f"{self.workers} worker{'s' * (self.workers != 1)}"
        return many + (f", prefetch {self.prefetch}" if self.workers else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderTuning:
    """The result of :func:`tune_loader`."""

    loader: Loader
    """The loader, set to the best way; its batches are unchanged."""
    best: Way
    times: dict[Way, Interval]
    """Milliseconds per batch with its step."""
    reasons: tuple[str, ...]
    """A sentence for each alternative."""

    def __str__(self) -> str:
        """The reasons, one a line."""
        return "\n".join(self.reasons)


def tune_loader(
    data: Any,
    *,
    step: Callable[[Batch], object] | float = 0.0,
    seconds: float = 5.0,
    most_workers: int | None = None,
    **options: Any,
) -> LoaderTuning:
    """Find the number of workers and the prefetch factor with the shortest time per batch and step on this machine.

    The ways take turns, forward and backward, so that a slow phase of the machine affects all of them. Batches that were read
    between the turns of a way are not timed. Order, random numbers and pinning of the loader do not change.

    Args:
        data: a :class:`Loader`, which is set to the best way; or a dataset, for which one is made with ``options``.
        step: a function of a batch, such as one update of a copy of the model, which competes with the workers for cores; or
            its seconds on a device that does not use the cores.
        seconds: approximate time of the tuning, with the start of workers.
        most_workers: most workers to try; default the number of cores.

    Raises:
        UsageError: the dataset or an option is refused.
        WorkloadError: the dataset raised.
    """
    if not seconds > 0:
        raise UsageError(f"seconds is {seconds}; tuning needs some time, such as 5.")
    if isinstance(data, Loader) and options:
        raise UsageError(f"{', '.join(options)} cannot be given with a Loader, which has its own. Give them to the Loader.")
    loader = data if isinstance(data, Loader) else Loader(data, **options)
    use = step if callable(step) else _waiting(float(step))
    trials = [_Trial(loader, way, use) for way in _ways(most_workers)]
    try:
        reasons = _measure(trials, time.perf_counter() + seconds)
    finally:
        for trial in trials:
            trial.loader.close()
    times = {trial.way: median_interval(trial.samples) for trial in trials if trial.samples}
    fastest = min(interval.value for interval in times.values())
    best = min(way for way, interval in times.items() if interval.value <= fastest * CLOSE)
    loader.retune(workers=best.workers, prefetch=best.prefetch)
    timed = [_sentence(way, interval, best, times) for way, interval in times.items()]
    return LoaderTuning(loader=loader, best=best, times=times, reasons=(*timed, *reasons))


class _Trial:
    """One way of reading, and its times so far."""

    def __init__(self, loader: Loader, way: Way, use: Callable[[Batch], object]) -> None:
        self.way, self.use = way, use
        self.loader = copy.copy(loader)
        self.loader.retune(workers=way.workers, prefetch=way.prefetch)
        self.samples: list[float] = []
        """Milliseconds per batch."""
        self.waited = 0.0
        """Share of the last sample spent waiting for data."""
        self._batches: Iterator[Batch] | None = None

    def sample(self) -> None:
        """Time some batches; those read before this turn are used, but not timed."""
        if self._batches is None:
            self._batches = itertools.chain.from_iterable(itertools.repeat(self.loader))
        for _ in range(1 + self.way.workers * self.way.prefetch):
            self.use(next(self._batches))
        _wait_for_gpu()
        count, waited, began = 0, 0.0, time.perf_counter()
        while count < 3 or time.perf_counter() - began < BLOCK_S:
            asked = time.perf_counter()
            batch = next(self._batches)
            waited += time.perf_counter() - asked
            self.use(batch)
            count += 1
        _wait_for_gpu()  # kernels run asynchronously
        took = time.perf_counter() - began
        self.samples.append(took / count * 1e3)
        self.waited = waited / took


def _measure(trials: list[_Trial], deadline: float) -> list[str]:
    """Let ``trials`` take turns until ``deadline``; sentences about those that had none."""
    trials[0].sample()
    if trials[0].waited < NEGLIGIBLE:
        share = f"{trials[0].waited:.1%} of the time goes into waiting for data with {trials[0].way}"
        return [f"{trial.way}: not tried, because only {share}." for trial in trials[1:]]
    for turn in range(MOST_ROUNDS):
        for trial in trials if turn % 2 == 0 else reversed(trials):
            if time.perf_counter() > deadline:
                return [f"{trial.way}: not tried, because the time was up." for trial in trials if not trial.samples]
            trial.sample()
    return []


def _ways(most_workers: int | None) -> list[Way]:
    """All ways, the cheapest first."""
    most = usable_cores() if most_workers is None else most_workers
    if most < 0:
        raise UsageError(f"most_workers is {most}; it must be at least 0.")
    counts = sorted({count for count in (1, 2, 4, 8, 16, 32, most) if 0 < count <= most})
    return [Way(0)] + [Way(count, ahead) for count in counts for ahead in (2, 4)]


def _sentence(way: Way, interval: Interval, best: Way, times: dict[Way, Interval]) -> str:
    figures = f"{way}: {interval.value:.3g} ms per batch ({interval.low:.3g} to {interval.high:.3g})"
    if way == best:
        return f"{figures}; chosen."
    ratio = interval.value / times[best].value
    if ratio < 1 or ratio <= CLOSE:
        return f"{figures}; not worth more than {best}, which is as fast within {CLOSE - 1:.0%}."
    return f"{figures}; {ratio:.3g} times the time of {best}."


def _wait_for_gpu() -> None:
    """Synchronize every GPU that this process has used."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    for index in range(torch.cuda.device_count()):
        if torch.cuda.memory_allocated(index):
            torch.cuda.synchronize(index)


def _waiting(seconds: float) -> Callable[[Batch], object]:
    """A step that sleeps, like one on a device that does not use the cores."""
    if seconds < 0:
        raise UsageError(f"step is {seconds}; a step cannot take less than no time.")
    return lambda batch: time.sleep(seconds) if seconds else None
