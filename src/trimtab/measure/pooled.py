"""Pool comparisons of the same two runners, each between a pair of freshly started processes."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from trimtab.core.measurement import QUIET, Comparison, Interval, Measurement
from trimtab.measure.pairs import FEW_QUADS, MIN_QUADS, PROCESS_NOISE, SLOWED, USUAL_QUANTILE
from trimtab.measure.quantiles import CONFIDENCE, normal_quantile, quantile_of, t_quantile
from trimtab.measure.stats import TRIM

STARTS, MOST_STARTS = 12, 32
"""Starts for a reported figure, and the maximum: more starts are made while the interval is wider than :data:`WIDE` and there
is time."""
START_S, LEAST_START_S, START_QUADS = 0.5, 0.4, 3
"""Seconds of timing in a start of quick calls, the minimum for a start, and its minimum number of quads.

Many short starts estimate more than a few long ones: a process keeps its speed. In one of five processes a small network on two
threads took 0.50 ms a call as long as the process lived, and 0.34 ms in the others; with one thread 0.35 ms in all of them.
"""
PRIOR_STARTS = 1
"""Degrees of freedom of the prior of the variance between starts: it counts as many starts."""
DRIFT, DISTURBED_DRIFT = 0.01, 0.04
"""Relative standard deviation of a ratio between minutes, and if most starts were disturbed. Starts of one confirmation follow
each other and share it: more of them do not average it out. Without it the intervals of two of ten studies of a small model
missed their common median, by 0.2% and 0.7%. On a host whose cores changed their pace from minute to minute, the standard
deviation of 29 figures of that model was 4%.
"""
TRIMMED_FROM = 8
"""Number of starts from which a fifth of the ratios at each end is trimmed."""
SLOW_JOIN, SLOWER = 0.25, 0.1
"""A start is slow if its rival's threads took longer than usual to begin and end a parallel operation, by more than
:data:`SLOW_JOIN`, and the rival's calls took longer by more than :data:`SLOWER`; both at the pace of the cores. Parallel
operations of processes on a fast machine differed by up to 13%; in the slow state of that machine they took 40% longer."""
FEWEST_STARTS = 4
"""Starts that must not be slow, so that slow ones do not count; also the fewest trials whose times may replace those of slow
starts."""
SLOW_SHARE = 0.5
"""Comparisons whose cores were slower than usual in a larger share of the time say nothing about the model's own speeds."""
WIDE = 1.15
"""More starts are worth their time if the bounds of the pooled ratio differ by more than this factor."""


