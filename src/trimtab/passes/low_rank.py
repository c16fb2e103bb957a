"""Replace linear layers by two narrower ones."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import nn
from torch.nn.utils import skip_init

from trimtab.core.candidate import Candidate
from trimtab.core.technique import Choice, ShrinkingPass
from trimtab.errors import CompileError
from trimtab.passes.common.structure import STEP, difference, kept_width, linears, sums_of_inputs


@dataclass(frozen=True, kw_only=True)
class LowRank(ShrinkingPass):
    """Replace the weight of each large linear layer by the product of two smaller matrices, by a singular value decomposition.

    Pays off for files and latency of models that consist of wide linear layers which cannot be pruned; at the same speed
    ``prune_units`` loses less and recovers fully: half of a sentence encoder's feed-forward units gave 1.47 times the speed at
    a correlation of 0.629, rank 128 of 384 gave 1.54 times at 0.600. So the search does not try it. The inputs that the layer
    gets on the calibration data decide which directions stay. Layers that share a weight stay whole, and so do those for which
    two matrices would not be smaller. ``recover`` trains both matrices.
    Source: Chen et al. 2021, https://proceedings.neurips.cc/paper/2021/hash/f56de5ef149cf0aedcc8f4797031e229-Abstract.html
    """

    words = "linear layers of lower rank, {share:.0%} of their weights"

    share: Annotated[float, Choice(0.75, 0.5, 0.25)] = 0.5
    """Share of each layer's weights that stay, which decides the rank."""

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs a linear layer for which two matrices are smaller."""
        if not self._ranks(candidate.model):
            return (
                "low_rank needs a linear layer of its own weight that two matrices of at least "
                f"{STEP} columns make smaller, and the model has none."
            )
        return None

    def apply(self, candidate: Candidate) -> Candidate:
        """A copy of the model with two layers in place of each large one."""
        if not (ranks := self._ranks(candidate.model)):
            raise CompileError(str(self.why_not(candidate)))
        model, masked = candidate.own_model(), candidate.own_model()
        roots = _input_roots(candidate, list(ranks))
        for name, rank in ranks.items():
            layer: Any = model.get_submodule(name)
            first, second = _factors(layer.weight.detach(), roots.get(name), rank)
            # skip_init draws no random numbers
            narrow: Any = skip_init(nn.Linear, layer.in_features, rank, bias=False)  # type: ignore[no-untyped-call]
            wide: Any = skip_init(nn.Linear, rank, layer.out_features, bias=layer.bias is not None)  # type: ignore[no-untyped-call]
            approximated: Any = masked.get_submodule(name)
            with torch.no_grad():
                narrow.weight.copy_(first)
                wide.weight.copy_(second)
                approximated.weight.copy_(second @ first)
                if layer.bias is not None:
                    wide.bias.copy_(layer.bias)
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, nn.Sequential(narrow, wide).to(layer.weight.dtype))
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoderLayer):
                module.activation_relu_or_gelu = 0  # its fused form reads the weight of the layer that is gone
        model.eval()
        if (reason := difference(candidate, model, masked)) is not None:
            raise CompileError(f"low_rank cannot be used on this model: {reason}.")
        return candidate.with_model(model)

    def _ranks(self, model: nn.Module) -> dict[str, int]:
        """The rank of each layer that becomes smaller, by name."""
        users = collections.Counter(id(value) for module in model.modules() for value in module._parameters.values())
        found = {}
        for name, layer in linears(model):
            before, edges = layer.weight.numel(), layer.in_features + layer.out_features
            rank = kept_width(min(layer.in_features, layer.out_features), self.share * before / edges / min(layer.weight.shape))
            if type(layer) is nn.Linear and name and users[id(layer.weight)] == 1 and rank * edges < before:
                found[name] = rank
        return found


def _factors(weight: torch.Tensor, root: torch.Tensor | None, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrices, (rank, in) and (out, rank), whose product is closest to ``weight`` on inputs with the root ``root``."""
    wide = weight.double()
    left, values, right = torch.linalg.svd(wide if root is None else wide @ root, full_matrices=False)
    first = right[:rank] if root is None else torch.linalg.solve(root, right[:rank], left=False)
    return first.to(weight.dtype), (left[:, :rank] * values[:rank]).to(weight.dtype)


def _input_roots(candidate: Candidate, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """A matrix C for each layer with C C^T equal to the Gram matrix of its inputs on the calibration data, in float64."""
    roots = {}
    for name, gram in sums_of_inputs(candidate, names, lambda rows: rows.double().T @ rows.double()).items():
        # directions that the inputs never take count a little, so that the root can be inverted
        gram = gram + gram.diagonal().mean().clamp_min(1e-12) * 1e-4 * torch.eye(len(gram), dtype=torch.float64)
        roots[name] = torch.linalg.cholesky(gram)
    return roots
