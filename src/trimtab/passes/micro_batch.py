"""Micro-batch size of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from trimtab.core.candidate import Candidate
from trimtab.core.technique import Choice, SettingPass


@dataclass(frozen=True, kw_only=True)
class MicroBatch(SettingPass):
    """Split the loader's batches and accumulate the gradients of the parts. Updates stay the same.

    Pays off if the activations of a whole batch exceed the processor's caches or the memory. With BatchNorm or dropout, parts
    do not give the same result as the whole; the losses then differ by more than rounding.
    Source: Ott et al. 2018, https://arxiv.org/abs/1806.00187
    """

    words = "{size} examples per forward pass"
    modes = frozenset({"train"})
    sets = frozenset({"data.micro_batch"})

    size: Annotated[int, Choice(4, 8, 16, 32, 64, 128, 256)] = 32
    """Examples per part."""

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs larger batches than ``size``."""
        rows = next((leaf.shape[0] for leaf in candidate.leaves if leaf.dim()), 1)
        if self.size >= rows:
            return f"micro_batch takes batches apart that have more than {self.size} examples, and these have no more."
        return None
