"""Quantiles of the normal, t and beta distributions, so that scipy need not be a dependency."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import NormalDist

CONFIDENCE = 0.95
"""Confidence level of every interval, and of every single bound of a drop."""

_NORMAL = NormalDist()
_TINY = 1e-300


def normal_quantile(p: float) -> float:
    """The value below which a standard normal variable falls with probability ``p``."""
    return _NORMAL.inv_cdf(p)


@lru_cache(maxsize=1024)
def t_quantile(p: float, df: float) -> float:
    """The ``p`` quantile of Student's t with ``df`` degrees of freedom."""
    if p == 0.5:
        return 0.0
    if p < 0.5:
        return -t_quantile(1 - p, df)
    # P(T <= t) = 1 - I(df / (df + t^2); df/2, 1/2) / 2, solved for the argument of I
    x = beta_quantile(2 * (1 - p), df / 2, 0.5)
    return math.sqrt(df * (1 - x) / max(x, _TINY))


@lru_cache(maxsize=1024)
def beta_quantile(p: float, a: float, b: float) -> float:
    """The ``p`` quantile of a beta variable with shapes ``a`` and ``b``, by bisection on the logit."""
    return _bisect(lambda x: beta_cdf(x, a, b), p)


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I(x; a, b): Lentz' continued fraction (Numerical Recipes, section 6.4)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    front = math.exp(log_front)
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(x, a, b) / a
    return 1 - front * _beta_fraction(1 - x, b, a) / b


def quantile_of(samples: Sequence[float], q: float) -> float:
    """The ``q``-quantile of ``samples``, interpolated linearly between neighbours."""
    ordered = sorted(samples)
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def binomial_cdf(k: int, n: int, p: float) -> float:
    """The probability of at most ``k`` successes in ``n`` tries."""
    return 1.0 if k >= n else 0.0 if k < 0 else beta_cdf(1 - p, n - k, k + 1)


def _bisect(cdf: Callable[[float], float], p: float) -> float:
    low, high = -700.0, 36.0  # logits: from 1e-304 to the last double below 1
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if cdf(_logistic(middle)) < p else (low, middle)
    return _logistic((low + high) / 2)


def _logistic(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit > 0 else math.exp(logit) / (1 + math.exp(logit))


def _beta_fraction(x: float, a: float, b: float) -> float:
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    total = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away_from_zero(1 + term * d)
            c = _away_from_zero(1 + term / c)
            total *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return total


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
