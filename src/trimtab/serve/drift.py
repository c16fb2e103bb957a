"""Drift in production: output errors against a reference model, and inputs outside of the range of the test vectors."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from trimtab.core.measurement import Interval
from trimtab.measure.quantiles import t_quantile
from trimtab.serve.protocol import Bytes, TensorFormat

WINDOW = 1000
"""Number of latest comparisons that the mean and the alarm are computed from."""
MIN_COMPARISONS = 10
"""Comparisons before an error above its tolerance can raise the alarm."""
LABELS = ("model", "version")
STATISTICS = ("low", "high", "mean", "std")


class OutputDrift:
    """Relative errors of served outputs against the reference, the last :data:`WINDOW` of them."""

    def __init__(self, outputs: Sequence[str], tolerances: Sequence[float]) -> None:
        self.tolerances = dict(zip(outputs, tolerances, strict=True))
        self.counts: collections.Counter[str] = collections.Counter()
        """``compared``; ``broken``: an output was not finite or had another shape, the reference's was right; ``incomparable``:
        the reference gave no finite output; ``skipped``: the reference was busy."""
        self.up = True
        """Whether the process of the reference runs."""
        self._recent: collections.deque[list[float | None]] = collections.deque(maxlen=WINDOW)

    def add(self, errors: list[float | None] | None) -> None:
        """Count one comparison; see :meth:`trimtab.serve.reference.Reference.compare`."""
        if errors is None:
            self.counts["incomparable"] += 1
            return
        self.counts["broken" if None in errors else "compared"] += 1
        self._recent.append(errors)

    def intervals(self) -> dict[str, Interval]:
        """Mean error and 95% interval of each output that has at least two comparisons."""
        found = {}
        for index, name in enumerate(self.tolerances):
            errors = [error for one in self._recent if (error := one[index]) is not None]
            if len(errors) > 1:
                mean = float(np.mean(errors))
                half = t_quantile(0.975, len(errors) - 1) * float(np.std(errors, ddof=1)) / math.sqrt(len(errors))
                found[name] = Interval(mean, mean - half, mean + half)
        return found

    @property
    def alarm(self) -> bool:
        """Whether the interval of an output lies above its tolerance, or one of the last outputs was broken."""
        if any(None in errors for errors in self._recent):
            return True
        enough = len(self._recent) >= MIN_COMPARISONS
        return enough and any(one.low > self.tolerances[name] for name, one in self.intervals().items())

    def statistics(self) -> dict[str, Any]:
        """The figures as JSON."""
        intervals = self.intervals()
        errors = [
            {"output": name, "tolerance": allowed, **({"mean": one.value, "low": one.low, "high": one.high} if one else {})}
            for name, allowed in self.tolerances.items()
            for one in [intervals.get(name)]
        ]
        return {"alarm": self.alarm, "up": self.up, "compared": self.counts["compared"], **self.counts, "errors": errors}


class InputDrift:
    """Values of sampled requests beside the range, mean and standard deviation of the artifact's test vectors."""

    def __init__(self, formats: Sequence[TensorFormat], known: Sequence[dict[str, Any] | None]) -> None:
        self.formats, self.known = formats, known
        self.counts = [collections.Counter[str]() for _ in formats]
        """Per input: values ``sampled``, of them ``nan`` and ``outside`` of the known range; infinities are outside. For
        integers and booleans ``unseen`` ones, too, which no test vector holds, if those hold few different values."""
        self._sums = [np.zeros(3) for _ in formats]
        self._bounds = [(math.inf, -math.inf) for _ in formats]

    def add(self, tensors: Sequence[Bytes]) -> None:
        """Count the inputs of one request."""
        for index, (form, tensor) in enumerate(zip(self.formats, tensors, strict=True)):
            if not len(tensor):
                continue
            values = np.frombuffer(tensor, form.code)
            if form.datatype == "BF16":
                values = (values.astype("u4") << 16).view("f4")
            values = values.astype("f8")
            nan = np.isnan(values)
            counts, known = self.counts[index], self.known[index]
            counts["sampled"] += values.size
            counts["nan"] += int(nan.sum())
            if known is not None:
                if "values" in known:
                    counts["unseen"] += int((~np.isin(values, known["values"])).sum())
                counts["outside"] += int(((values < known["low"]) | (values > known["high"])).sum())
            values = values[np.isfinite(values)]
            if values.size:
                self._sums[index] += (values.size, values.sum(), np.square(values).sum())
                low, high = self._bounds[index]
                self._bounds[index] = min(low, float(values.min())), max(high, float(values.max()))

    def seen(self, index: int) -> dict[str, float] | None:
        """Range, mean and standard deviation of the finite values that were sampled."""
        count, total, squares = self._sums[index].tolist()
        if not count:
            return None
        low, high = self._bounds[index]
        mean = total / count
        return {"low": low, "high": high, "mean": mean, "std": math.sqrt(max(squares / count - mean * mean, 0.0))}

    def statistics(self) -> list[dict[str, Any]]:
        """The figures as JSON."""
        return [
            {"input": form.name, **self.counts[i], "artifact": self.known[i], "requests": self.seen(i)}
            for i, form in enumerate(self.formats)
        ]


def drift_metrics(found: Iterable[tuple[str, str, OutputDrift | None, InputDrift | None]]) -> Iterator[Metric]:
    """Prometheus metrics of each version, from (model, version, drift of its outputs, drift of its inputs)."""
    counts = CounterMetricFamily(
        "trimtab_shadow_requests", "Requests compared with the reference.", labels=[*LABELS, "outcome"]
    )
    errors = GaugeMetricFamily(
        "trimtab_shadow_error", "Relative error of an output: mean and 95% interval.", labels=[*LABELS, "output", "statistic"]
    )
    tolerance = GaugeMetricFamily("trimtab_shadow_tolerance", "Error that the artifact allows.", labels=[*LABELS, "output"])
    alarm = GaugeMetricFamily("trimtab_shadow_alarm", "1 if the error is above the tolerance.", labels=LABELS)
    up = GaugeMetricFamily("trimtab_shadow_up", "1 if the process of the reference runs.", labels=LABELS)
    values = CounterMetricFamily("trimtab_input_values", "Values of sampled requests.", labels=[*LABELS, "input", "kind"])
    statistic = GaugeMetricFamily(
        "trimtab_input", "Inputs of the test vectors and of sampled requests.", labels=[*LABELS, "input", "of", "statistic"]
    )
    for model, version, outputs, inputs in found:
        labels = [model, version]
        if outputs is not None:
            for outcome in ("compared", "broken", "incomparable", "skipped"):
                counts.add_metric([*labels, outcome], outputs.counts[outcome])
            for name, one in outputs.intervals().items():
                for word, value in (("mean", one.value), ("low", one.low), ("high", one.high)):
                    errors.add_metric([*labels, name, word], value)
            for name, allowed in outputs.tolerances.items():
                tolerance.add_metric([*labels, name], allowed)
            alarm.add_metric(labels, outputs.alarm)
            up.add_metric(labels, outputs.up)
        for index, form in enumerate(() if inputs is None else inputs.formats):
            assert inputs is not None
            for kind in ("sampled", "nan", "outside", *(["unseen"] if "values" in (inputs.known[index] or {}) else [])):
                values.add_metric([*labels, form.name, kind], inputs.counts[index][kind])
            for of, figures in (("artifact", inputs.known[index]), ("requests", inputs.seen(index))):
                for word in STATISTICS if figures else ():
                    assert figures is not None
                    statistic.add_metric([*labels, form.name, of, word], figures[word])
    yield from (counts, errors, tolerance, alarm, up, values, statistic)
