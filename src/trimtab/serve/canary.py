"""A new version on trial: errors and latency beside those of the version that serves, and the decision."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import statistics
from collections.abc import Callable

from trimtab.core.measurement import Interval
from trimtab.measure.quantiles import normal_quantile, t_quantile

MOST_BATCHES = 24
"""Batches of a version's latencies, in the order of the answers; from this number on, two neighbours become one."""
LOOK_S = 0.1
EARLY_LEAST, EARLY_CONFIDENCE = 20, 0.999
"""Requests from which on, and confidence with which, more errors end the trial before its time; it is looked at many times."""


class Trial:
    """The outcomes of one version's requests during a trial."""

    def __init__(self) -> None:
        self.answered = self.failed = 0
        """Answers with 200; answers with 500, 503 or 504."""
        self.warm = True
        """Whether the latency of answers counts. The first answers after the other version's turn are slower, by up to a half:
        the caches hold the other version's weights."""
        self.means: list[float] = []
        """Mean of the logarithm of the latency of each batch of answers, in their order: from 12 answers on, 12 to 23 batches.

        Answers that follow each other are slow together, where a neighbour has the core for a while. From single answers the
        mean looks far surer than it is; from means of long batches it does not (Law and Carson, "A Sequential Procedure for
        Determining the Length of a Steady-State Simulation", 1979).
        """
        self._size, self._sum, self._count = 1, 0.0, 0

    def add(self, seconds: float) -> None:
        """Count an answer."""
        self.answered += 1
        if not self.warm:
            return
        self._sum += math.log(max(seconds, 1e-9))
        self._count += 1
        if self._count < self._size:
            return
        self.means.append(self._sum / self._size)
        self._sum, self._count = 0.0, 0
        if len(self.means) == MOST_BATCHES:
            self.means = [(a + b) / 2 for a, b in zip(self.means[::2], self.means[1::2], strict=True)]
            self._size *= 2

    @property
    def requests(self) -> int:
        """Answers and failures."""
        return self.answered + self.failed


class Turns:
    """Which version gets the next request. Requests go to the versions in turns of many, so that both answer under the same
    conditions: with each request drawn on its own, the version with fewer requests finds its caches cold and its batches small.
    A version with 30% of the requests was 1.2 times, one with 10% was 1.4 times as slow as itself.

    Args:
        share: of the requests that go to the new version, above 0 and below 1.
        rows: of the largest batch.
        new, old: the outcomes of the two versions.
    """

    def __init__(self, share: float, rows: int, new: Trial, old: Trial) -> None:
        self._warm_up = min(max(rows, 5), 20)
        self._new, self._old = new, old
        self._lengths = 2 * self._warm_up, round(2 * self._warm_up * (1 - share) / share)
        self._at = 0

    def next_is_new(self) -> bool:
        """Whether the new version gets the next request. A trial begins with it."""
        new = self._at < self._lengths[0]
        position = self._at if new else self._at - self._lengths[0]
        (self._new if new else self._old).warm = position >= min(self._warm_up, self._lengths[not new] // 2)
        self._at = (self._at + 1) % sum(self._lengths)
        return new


@dataclasses.dataclass(frozen=True)
class Decision:
    """Whether the new version takes over, and why, as a sentence."""

    takes_over: bool
    sentence: str


def more_errors(new: Trial, old: Trial, confidence: float = 0.95) -> Interval:
    """The share of failed requests of ``new`` minus that of ``old``; Newcombe's hybrid score interval."""
    z = normal_quantile(0.5 + confidence / 2)
    (p, low, high), (q, below, above) = _wilson(new.failed, new.requests, z), _wilson(old.failed, old.requests, z)
    return Interval(p - q, p - q - math.hypot(p - low, above - q), p - q + math.hypot(high - p, q - below))


def _wilson(count: int, n: int, z: float) -> tuple[float, float, float]:
    """A share and the bounds of its score interval."""
    if not n:
        return 0.0, 0.0, 1.0
    share, centre = count / n, (count + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(n * share * (1 - share) + z * z / 4)
    return share, min(max(centre - half, 0.0), share), max(min(centre + half, 1.0), share)


def latency_ratio(new: Trial, old: Trial) -> Interval | None:
    """The geometric mean latency of ``new`` over that of ``old``, with Welch's interval over the batches of answers; ``None``
    for too few answers."""
    if min(len(new.means), len(old.means)) < 2:
        return None
    ratio = statistics.fmean(new.means) - statistics.fmean(old.means)
    parts = [(statistics.variance(one.means) / len(one.means), len(one.means)) for one in (new, old)]
    total = sum(error for error, _ in parts)
    weights = sum(error * error / (count - 1) for error, count in parts)
    half = t_quantile(0.975, max(total * total / weights, 1.0)) * math.sqrt(total) if total and weights else 0.0
    return Interval(math.exp(ratio), math.exp(ratio - half), math.exp(ratio + half))


def decide(new: Trial, old: Trial, slowdown: float, *, early: bool = False) -> Decision | None:
    """The decision after a trial.

    Args:
        new, old: the outcomes of the two versions.
        slowdown: the new version is withdrawn if its latency is surely above this multiple of the old one's.
        early: only more errors, of which there is no doubt; else ``None``.
    """
    if early:
        surely = new.requests >= EARLY_LEAST and more_errors(new, old, EARLY_CONFIDENCE).low > 0
        return decide(new, old, slowdown) if surely else None
    errors, latency = more_errors(new, old), latency_ratio(new, old)
    found = (
        f"{new.requests} requests against {old.requests} of the old version; errors {_percent(new)} against {_percent(old)}, "
        f"difference {100 * errors.low:+.2g} to {100 * errors.high:+.2g} points"
    )
    if latency is not None:
        found += f"; latency {latency.value:.3g} times (95% interval {latency.low:.3g} to {latency.high:.3g}) the old one's"
    if errors.low > 0:
        return Decision(False, f"The new version is withdrawn, as it fails more often: {found}.")
    if latency is not None and latency.low > slowdown:
        return Decision(False, f"The new version is withdrawn, as it is more than {slowdown:g} times as slow: {found}.")
    doubt = " Too few answers to compare the latency." if latency is None else ""
    return Decision(True, f"The new version takes over, as nothing speaks against it: {found}.{doubt}")


def _percent(trial: Trial) -> str:
    return f"{100 * trial.failed / max(trial.requests, 1):.2g}%"


async def tried(new: Trial, old: Trial, seconds: float, slowdown: float, stopping: Callable[[], bool]) -> Decision:
    """Wait for ``seconds`` while both versions serve, then :func:`decide`; earlier if the new one surely fails more often."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end:
        if stopping():
            return Decision(False, "The new version is withdrawn, as the server stops.")
        if (decision := decide(new, old, slowdown, early=True)) is not None:
            return decision
        await asyncio.sleep(min(LOOK_S, max(end - loop.time(), 0.0)))
    decision = decide(new, old, slowdown)
    assert decision is not None
    return decision
