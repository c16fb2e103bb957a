"""cuDNN's benchmark mode."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trimtab.core.candidate import Candidate
from trimtab.core.technique import SettingPass


@dataclass(frozen=True, kw_only=True)
class CudnnBenchmark(SettingPass):
    """Let cuDNN time its convolution algorithms for each new input shape, and use the fastest one.

    Pays off for convolutional networks with one or few input shapes; each new shape costs another search.
    Source: https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
    """

    words = "convolutions chosen by cuDNN's timing"
    modes = frozenset({"train"})
    sets = frozenset({"cudnn_benchmark"})

    def why_not_here(self) -> str | None:
        """Needs a GPU."""
        return None if torch.cuda.is_available() else "cudnn_benchmark needs an NVIDIA GPU, and PyTorch finds none here."

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs a convolution, and training on the GPU."""
        if not candidate.settings.device.startswith("cuda"):
            return f"cudnn_benchmark needs an NVIDIA GPU, and this runs on {candidate.settings.device!r}."
        if not any(isinstance(module, nn.modules.conv._ConvNd) for module in candidate.model.modules()):
            return "cudnn_benchmark needs a convolution, and the model has none."
        return None
