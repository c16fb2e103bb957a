"""torch.compile for training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from trimtab.core.candidate import Candidate
from trimtab.core.technique import Choice, Pass
from trimtab.hardware.system import no_compiler


@dataclass(frozen=True, kw_only=True)
class Compile(Pass):
    """Train through ``torch.compile``, which fuses element-wise operations and removes Python from forward and backward pass.

    Pays off if the run is long compared with the compile time, from seconds to minutes, and shapes seldom change: each new
    shape may be compiled again. For inference, use the backends ``inductor`` and ``aoti``.
    ``mode="max-autotune-no-cudagraphs"`` times several kernels for each product, which takes minutes. ``dynamic`` makes code
    for all sizes at once: it is slower, and spares compilations if the lengths of batches differ.
    Source: Ansel et al. 2024, https://pytorch.org/assets/pytorch2-2.pdf
    """

    modes = frozenset({"train"})
    sets = frozenset({"compile", "compiler.mode", "compiler.dynamic"})

    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """What the compiler optimizes for."""
    dynamic: Annotated[bool, Choice(False, True)] = False
    """Whether code is made for all sizes at once."""

    def describe(self) -> str:
        """Names the compiler and what it was asked for."""
        mode = "" if self.mode == "default" else f", mode {self.mode}"
        return f"compiled by torch.compile{mode}{', for all sizes at once' if self.dynamic else ''}"

    def why_not_here(self) -> str | None:
        """Needs a C++ compiler, or a GPU."""
        return None if torch.cuda.is_available() else no_compiler()

    def why_not(self, candidate: Candidate) -> str | None:
        """Training on the CPU needs a C++ compiler even if there is a GPU; options of the compiler leave no mode to choose."""
        if self.mode != "default" and candidate.settings.compiler.options is not None:
            return "compile has a mode, and the settings give the compiler options of their own, which stand in its place."
        return no_compiler() if candidate.settings.device == "cpu" else None

    def apply(self, candidate: Candidate) -> Candidate:
        """The same model with the setting ``compile``; the Trainer compiles it. Defaults keep what the settings ask for."""
        asked: dict[str, Any] = {"compile": True}
        asked |= {} if self.mode == "default" else {"compiler.mode": self.mode}
        asked |= {"compiler.dynamic": True} if self.dynamic else {}
        return candidate.with_settings(asked)
