"""NHWC memory format."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.core.candidate import Candidate
from trimtab.core.technique import Pass
from trimtab.tensors.memory_format import to_channels_last


@dataclass(frozen=True, kw_only=True)
class ChannelsLast(Pass):
    """Store 4-D activations and weights as NHWC, the fastest layout for convolution kernels of CPUs and tensor cores.

    Pays off for convolutional networks.
    Source: https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
    """

    words = "channels-last memory layout"
    modes = frozenset({"infer", "train"})
    sets = frozenset({"memory_format"})

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs a 4-D weight and a 4-D input."""
        if not any(p.dim() == 4 for p in candidate.model.parameters()):
            return "channels_last needs a 2-D convolution, and the model has none."
        if not any(leaf.dim() == 4 for leaf in candidate.leaves):
            return "channels_last needs a 4-D input (batch, channels, height, width), and the model takes none."
        return None

    def apply(self, candidate: Candidate) -> Candidate:
        """A copy of the model with NHWC weights. Backends convert the inputs, because of the setting ``memory_format``."""
        model = candidate.own_model()
        to_channels_last(model)
        return candidate.with_model(model, {"memory_format": "channels_last"})
