"""Remove channels of convolutions, units of linear layers and hidden units of LSTMs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import nn

from trimtab.core.candidate import MODEL_ERRORS, Candidate
from trimtab.core.technique import Choice, ShrinkingPass, require
from trimtab.errors import CompileError
from trimtab.passes.common import lstm
from trimtab.passes.common.structure import STEP, clear_inputs, difference, kept_width
from trimtab.tensors.structure import flatten

LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.LSTM)
MIXING = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.MultiheadAttention)
"""Modules whose results change if a channel is missing, even one without effect elsewhere."""
MAX_SINGLE_GROUPS = 64
"""Most groups of channels that are tested one by one if pruning all of them together fails."""


@dataclass(frozen=True, kw_only=True)
class PruneChannels(ShrinkingPass):
    """Remove the channels with the smallest weights from convolutions, and hidden units from linear layers and LSTMs.

    Pays off on every runtime, because what is left is an ordinary smaller network: half of the channels are about a quarter of
    the arithmetic. It does not pay where a call is near the runtime's floor, about 0.01 ms in ONNX Runtime and 0.1 ms in
    OpenVINO. Accuracy is lost until ``recover`` has trained the rest. All layers keep the same share, rounded to multiples of
    8; layers that feed the outputs stay whole, and so do those before a layer norm or group norm. Which layers depend on each
    other is found by torch-pruning, and the result is checked: it must equal the original with the removed channels masked.
    Source: Fang et al. 2023, https://arxiv.org/abs/2301.12900; https://github.com/VainF/Torch-Pruning
    """

    words = "{keep:.0%} of the channels"
    requires = ("torch_pruning",)

    keep: Annotated[float, Choice(0.75, 0.5, 0.35, 0.25, 0.12)] = 0.5
    """Share of the channels that stay."""

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs at least two layers, one of them with more than 8 channels."""
        found = [module for module in candidate.model.modules() if isinstance(module, LAYERS)]
        if len(found) < 2 or not any(_width(module) > STEP for module in found):
            return (
                f"prune_channels needs a convolution, linear layer or LSTM with more than {STEP} channels and a layer after "
                "it, and the model has none."
            )
        return None

    def apply(self, candidate: Candidate) -> Candidate:
        """A copy of the model with fewer channels."""
        attempt = _pruned(candidate, self.keep, None)
        if attempt.reason is not None and len(attempt.roots) <= MAX_SINGLE_GROUPS:
            removable = {root for root in attempt.roots if _pruned(candidate, self.keep, {root}).reason is None}
            attempt = _pruned(candidate, self.keep, removable) if removable else attempt
        if attempt.reason is not None:
            raise CompileError(f"prune_channels cannot prune this model: {attempt.reason}.")
        if not attempt.roots:
            raise CompileError(
                f"prune_channels finds nothing to remove: no layer that only other layers read has more than {STEP} channels "
                f"at keep={self.keep}."
            )
        return candidate.with_model(attempt.model)


@dataclasses.dataclass(frozen=True)
class _Attempt:
    model: nn.Module
    roots: tuple[str, ...] = ()
    """Name of the first layer of each group of channels that were removed together."""
    reason: str | None = None
    """Why ``model`` cannot be used; ``None`` if it can."""


def _width(module: nn.Module) -> int:
    if isinstance(module, nn.LSTM):
        return module.hidden_size
    return module.out_features if isinstance(module, nn.Linear) else getattr(module, "out_channels", 0)


def _pruned(candidate: Candidate, keep: float, only: Collection[str] | None) -> _Attempt:
    """Prune a copy of the model: all groups of channels, or with ``only`` those whose first layer is named in it."""
    tp = require("torch_pruning")
    model, masked = candidate.own_model(), candidate.own_model()
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    names = {module: name for name, module in model.named_modules()}
    try:
        graph = _graph(tp, model, candidate)
    except MODEL_ERRORS as error:
        raise CompileError(f"prune_channels cannot trace how the layers depend on each other: {_cause(error)}.") from error
    roots: list[str] = []
    try:
        found = list(_groups(graph, keep))
        chosen = [each for each in found if only is None or names[each[0]] in only]
        roots = [names[module] for module, _, _ in chosen]
        for module, handler, lost in chosen:  # before any is pruned, so that indices are those of the original
            _mask(graph, graph.get_pruning_group(module, handler, lost), masked, names)
        for module, handler, lost in chosen:
            graph.get_pruning_group(module, handler, lost).prune()
    except MODEL_ERRORS as error:
        return _Attempt(model, tuple(roots), f"torch-pruning fails ({_cause(error)})")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained.get(name, True))
        parameter.grad = None
    model.eval()
    return _Attempt(model, tuple(roots), difference(candidate, model, masked))


