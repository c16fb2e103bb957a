"""Remove whole layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import nn

from trimtab.core.candidate import Candidate
from trimtab.core.technique import Choice, ShrinkingPass
from trimtab.errors import CompileError
from trimtab.passes.common.structure import difference

MIN_LAYERS = 3
"""Fewest layers of one kind in a list from which some can be dropped."""


@dataclass(frozen=True, kw_only=True)
class DropLayers(ShrinkingPass):
    """Remove layers, evenly spaced, from the longest list of equal layers, such as the blocks of a transformer.

    Pays off where many equal layers follow each other: the time of a call falls with their number, on every runtime. It does
    not pay for networks of few layers, where each one changes the size of what it passes on. The first and the last layer
    stay. Accuracy is lost until ``recover`` has trained the rest.
    Source: Sajjad et al. 2020, https://arxiv.org/abs/2004.03844
    """

    words = "{keep:.0%} of the layers"

    keep: Annotated[float, Choice(0.75, 0.5, 0.35, 0.25)] = 0.5
    """Share of the layers that stay."""

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs a list of equal layers."""
        if _longest(candidate.model) is None:
            return f"drop_layers needs a list of at least {MIN_LAYERS} layers of one kind, and the model has none."
        return None

    def apply(self, candidate: Candidate) -> Candidate:
        """A copy of the model with fewer layers."""
        name = _longest(candidate.model)
        if name is None:
            raise CompileError(f"drop_layers needs a list of at least {MIN_LAYERS} layers of one kind, and the model has none.")
        model = candidate.own_model()
        layers = list(model.get_submodule(name).children())
        count = max(2, round(len(layers) * self.keep))
        if count >= len(layers):
            raise CompileError(f"drop_layers would keep all {len(layers)} layers of {name} at keep={self.keep}.")
        chosen = [layers[int(i)] for i in torch.linspace(0, len(layers) - 1, count).round()]
        parent, _, last = name.rpartition(".")
        shorter = nn.Sequential(*chosen) if isinstance(model.get_submodule(name), nn.Sequential) else nn.ModuleList(chosen)
        setattr(model.get_submodule(parent), last, shorter)
        model.eval()
        if (reason := difference(candidate, model)) is not None:
            raise CompileError(f"drop_layers cannot drop layers of {name} in this model: {reason}.")
        return candidate.with_model(model)


def _longest(model: nn.Module) -> str | None:
    """The name of the longest list of layers of one class with parameters; ``None`` without one."""
    found: list[tuple[int, str]] = []
    for name, module in model.named_modules():
        layers = list(module.children())
        if not name or type(module) not in (nn.ModuleList, nn.Sequential) or len(layers) < MIN_LAYERS:
            continue
        alike = len({type(layer) for layer in layers}) == 1 and len({id(layer) for layer in layers}) == len(layers)
        if alike and any(True for _ in layers[0].parameters()):
            found.append((len(layers), name))
    return max(found, key=lambda each: each[0])[1] if found else None
