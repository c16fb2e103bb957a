"""Limits that a recipe must keep."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from collections.abc import Callable, Mapping

from trimtab._internal import units
from trimtab._internal.validation import by_name, checked_call
from trimtab.errors import UsageError

PRESETS = {"mlperf-99": 0.01, "mlperf-99.9": 0.001}
"""Accuracy limits by name: the share of the model's own score that may be lost. The values are those of MLPerf Inference."""


@by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that a recipe must keep. ``None`` means no limit, except that ``max_drop=None`` means ``"mlperf-99"``.

    A text with a unit, such as ``latency_ms="4ms"`` or ``max_drop="0.5%"``, is converted to the number in the field's unit.
    """

    max_drop: float | str | None = None
    """Largest drop of the score, in its own unit (0.005 is half a point of accuracy), or ``"mlperf-99"`` or ``"mlperf-99.9"``.
    The *upper* bound of the drop must keep it. In training: the largest increase of the final loss."""
    max_error: float = 0.05
    """Largest root mean square error of the outputs, relative to their standard deviation. Used if there are no labels."""
    latency_ms: float | None = None
    """Largest median latency of one call on the example, in milliseconds."""
    memory_mb: float | None = None
    """Largest peak memory in MB (10**6 bytes) of a fresh process that loads and calls the model, or trains it, above its memory
    after importing torch."""
    size_mb: float | None = None
    """Largest size of the runtime's files, in MB (10**6 bytes)."""
    throughput: float | None = None
    """Least examples per second, where throughput is the objective."""

    def __post_init__(self) -> None:
        if isinstance(self.max_drop, str) and self.max_drop not in PRESETS and not re.match(r"\s*[0-9.]", self.max_drop):
            raise UsageError(f"max_drop is {self.max_drop!r}; use a number like 0.005 or one of {', '.join(PRESETS)}.")
        for field in dataclasses.fields(self):
            value, (read, example) = getattr(self, field.name), _READ[field.name]
            preset = field.name == "max_drop" and isinstance(value, str) and value in PRESETS
            if isinstance(value, str) and not preset:
                object.__setattr__(self, field.name, value := read(value, field.name))
            if value is not None and not preset and not isinstance(value, numbers.Real):
                raise UsageError(f"{field.name} is {value!r}; give a number or a text with a unit, such as {example!r}.")
            if isinstance(value, numbers.Real) and not isinstance(value, (int, float)):  # such as a numpy number
                object.__setattr__(self, field.name, value := float(value))
            if isinstance(value, float) and not math.isfinite(value):
                way_out = "Give a large one, such as 1e9" if field.name.startswith("max_") else "Leave it out for none"
                raise UsageError(f"{field.name} is {value}; a limit is a finite number. {way_out}.")
            if isinstance(value, (int, float)) and not (value >= 0 if field.name == "max_drop" else value > 0):
                raise UsageError(f"{field.name} is {value}; a limit is a positive number.")

    @classmethod
    @checked_call("Limits.parse")
    def parse(
        cls,
        *,
        max_drop: str | None = None,
        max_error: str | None = None,
        latency: str | None = None,
        memory: str | None = None,
        size: str | None = None,
        throughput: str | None = None,
    ) -> Limits:
        """Limits from the texts of the command line: ``0.5%``, ``4ms``, ``500MB``, ``200/s``.

        Raises:
            UsageError: a unit is missing or wrong, or a text is not a number.
        """
        drop = max_drop if max_drop is None or max_drop in PRESETS else units.fraction(max_drop, "--max-drop")
        return cls(
            max_drop=drop,
            max_error=cls.max_error if max_error is None else _error(max_error, "--max-error"),
            latency_ms=None if latency is None else _milliseconds(latency, "--latency"),
            memory_mb=None if memory is None else units.megabytes(memory, "--memory"),
            size_mb=None if size is None else units.megabytes(size, "--size"),
            throughput=None if throughput is None else units.per_second(throughput, "--throughput"),
        )

    def drop_limit(self, baseline_score: float) -> float:
        """The largest drop in score units. A preset is a share of ``baseline_score``; the default preset is ``mlperf-99``."""
        if isinstance(self.max_drop, (int, float)):
            return float(self.max_drop)
        return PRESETS[self.max_drop or "mlperf-99"] * abs(baseline_score)


def _error(text: str, name: str) -> float:
    """Parse a ``max_error``. Numbers from 1 to 100 without ``%`` are refused as forgotten percent signs."""
    found = units.fraction(text, name)
    if "%" not in text and 1 <= found < 100:
        raise UsageError(
            f"{name} is {text!r}, which allows outputs to be off by {found:.0%} of what they vary by. If {found:g}% was "
            f"meant, write {name}{' ' if name.startswith('-') else '='}{found:g}%."
        )
    return found


def _milliseconds(text: str, name: str) -> float:
    return 1e3 * units.seconds(text, name)


_READ: Mapping[str, tuple[Callable[[str, str], float], str]] = {
    "max_drop": (units.fraction, "0.5%"),
    "max_error": (_error, "5%"),
    "latency_ms": (_milliseconds, "4ms"),
    "memory_mb": (units.megabytes, "500MB"),
    "size_mb": (units.megabytes, "5MB"),
    "throughput": (units.per_second, "200/s"),
}
"""Limit -> the function that reads it from a text, and an example of such a text."""
