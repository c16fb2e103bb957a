"""Intervals for latencies, for ratios of latencies and for drops of a score. Imports no torch.

Everything random is seeded, so that the same samples give the same interval; only a slow metric may get to another number of
resamples the next time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trimtab.core.measurement import Drop, Interval, Measurement, Scalar
from trimtab.errors import UsageError, WorkloadError
from trimtab.measure.quantiles import (
    CONFIDENCE,
    beta_quantile,
    binomial_cdf,
    clopper_pearson_upper,
    normal_quantile,
    quantile_of,
    t_quantile,
)

Array = np.ndarray[Any, np.dtype[Any]]
MetricOf = Callable[[np.ndarray[Any, np.dtype[np.int64]], int], float]

NANOSECONDS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
TRIM = 0.2
"""Share of the quads that is trimmed at either end before the ratio's centre and spread are taken."""
LOOKS = 4.0
"""Intervals of a ratio are widened by ``1 + LOOKS / n``: what looking after every quad, and stopping once it is narrow, costs.

Found by simulation: without it, 95% intervals hold in 88% of all cases and say "faster" of the same thing in 6%, at the worst
ratio of noise to the width asked for; with it in 94% and 3% from six quads on, 93% and 3% from four (normal or heavy tails).
"""
ENOUGH_QUADS = 4
"""Of fewer, t knows so little of the spread that the interval would be of 27 standard deviations (two quads) or of six."""
SEED = 20_260_801
FEW, MANY = 5, 200
"""Resamples below which a metric has no interval, and from which its bounds are quantiles of them. In between, where a quantile
would be one resample's luck, the bounds are Student's t on their spread, and so the wider the fewer there are."""
PATIENCE = 4.0
"""Times the seconds of a bootstrap that a slow metric may take, to be resampled at least :data:`FEW` times."""
ALIKE = 1e-3
"""What a metric may differ by when it is asked the same twice, relative to what it could lose: by rounding alone."""
UNUSABLE = (ValueError, TypeError, ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, StopIteration)
"""What a metric raises on a resample that it cannot judge, such as one with a single class."""


def median_interval(samples: Sequence[float]) -> Interval:
    """The median with an interval made of two order statistics, which holds for any distribution of independent samples.

    With fewer than six samples no two of them reach 95%; the interval is then from the smallest to the largest.

    Raises:
        UsageError: there are no samples.
    """
    if not samples:
        raise UsageError("A median needs at least one sample, but there are none.")
    ordered, n = sorted(samples), len(samples)
    # the largest rank whose interval, from that order statistic to its mirror image, is still wide enough; found by halving,
    # since there may be a million samples
    rank, most = 0, max(0, math.ceil(n / 2) - 1)
    while rank < most:
        middle = (rank + most + 1) // 2
        rank, most = (middle, most) if 2 * binomial_cdf(middle, n, 0.5) <= 1 - CONFIDENCE else (rank, middle - 1)
    return Interval(quantile_of(ordered, 0.5), ordered[rank], ordered[n - 1 - rank])


def percentile(samples: Sequence[float], q: float) -> float | None:
    """The ``q``-quantile (0.99 for p99), or ``None`` where the samples are too few to know it.

    The rule: it must be 95% sure that the largest (for q below one half, the smallest) sample lies beyond it, so that the
    sample bounds it at all. That takes 29 samples for p90 and 299 for p99.
    """
    within = max(q, 1 - q)
    return quantile_of(samples, q) if samples and within ** len(samples) <= 0.05 else None


def summarize(
    samples_ns: Sequence[float],
    *,
    unit: str = "ms",
    conditions: Mapping[str, Scalar] | None = None,
    blocks: Sequence[float] | None = None,
) -> Measurement:
    """Samples in nanoseconds as a measurement in ``unit`` (ns, us, ms or s).

    Calls that follow each other are not independent. Where ``blocks``, the medians of separate blocks of calls in
    nanoseconds, are given, the interval of the median rests on them instead of on the single calls.

    Raises:
        UsageError: no samples, or an unknown unit.
    """
    if unit not in NANOSECONDS:
        raise UsageError(f"{unit!r} is not a unit of time; use {', '.join(NANOSECONDS)}.")
    scaled = (np.sort(np.asarray(samples_ns, float)) / NANOSECONDS[unit]).tolist()
    if blocks:
        value, between = quantile_of(scaled, 0.5), median_interval([ns / NANOSECONDS[unit] for ns in blocks])
        interval = Interval(value, min(between.low, value), max(between.high, value))
    else:
        interval = median_interval(scaled)
    return Measurement(
        unit=unit,
        n=len(scaled),
        median=interval.value,
        interval=interval,
        p90=percentile(scaled, 0.9),
        p99=percentile(scaled, 0.99),
        conditions=dict(conditions or {}),
    )


