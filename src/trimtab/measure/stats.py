"""Intervals for latencies, for ratios of latencies and for drops of a score. Imports no torch.

Everything random is seeded, so that equal samples give equal intervals; only a slow metric may get another number of
resamples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trimtab.core.measurement import Drop, Interval, Measurement, Scalar
from trimtab.errors import UsageError, WorkloadError
from trimtab.measure.quantiles import CONFIDENCE, beta_quantile, binomial_cdf, normal_quantile, quantile_of, t_quantile

Array = np.ndarray[Any, np.dtype[Any]]
MetricOf = Callable[[np.ndarray[Any, np.dtype[np.int64]], int], float]

NANOSECONDS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
TRIM = 0.2
"""Share of the quads that is trimmed at either end for the ratio's centre and spread."""
STOPPING_COST = 4.0
"""Intervals of a ratio are widened by ``1 + STOPPING_COST / n``, the cost of stopping as soon as the interval is narrow.

Found by simulation: without it, 95% intervals hold in 88% of all cases and say "faster" of the same thing in 6%, at the worst
ratio of noise to the width asked for; with it in 94% and 3% from six quads on, 93% and 3% from four (normal or heavy tails).
"""
ENOUGH_QUADS = 4
"""With fewer quads, t would give an interval of 27 standard deviations (two quads) or six (three)."""
SEED = 20_260_801
MIN_RESAMPLES, QUANTILE_RESAMPLES = 5, 200
"""A metric with fewer than :data:`MIN_RESAMPLES` resamples has no interval. From :data:`QUANTILE_RESAMPLES` on, its bounds are
quantiles. In between they are Student's t on the spread of the resamples, because a quantile would depend on one resample."""
PATIENCE = 4.0
"""Factor on the seconds of a bootstrap that a slow metric may take to be resampled :data:`MIN_RESAMPLES` times."""
ROUNDING = 1e-3
"""Tolerance between two values of a metric on equal data, relative to its largest possible loss: rounding only."""
UNUSABLE = (ValueError, TypeError, ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, StopIteration)
"""Exceptions of a metric on a resample that it cannot score, such as one with a single class."""


def median_interval(samples: Sequence[float]) -> Interval:
    """The median with an interval of two order statistics, which holds for any distribution of independent samples.

    With fewer than six samples no two of them reach 95%; the interval then goes from the smallest to the largest.

    Raises:
        UsageError: there are no samples.
    """
    if not samples:
        raise UsageError("A median needs at least one sample, but there are none.")
    ordered, n = sorted(samples), len(samples)
    # the largest rank whose interval, from that order statistic to its mirror image, is wide enough; by bisection, since
    # there may be a million samples
    rank, most = 0, max(0, math.ceil(n / 2) - 1)
    while rank < most:
        middle = (rank + most + 1) // 2
        rank, most = (middle, most) if 2 * binomial_cdf(middle, n, 0.5) <= 1 - CONFIDENCE else (rank, middle - 1)
    return Interval(quantile_of(ordered, 0.5), ordered[rank], ordered[n - 1 - rank])


def percentile(samples: Sequence[float], q: float) -> float | None:
    """The ``q``-quantile (0.99 for p99), or ``None`` if there are too few samples.

    With 95% probability the largest sample (for q below one half, the smallest) must lie beyond the quantile. That takes 29
    samples for p90 and 299 for p99.
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

    Consecutive calls are not independent. With ``blocks``, the medians of separate blocks of calls in nanoseconds, the
    interval of the median is computed from these.

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
    """The speed-up of the candidate over the rival, from times of blocks in A B B A quads.

    Both sequences hold two blocks per quad, in the order of measurement. Each quad gives one log ratio, in which linear drift
    cancels. The value is their 20% trimmed mean, and the interval is Tukey and McLaughlin's (1963): t on the winsorized spread,
    widened for sequential stopping (:data:`STOPPING_COST`). With fewer than :data:`ENOUGH_QUADS` quads, each half gives one
    ratio, and drift widens the interval.

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
    """``ratio`` with a further, independent uncertainty: a relative standard deviation ``sigma`` that quads do not reduce."""
    extra = normal_quantile((1 + CONFIDENCE) / 2) * sigma
    down, up = (math.hypot(math.log(ratio.value / ratio.low), extra), math.hypot(math.log(ratio.high / ratio.value), extra))
    return Interval(ratio.value, ratio.value * math.exp(-down), ratio.value * math.exp(up))


def combined(first: Interval, second: Interval) -> Interval:
    """The ratio of two independent measurements of it, weighted by the inverse squares of their widths."""
    logs = [(math.log(each.value), math.log(each.high / each.low) / 2) for each in (first, second)]
    weights = [1 / max(half, 1e-9) ** 2 for _, half in logs]
    centre = sum(weight * log for weight, (log, _) in zip(weights, logs, strict=True)) / sum(weights)
    half = 1 / math.sqrt(sum(weights))
    return Interval(math.exp(centre), math.exp(centre - half), math.exp(centre + half))


