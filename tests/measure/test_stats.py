"""Intervals: do they hold what they promise? Coverage is checked by seeded simulation, invariants by hypothesis."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from trimtab.core.measurement import Drop, Interval, Measurement
from trimtab.errors import UsageError, WorkloadError
from trimtab.measure import quantiles
from trimtab.measure.quantiles import binomial_cdf
from trimtab.measure.stats import (
    MIN_RESAMPLES,
    bootstrap_drop,
    combined,
    mean_upper,
    median_interval,
    paired_drop,
    percentile,
    ratio_interval,
    summarize,
    widened,
)

Blocks = Callable[[np.random.Generator, int], np.ndarray]

positive = st.floats(1e-3, 1e9)
scores = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=40)


def test_stats_imports_no_torch() -> None:
    code = "import sys, trimtab.measure.stats; sys.exit('torch' in sys.modules or 'scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- quantiles: values from the tables of R 4.3 (qt, qbeta) and from closed forms


@pytest.mark.parametrize(
    ("p", "df", "value"),
    [(0.975, 1, 12.7062047), (0.975, 5, 2.57058184), (0.95, 10, 1.81246112), (0.995, 30, 2.74999565), (0.975, 1e6, 1.95996636)],
)
def test_t_quantile(p: float, df: float, value: float) -> None:
    assert quantiles.t_quantile(p, df) == pytest.approx(value, rel=1e-7)
    assert quantiles.t_quantile(1 - p, df) == pytest.approx(-value, rel=1e-6)
    assert quantiles.t_quantile(0.5, df) == 0


def test_the_beta_distribution_in_closed_form() -> None:
    for n in (1, 10, 450, 100_000):
        assert quantiles.beta_quantile(0.95, 1, n) == pytest.approx(1 - 0.05 ** (1 / n), rel=1e-9)
    assert quantiles.beta_quantile(0.95, 10, 1) == pytest.approx(0.95**0.1)


@given(st.floats(0.01, 0.99), st.floats(0.5, 500), st.floats(0.5, 500))
@settings(max_examples=100, deadline=None)
def test_beta_quantile_inverts_the_cdf(p: float, a: float, b: float) -> None:
    x = quantiles.beta_quantile(p, a, b)
    assume(x < 1 - 1e-12)
    assert quantiles.beta_cdf(x, a, b) == pytest.approx(p, abs=1e-9)
    assert quantiles.beta_cdf(1 - x, b, a) == pytest.approx(1 - p, abs=1e-9)


@given(st.integers(1, 60), st.floats(0.01, 0.99))
@settings(deadline=None)
def test_binomial_cdf_is_the_sum_of_its_terms(n: int, p: float) -> None:
    k = n // 3
    terms = sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))
    assert quantiles.binomial_cdf(k, n, p) == pytest.approx(terms, rel=1e-9)


# --- medians and percentiles


@given(st.lists(positive, min_size=1, max_size=80))
def test_median_interval_holds_the_median_and_lies_within_the_samples(samples: list[float]) -> None:
    found = median_interval(samples)
    assert min(samples) <= found.low <= found.value <= found.high <= max(samples)
    assert found.value == pytest.approx(np.median(samples))


@pytest.mark.parametrize("n", [6, 9, 20, 101])
def test_median_interval_covers(n: int) -> None:
    rng = np.random.default_rng(n)
    hits = [(f := median_interval(list(rng.exponential(size=n)))).low <= math.log(2) <= f.high for _ in range(1500)]
    assert np.mean(hits) > 0.94


def test_percentiles_need_enough_samples() -> None:
    assert percentile(range(28), 0.9) is None
    assert percentile(range(29), 0.9) == pytest.approx(25.2)
    assert percentile(range(298), 0.99) is None
    assert percentile(range(299), 0.99) == pytest.approx(np.quantile(range(299), 0.99))
    assert percentile([], 0.5) is None


def test_summarize_says_what_it_rests_on() -> None:
    found = summarize([1_000_000 + i for i in range(40)], unit="ms", conditions={"threads": 2})
    assert isinstance(found, Measurement)
    assert (found.unit, found.n, found.p99) == ("ms", 40, None)
    assert found.median == pytest.approx(1.0000195)
    assert found.p90 is not None
    assert dict(found.conditions) == {"threads": 2}
    wide = summarize([1e6, 2e6] * 50, blocks=[1e6, 2e6, 3e6])
    assert (wide.interval.low, wide.interval.high) == (1, 3), "blocks differ by more than the calls within them tell"
    with pytest.raises(UsageError, match="'minutes' is not a unit of time"):
        summarize([1], unit="minutes")
    with pytest.raises(UsageError, match="at least one sample"):
        summarize([])


# --- ratios


def _normal(rng: np.random.Generator, quads: int) -> np.ndarray:
    return rng.normal(0, 0.02, (quads, 4))


def _noisier(rng: np.random.Generator, quads: int) -> np.ndarray:
    return rng.normal(0, 0.03, (quads, 4))


def _heavy(rng: np.random.Generator, quads: int) -> np.ndarray:
    return 0.01 * rng.standard_t(2, (quads, 4))


def _spikes(rng: np.random.Generator, quads: int) -> np.ndarray:
    return rng.normal(0, 0.01, (quads, 4)) + (rng.random((quads, 4)) < 0.1) * rng.exponential(0.3, (quads, 4))


def _drifting(rng: np.random.Generator, quads: int) -> np.ndarray:
    return np.cumsum(rng.normal(0.002, 0.01, 4 * quads)).reshape(quads, 4)


NOISES = [_normal, _noisier, _heavy, _spikes, _drifting]


def interval_of(logs: np.ndarray, ratio: float = 1.0):  # type: ignore[no-untyped-def]
    times = 1e6 * np.exp(logs)
    candidate, rival = times[:, [0, 3]], times[:, [1, 2]] * ratio
    return ratio_interval(list(rival.ravel()), list(candidate.ravel()))


@pytest.mark.parametrize("quads", [2, 3, 4, 6, 12, 25])
@pytest.mark.parametrize("noise", NOISES)
def test_ratio_interval_covers(noise: Blocks, quads: int) -> None:
    rng = np.random.default_rng(quads)
    found = [interval_of(noise(rng, quads), 1.3) for _ in range(1000)]
    assert np.mean([f.low <= 1.3 <= f.high for f in found]) >= 0.94
    assert np.mean([f.low > 1.3 for f in found]) <= 0.035


@pytest.mark.parametrize("first", [4, 6])
@pytest.mark.parametrize("noise", NOISES)
def test_stopping_when_the_interval_is_narrow_does_not_break_it(noise: Blocks, first: int) -> None:
    rng = np.random.default_rng(7)
    faster = slower = 0
    tries = 800
    for _ in range(tries):
        logs = noise(rng, 40)
        found = next((f for n in range(first, 40) if (f := interval_of(logs[:n])).width <= 0.03), interval_of(logs))
        faster, slower = faster + (found.low > 1), slower + (found.high < 1)
    assert faster / tries <= 0.04
    # 6.7% from four quads and 5.3% from six at the worst noise in 6000 tries; the standard error of 800 is 0.9%
    assert (faster + slower) / tries <= (0.085 if first == 4 else 0.07)


@given(st.lists(st.tuples(positive, positive, positive, positive), min_size=2, max_size=12), st.floats(0.01, 100))
def test_ratio_turns_round_and_scales(quads: list[tuple[float, float, float, float]], factor: float) -> None:
    rival = [t for q in quads for t in q[:2]]
    candidate = [t for q in quads for t in q[2:]]
    found, turned = ratio_interval(rival, candidate), ratio_interval(candidate, rival)
    assert found.low <= found.value <= found.high
    assert found.value * turned.value == pytest.approx(1)
    assert found.low * turned.high == pytest.approx(1)
    scaled = ratio_interval([t * factor for t in rival], candidate)
    assert scaled.value == pytest.approx(found.value * factor)
    assert scaled.low == pytest.approx(found.low * factor)


def test_ratio_refuses_what_has_no_interval() -> None:
    for rival, candidate in (([1.0, 1.0], [1.0, 1.0]), ([1.0] * 4, [1.0] * 6), ([1.0] * 5, [1.0] * 5)):
        with pytest.raises(UsageError, match="at least two quads"):
            ratio_interval(rival, candidate)
    with pytest.raises(UsageError, match="above zero"):
        ratio_interval([1.0, 1.0, 0.0, 1.0], [1.0] * 4)


def test_a_further_uncertainty_adds_in_quadrature() -> None:
    found = widened(Interval(2.0, 2.0 * math.exp(-0.03), 2.0 * math.exp(0.03)), 0.04 / 1.959964)
    assert found.value == 2.0
    assert found.low == pytest.approx(2.0 * math.exp(-0.05))
    assert found.high == pytest.approx(2.0 * math.exp(0.05))
    assert widened(found, 0.0) == Interval(2.0, pytest.approx(found.low), pytest.approx(found.high))


# --- drops


def test_identical_outputs_are_n_examples_of_evidence_and_no_more() -> None:
    same = [1.0] * 440 + [0.0] * 10
    found = paired_drop(same, same, limit=0.01)
    assert found.value == 0
    assert found.upper == pytest.approx(3 / 450, rel=0.01)
    assert found.low == -found.upper
    assert found.decided is True
    tight = paired_drop(same, same, limit=0.005)
    assert tight.decided is None
    assert tight.n_needed == 598, "the n for which 0.995**n is 5%"
    assert paired_drop([1.0] * 598, [1.0] * 598, limit=0.005).decided is True


def test_rounding_noise_in_real_scores_is_no_more_evidence_either() -> None:
    rng = np.random.default_rng(0)
    loss = rng.uniform(0, 2, 300)
    found = paired_drop(loss, loss + 1e-7 * rng.normal(size=300), limit=0.001, higher_is_better=False)
    assert found.upper == pytest.approx(2 * 3 / 300, rel=0.02)
    assert found.decided is None


@pytest.mark.parametrize(("n", "lost", "won"), [(100, 0.03, 0.0), (200, 0.05, 0.04), (450, 0.0067, 0.0), (450, 0.01, 0.005)])
def test_bounds_of_a_binary_drop_hold(n: int, lost: float, won: float) -> None:
    rng, table = np.random.default_rng(1), {}
    inside = []
    for losses, wins, _ in rng.multinomial(n, [lost, won, 1 - lost - won], 2000):
        if (losses, wins) not in table:
            base = [1.0] * losses + [0.0] * (n - losses)
            other = [0.0] * losses + [1.0] * wins + [0.0] * (n - losses - wins)
            found = paired_drop(base, other)
            table[losses, wins] = found.low <= lost - won, lost - won <= found.upper
        inside.append(table[losses, wins])
    assert np.mean(inside, axis=0).min() >= 0.94


def test_bounds_of_a_skewed_real_drop_hold() -> None:
    rng = np.random.default_rng(2)
    hits = []
    for _ in range(200):
        base = rng.uniform(0.5, 1, 150)
        other = np.where(rng.random(150) < 0.02, base - 0.5, base)
        hits.append(paired_drop(base, other).upper >= 0.01)
    assert np.mean(hits) >= 0.93, "a t bound covers 80% here"


def test_seeded_drops_are_caught() -> None:
    rng = np.random.default_rng(3)
    base = (rng.random(2000) < 0.95).astype(float)
    broken = np.where(rng.random(2000) < 0.05, 0.0, base)
    found = paired_drop(base, broken, limit=0.01)
    assert found.decided is False
    assert found.low > 0.01
    assert found.n_needed is None
    assert paired_drop(broken, base, limit=0.01).decided is True


def test_more_examples_cannot_help_where_the_estimate_is_beyond_the_limit() -> None:
    found = paired_drop([1.0] * 100, [1.0] * 98 + [0.0] * 2, limit=0.015)
    assert (found.decided, found.n_needed) == (None, None)
    assert paired_drop([1.0] * 100, [1.0] * 98 + [0.0] * 2).decided is None, "without a limit there is nothing to decide"


def test_the_examples_asked_for_decide() -> None:
    def sample(repeat: int) -> Drop:
        base, other = [1.0] * 200, [0.0] * 2 + [1.0] * 198
        return paired_drop(base * repeat, other * repeat, limit=0.02)

    found = sample(1)
    assert found.decided is None
    assert found.n_needed is not None
    assert sample(math.ceil(1.1 * found.n_needed / 200)).decided is True
    assert sample(max(1, math.floor(0.6 * found.n_needed / 200))).decided is None


@given(scores)
@example([(3.9738113160602815, -1.9556168973372916)] * 3)  # the mean is rounded to beyond the largest value
@settings(max_examples=60, deadline=None)
def test_drop_is_symmetric_and_ordered(pairs: list[tuple[float, float]]) -> None:
    base, other = [p[0] for p in pairs], [p[1] for p in pairs]
    found, turned = paired_drop(base, other), paired_drop(base, other, higher_is_better=False)
    assert found.low <= found.value <= found.upper
    assert found.value == pytest.approx(-turned.value)
    assert found.low == pytest.approx(-turned.upper)
    assert all(map(math.isfinite, (found.low, found.upper)))


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), min_size=1, max_size=30))
@settings(max_examples=40, deadline=None)
def test_a_better_sample_never_has_a_worse_bound(values: list[float]) -> None:
    bound = mean_upper(np.asarray(values), 1.0)
    assert bound <= 1.0
    assert mean_upper(np.asarray([*values[:-1], -1.0]), 1.0) <= bound + 0.01
    assert mean_upper(np.asarray(values * 4), 1.0) <= bound + 0.01


def test_a_share_near_one_can_still_fall_to_nothing() -> None:
    right = [1.0] * 50
    worse = paired_drop(right, [1.0] * 49 + [0.98], limit=0.005)
    assert paired_drop(right, right).upper == pytest.approx(1 - 0.05 ** (1 / 50))
    assert worse.upper > 0.95 * paired_drop(right, right).upper, "who lost something has not proved more"
    assert worse.decided is None
    error = paired_drop([0.0] * 50, [0.0] * 49 + [0.02], higher_is_better=False)
    assert error.upper == pytest.approx(0.02 * quantiles.beta_quantile(0.95, 2, 49)), "an error is no share that can fall"


def test_the_bound_of_a_share_holds_for_a_failure_that_few_samples_show() -> None:
    rng, hits = np.random.default_rng(6), []
    for _ in range(200):
        base = rng.uniform(0.95, 1, 100)
        other = np.where(rng.random(100) < 0.01, 0.0, base)
        hits.append(paired_drop(base, other).upper >= 0.01 * 0.975)
    assert np.mean(hits) >= 0.93, "the spread of what is seen covers 63% here"


def test_scores_that_say_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="one score per example of both sides, but there are 2 of the baseline and 1"):
        paired_drop([1.0, 2.0], [1.0])
    with pytest.raises(UsageError, match="one score per example"):
        paired_drop([], [])
    with pytest.raises(UsageError, match="1 scores are not finite"):
        paired_drop([1.0, math.nan], [1.0, 1.0])


# --- metrics of the whole set


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a, b)[0, 1])


def test_bootstrap_agrees_with_the_paired_bound_on_a_mean() -> None:
    rng = np.random.default_rng(4)
    base = rng.normal(1, 0.3, 400)
    sides = base, base - rng.normal(0.05, 0.2, 400)
    paired = paired_drop(*sides, limit=0.1)
    found = bootstrap_drop(lambda index, which: float(sides[which][index].mean()), 400, limit=0.1)
    assert found.value == pytest.approx(paired.value)
    assert found.upper == pytest.approx(paired.upper, abs=0.006)
    assert found.low == pytest.approx(paired.low, abs=0.006)
    assert found.decided is True
    assert found.method == "bootstrap (2000 resamples)"


def test_bootstrap_of_a_correlation_covers() -> None:
    rng, hits = np.random.default_rng(5), []
    population = rng.normal(size=(200_000, 3))
    target = population[:, 0]
    outputs = target + 0.5 * population[:, 1], target + 0.6 * population[:, 1] + 0.3 * population[:, 2]
    truth = correlation(outputs[0], target) - correlation(outputs[1], target)
    for start in range(0, 150 * 200, 200):
        rows = slice(start, start + 200)
        sides, wanted = [o[rows] for o in outputs], target[rows]
        found = bootstrap_drop(lambda i, which, s=sides, w=wanted: correlation(s[which][i], w[i]), 200, resamples=300)
        hits.append((found.low <= truth, truth <= found.upper))
    assert np.mean(hits, axis=0).min() >= 0.9


def test_bootstrap_of_identical_outputs_is_not_zero() -> None:
    rng = np.random.default_rng(6)
    x = rng.normal(size=300)
    y = x + rng.normal(size=300)
    found = bootstrap_drop(lambda index, which: correlation(x[index], y[index]), 300, limit=0.005)
    assert found.value == 0
    assert found.upper >= 0.7 * 3 / 300
    assert found.decided is None
    assert found.n_needed is not None
    assert found.n_needed > 300


def test_a_metric_that_is_zero_for_both_proves_nothing() -> None:
    for higher in (True, False):
        found = bootstrap_drop(lambda index, which: 0.0, 12, limit=0.0, higher_is_better=higher)
        assert found.decided is None, "a dozen without an error"
        assert found.upper > 0.2


def test_a_failure_costs_an_error_as_much_as_its_complement() -> None:
    wrong = np.zeros(300)
    wrong[::100] = 1.0
    error = bootstrap_drop(lambda index, which: float(wrong[index].mean()), 300, higher_is_better=False, failed=0.9)
    right = bootstrap_drop(lambda index, which: float(1 - wrong[index].mean()), 300, failed=0.1)
    for found in (error, right):
        assert found.upper >= 0.7 * 3 / 300
    assert error.upper == pytest.approx(right.upper, rel=0.15)


def test_bootstrap_is_seeded_and_knows_which_way_is_better() -> None:
    rng = np.random.default_rng(8)
    sides = rng.random(100), rng.random(100)

    def metric(index: np.ndarray, which: int) -> float:
        return float(np.median(sides[which][index]))

    first, again = (bootstrap_drop(metric, 100, resamples=200) for _ in range(2))
    turned = bootstrap_drop(metric, 100, higher_is_better=False, resamples=200)
    assert first == again
    assert turned.value == -first.value
    assert turned.low == pytest.approx(-first.upper, abs=0.05)


def test_a_slow_metric_stops_by_the_clock_and_says_how_far_it_got() -> None:
    rng = np.random.default_rng(9)
    base = rng.normal(1, 0.3, 400)
    sides = base, base - rng.normal(0.05, 0.2, 400)

    def slow(index: np.ndarray, which: int, seconds: float = 0.01) -> float:
        time.sleep(seconds)
        return float(sides[which][index].mean())

    begun = time.perf_counter()
    found = bootstrap_drop(slow, 400, limit=0.2, seconds=0.1)
    assert time.perf_counter() - begun < 1.5, "200 resamples take four seconds"
    count = int(re.fullmatch(r"bootstrap \((\d+) resamples\)", found.method)[1])  # type: ignore[index]
    assert MIN_RESAMPLES <= count <= 11
    assert found.decided is True, "a few resamples decide what is clear"
    assert found.upper - found.value > (paired_drop(*sides).upper - found.value) * 0.5

    slower = bootstrap_drop(lambda index, which: slow(index, which, 0.1), 400, limit=0.2, seconds=0.05)
    assert slower.method == "bootstrap (1 resamples, too few for an interval)"
    assert slower.decided is None


@pytest.mark.parametrize("resamples", [MIN_RESAMPLES, 12, 60])
def test_few_resamples_give_bounds_that_hold(resamples: int) -> None:
    rng, hits, widths = np.random.default_rng(10), [], []
    for _ in range(600):
        sides = rng.normal(1, 0.3, (2, 100))
        found = bootstrap_drop(lambda i, which, s=sides: float(s[which][i].mean()), 100, resamples=resamples)
        hits.append((found.low <= 0, found.upper >= 0))
        widths.append(found.upper - found.low)
    assert np.mean(hits, axis=0).min() >= 0.93
    assert np.mean(widths) < 2.2 * 2 * 1.645 * 0.3 * math.sqrt(2 / 100), "and they still say something"


@pytest.mark.parametrize("resamples", [0, 3, 300])
def test_a_metric_that_adds_up_what_it_is_fed_is_refused(resamples: int) -> None:
    rng = np.random.default_rng(12)
    sides = rng.random(200) < 0.95, rng.random(200) < 0.80
    fed: list[float] = [0.1]  # of the answers that belong to other examples

    def running(index: np.ndarray, which: int) -> float:
        fed.append(float(sides[which][index].mean()))
        return float(np.mean(fed))

    with pytest.raises(WorkloadError, match="for the same outputs and targets. Have it keep nothing from call to call"):
        bootstrap_drop(running, 200, limit=0.01, resamples=resamples)


def test_resamples_that_a_metric_cannot_judge_are_left_out() -> None:
    sides = np.ones(60), np.ones(60)

    def picky(index: np.ndarray, which: int) -> float:
        if len(index) == 60 and index[0] != 0:
            raise ValueError("only one class present")
        return float(sides[which][index].mean())

    found = bootstrap_drop(picky, 60, limit=0.1, resamples=100)
    assert "cannot be resampled" in found.method
    assert found.decided is None
    with pytest.raises(UsageError, match="must be finite"):
        bootstrap_drop(lambda index, which: math.nan, 10)


def test_a_class_that_a_resample_lacks_stops_nothing() -> None:
    rng = np.random.default_rng(11)
    classes = np.append(rng.integers(0, 2, 58), [2, 2])
    sides = classes.copy(), classes.copy()
    sides[1][:2] = 1 - sides[1][:2]

    def of_every_class(index: np.ndarray, which: int, error: type[Exception]) -> float:
        if 2 not in classes[index]:
            raise error("class 2")
        return float(np.mean([np.mean(sides[which][index][classes[index] == c] == c) for c in range(3)]))

    for error in (KeyError, AssertionError, AttributeError, TypeError, StopIteration, ZeroDivisionError):
        found = bootstrap_drop(lambda index, which, e=error: of_every_class(index, which, e), 60, resamples=300)
        assert "cannot" not in found.method
        assert found.method != "bootstrap (300 resamples)", "some had no example of the third class"


@pytest.mark.parametrize("n", [1, 2, 5, 6, 7, 20, 101, 1000])
def test_the_interval_of_a_median_is_the_narrowest_that_holds(n: int) -> None:
    found = median_interval([float(i) for i in range(n)])
    rank = int(found.low)
    assert found.high == n - 1 - rank
    assert rank == 0 or 2 * binomial_cdf(rank, n, 0.5) <= 0.05
    assert rank + 1 >= n / 2 or 2 * binomial_cdf(rank + 1, n, 0.5) > 0.05


def test_two_measurements_of_a_ratio_count_by_the_width_of_their_intervals() -> None:
    equal = combined(Interval(1.1, 1.0, 1.21), Interval(1.1, 1.0, 1.21))
    assert equal.value == pytest.approx(1.1)
    assert math.log(equal.high / equal.low) == pytest.approx(math.log(1.21) / 2**0.5)
    wide = combined(Interval(2.0, 0.5, 8.0), Interval(1.1, 1.09, 1.11))
    assert wide.value == pytest.approx(1.1, rel=0.001)
