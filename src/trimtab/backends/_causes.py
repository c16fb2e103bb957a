"""Known reasons why a graph computes something else than the model it was made from, for a person to act on."""

from __future__ import annotations

from torch import nn


def known_cause(model: nn.Module) -> str:
    """What may explain a difference, in brackets with a space before them; empty where nothing is known.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.TransformerEncoder.html, ``enable_nested_tensor``
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoder) and getattr(module, "use_nested_tensor", False):
            return (
                f" (given a padding mask, the nn.TransformerEncoder {name!r} sets padded positions to zero by nested tensors, "
                "which no export does; where nothing reads these positions, make it with enable_nested_tensor=False)"
            )
    return ""