def paired_drop(
    baseline_scores: Sequence[float],
    candidate_scores: Sequence[float],
    limit: float | None = None,
    higher_is_better: bool = True,
) -> Drop:
    """The drop of the mean score, from scores of the same examples in the same order; each bound holds with 95%.

    The bound is Gaffke's (2005; studied by Phan et al., "Towards practical mean bounds for small samples", 2021): the mean
    under Dirichlet weights of the observed differences, and of one unobserved difference that is as bad as possible: the
    spread of the scores or, for scores between 0 and 1, which can fall to 0, the largest one. On scores of 0 and 1 without
    gains it is Clopper and Pearson's exact bound, so that no difference among n examples bounds the drop by about 3/n, and
    not by 0.

    Raises:
        UsageError: no scores, unequal counts, or scores that are not finite.
    """
    baseline, candidate = np.asarray(baseline_scores, float), np.asarray(candidate_scores, float)
    _check_scores(baseline, candidate)
    lost = baseline - candidate if higher_is_better else candidate - baseline
    fall, rise = _largest_changes(np.concatenate([baseline, candidate]))
    worst, best = (fall, rise) if higher_is_better else (rise, fall)
    value, n = float(lost.mean()), len(lost)
    upper, low = mean_upper(lost, worst), -mean_upper(-lost, best)
    sampling = normal_quantile(CONFIDENCE) * float(lost.std(ddof=1)) / math.sqrt(n) if n > 1 else 0.0
    return _decide(value, low, upper, n, limit, sampling, method="paired")


def mean_upper(values: Array, worst: float) -> float:
    """Gaffke's upper confidence bound for the mean of the distribution of ``values``, of which nothing exceeds ``worst``."""
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
    """The drop of a whole-set metric; each bound holds with 95%.

    ``metric_of(indices, which)`` is the metric over the examples at ``indices`` (int64, repeats possible), of the baseline for
    ``which`` 0 and of the candidate for 1. Both sides are resampled with the same indices. The interval is bias-corrected
    (Efron 1987, without acceleration) and widened for small n (Hesterberg 2015, "expanded percentile"). It is never narrower
    than the effect of a failure unseen in n examples, about 3/n of all. That effect is the largest of the metric's value, its
    spread, and its distance from ``failed``, the metric of a baseline that answers every example wrong.

    There are as many resamples, at most ``resamples``, as ``seconds`` allow; ``method`` states the number. Bounds from fewer
    than :data:`QUANTILE_RESAMPLES` are wider. If not even :data:`MIN_RESAMPLES` are done in :data:`PATIENCE` times the seconds,
    or most of them cannot be scored, the interval is the largest possible loss of the metric, which decides hardly anything.

    Raises:
        UsageError: there are no examples, or the metric of the whole set is not finite.
        WorkloadError: the metric keeps state between calls, or is random.
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
    refuse_stateful(sides[0], metric_of(whole, 0), worst)  # a metric with state has seen both sides by now
    rare = worst * (1 - (1 - CONFIDENCE) ** (1 / n))  # the upper bound of a probability after 0 of n
    low, upper = value - worst, value + worst
    if 2 * len(found) < tried:
        method = "bootstrap (the metric cannot be resampled)"
    elif len(found) < MIN_RESAMPLES:
        method = f"bootstrap ({len(found)} resamples, too few for an interval)"
    else:
        bound = _bias_corrected if len(found) >= QUANTILE_RESAMPLES else _t_bound
        low, upper = (bound(lost, value, n, p) for p in (1 - CONFIDENCE, CONFIDENCE))
        method = f"bootstrap ({len(found)} resamples)"
    sampling = max(0.0, upper - value)
    return _decide(value, min(low, value - rare), max(upper, value + rare), n, limit, sampling, method=method)


def refuse_stateful(first: float, again: float, worst: float) -> None:
    """Refuse a metric with the values ``first`` and ``again`` on equal data; ``worst`` is its largest possible loss.

    Raises:
        WorkloadError: the metric keeps state between calls, or is random.
    """
    if not abs(again - first) <= ROUNDING * worst:
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
    return float(ordered[cut : n - cut].mean()), t_quantile((1 + CONFIDENCE) / 2, kept - 1) * error * (1 + STOPPING_COST / n)


def _check_scores(baseline: Array, candidate: Array) -> None:
    if baseline.ndim != 1 or baseline.shape != candidate.shape or not len(baseline):
        raise UsageError(
            f"A drop needs one score per example of both sides, but there are {baseline.size} of the baseline and "
            f"{candidate.size} of the candidate."
        )
    if bad := int((~np.isfinite(baseline)).sum() + (~np.isfinite(candidate)).sum()):
        raise UsageError(f"{bad} scores are not finite, so their mean means nothing; look for NaN in the outputs or the score.")


def _largest_changes(scores: Array) -> tuple[float, float]:
    """The largest possible fall and rise of one example's score: the spread of all scores, or their size if all are equal.
    Scores between 0 and 1 can fall to 0, however close to each other the observed ones are."""
    spread = float(np.ptp(scores)) or abs(float(scores[0])) or 1.0
    lowest, highest = float(scores.min()), float(scores.max())
    return (max(spread, highest) if lowest >= 0 and highest <= 1 else spread), spread


def _resampled(metric_of: MetricOf, n: int, resamples: int, seconds: float) -> tuple[Array, int]:
    """The metric of both sides on every resample that it could score, of shape (resamples, 2), and the number of tries."""
    rng, begun = np.random.default_rng(SEED), time.perf_counter()
    rows: list[tuple[float, float]] = []
    tried = 0
    while tried < resamples and time.perf_counter() - begun <= seconds * (1.0 if len(rows) >= MIN_RESAMPLES else PATIENCE):
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


def _t_bound(found: Array, value: float, n: int, p: float) -> float:
    """The ``p`` bound from the spread of a few resamples, itself uncertain: normal theory, widened for small n."""
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
