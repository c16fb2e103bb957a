"""Only the largest gradients cross."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.futures import Future

from trimtab.train.distributed.exchange import Errors, Exchange


class TopK(Exchange):
    """The largest ``share`` of each bucket's numbers crosses, with their places; the rest is kept and added to the next.

    Picked from each gradient for itself, they would serve worse: in tests the loss came 4% behind, instead of within 2%.

    What crosses is two numbers of four bytes for each one kept, from each process to each other. So it pays for few processes
    on a slow network: the traffic grows with their number, which that of a sum does not.

    Source: Lin et al. 2018, https://arxiv.org/abs/1712.01887
    """

    def __init__(self, share: float = 0.01) -> None:
        super().__init__()
        self.share, self.errors = share, Errors()

    def reset(self) -> None:
        """Forget what was left out, too, which holds a part of the update that is made again."""
        super().reset()
        self.errors = Errors()

    def state_dict(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What was left out."""
        return {"errors": self.errors.state_dict(parameters)}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], parameters: Mapping[str, torch.Tensor]) -> bool:
        """Take up what an earlier run left out."""
        self.errors.load_state_dict([state.get("errors", {}) for state in states], parameters)
        return True

    def add_up(self, parameters: Sequence[torch.Tensor], flat: torch.Tensor) -> Future[torch.Tensor]:
        """The sum of what all processes picked, zero elsewhere."""
        kept = self.errors.of(parameters, flat)
        kept += flat
        count = max(int(self.share * flat.numel()), 1)
        places = kept.abs().topk(count, sorted=False).indices
        values = kept[places].float()
        kept[places] = 0
        kept.nan_to_num_(0.0, 0.0, 0.0)  # what is no number spoils this update, among what is picked, and none after it
        packed, future = self.collected(torch.cat([values, places.int().view(torch.float32)]))

        def spread(done: Future[torch.Tensor]) -> torch.Tensor:
            done.value()
            flat.zero_()
            for row in packed:
                flat.index_add_(0, row[count:].view(torch.int32), row[:count].to(flat.dtype))
            return flat

        return future.then(spread)
