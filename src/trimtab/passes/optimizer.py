"""Choice of the optimizer's implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trimtab.core.technique import SettingPass


@dataclass(frozen=True, kw_only=True)
class OptimizerKernels(SettingPass):
    """Update all parameters with few kernels, instead of one operation and parameter at a time.

    Pays off for many or large parameters: the plain loop reads and writes every tensor several times. Not every torch optimizer
    has every implementation; the Trainer refuses missing ones.
    Source: https://docs.pytorch.org/docs/stable/optim.html#algorithms
    """

    words = "{kernels} optimizer"
    modes = frozenset({"train"})
    sets = frozenset({"optimizer.implementation"})

    kernels: Literal["fused", "foreach"] = "fused"
    """``fused``: one kernel for the whole update. ``foreach``: one kernel per operation, for all parameters."""
