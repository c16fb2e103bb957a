"""cuDNN's own search."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trimtab.core.candidate import Candidate
from trimtab.core.technique import Pass


@dataclass(frozen=True, kw_only=True)
class CudnnBenchmark(Pass):
    """Have cuDNN time its convolution algorithms for each shape that it meets, and use the fastest from then on.

    Pays on convolutional networks whose inputs keep one shape, or few; each new shape costs another search.
    Source: https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
    """

    name = "cudnn_benchmark"
    modes = frozenset({"train"})
    sets = frozenset({"cudnn_benchmark"})

    def describe(self) -> str:
        """What it is."""
        return "convolutions chosen by cuDNN's timing"

    def why_not_here(self) -> str | None:
        """Needs a GPU."""
        return None if torch.cuda.is_available() else "cudnn_benchmark needs an NVIDIA GPU, and PyTorch finds none here."

    def why_not(self, candidate: Candidate) -> str | None:
        """Must run on that GPU, and have a convolution."""
        if not candidate.settings.device.startswith("cuda"):
            return f"cudnn_benchmark needs an NVIDIA GPU, and this runs on {candidate.settings.device!r}."
        if not any(isinstance(module, nn.modules.conv._ConvNd) for module in candidate.model.modules()):
            return "cudnn_benchmark needs a convolution, and the model has none."
        return None

    def apply(self, candidate: Candidate) -> Candidate:
        """The same model; whoever trains it sets torch's flag."""
        return candidate.with_settings({"cudnn_benchmark": True})
