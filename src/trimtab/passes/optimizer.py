"""How the optimizer's arithmetic is carried out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trimtab.core.candidate import Candidate
from trimtab.core.technique import Pass


@dataclass(frozen=True, kw_only=True)
class OptimizerKernels(Pass):
    """Update all parameters in few kernels instead of one operation at a time and parameter by parameter.

    Pays where parameters are many or large: an update in the plain loop reads and writes every tensor several times over.
    Which of torch's optimizers have which implementation is theirs to say; the Trainer declines what they have not.
    Source: https://docs.pytorch.org/docs/stable/optim.html#algorithms
    """

    name = "optimizer"
    modes = frozenset({"train"})
    sets = frozenset({"optimizer.implementation"})

    kernels: Literal["fused", "foreach"] = "fused"
    """``fused`` makes the whole update one kernel; ``foreach`` makes each of its operations one kernel for all parameters."""

    def describe(self) -> str:
        """Says which."""
        return f"{self.kernels} optimizer"

    def apply(self, candidate: Candidate) -> Candidate:
        """The same model; the Trainer tells the optimizer."""
        return candidate.with_settings({"optimizer.implementation": self.kernels})
