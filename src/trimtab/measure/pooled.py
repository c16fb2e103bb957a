"""Several comparisons of the same two things, each between a pair of processes of its own, as one."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from trimtab.measure.pairs import FEW_QUADS, PROCESS_NOISE
from trimtab.measure.quantiles import CONFIDENCE, normal_quantile, t_quantile
from trimtab.measurement import UNLIKE, Comparison, Interval, Measurement

ROUNDS, MOST_ROUNDS = 3, 5
"""Pairs of processes that a figure rests on which is handed over: two have an interval of nine standard deviations, three one
of 2.5. Where the first ones differ by more than :data:`~trimtab.measurement.UNLIKE` there are more."""


def pooled(rounds: Sequence[Comparison]) -> Comparison:
    """``rounds`` as one comparison, whose interval holds for yet another pair of processes that runs for long.

    The figure is the middle one, which an unlucky pair of processes does not move. The interval is Student's t on what the logs
    of the ratios differ by, around their mean, for that is the only thing that tells how processes differ here; and as a few
    may agree by chance, it is never narrower than :data:`PROCESS_NOISE` and the rounds' own intervals make it. A single round
    has nothing but these.

    ``rounds`` are compared with ``process_noise=0``.
    """
    logs, n = [math.log(found.ratio.value) for found in rounds], len(rounds)
    within = statistics.fmean(_half(found.ratio) ** 2 for found in rounds)
    least = math.sqrt((within + (normal_quantile((1 + CONFIDENCE) / 2) * PROCESS_NOISE) ** 2) / n)
    spread = statistics.stdev(logs) if n > 1 else 0.0
    half = max(least, t_quantile((1 + CONFIDENCE) / 2, n - 1) * spread / math.sqrt(n)) if n > 1 else least
    centre, middle = statistics.fmean(logs), statistics.median(logs)
    low, high = min(centre - half, middle), max(centre + half, middle)
    total = sum(found.pairs for found in rounds)
    shares = {
        name: sum(getattr(found, name) * found.pairs for found in rounds) / total for name in ("foreign", "stolen", "slowed")
    }
    return dataclasses.replace(
        rounds[-1],
        ratio=Interval(math.exp(middle), math.exp(low), math.exp(high)),
        pairs=total,
        candidate=_joined([found.candidate for found in rounds]),
        rival=_joined([found.rival for found in rounds]),
        discarded=sum(found.discarded for found in rounds),
        noise=max((found.noise for found in rounds if found.noise is not None), default=None),
        process_noise=max(PROCESS_NOISE, spread),
        processes=n,
        **shares,
    )


def settled(rounds: Sequence[Comparison]) -> bool:
    """Whether the rounds so far are so much alike that no more are needed."""
    ratios = [found.ratio.value for found in rounds]
    return not ratios or max(ratios) <= (1 + UNLIKE) * min(ratios)


def slow(candidate_s: float, rival_s: float, seconds: float) -> bool:
    """Whether calls that take so long are too slow for a few quads in a round of ``seconds``.

    More rounds would take minutes, and what such calls take is large against how processes differ.
    """
    return FEW_QUADS * 2 * (candidate_s + rival_s) > seconds


def _half(ratio: Interval) -> float:
    """Half the width of the interval of its logarithm; the wider half where they differ."""
    return max(math.log(ratio.high / ratio.value), math.log(ratio.value / ratio.low))


def _joined(found: Sequence[Measurement]) -> Measurement:
    """The middle one, with bounds that hold them all."""
    middle = sorted(found, key=lambda each: each.median)[len(found) // 2]
    low, high = min(each.interval.low for each in found), max(each.interval.high for each in found)
    return dataclasses.replace(middle, n=sum(each.n for each in found), interval=Interval(middle.median, low, high))
