"""Checks of passes that remove parts of a network: widths, signature, and equality with masked parts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from trimtab.core.candidate import MODEL_ERRORS, Candidate, call_model
from trimtab.tensors.comparison import is_discrete
from trimtab.tensors.structure import cloned, flatten

STEP = 8
"""Widths are multiples of this: a vector of AVX2 has 8 floats, so a convolution with 36 channels costs as much as with 40."""
MASKED_TOLERANCE = 1e-3
"""Largest error against the masked original, relative to the largest output. A wrong removal makes errors of about 1."""

MOST_CALLS = 16
"""Calibration calls on which inputs of layers are measured."""
ZEROS_STAY = "zeros_stay"
"""Attribute of layers whose zero weights stay zero in training."""


def keep_zeros(model: nn.Module) -> None:
    """Keep zero weights zero while ``model`` is trained, in the layers that are marked with :data:`ZEROS_STAY`.

    Their gradients are masked: without a gradient AdamW leaves a zero unchanged, weight decay included.
    """
    for module in model.modules():
        if getattr(module, ZEROS_STAY, False):
            weight = module.weight
            assert isinstance(weight, nn.Parameter)
            weight.register_hook((weight.detach() != 0).to(weight.dtype).mul)  # type: ignore[no-untyped-call]


def kept_width(width: int, keep: float, step: int = STEP) -> int:
    """``keep`` of ``width``, rounded to a multiple of ``step``, at least one step and at most ``width``."""
    return min(width, max(step, math.floor(width * keep / step + 0.5) * step))


def outputs_of(candidate: Candidate, model: nn.Module) -> list[torch.Tensor]:
    """The outputs of ``model`` for the example of ``candidate``."""
    return flatten(call_model(model, candidate.signature.input_structure, candidate.leaves), "output")[0]


def difference(candidate: Candidate, model: nn.Module, masked: nn.Module | None = None) -> str | None:
    """Why ``model`` cannot replace the candidate's model; ``None`` if it can. It fails on the example, has outputs of other
    shapes or dtypes, has infinite outputs or NaN, or differs from ``masked``, the original with the removed parts masked."""
    wanted = outputs_of(candidate, candidate.model)
    try:
        found = outputs_of(candidate, model)
    except MODEL_ERRORS as error:
        return f"it fails on the example ({type(error).__name__}: {' '.join(str(error).split())[:160]})"
    if [(out.shape, out.dtype) for out in found] != [(out.shape, out.dtype) for out in wanted]:
        return "its outputs have other shapes"
    if any(not is_discrete(out.dtype) and not torch.isfinite(out).all() for out in found):
        return "its outputs are not finite"
    if masked is None:
        return None
    for ours, theirs in zip(found, outputs_of(candidate, masked), strict=True):
        if is_discrete(ours.dtype) or not ours.numel():
            continue
        off, size = (ours - theirs).abs().max().item(), theirs.abs().max().item()
        if not off <= MASKED_TOLERANCE * size + 1e-6:
            return f"its outputs differ from those of the original without these parts by {off:.2g}, of {size:.2g} at most"
    return None


def sums_of_inputs(
    candidate: Candidate, names: Sequence[str], of: Callable[[torch.Tensor], torch.Tensor], *, example: bool = False
) -> dict[str, torch.Tensor]:
    """The sum of ``of(rows)`` over the inputs of each layer in ``names``, on the calibration data. If there is none, on the
    example with ``example``, else empty. Layers that are not reached before the model fails are left out."""
    model, sums = candidate.own_model(), dict[str, torch.Tensor]()

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            found = of(inputs[0].detach().flatten(0, -2))
            sums[name] = sums[name] + found if name in sums else found

        return hook

    for name in names:
        model.get_submodule(name).register_forward_pre_hook(watch(name))
    calls = candidate.calibration[:MOST_CALLS] or (((candidate.args, candidate.kwargs),) if example else ())
    with contextlib.suppress(*MODEL_ERRORS), torch.no_grad():
        for args, kwargs in calls:
            model(*cloned(args), **cloned(dict(kwargs)))
    return sums


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The plain linear layers of ``model`` with their names, in the order in which they are registered."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not hasattr(module, "parametrizations") and type(module.weight) is nn.Parameter:
            yield name, module


def keep_outputs(layer: nn.Linear, index: torch.Tensor) -> None:
    """Keep only the outputs ``index`` of ``layer``."""
    layer.weight = _selected(layer.weight, 0, index)
    if layer.bias is not None:
        layer.bias = _selected(layer.bias, 0, index)
    layer.out_features = len(index)


def keep_inputs(layer: nn.Linear, index: torch.Tensor) -> None:
    """Keep only the inputs ``index`` of ``layer``."""
    layer.weight, layer.in_features = _selected(layer.weight, 1, index), len(index)


def _selected(weight: torch.Tensor, axis: int, index: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().index_select(axis, index), requires_grad=weight.requires_grad)


def clear_inputs(weight: torch.Tensor, index: Sequence[int] | torch.Tensor, axis: int = 1) -> None:
    """Set the columns ``index`` of ``weight`` to zero."""
    with torch.no_grad():
        weight.index_fill_(axis, torch.as_tensor(index, dtype=torch.long), 0.0)
