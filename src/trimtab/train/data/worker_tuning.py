"""How many workers a loader should have: found by going through it with the consumer's own step."""

from __future__ import annotations

import copy
import dataclasses
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
"""Time of one sample, or of three batches if these take longer."""
NEGLIGIBLE = 0.02
"""Where waiting for data is less than this share of a step, no way of reading is worth a process."""
CLOSE = 1.03
"""Among ways that are this close to the fastest, that with the fewest processes is taken."""
MOST_ROUNDS = 15


@dataclasses.dataclass(frozen=True, order=True)
class Way:
    """One way to read; in the order of what it costs."""

    workers: int
    prefetch: int = 2

    def __str__(self) -> str:
        """In words."""
        many = f"{self.workers} worker{'s' * (self.workers != 1)}"
        return many + (f", prefetch {self.prefetch}" if self.workers else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderTuning:
    """What :func:`tune_loader` found."""

    loader: Loader
    """Reads in the best way from now on; its batches are what they were."""
    best: Way
    times: dict[Way, Interval]
    """Milliseconds per batch, the step included."""
    reasons: tuple[str, ...]
    """A sentence for each alternative."""

    def __str__(self) -> str:
        """The sentences, a line each."""
        return "\n".join(self.reasons)


def tune_loader(
    data: Any,
    *,
    step: Callable[[Batch], object] | float = 0.0,
    seconds: float = 5.0,
    most_workers: int | None = None,
    **options: Any,
) -> LoaderTuning:
    """Find the number of workers and the prefetch factor with which ``step`` gets its batches fastest, here and now.

    The ways take turns, forth and back, so that a slow spell of the machine hits all of them. Batches that were read while a
    way did not have its turn are not counted. The order and the random numbers of the loader are not touched, nor is pinning,
    whose gain is in the copy to a GPU.

    Args:
        data: a :class:`Loader`, which is set to the best way; or a dataset, for which one is made with ``options``.
        step: what uses a batch, such as one update of a copy of the model, since it competes with the workers for the cores; or
            how many seconds it takes on a device that leaves the cores alone.
        seconds: about how long it may take, the start of the workers included.
        most_workers: the most to try; if not given, as many as there are cores.

    Raises:
        UsageError: the dataset or the options make no sense.
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
    told = [_told(way, interval, best, times) for way, interval in times.items()]
    return LoaderTuning(loader=loader, best=best, times=times, reasons=(*told, *reasons))


class _Trial:
    """One way of reading, and what it took so far."""

    def __init__(self, loader: Loader, way: Way, use: Callable[[Batch], object]) -> None:
        self.way, self.use = way, use
        self.loader = copy.copy(loader)
        self.loader.retune(workers=way.workers, prefetch=way.prefetch)
        self.samples: list[float] = []
        """Milliseconds per batch."""
        self.waited = 0.0
        """Share of the last sample that went into waiting."""
        self._batches: Iterator[Batch] | None = None

    def sample(self) -> None:
        """Go through some batches; those that were ready before are used, but not counted."""
        if self._batches is None:
            self._batches = _endless(self.loader)
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
        _wait_for_gpu()  # a step that was only asked for has not used its batch
        took = time.perf_counter() - began
        self.samples.append(took / count * 1e3)
        self.waited = waited / took


def _measure(trials: list[_Trial], deadline: float) -> list[str]:
    """Let ``trials`` take turns until ``deadline``; sentences for those that never had one."""
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
    """Every alternative, the cheapest first."""
    most = usable_cores() if most_workers is None else most_workers
    if most < 0:
        raise UsageError(f"most_workers is {most}; it must be at least 0.")
    counts = sorted({count for count in (1, 2, 4, 8, 16, 32, most) if 0 < count <= most})
    return [Way(0)] + [Way(count, ahead) for count in counts for ahead in (2, 4)]


def _told(way: Way, interval: Interval, best: Way, times: dict[Way, Interval]) -> str:
    figures = f"{way}: {interval.value:.3g} ms per batch ({interval.low:.3g} to {interval.high:.3g})"
    if way == best:
        return f"{figures}; chosen."
    ratio = interval.value / times[best].value
    if ratio < 1 or ratio <= CLOSE:
        return f"{figures}; not worth more than {best}, which is as fast within {CLOSE - 1:.0%}."
    return f"{figures}; {ratio:.3g} times the time of {best}."


def _endless(loader: Loader) -> Iterator[Batch]:
    while True:
        yield from loader


def _wait_for_gpu() -> None:
    """Until what was asked of any GPU is done, whichever the step runs on; one that nobody has used yet is not woken."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    for index in range(torch.cuda.device_count()):
        if torch.cuda.memory_allocated(index):
            torch.cuda.synchronize(index)


def _waiting(seconds: float) -> Callable[[Batch], object]:
    """A step on a device that leaves the cores alone."""
    if seconds < 0:
        raise UsageError(f"step is {seconds}; a step cannot take less than no time.")
    return lambda batch: time.sleep(seconds) if seconds else None
