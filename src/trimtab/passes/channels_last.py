"""NHWC memory format."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trimtab.candidate import Candidate
from trimtab.contracts import Pass


@dataclass(frozen=True, kw_only=True)
class ChannelsLast(Pass):
    """Store 4-D activations and weights as NHWC, the layout that convolution kernels on CPUs and tensor cores read fastest.

    Pays on convolutional networks; elsewhere it does nothing.
    Source: https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
    """

    name = "channels_last"
    modes = frozenset({"infer", "train"})
    sets = frozenset({"memory_format"})

    def describe(self) -> str:
        """The layout in words."""
        return "channels-last memory layout"

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs a 4-D weight and a 4-D input."""
        if not any(p.dim() == 4 for p in candidate.model.parameters()):
            return "channels_last needs a 2-D convolution, and the model has none."
        if not any(leaf.dim() == 4 for leaf in candidate.leaves):
            return "channels_last needs a 4-D input (batch, channels, height, width), and the model takes none."
        return None

    def apply(self, candidate: Candidate) -> Candidate:
        """A copy of the model with NHWC weights; the settings make backends lay out the inputs alike."""
        model = candidate.own_model()
        lay_out(model)
        return candidate.with_model(model, memory_format="channels_last")


def lay_out(model: nn.Module) -> None:
    """Give ``model`` NHWC weights, in place.

    ``model.to(memory_format=...)`` fails where a 3-D convolution has weights of five dimensions.
    """
    model._apply(_laid_out)  # type: ignore[no-untyped-call]


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
