"""Replace smooth activation functions by ReLU."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn import functional

from trimtab.core.candidate import Candidate
from trimtab.core.technique import Pass

SMOOTH = (nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.ELU, nn.CELU, nn.SELU, nn.Softplus)
"""Modules that are replaced. Bounded ones, such as the sigmoid of a gate, do other work and stay."""


@dataclass(frozen=True, kw_only=True)
class SwapActivations(Pass):
    """Put ReLU in the place of GELU, SiLU, Mish and other smooth activation functions.

    Pays off where such a function is not fused and takes a noticeable share of a call, as in small convolutional networks with
    SiLU, and before quantization, because ReLU fuses into the layer before it. It cannot pay where the layers themselves take
    the time. The outputs are wrong until ``recover`` has trained the network: recipes without ``recover`` are refused, and
    searches try the pass only if asked. Functions that the model calls itself, such as ``functional.gelu``, are not visible as
    modules and stay; those of ``nn.TransformerEncoderLayer`` are replaced.
    Source: Mirzadeh et al. 2023, https://arxiv.org/abs/2310.04564
    """

    words = "ReLU instead of smooth activations"
    exact = False  # another function gives other outputs
    compresses = True
    trained_only = True

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs a smooth activation function."""
        if not any(isinstance(module, SMOOTH) or _has_gelu(module) for module in candidate.model.modules()):
            known = ", ".join(kind.__name__ for kind in SMOOTH)
            return f"swap_activations needs a module that ReLU can replace ({known}), and the model has none."
        return None

    def apply(self, candidate: Candidate) -> Candidate:
        """A copy of the model with ReLU instead of smooth activation functions."""
        model = candidate.own_model()
        if isinstance(model, SMOOTH):
            model = nn.ReLU()
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, SMOOTH):
                    setattr(module, name, nn.ReLU())
            if _has_gelu(module):
                module.activation, module.activation_relu_or_gelu = functional.relu, 1  # type: ignore[assignment]
        model.eval()
        return candidate.with_model(model)


def _has_gelu(module: nn.Module) -> bool:
    """Whether ``module`` is one of torch's transformer layers with GELU as its activation function."""
    known = isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))
    return known and getattr(module, "activation", None) is functional.gelu