def ratio_interval(rival_blocks: Sequence[float], candidate_blocks: Sequence[float]) -> Interval:
    """The speed-up of the candidate over the rival, from times of blocks that were measured in A B B A quads.

    Both sequences hold two blocks per quad, in the order they were measured. Each quad gives one log ratio, in which linear
    drift cancels. The centre is their 20% trimmed mean and the interval Tukey and McLaughlin's (1963): t on the winsorized
    spread, widened for sequential stopping (:data:`LOOKS`). Of fewer than :data:`ENOUGH_QUADS`, each half gives one, and drift
    only widens the interval.

    Raises:
        UsageError: fewer than two quads, or times that are not positive.
    """
    if len(rival_blocks) != len(candidate_blocks) or len(rival_blocks) % 2 or len(rival_blocks) < 4:
        raise UsageError(
            f"A ratio needs two blocks per side and quad, and at least two quads; there are {len(rival_blocks)} blocks of the "
            f"rival and {len(candidate_blocks)} of the candidate."
        )
    if min(*rival_blocks, *candidate_blocks) <= 0:
        raise UsageError("A ratio needs times above zero; a block took no time at all, so time more calls at once.")
    ratios = np.log(np.asarray(rival_blocks, float)) - np.log(np.asarray(candidate_blocks, float))
    enough = len(ratios) >= 2 * ENOUGH_QUADS
    centre, half = _trimmed_t(ratios.reshape(-1, 2).mean(1) if enough else ratios)
    return Interval(math.exp(centre), math.exp(centre - half), math.exp(centre + half))


def widened(ratio: Interval, sigma: float) -> Interval:
    """``ratio`` with a further, independent uncertainty: a relative standard deviation ``sigma`` that no quad lessens."""
    extra = normal_quantile((1 + CONFIDENCE) / 2) * sigma
    down, up = (math.hypot(math.log(ratio.value / ratio.low), extra), math.hypot(math.log(ratio.high / ratio.value), extra))
    return Interval(ratio.value, ratio.value * math.exp(-down), ratio.value * math.exp(up))


def paired_drop(
    baseline_scores: Sequence[float],
    candidate_scores: Sequence[float],
    limit: float | None = None,
    higher_is_better: bool = True,
) -> Drop:
    """How much mean score was lost, from scores of the same examples in the same order; each bound holds with 95%.

    The bound is Gaffke's (2005; studied by Phan et al., "Towards practical mean bounds for small samples", 2021): the mean
    under Dirichlet weights of the differences seen, and of one more that was not seen and is as bad as can be, namely the
    whole spread of the scores or, of those between 0 and 1, which can fall to 0, the largest one. On scores of 0 and 1 without
    gains it is Clopper and Pearson's exact bound, so that no difference among n examples bounds the drop by about 3/n, and
    not by 0.

    Raises:
        UsageError: no scores, unequal counts, or scores that are not finite.
    """
    baseline, candidate = np.asarray(baseline_scores, float), np.asarray(candidate_scores, float)
    _check_scores(baseline, candidate)
    lost = baseline - candidate if higher_is_better else candidate - baseline
    fall, rise = _reach(np.concatenate([baseline, candidate]))
    worst, best = (fall, rise) if higher_is_better else (rise, fall)
    value, n = float(lost.mean()), len(lost)
    upper, low = mean_upper(lost, worst), -mean_upper(-lost, best)
    sampling = normal_quantile(CONFIDENCE) * float(lost.std(ddof=1)) / math.sqrt(n) if n > 1 else 0.0
    return _decide(value, low, upper, n, limit, sampling, method="paired")


