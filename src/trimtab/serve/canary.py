"""Canary release: errors and latency of a new version against the version in service, and the decision."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import statistics
from collections.abc import Callable

from trimtab.core.measurement import Interval
from trimtab.measure.quantiles import normal_quantile, t_quantile

MOST_BATCHES = 24
"""Batches of latencies per version, in time order. When a list reaches this length, adjacent batches are merged in pairs."""
POLL_S = 0.1
EARLY_REQUESTS, EARLY_CONFIDENCE = 20, 0.999
"""Requests, and confidence of higher errors, that end a canary early. The confidence is high because the test is repeated."""


class CanaryStats:
    """Requests, failures and latencies of one version during a canary."""

    def __init__(self) -> None:
        self.answered = self.failed = 0
        """Answers with 200; answers with 500, 503 or 504."""
        self.warm = True
        """Whether latencies are recorded. The first answers after a switch between versions are up to 50% slower, because the
        caches hold the weights of the other version."""
        self.means: list[float] = []
        """Mean log latency of each batch of answers, in time order: 12 to 23 batches from 12 answers on.

        Successive answers are correlated: a busy neighbour slows many of them. Single answers give far too narrow an interval,
        means of long batches do not (Law and Carson, "A Sequential Procedure for Determining the Length of a Steady-State
        Simulation", 1979).
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


class TrafficSplit:
    """Sends requests to two versions in alternating runs, so that both answer under equal conditions. With a random choice for
    each request, the version with the smaller share has cold caches and small batches. It measured as 1.2 times as slow as
    itself at a share of 30%, and 1.4 times at 10%.

    Args:
        share: of the requests that go to the new version, above 0 and below 1.
        rows: of the largest batch.
        new, old: statistics of the two versions; their ``warm`` is set.
    """

    def __init__(self, share: float, rows: int, new: CanaryStats, old: CanaryStats) -> None:
        self._warm_up = min(max(rows, 5), 20)
        self._new, self._old = new, old
        self._lengths = 2 * self._warm_up, round(2 * self._warm_up * (1 - share) / share)
        self._at = 0

    def next_is_new(self) -> bool:
        """Whether the new version gets the next request. A canary begins with the new version."""
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


def error_difference(new: CanaryStats, old: CanaryStats, confidence: float = 0.95) -> Interval:
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


def latency_ratio(new: CanaryStats, old: CanaryStats) -> Interval | None:
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


def decide(new: CanaryStats, old: CanaryStats, slowdown: float, *, early: bool = False) -> Decision | None:
    """The decision after a canary.

    Args:
        new, old: statistics of the two versions.
        slowdown: the new version is withdrawn if the lower bound of its latency ratio is above this.
        early: decide only if errors are higher with :data:`EARLY_CONFIDENCE`; else return ``None``.
    """
    if early:
        surely = new.requests >= EARLY_REQUESTS and error_difference(new, old, EARLY_CONFIDENCE).low > 0
        return decide(new, old, slowdown) if surely else None
    errors, latency = error_difference(new, old), latency_ratio(new, old)
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


def _percent(stats: CanaryStats) -> str:
    return f"{100 * stats.failed / max(stats.requests, 1):.2g}%"


async def run_canary(
    new: CanaryStats, old: CanaryStats, seconds: float, slowdown: float, stopping: Callable[[], bool]
) -> Decision:
    """Wait for ``seconds`` while both versions serve, then :func:`decide`. Ends early if ``new`` surely fails more often."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while loop.time() < end:
        if stopping():
            return Decision(False, "The new version is withdrawn, as the server stops.")
        if (decision := decide(new, old, slowdown, early=True)) is not None:
            return decision
        await asyncio.sleep(min(POLL_S, max(end - loop.time(), 0.0)))
    decision = decide(new, old, slowdown)
    assert decision is not None
    return decision