def pooled(starts: Sequence[Comparison], seen: Sequence[Comparison] = (), *, drift: float | None = None) -> Comparison:
    """Pool ``starts`` into one comparison. Its interval holds for a further start of both sides.

    The value is the median of the starts' ratios. Each is a ratio of times measured in turns, so a machine that slows down
    between two starts does not change it. (The ratio of both sides' median times does change: on a machine whose cores ran at
    half their pace for minutes its standard deviation was 7% with 8 starts, against 4%.)

    The interval is Student's t around the mean of the logarithms, from :data:`TRIMMED_FROM` starts on Tukey and McLaughlin's
    (1963) around the 20% trimmed mean: in one process of five a model may run at another speed, and a neighbour may stop one of
    two threads for a whole start. The variance between starts is shrunk towards a scaled inverse chi-square prior with
    :data:`PRIOR_STARTS` degrees of freedom (Gelman et al., "Bayesian Data Analysis", section 2.6). The prior contains
    :data:`PROCESS_NOISE`, the variation of the rival's time in ``seen``, and the starts' own errors. So a few starts that agree
    by chance do not give a narrow interval. A single start uses the prior as a known variance. Several add :data:`DRIFT`, or
    :data:`DISTURBED_DRIFT`.

    With ``seen``, starts are left out in which the rival's threads met more slowly than usual (:func:`usual_starts`), if at
    least :data:`FEWEST_STARTS` others were made: a machine may be in that state for a minute. Of 14 studies of a small
    network on such a machine, 3 gave 19.5x and 11 gave 13.2x to 14.2x. With fewer others, if the candidate has one thread,
    the rival's time in ``seen`` replaces its time in such starts. :data:`DISTURBED_DRIFT` is then added, because these
    times were not measured in turns.

    Two uncertainties that more starts do not reduce widen the interval further. One is the effect of neighbours on both sides,
    as the medians over starts of each of the :attr:`~trimtab.core.measurement.Comparison.estimates`. The other is a time
    of the rival that differs from the one in ``seen`` at the same pace of the cores, as for a model that has two speeds for
    minutes. The time says nothing if most starts were disturbed, because a core may change its pace within a block: on such a
    host the interval of 14.7x was 14.1 to 15.7 by the starts, and 11.6 to 15.7 with times from quieter minutes.

    Args:
        starts: made with ``process_noise=0``.
        seen: further comparisons with the rival, by other processes or at other times, such as the trials of a study. Those
            beside busy neighbours, or on cores that were slower than usual for most of the time, are ignored.
        drift: relative standard deviation between minutes, in place of the default.
    """
    made, undisturbed = len(starts), [each for each in seen if _is_quiet(each)]
    known = _log_times_at_same_pace([each.rival for each in undisturbed], starts)
    every = [*[found.rival.median for found in starts], *map(math.exp, known)]
    starts, quiet = _counted(starts, undisturbed)
    corrected = sum(each.starts_corrected for each in starts)
    logs, n = [math.log(found.ratio.value) for found in starts], len(starts)
    known = _log_times_at_same_pace([each.rival for each in quiet], starts)
    halves = [_half_width(found.sampling or found.ratio) for found in starts]
    error = (statistics.median(halves) / normal_quantile((1 + CONFIDENCE) / 2)) ** 2
    prior = max(PROCESS_NOISE, _spread(known)) ** 2 + error
    centre, spread, kept = _trimmed(logs)
    freedom, value = PRIOR_STARTS + kept - 1, statistics.median(logs)
    variance = (PRIOR_STARTS * prior + (kept - 1) * spread) / freedom
    quantile = t_quantile((1 + CONFIDENCE) / 2, freedom) if n > 1 else normal_quantile((1 + CONFIDENCE) / 2)
    estimates = _estimates(starts)
    if drift is None:
        drift = DISTURBED_DRIFT if corrected or (estimates and n > 1) else DRIFT if n > 1 else 0.0
    half = math.hypot(quantile * math.sqrt(variance / n), normal_quantile((1 + CONFIDENCE) / 2) * drift)
    low, high = min(centre - half, value), max(centre + half, value)
    alone = Interval(math.exp(value), math.exp(low), math.exp(high))
    low, high = min([low, *map(math.log, estimates)]), max([high, *map(math.log, estimates)])
    times = [found.rival.median for found in starts]
    if known and not estimates and abs(shift := statistics.median(known) - statistics.median(map(math.log, times))) > half:
        low, high = min(low, value + shift), max(high, value + shift)
    total = sum(found.pairs for found in starts)
    shares = {
        name: sum(getattr(found, name) * found.pairs for found in starts) / total for name in ("foreign", "stolen", "slowed")
    }
    return dataclasses.replace(
        starts[-1],
        ratio=Interval(math.exp(value), math.exp(low), math.exp(high)),
        sampling=alone if estimates else None,
        estimates=estimates or None,
        pairs=total,
        candidate=_middle_measurement([found.candidate for found in starts]),
        rival=_middle_measurement([found.rival for found in starts]),
        discarded=sum(found.discarded for found in starts),
        noise=max((found.noise for found in starts if found.noise is not None), default=None),
        process_noise=max(PROCESS_NOISE, statistics.stdev(logs) if n > 1 else 0.0),
        starts=n,
        starts_left_out=made - n,
        starts_corrected=corrected,
        rival_ms=(min(every), max(every)),
        undisturbed=min((found.undisturbed for found in starts if found.undisturbed is not None), default=None),
        **shares,
    )


def _counted(starts: Sequence[Comparison], quiet: Sequence[Comparison]) -> tuple[Sequence[Comparison], Sequence[Comparison]]:
    """The starts that count, with the rival's usual time if too few are left; and those of ``quiet`` that fit them."""
    met = usual_starts(starts, quiet)
    if len(met) == len(starts):
        return starts, quiet
    usually = usual_starts(quiet, starts)
    if len(met) < FEWEST_STARTS:
        met = _with_usual_rival(starts, met, usually)
    return (met, usually) if met else (starts, quiet)


def usual_starts(starts: Sequence[Comparison], seen: Sequence[Comparison]) -> list[Comparison]:
    """Those of ``starts`` that are not slow by :data:`SLOW_JOIN` and :data:`SLOWER`; all of them without any ``seen``.

    What is usual is found from the starts and the quiet ones of ``seen``, by the
    :data:`~trimtab.measure.pairs.USUAL_QUANTILE` of the parallel operation. Both times are divided by the pace of the
    cores, on which they depend too.
    """
    every = [*starts, *filter(_is_quiet, seen)]
    joins = [join for each in every if (join := _fork_join(each)) is not None]
    if not seen or not joins:
        return list(starts)
    most = (1 + SLOW_JOIN) * quantile_of(joins, USUAL_QUANTILE)
    longest = (1 + SLOWER) * statistics.median(_paced(each) for each in every if (_fork_join(each) or 0.0) <= most)
    return [each for each in starts if (_fork_join(each) or 0.0) <= most or _paced(each) <= longest]


def _paced(found: Comparison) -> float:
    """The rival's time divided by the pace of its core."""
    return found.rival.median / (_pace(found.rival) or 1.0)


def _with_usual_rival(starts: Sequence[Comparison], met: Sequence[Comparison], seen: Sequence[Comparison]) -> list[Comparison]:
    """``starts`` with the rival's median time in ``seen`` in place of its time in those that are not in ``met``.

    Empty if ``seen`` has too few times, or if a candidate has several threads, which may have met slowly too.
    """
    times = _log_times_at_same_pace([each.rival for each in seen], starts)
    if len(times) < FEWEST_STARTS or any(each.candidate.conditions.get("threads") != 1 for each in starts):
        return []
    usual_ms, found = math.exp(statistics.median(times)), []
    for each in starts:
        if each not in met:
            factor = usual_ms / each.rival.median
            each = dataclasses.replace(
                each,
                ratio=each.ratio.scaled(factor),
                sampling=each.sampling and each.sampling.scaled(factor),
                estimates=each.estimates and tuple(factor * one for one in each.estimates),
                rival=dataclasses.replace(
                    each.rival, median=usual_ms, interval=each.rival.interval.scaled(factor), p90=None, p99=None
                ),
                starts_corrected=1,
            )
        found.append(each)
    return found


