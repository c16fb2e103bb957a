"""Dropout taken out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from trimtab.core.candidate import Candidate
from trimtab.core.technique import Pass


@dataclass(frozen=True, kw_only=True)
class RemoveDropout(Pass):
    """Replace dropout layers by the identity, which they are at inference.

    Pays a little in eager mode, where each is a module call, and where a runtime would keep an export's dropout as an
    operator, which stops the fusion of what stands around it; most exporters take it out by themselves. Calls of
    ``functional.dropout`` are left alone: in evaluation mode they return their input, and nothing in the module says that they
    are there.
    Source: Srivastava et al. 2014, https://jmlr.org/papers/v15/srivastava14a.html (dropout is for training only).
    """

    name = "remove_dropout"

    def describe(self) -> str:
        """What became of the dropout layers."""
        return "dropout removed"

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs a dropout layer."""
        if not any(map(_removable, candidate.model.modules())):
            return "remove_dropout needs a dropout layer, and the model has none."
        return None

    def apply(self, candidate: Candidate) -> Candidate:
        """A copy of the model with identities, and with the rates inside attention and recurrent layers set to zero."""
        model = candidate.own_model()
        if _removable(model):
            return candidate.with_model(_identity())
        for module in list(model.modules()):
            for name, child in module.named_children():
                if _removable(child):
                    setattr(module, name, _identity())
            if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
                module.dropout = 0.0
        return candidate.with_model(model)


def _removable(module: nn.Module) -> bool:
    """A dropout layer in evaluation mode that nothing is hooked to and that does what torch's own do; others may do more."""
    if not isinstance(module, _DropoutNd) or module.training or module._forward_hooks or module._forward_pre_hooks:
        return False
    return "forward" not in vars(module) and type(module).forward.__module__ == _DropoutNd.__module__


def _identity() -> nn.Module:
    """An identity that still answers to ``p``, which some models hand on to ``functional.dropout``."""
    identity = nn.Identity().eval()
    identity.p = 0.0  # type: ignore[assignment]
    identity.inplace = False  # type: ignore[assignment]
    return identity
