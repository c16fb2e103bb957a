"""Compilation while training."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab.core.candidate import Candidate
from trimtab.core.technique import Pass
from trimtab.hardware.system import no_compiler


@dataclass(frozen=True, kw_only=True)
class Compile(Pass):
    """Train through ``torch.compile``, which fuses element-wise work and leaves Python out of the forward and backward pass.

    Pays on runs that are long enough for what compiling costs, from seconds to minutes, and where shapes seldom change: each
    new one may be compiled again. For inference the backends ``inductor`` and ``aoti`` do the same.
    Source: Ansel et al. 2024, https://pytorch.org/assets/pytorch2-2.pdf
    """

    name = "compile"
    modes = frozenset({"train"})
    sets = frozenset({"compile"})

    def describe(self) -> str:
        """What it is."""
        return "compiled by torch.compile"

    def why_not_here(self) -> str | None:
        """Needs a C++ compiler, or a GPU."""
        return None if torch.cuda.is_available() else no_compiler()

    def why_not(self, candidate: Candidate) -> str | None:
        """On a CPU, needs a C++ compiler, whatever GPU there is beside it."""
        return no_compiler() if candidate.settings.device == "cpu" else None

    def apply(self, candidate: Candidate) -> Candidate:
        """The same model; the Trainer compiles it."""
        return candidate.with_settings({"compile": True})