def _is_quiet(found: Comparison) -> bool:
    """Whether neighbours and slow cores left the times of ``found`` as the model's own."""
    unshared = found.undisturbed is not None or found.foreign + found.stolen <= QUIET
    return unshared and found.slowed <= SLOW_SHARE


def _estimates(starts: Sequence[Comparison]) -> tuple[float, ...]:
    """The median over ``starts`` of each estimate; empty unless most starts were disturbed. One that was not has one estimate,
    its ratio."""
    disturbed = [found.estimates for found in starts if found.estimates is not None]
    if 2 * len(disturbed) <= len(starts):
        return ()
    quiet = [found.ratio.value for found in starts if found.estimates is None]
    return tuple(statistics.median([*each, *quiet]) for each in zip(*disturbed, strict=True))


def _trimmed(logs: Sequence[float]) -> tuple[float, float, int]:
    """The mean of ``logs``, the variance of one of them, and the number that counts; trimmed from :data:`TRIMMED_FROM` on."""
    n = len(logs)
    if n < TRIMMED_FROM:
        return statistics.fmean(logs), statistics.variance(logs) if n > 1 else 0.0, n
    ordered, cut = sorted(logs), int(TRIM * n)
    kept = ordered[cut : n - cut]
    winsorized = [*[kept[0]] * cut, *kept, *[kept[-1]] * cut]
    return statistics.fmean(kept), statistics.variance(winsorized) * (n / len(kept)) ** 2, len(kept)


def narrow(starts: Sequence[Comparison]) -> bool:
    """Whether the interval of the pooled ``starts`` is narrow enough to stop; more starts do not reduce what drifts."""
    ratio = pooled(starts, drift=0.0).ratio
    return ratio.high <= WIDE * ratio.low


def number_of_starts(candidate_s: float, rival_s: float, seconds: float) -> int:
    """The number of starts among which ``seconds`` of timing are divided, for calls of this duration.

    Slow calls get fewer, because each start measures at least :data:`~trimtab.measure.pairs.FEW_QUADS` quads.
    """
    each_s = max(LEAST_START_S, FEW_QUADS * 2 * (candidate_s + rival_s))
    return max(1, min(STARTS, int(seconds / each_s)))


class StartTiming(NamedTuple):
    """Duration and quads of the timing in one start."""

    seconds: float
    min_quads: int


def start_timing(seconds: float, count: int) -> StartTiming:
    """The timing of each of ``count`` starts that share ``seconds``: quick calls leave time for further starts."""
    each_s = seconds / count
    return StartTiming(each_s if count < STARTS else min(each_s, START_S), MIN_QUADS if count == 1 else START_QUADS)


def _log_times_at_same_pace(seen: Sequence[Measurement], starts: Sequence[Comparison]) -> list[float]:
    """Logarithms of the times in ``seen`` that were measured at about the pace of the cores in ``starts``. All other times tell
    about the machine only."""
    paces = [pace for found in starts if (pace := _pace(found.rival)) is not None]
    usual = statistics.median(paces) if paces else math.nan
    near = [each for each in seen if (pace := _pace(each)) is not None and abs(math.log(pace / usual)) <= SLOWED]
    return [math.log(each.median) for each in near]


def _spread(logs: Sequence[float]) -> float:
    """The standard deviation of ``logs``, by their median absolute deviation, which one outlier does not move."""
    if len(logs) < 2:
        return 0.0
    middle = statistics.median(logs)
    return statistics.median(abs(each - middle) for each in logs) / normal_quantile(0.75)


def _pace(timed: Measurement) -> float | None:
    pace = timed.conditions.get("pace_ns")
    return float(pace) if isinstance(pace, (int, float)) and pace > 0 else None


def _fork_join(found: Comparison) -> float | None:
    """The rival's time of a parallel operation divided by the pace of its core; ``None`` if it was not measured."""
    ns = found.rival.conditions.get("fork_join_ns")
    return ns / (_pace(found.rival) or 1.0) if isinstance(ns, (int, float)) else None


def _half_width(ratio: Interval) -> float:
    """The wider half of the interval of the ratio's logarithm."""
    return max(math.log(ratio.high / ratio.value), math.log(ratio.value / ratio.low))


def _middle_measurement(found: Sequence[Measurement]) -> Measurement:
    """The middle measurement, with bounds that contain those of all."""
    middle = sorted(found, key=lambda each: each.median)[len(found) // 2]
    low, high = min(each.interval.low for each in found), max(each.interval.high for each in found)
    return dataclasses.replace(middle, n=sum(each.n for each in found), interval=Interval(middle.median, low, high))
