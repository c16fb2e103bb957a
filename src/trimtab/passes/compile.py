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
    ``kernels="max-autotune-no-cudagraphs"``, a mode of ``torch.compile``, times several kernels for each product, which takes
    minutes. ``kernels="coordinate_descent_tuning"``, an option of TorchInductor, times the block sizes of the kernels that are
    generated. Both change kernels for GPUs: in training, TorchInductor calls the same products on a CPU. ``dynamic`` makes
    code for all sizes at once: it is slower, and spares compilations if the lengths of batches differ.
    Source: Ansel et al. 2024, https://pytorch.org/assets/pytorch2-2.pdf
    """

    modes = frozenset({"train"})
    sets = frozenset({"compile", "compiler.mode", "compiler.dynamic", "compiler.options"})

    kernels: Literal["default", "max-autotune-no-cudagraphs", "coordinate_descent_tuning"] = "default"
    """How kernels are chosen."""
    dynamic: Annotated[bool, Choice(False, True)] = False
    """Whether code is made for all sizes at once."""

    def describe(self) -> str:
        """Names the compiler and what it was asked for."""
        kernels = "" if self.kernels == "default" else f", {self.kernels}"
        return f"compiled by torch.compile{kernels}{', for all sizes at once' if self.dynamic else ''}"

    def why_not_here(self) -> str | None:
        """Needs a C++ compiler, or a GPU."""
        return None if torch.cuda.is_available() else no_compiler()

    def why_not(self, candidate: Candidate) -> str | None:
        """Training on the CPU needs a C++ compiler even if there is a GPU, and gets no other kernels. A mode or options in the
        settings stay."""
        compiler = candidate.settings.compiler
        if self.kernels != "default" and (compiler.mode is not None or compiler.options is not None):
            return "compile would choose kernels, and the settings give the compiler a mode or options, which stay."
        if candidate.settings.device != "cpu":
            return None
        if self.kernels != "default":
            return f"compile with {self.kernels} changes kernels for GPUs only."
        return no_compiler()

    def apply(self, candidate: Candidate) -> Candidate:
        """The same model with the setting ``compile``; the Trainer compiles it. Defaults keep what the settings ask for."""
        asked: dict[str, Any] = {"compile": True}
        if self.kernels == "coordinate_descent_tuning":
            asked["compiler.options"] = {self.kernels: True}
        elif self.kernels != "default":
            asked["compiler.mode"] = self.kernels
        asked |= {"compiler.dynamic": True} if self.dynamic else {}
        return candidate.with_settings(asked)
