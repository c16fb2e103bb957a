"""Examples per forward pass of a training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from trimtab.core.candidate import Candidate
from trimtab.core.technique import Choice, Pass


@dataclass(frozen=True, kw_only=True)
class MicroBatch(Pass):
    """Take the loader's batches apart and accumulate the gradients of the parts, so that an update stays what it was.

    Pays where the activations of a whole batch fall out of the processor's caches, or do not fit into memory. Where BatchNorm
    looks at batches, or dropout draws masks, a part is not a whole: losses then differ by more than rounding, and show it.
    Source: Ott et al. 2018, https://arxiv.org/abs/1806.00187
    """

    name = "micro_batch"
    modes = frozenset({"train"})
    sets = frozenset({"data.micro_batch"})

    size: Annotated[int, Choice(4, 8, 16, 32, 64, 128, 256)] = 32
    """Examples per part."""

    def describe(self) -> str:
        """Says the number."""
        return f"{self.size} examples per forward pass"

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs batches that are larger."""
        rows = next((leaf.shape[0] for leaf in candidate.leaves if leaf.dim()), 1)
        if self.size >= rows:
            return f"micro_batch takes batches apart that have more than {self.size} examples, and these have no more."
        return None

    def apply(self, candidate: Candidate) -> Candidate:
        """The same model; the Trainer takes the batches apart."""
        return candidate.with_settings({"data.micro_batch": self.size})
