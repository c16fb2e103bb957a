"""Metrics of a validation: means of one value per example, or values of the whole set, such as F1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import torch

from trimtab._internal.text import of_type
from trimtab._internal.validation import refuses
from trimtab.core.workload import user_code
from trimtab.errors import UsageError, WorkloadError
from trimtab.train.loss.adapter import Batch, examples, is_pair
from trimtab.train.runtime.world import World, wide


@runtime_checkable
class Whole(Protocol):
    """A metric of the whole set, such as F1, with the interface of torchmetrics."""

    def reset(self) -> None:
        """Begin a validation."""

    def update(self, outputs: Any, targets: Any) -> None:
        """Take a batch into account, without changing it."""

    def compute(self) -> Any:
        """One number for all batches since :meth:`reset`; with several processes, for those of all processes."""


Metric = Callable[[Any, Any], Any] | Whole
"""``metric(outputs, targets)`` -> one value per example, shape ``(examples,)``; or a :class:`Whole`. It must not change the
outputs, which the loss and other metrics get too."""


def checked_metrics(metrics: Mapping[str, Metric] | None) -> dict[str, Metric]:
    """``metrics``, after a check that each can be called with outputs and targets.

    Raises:
        UsageError: one of them cannot.
    """
    fix = "Give them by name: metrics={'accuracy': lambda outputs, targets: outputs.argmax(1) == targets}."
    found = dict(metrics or {})
    for name, metric in found.items():
        if isinstance(metric, type):
            raise UsageError(f"The metric {name!r} is {metric.__name__}, a class. Give what it makes: {metric.__name__}(...).")
        function = metric.update if isinstance(metric, Whole) else metric
        if not callable(function):
            raise UsageError(f"The metric {name!r} is {metric!r}, which cannot be called. {fix}")
        if error := refuses(function, None, None):
            raise UsageError(f"The metric {name!r} cannot be called with (outputs, targets): {error}. {fix}")
    return found


class Figures:
    """Computes ``metrics`` over the batches of one validation."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self.metrics = metrics
        self._values: dict[str, list[torch.Tensor]] = {name: [] for name in metrics}
        self.batched: list[str] = []
        """Names of metrics that gave one number for a batch of several examples."""
        for name, metric in metrics.items():
            if isinstance(metric, Whole):
                with user_code(f"reset() of the metric {name!r} raised"):
                    metric.reset()

    def add(self, outputs: Any, batch: Batch) -> None:
        """Count a batch.

        Raises:
            WorkloadError: a metric raised, or gives something else than numbers.
        """
        for name, metric in self.metrics.items():
            if isinstance(metric, Whole):
                with user_code(f"update() of the metric {name!r} raised"):
                    metric.update(outputs, _targets(batch))
            else:
                self._values[name].append(self._per_example(name, metric, outputs, batch))

    def remark(self) -> str | None:
        """A sentence if a mean over batches may differ from the value of the whole set."""
        names = [name for name in self.batched if len(self._values[name]) > 1]
        if not names:
            return None
        return (
            f"metrics={{{', '.join(map(repr, names))}}} gave one number per batch, of which the mean is shown. Where that is "
            "not what the whole set has, as with an F1, give one value per example, or an object with reset(), "
            "update(outputs, targets) and compute(), as those of torchmetrics are."
        )

    def values(self, world: World) -> dict[str, float]:
        """The value of each metric over all processes; a collective operation.

        Raises:
            WorkloadError: a metric raised, gives no number, or several processes each have one of their own.
        """
        found: dict[str, float] = {}
        for name, metric in self.metrics.items():
            if isinstance(metric, Whole):
                with world.together():
                    value = _number(name, metric)
                if len(set(map(str, world.gathered(value)))) > 1:
                    raise WorkloadError(
                        f"compute() of the metric {name!r} gave each process the figure of its own share. Let it bring "
                        "together what all have seen, as those of torchmetrics do, or give one value per example."
                    )
                found[name] = value
            else:
                parts = self._values[name]
                means, counts = [wide(part).mean() for part in parts], [float(part.numel()) for part in parts]
                found[name] = float(world.mean(means, counts, summed=False)[0])
        return found

    def _per_example(self, name: str, metric: Callable[[Any, Any], Any], outputs: Any, batch: Batch) -> torch.Tensor:
        with user_code(f"The metric {name!r} raised"):
            given = metric(outputs, _targets(batch))
        try:
            found = torch.as_tensor(given)
        except (RuntimeError, TypeError, ValueError) as error:
            raise WorkloadError(
                f"The metric {name!r} gave {of_type(given)}. Let it give one value per example; several figures are several "
                "metrics."
            ) from error
        if found.dim() == 0:
            if (count := examples(batch)) > 1 and name not in self.batched:
                self.batched.append(name)
            found = found.expand(count)
        return found.reshape(-1)


def _targets(batch: Batch) -> Any:
    """The targets of ``batch``; the whole batch if it is no pair, as for a model that takes its labels as inputs."""
    return batch[1] if is_pair(batch) else batch


def _number(name: str, metric: Whole) -> float:
    """``metric.compute()`` as a float."""
    with user_code(f"compute() of the metric {name!r} raised"):
        found = metric.compute()
    if isinstance(found, torch.Tensor) and found.numel() == 1 and not found.is_complex():
        return float(found)
    if isinstance(found, Real):
        return float(found)
    raise WorkloadError(
        f"compute() of the metric {name!r} gave {of_type(found)}, not one number. Several figures are several metrics, each "
        "with its name."
    )
