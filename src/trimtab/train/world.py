"""The processes that train together: how many they are, and what crosses between them. Here: one alone."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import nn

from trimtab.train.objective import Weight


class World:
    """A process that trains alone; ``distributed/`` has those that do not."""

    rank: int = 0
    size: int = 1
    averages: bool = False
    """Whether gradients are divided by the number of processes on their way, as DDP and FSDP do."""

    def exchanging(self, model: nn.Module, *, now: bool) -> contextlib.AbstractContextManager[object]:
        """A block whose backward pass exchanges gradients with the other processes only if ``now``."""
        return contextlib.nullcontext()

    def mean(
        self, losses: Sequence[torch.Tensor], weights: Sequence[Weight], *, summed: bool
    ) -> tuple[torch.Tensor, Weight | None]:
        """The mean of all losses of an update (the sum, if they are ``summed``), and the weight of all of them.

        The weight is ``None`` where there is only one loss, whose weight makes no difference.
        """
        if len(losses) == 1:
            return losses[0], None
        if summed:
            return torch.stack(list(losses)).sum(), None
        count, value = weighted(losses, weights)
        return value / count, count

    def norm(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm of the gradient of all parameters, wherever they lie."""
        return torch.nn.utils.get_total_norm(grads)

    def agreed(self, value: float) -> float:
        """The same number in all processes: the mean of what they give."""
        return value

    def any(self, truth: bool) -> bool:
        """Whether it is true in any process."""
        return truth

    def barrier(self) -> None:
        """Wait until every process is here."""
        return None


def weighted(losses: Sequence[torch.Tensor], weights: Sequence[Weight]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the weights, and of the losses times their weights; a loss that weighs nothing counts for nothing."""
    values = torch.stack(list(losses)).double()
    counts = torch.stack([torch.as_tensor(w, dtype=torch.float64, device=values.device) for w in weights])
    return counts.sum(), torch.where(counts > 0, values * counts, 0.0).sum()