def _graph(tp: Any, model: nn.Module, candidate: Candidate) -> Any:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(True)  # otherwise torch-pruning prunes nothing, without an error
    args, kwargs = candidate.own_inputs()

    def total(output: Any) -> torch.Tensor:
        leaves = [leaf for leaf in flatten(output, "output")[0] if leaf.is_floating_point() and leaf.requires_grad]
        return torch.stack([leaf.sum() for leaf in leaves]).sum()

    with torch.enable_grad():
        return tp.DependencyGraph().build_dependency(
            model,
            args,
            forward_fn=lambda module, inputs: module(*inputs, **kwargs),
            output_transform=total,
            customized_pruners={nn.LSTM: lstm.pruner(tp.function.BasePruningFunc)},
        )


def _groups(graph: Any, keep: float) -> Iterator[tuple[nn.Module, Any, list[int]]]:
    """The first layer of each group of channels, how it is pruned, and the channels that it loses."""
    for group in graph.get_all_groups(root_module_types=list(LAYERS)):
        module, handler = group[0].dep.target.module, group[0].dep.handler
        members = [(dep.target.module, graph.is_out_channel_pruning_fn(dep.handler)) for dep, _ in group]
        if not any(isinstance(each, LAYERS) and not is_output for each, is_output in members):
            continue  # only the outputs of the model read these channels
        if any(isinstance(each, (*MIXING, nn.Parameter)) for each, _ in members):
            continue
        width = _width(module)
        if (count := width - kept_width(width, keep)) <= 0:
            continue
        # both directions of an LSTM lose as many units
        parts = _scores(graph, group, module).reshape(-1, width)
        lost = [int(i) + number * width for number, part in enumerate(parts) for i in part.argsort()[:count]]
        yield module, handler, sorted(lost)


def _scores(graph: Any, group: Any, root: nn.Module) -> torch.Tensor:
    """The importance of each channel of ``root``: squared weights that make or read it, each layer's relative to their mean."""
    total = torch.zeros(_width(root) * (1 + getattr(root, "bidirectional", False)))
    for i, (dep, indices) in enumerate(group):
        module, is_output = dep.target.module, graph.is_out_channel_pruning_fn(dep.handler)
        if not isinstance(module, LAYERS):
            continue
        if isinstance(module, nn.LSTM):
            first: Any = module.weight_ih_l0
            squares = lstm.scores(module) if is_output else first.detach().float().square().sum(0)
        else:
            axis = int(is_output == bool(getattr(module, "transposed", False)))
            weight: Any = module.weight
            squares = weight.detach().float().square().transpose(0, axis).flatten(1).sum(1)
        lost, roots = torch.tensor(_indices(indices)), torch.tensor(_indices(group[i].root_idxs))
        known = lost < len(squares)  # a grouped convolution has fewer columns than inputs
        found = torch.zeros_like(total).index_add_(0, roots[known], squares[lost[known]])
        total += found / found.mean().clamp_min(torch.finfo(torch.float32).tiny)
    return total


def _mask(graph: Any, group: Any, masked: nn.Module, names: dict[nn.Module, str]) -> None:
    """Zero the weights with which layers of ``masked`` read the channels that ``group`` removes."""
    parts = dict(masked.named_modules())
    for dep, indices in group:
        lost, is_output = _indices(indices), graph.is_out_channel_pruning_fn(dep.handler)
        module = parts.get(names.get(dep.target.module, " "))
        if isinstance(module, nn.LSTM):
            if is_output:
                lstm.clear_units(module, lost)
            else:
                for name in (n for n, _ in module.named_parameters() if n.startswith("weight_ih_l0")):
                    clear_inputs(getattr(module, name), lost)
        elif not is_output and isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
            clear_inputs(module.weight, lost, axis=0 if getattr(module, "transposed", False) else 1)


def _indices(indices: Sequence[Any]) -> list[int]:
    return [int(getattr(index, "idx", index)) for index in indices]


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": .")
