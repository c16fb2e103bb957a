"""Values with units as people type them: ``4ms``, ``5MB``, ``0.5%``, ``10m``, ``200/s``."""

from __future__ import annotations

import math
import numbers
import re
from typing import TypeVar

from trimtab.errors import UsageError

N = TypeVar("N", int, float)

_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z%µ]*)\s*")
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_MEGABYTES = {"b": 1e-6, "kb": 1e-3, "mb": 1.0, "gb": 1e3, "kib": 1024e-6, "mib": 1024**2 * 1e-6, "gib": 1024**3 * 1e-6}


def seconds(text: str | float, name: str) -> float:
    """A duration such as ``4ms`` or ``10m`` in seconds. A text without a unit is refused; a plain number counts as seconds."""
    return _finite(_with_unit(text, _SECONDS, name, "4ms, 90s or 10m") if isinstance(text, str) else positive(text, name), name)


def megabytes(text: str | float, name: str) -> float:
    """A size such as ``5MB`` or ``1.5GiB`` in megabytes (10**6 bytes)."""
    return _finite(_with_unit(text, _MEGABYTES, name, "5MB or 1.5GB") if isinstance(text, str) else positive(text, name), name)


def per_second(text: str | float, name: str) -> float:
    """A rate such as ``200/s`` or ``12000/min`` per second. A text without a unit is refused; a plain number is per second."""
    if not isinstance(text, str):
        return _finite(positive(text, name), name)
    amount, _, time = text.partition("/")
    unit = _SECONDS.get(time.strip().lower())
    match = _NUMBER.fullmatch(amount)
    if unit is None or match is None or match[2] or not 0 < float(match[1]) < math.inf:
        raise UsageError(f"{name} is {text!r}, which is no rate. Write it like 200/s or 12000/min.")
    return float(match[1]) / unit


def fraction(text: str | float, name: str) -> float:
    """A share such as ``0.5%`` or ``0.005`` as a fraction. Percentages above 100 are refused; plain numbers are not limited."""
    if isinstance(text, (int, float)):
        return float(text)
    number, unit = _split(text, name, "0.5% or 0.005")
    if unit not in ("", "%"):
        raise UsageError(f"{name} is {text!r}: {unit!r} is not a unit of a share. Write it like 0.5% or 0.005.")
    if unit and number > 100:
        raise UsageError(f"{name} is {text!r}, more than all there is. Write it like 0.5% or 0.005.")
    return number / 100 if unit else number


def positive(value: N, name: str, example: str = "") -> N:
    """Return ``value`` if it is a number above zero. ``example`` shows in the error message how to write one.

    Raises:
        UsageError: ``value`` is not a number, or not above zero.
    """
    if not isinstance(value, numbers.Real):
        raise UsageError(f"{name} is {value!r}; it must be a plain number above zero, without a unit.")
    if not value > 0:
        raise UsageError(f"{name} is {value}; it must be above zero.{f' Write it like {example}.' if example else ''}")
    return value


def _finite(value: float, name: str) -> float:
    """Return ``value`` if it is finite."""
    if not math.isfinite(value):
        raise UsageError(f"{name} is too large to be counted. Give a smaller one, or leave it out.")
    return value


def _with_unit(text: str, units: dict[str, float], name: str, example: str) -> float:
    number, unit = _split(text, name, example)
    factor = units.get(unit.lower())
    if factor is None:
        given = f"{unit!r} is not a unit of it" if unit else "the unit is missing"
        raise UsageError(f"{name} is {text!r}: {given}. Write it like {example}.")
    if number == 0:
        raise UsageError(f"{name} is {text!r}; it must be above zero. Write it like {example}.")
    return number * factor


def _split(text: str, name: str, example: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if match is None or not math.isfinite(float(match[1])):
        raise UsageError(f"{name} is {text!r}, which is not a positive number with a unit. Write it like {example}.")
    return float(match[1]), match[2]
