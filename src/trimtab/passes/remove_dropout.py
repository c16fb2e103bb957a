"""Remove dropout layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from trimtab.core.candidate import Candidate
from trimtab.core.technique import Pass


@dataclass(frozen=True, kw_only=True)
class RemoveDropout(Pass):
    """Replace dropout layers by identities, which they are at inference.

    Pays off a little in eager mode, which calls one module less per layer, and on runtimes that would keep dropout as an
    operator, which prevents fusion; most exporters remove it themselves. Calls of ``functional.dropout`` are not changed: they
    are not visible in the module, and return their input in evaluation mode.
    Source: Srivastava et al. 2014, https://jmlr.org/papers/v15/srivastava14a.html (dropout is for training only).
    """

    words = "dropout removed"

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs a dropout layer."""
        if not any(map(_removable, candidate.model.modules())):
            return "remove_dropout needs a dropout layer, and the model has none."
        return None

    def apply(self, candidate: Candidate) -> Candidate:
        """A copy of the model with identities. Dropout rates inside attention and recurrent layers are set to zero."""
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
    """Whether ``module`` is a dropout layer of torch, in evaluation mode, without hooks and with torch's ``forward``."""
    if not isinstance(module, _DropoutNd) or module.training or module._forward_hooks or module._forward_pre_hooks:
        return False
    return "forward" not in vars(module) and type(module).forward.__module__ == _DropoutNd.__module__


def _identity() -> nn.Module:
    """An identity with the attributes of a dropout layer; some models pass ``p`` to ``functional.dropout``."""
    identity = nn.Identity().eval()
    identity.p = 0.0  # type: ignore[assignment]
    identity.inplace = False  # type: ignore[assignment]
    return identity
