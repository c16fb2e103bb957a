"""Set single weights to zero."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from trimtab._internal.text import counted
from trimtab.core.candidate import Candidate
from trimtab.core.technique import Pass
from trimtab.errors import CompileError, UsageError
from trimtab.passes.common.structure import ZEROS_STAY, difference
from trimtab.tensors.weights import raw

LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
MOST_NAMED = 40
"""Most layers that a note lists."""


@dataclass(frozen=True, kw_only=True)
class Sparsify(Pass):
    """Set the smallest weights of convolutions and linear layers to zero, for good: ``recover`` leaves them zero.

    Pays off for downloads only: a file with 90% zeros is as large as before, and about a third smaller when it is compressed.
    No runtime here runs faster: a sentence encoder took 43.0 ms with zeros and 43.4 ms without. So the search does not try it;
    it is for recipes of your own. A note gives the share of zeros of each layer, because with one bound for all layers some
    become nearly empty, and the deflated size of the weights.
    Source: Han et al. 2015, https://arxiv.org/abs/1506.02626; N:M patterns: Mishra et al. 2021, https://arxiv.org/abs/2104.08378
    """

    exact = False  # zeros change the outputs
    compresses = True

    scope: Literal["layer", "global", "threshold", "n:m"] = "layer"
    """``layer``: the same share of zeros in each layer; ``global``: that share of all weights together; ``threshold``: weights
    below a bound; ``n:m``: a pattern, such as 2 of 4 weights that stay."""
    zeros: float = 0.8
    """Share of zeros, for ``layer`` and ``global``."""
    bound: float = 0.01
    """Weights of a smaller absolute value become zero, for ``threshold``."""
    pattern: str = "2:4"
    """How many of how many neighbouring weights of an output stay, for ``n:m``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.zeros < 1:
            raise UsageError(f"sparsify: zeros is {self.zeros!r}; it must be above 0 and below 1.")
        if not self.bound > 0:
            raise UsageError(f"sparsify: bound is {self.bound!r}; it must be above 0.")
        found = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", self.pattern)
        if found is None or int(found[1]) >= int(found[2]):
            raise UsageError(f"sparsify: pattern is {self.pattern!r}; give two numbers such as 2:4, the first one smaller.")

    def describe(self) -> str:
        """Says which weights are zero."""
        return {
            "layer": f"{self.zeros:.0%} zeros in each layer",
            "global": f"{self.zeros:.0%} zeros in all layers together",
            "threshold": f"weights below {self.bound:g} set to zero",
            "n:m": f"{self.pattern} sparse weights",
        }[self.scope]

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs layers with weights."""
        if not dict(_layers(candidate.model)):
            return "sparsify needs a convolution or linear layer with plain weights, and the model has none."
        return None

    def apply(self, candidate: Candidate) -> Candidate:
        """A copy of the model with zeros, and a note about each layer."""
        model = candidate.own_model()
        layers = dict(_layers(model))
        before = _deflated(layers)
        threshold = self._threshold(layers)
        for layer in layers.values():
            weight = layer.weight
            assert isinstance(weight, nn.Parameter)
            with torch.no_grad():
                weight.masked_fill_(self._zero_mask(weight.detach(), threshold), 0.0)
            setattr(layer, ZEROS_STAY, True)
        shares = {name: float((layer.weight == 0).float().mean()) for name, layer in layers.items()}
        if not any(shares.values()):
            raise CompileError(f"sparsify finds nothing to set to zero: no weight is below {self.bound:g}.")
        if (reason := difference(candidate, model)) is not None:
            raise CompileError(f"sparsify cannot be used on this model: {reason}.")
        sizes = f"deflated, these weights take {_deflated(layers):.3g} instead of {before:.3g} MB"
        return dataclasses.replace(candidate, model=model, notes=(*candidate.notes, _report(shares, layers), f"Size: {sizes}."))

    def _threshold(self, layers: dict[str, Any]) -> float:
        """The absolute value below which (scope ``threshold``) or up to which (scope ``global``) weights are set to zero."""
        if self.scope != "global":
            return self.bound
        sizes = torch.cat([layer.weight.detach().abs().flatten().float() for layer in layers.values()])
        return float(sizes.kthvalue(max(1, int(self.zeros * sizes.numel()))).values)

    def _zero_mask(self, weight: torch.Tensor, threshold: float) -> torch.Tensor:
        sizes = weight.abs()
        if self.scope == "threshold":
            return sizes < threshold
        if self.scope == "global":
            return sizes <= threshold
        mask = torch.zeros_like(weight, dtype=torch.bool)
        if self.scope == "layer":
            count = int(self.zeros * weight.numel())
            mask.view(-1)[sizes.flatten().argsort(stable=True)[:count]] = True
            return mask
        stay, of = map(int, self.pattern.split(":"))
        rows = sizes.flatten(1)
        whole = rows.shape[1] // of * of  # a rest that fills no group stays
        groups = rows[:, :whole].reshape(len(rows), -1, of)
        places = groups.argsort(dim=2, stable=True)[..., : of - stay]
        marked = torch.zeros_like(groups, dtype=torch.bool).scatter_(2, places, value=True)
        mask.view(len(rows), -1)[:, :whole] = marked.reshape(len(rows), whole)
        return mask


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers with plain weights, by name. Of layers that share a weight only the first one is yielded."""
    seen: set[int] = set()
    for name, found in model.named_modules():
        module: Any = found
        plain = isinstance(module, LAYERS) and not hasattr(module, "parametrizations") and type(module.weight) is nn.Parameter
        if plain and id(module.weight) not in seen and module.weight.is_floating_point():
            seen.add(id(module.weight))
            yield name, module


def _deflated(layers: dict[str, Any]) -> float:
    """Size of the deflated weights in MB."""
    return sum(len(zlib.compress(raw(layer.weight).numpy().tobytes())) for layer in layers.values()) / 1e6


def _report(shares: dict[str, float], layers: dict[str, Any]) -> str:
    sizes = {name: layer.weight.numel() for name, layer in layers.items()}
    total = sum(shares[name] * sizes[name] for name in shares) / sum(sizes.values())
    named = ", ".join(f"{name} {share:.0%}" for name, share in list(shares.items())[:MOST_NAMED])
    more = f" and {counted(len(shares) - MOST_NAMED, 'more layer')}" if len(shares) > MOST_NAMED else ""
    return f"Zeros: {total:.0%} of the weights; by layer: {named}{more}. No runtime here is faster for them."
