"""Remove hidden units of feed-forward layers and attention heads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import nn

from trimtab.core.candidate import Candidate
from trimtab.core.technique import Choice, ShrinkingPass
from trimtab.errors import CompileError
from trimtab.passes.common.structure import (
    STEP,
    clear_inputs,
    difference,
    keep_inputs,
    keep_outputs,
    kept_width,
    linears,
    sums_of_inputs,
)


@dataclass(frozen=True, kw_only=True)
class PruneUnits(ShrinkingPass):
    """Remove the feed-forward units and attention heads of a transformer that contribute least to its outputs.

    Pays off where linear layers dominate, as in encoders with many tokens: a small sentence encoder with half of both ran 2.25
    times as fast in OpenVINO. It does not pay for models whose time goes into convolutions, or into reading an embedding.
    Units are ranked by the size of their activations on the calibration inputs times the norm of their outgoing weights, and
    the same share stays in every layer, rounded to multiples of 8. Heads are removed from attention modules that name their
    number (``num_attention_heads``), such as those of transformers' BERT. The result must equal the original with the removed
    parts masked.
    Source: Michel et al. 2019, https://arxiv.org/abs/1905.10650 (heads); McCarley et al. 2019, https://arxiv.org/abs/1910.06360
    """

    words = "{keep:.0%} of the feed-forward units and heads"

    keep: Annotated[float, Choice(0.75, 0.5, 0.35, 0.25, 0.12)] = 0.5
    """Share of the units and heads that stay."""

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs a wide linear layer between two narrow ones, or attention heads."""
        if not _feed_forwards(candidate.model) and not _attentions(candidate.model):
            return "prune_units needs the feed-forward layers or attention heads of a transformer, and the model has none."
        return None

    def apply(self, candidate: Candidate) -> Candidate:
        """A copy of the model with fewer units and heads."""
        layer_pairs = [*_feed_forwards(candidate.model), *_attentions(candidate.model)]
        activations = _activations(candidate, [outer for _, outer in layer_pairs])
        removed: list[tuple[str, str]] = []
        pruned, masked = candidate.own_model(), candidate.own_model()
        for inner, outer in layer_pairs:
            before = candidate.with_model(pruned).own_model(), candidate.with_model(masked).own_model()
            _prune(pruned, masked, inner, outer, self.keep, activations.get(outer))
            if difference(candidate, pruned, masked) is None:
                removed.append((inner, outer))
            else:
                pruned, masked = before
        if not removed or all(
            a.shape == b.shape for a, b in zip(pruned.parameters(), candidate.model.parameters(), strict=True)
        ):
            raise CompileError(
                "prune_units cannot prune this model: without the smallest units, every layer that it tried gave other outputs "
                f"than the original with these masked, or had no more than {STEP} of them."
            )
        return candidate.with_model(pruned)


def _feed_forwards(model: nn.Module) -> list[tuple[str, str]]:
    """Names of consecutive linear layers, a wide one and one that projects back to the width of the input."""
    found, layers = [], list(linears(model))
    for (inner, first), (outer, second) in itertools.pairwise(layers):
        wide = first.out_features == second.in_features and first.out_features > max(first.in_features, STEP)
        if wide and second.out_features == first.in_features:
            found.append((inner, outer))
    return found


def _attentions(model: nn.Module) -> list[tuple[str, str]]:
    """Names of attention modules with ``num_attention_heads``, and of the linear layers that project their outputs."""
    layers, found = dict(linears(model)), []
    for name, module in model.named_modules():
        parts = [getattr(module, part, None) for part in ("query", "key", "value")]
        if not all(isinstance(part, nn.Linear) for part in parts) or not isinstance(_heads(module), int):
            continue
        parent = name.rpartition(".")[0]
        readers = [n for n in layers if n.startswith(f"{parent}.") and not n.startswith(f"{name}.")]
        width = parts[0].out_features if isinstance(parts[0], nn.Linear) else 0
        if (reader := next((n for n in readers if layers[n].in_features == width), None)) is not None and _heads(module) > 1:
            found.append((name, reader))
    return found


def _heads(module: nn.Module) -> Any:
    return getattr(module, "num_attention_heads", None)


def _activations(candidate: Candidate, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Root mean square of each input of the layers ``names`` over calibration inputs, or over the example without these."""
    sums = sums_of_inputs(candidate, names, lambda rows: rows.float().square().mean(0), example=True)
    return {name: total.sqrt() for name, total in sums.items()}


def _prune(pruned: nn.Module, masked: nn.Module, inner: str, outer: str, keep: float, activations: torch.Tensor | None) -> None:
    """Remove units, or heads, between ``inner`` and ``outer``, and mask the same ones."""
    first, second = pruned.get_submodule(inner), pruned.get_submodule(outer)
    assert isinstance(second, nn.Linear)
    scores = second.weight.detach().float().norm(dim=0) * (1.0 if activations is None else activations)
    best = torch.empty(0)
    if isinstance(first, nn.Linear):
        chosen = scores.argsort(descending=True)[: kept_width(second.in_features, keep)].sort().values
    else:
        heads = _heads(first)
        size = second.in_features // heads
        best = scores.reshape(heads, size).square().sum(1).argsort(descending=True)[: kept_width(heads, keep, 1)].sort().values
        chosen = (best[:, None] * size + torch.arange(size)).flatten()
    lost = torch.ones(second.in_features, dtype=torch.bool)
    lost[chosen] = False
    reader = masked.get_submodule(outer)
    assert isinstance(reader, nn.Linear)
    clear_inputs(reader.weight, lost.nonzero().flatten())
    keep_inputs(second, chosen)
    if isinstance(first, nn.Linear):
        keep_outputs(first, chosen)
        return
    for part in ("query", "key", "value"):
        keep_outputs(getattr(first, part), chosen)
    first.num_attention_heads = len(best)  # type: ignore[assignment]
    if hasattr(first, "all_head_size"):
        first.all_head_size = len(chosen)  # type: ignore[assignment]