def mean_upper(values: Array, worst: float) -> float:
    """Gaffke's upper confidence bound for the mean of what ``values`` are samples of, when nothing exceeds ``worst``."""
    distinct, counts = np.unique(np.append(values, worst), return_counts=True)
    if len(distinct) == 1:
        return float(worst)
    if len(distinct) == 2:  # two values: the weight of the larger is a beta variable, and the bound is exact
        share = beta_quantile(CONFIDENCE, float(counts[1]), float(counts[0]))
        return float(distinct[0] + share * (distinct[1] - distinct[0]))
    rng = np.random.default_rng(SEED)
    draws = int(np.clip(2e7 // len(distinct), 1000, 100_000))
    means = np.empty(draws)
    for start in range(0, draws, step := max(1, 2_000_000 // len(distinct))):
        weights = rng.standard_gamma(counts, (min(step, draws - start), len(counts)))
        means[start : start + step] = weights @ distinct / weights.sum(1)
    return float(np.quantile(means, CONFIDENCE))


def bootstrap_drop(
    metric_of: MetricOf,
    n: int,
    limit: float | None = None,
    higher_is_better: bool = True,
    *,
    failed: float | None = None,
    resamples: int = 2000,
    seconds: float = 5.0,
) -> Drop:
    """How much of a whole-set metric was lost; each bound holds with 95%.

    ``metric_of(indices, which)`` is the metric over the examples at ``indices`` (int64, repeats possible), of the baseline for
    ``which`` 0 and of the candidate for 1. Both sides are resampled with the same indices. The interval is bias-corrected
    (Efron 1987, without acceleration) and widened for small n (Hesterberg 2015, "expanded percentile"). It is never narrower
    than what a failure that n examples would not have shown, about 3/n of all, could do to the metric: what it is worth itself,
    its spread, or the way from it to ``failed``, the metric of a baseline that answers every example wrong.

    There are as many resamples, at most ``resamples``, as ``seconds`` allow; ``method`` says how many. Bounds from fewer than
    :data:`MANY` are wider. Where not even :data:`FEW` are done in :data:`PATIENCE` times the seconds, or most of them cannot be
    judged, the interval is what the metric itself could lose, which decides hardly anything.

    Raises:
        UsageError: there are no examples, or the metric of the whole set is not finite.
        WorkloadError: the metric keeps something from call to call, or is random.
    """
    if n < 1:
        raise UsageError("A drop needs at least one example, but there are none.")
    whole = np.arange(n)
    sides = metric_of(whole, 0), metric_of(whole, 1)
    if not all(map(math.isfinite, sides)):
        raise UsageError(f"The metric is {sides[0]} for the baseline and {sides[1]} for the candidate; it must be finite.")
    found, tried = _resampled(metric_of, n, resamples, seconds)
    sign = 1 if higher_is_better else -1
    value, lost = sign * (sides[0] - sides[1]), sign * (found[:, 0] - found[:, 1])
    spread = 3 * math.sqrt(n) * float(found[:, 0].std()) if len(found) else 0.0
    worst = max(abs(sides[0]), abs(sides[1]), spread, 0.0 if failed is None else abs(failed - sides[0])) or 1.0
    refuse_memory(sides[0], metric_of(whole, 0), worst)  # which has made both sides alike by now
    rare = worst * clopper_pearson_upper(0, n)
    low, upper = value - worst, value + worst
    if 2 * len(found) < tried:
        method = "bootstrap (the metric cannot be resampled)"
    elif len(found) < FEW:
        method = f"bootstrap ({len(found)} resamples, too few for an interval)"
    else:
        bound = _bias_corrected if len(found) >= MANY else _student
        low, upper = (bound(lost, value, n, p) for p in (1 - CONFIDENCE, CONFIDENCE))
        method = f"bootstrap ({len(found)} resamples)"
    sampling = max(0.0, upper - value)
    return _decide(value, min(low, value - rare), max(upper, value + rare), n, limit, sampling, method=method)


def refuse_memory(first: float, again: float, worst: float) -> None:
    """Refuse a metric that is ``first`` and then ``again`` of the same, where ``worst`` is the most that it could lose.

    Raises:
        WorkloadError: it keeps something from call to call, or is random.
    """
    if not abs(again - first) <= ALIKE * worst:
        raise WorkloadError(
            f"The metric is {first:.6g} and then {again:.6g} for the same outputs and targets. Have it keep nothing from "
            "call to call, as a torchmetrics object does that is updated and not reset, and seed what is random in it."
        )


def _trimmed_t(values: Array) -> tuple[float, float]:
    """The trimmed mean of ``values`` and half the width of its interval."""
    ordered, n = np.sort(values), len(values)
    cut = int(TRIM * n)
    kept = n - 2 * cut
    winsorized = np.clip(ordered, ordered[cut], ordered[n - 1 - cut])
    error = float(winsorized.std(ddof=1)) * math.sqrt(n) / kept
    return float(ordered[cut : n - cut].mean()), t_quantile((1 + CONFIDENCE) / 2, kept - 1) * error * (1 + LOOKS / n)


def _check_scores(baseline: Array, candidate: Array) -> None:
    if baseline.ndim != 1 or baseline.shape != candidate.shape or not len(baseline):
        raise UsageError(
            f"A drop needs one score per example of both sides, but there are {baseline.size} of the baseline and "
            f"{candidate.size} of the candidate."
        )
    if bad := int((~np.isfinite(baseline)).sum() + (~np.isfinite(candidate)).sum()):
        raise UsageError(f"{bad} scores are not finite, so their mean means nothing; look for NaN in the outputs or the score.")


def _reach(scores: Array) -> tuple[float, float]:
    """How far the score of one example can fall, and rise, at most: by the spread of all scores, or by their size where all are
    equal. What lies between 0 and 1 can fall to 0, however close to each other those are that were seen."""
    spread = float(np.ptp(scores)) or abs(float(scores[0])) or 1.0
    lowest, highest = float(scores.min()), float(scores.max())
    return (max(spread, highest) if lowest >= 0 and highest <= 1 else spread), spread


def _resampled(metric_of: MetricOf, n: int, resamples: int, seconds: float) -> tuple[Array, int]:
    """The metric of both sides on every resample that it could judge, of shape (resamples, 2), and how many were tried."""
    rng, begun = np.random.default_rng(SEED), time.perf_counter()
    rows: list[tuple[float, float]] = []
    tried = 0
    while tried < resamples and time.perf_counter() - begun <= seconds * (1.0 if len(rows) >= FEW else PATIENCE):
        tried += 1
        indices = rng.integers(0, n, n)
        try:
            row = metric_of(indices, 0), metric_of(indices, 1)
        except UNUSABLE:
            continue
        if all(map(math.isfinite, row)):
            rows.append(row)
    return np.asarray(rows, float).reshape(-1, 2), tried


def _bias_corrected(found: Array, value: float, n: int, p: float) -> float:
    """The ``p`` bound of the bias-corrected, expanded percentile interval."""
    below = float(np.mean(found < value) + np.mean(found == value) / 2)
    shift = normal_quantile(min(max(below, 0.5 / len(found)), 1 - 0.5 / len(found)))
    reach = t_quantile(p, n - 1) * math.sqrt(n / (n - 1)) if n > 1 else normal_quantile(p)
    share = 0.5 * math.erfc(-(2 * shift + reach) / math.sqrt(2))
    return float(np.quantile(found, share))


def _student(found: Array, value: float, n: int, p: float) -> float:
    """The ``p`` bound from the spread of a few resamples, which is itself uncertain: normal theory, widened for small n."""
    spread = float(found.std(ddof=1)) * math.sqrt(n / max(n - 1, 1))
    return value + t_quantile(p, max(1, min(n, len(found)) - 1)) * spread


def _decide(value: float, low: float, upper: float, n: int, limit: float | None, sampling: float, *, method: str) -> Drop:
    """The drop with its verdict. ``sampling`` is the part of the upper margin that shrinks with the root of n."""
    low, upper = min(low, value), max(upper, value)  # rounding can put a bound that equals the value on its other side
    decided, needed = None, None
    if limit is not None:
        decided = True if upper <= limit else False if low > limit else None
        if decided is None and value < limit:
            needed = _examples_needed(upper - value, min(sampling, upper - value), limit - value, n)
    return Drop(value=value, low=low, upper=upper, n=n, limit=limit, decided=decided, n_needed=needed, method=method)


def _examples_needed(margin: float, sampling: float, room: float, n: int) -> int:
    """The n at which the margin fits the room: its sampling part shrinks with the root of n, the rest (rare events) with n."""
    rare = margin - sampling
    # with x = sqrt(n / needed): rare x^2 + sampling x = room
    root = math.sqrt(sampling**2 + 4 * rare * room)
    x = 2 * room / (sampling + root)
    return max(n + 1, math.ceil(n / x**2))
