"""Remove whole layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from torch import nn

from trimtab.core.candidate import Candidate
from trimtab.core.technique import Choice, ShrinkingPass
from trimtab.errors import CompileError
from trimtab.passes.common.structure import difference, outputs_of
from trimtab.tensors.structure import tensors_of

MIN_LAYERS = 3
"""Fewest layers of one kind in a list from which some can be dropped."""


@dataclass(frozen=True, kw_only=True)
class DropLayers(ShrinkingPass):
    """Remove layers, evenly spaced, from the longest list of layers of one kind, such as the blocks of a transformer.

    Pays off where many such layers follow each other: the time of a call falls with their number, on every runtime. The first
    and the last layer stay, and layers whose outputs have another shape than their inputs, such as those of a convolutional
    network that halve the image. Accuracy is lost until ``recover`` has trained the rest.
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
        excess = len(layers) - max(2, round(len(layers) * self.keep))
        if excess <= 0:
            raise CompileError(f"drop_layers would keep all {len(layers)} layers of {name} at keep={self.keep}.")
        removable = _removable(candidate, model, layers)
        if excess > len(removable):
            raise CompileError(
                f"drop_layers would drop {excess} of the {len(layers)} layers of {name} at keep={self.keep}, but between the "
                f"first and the last only {len(removable)} keep the shape of their input."
            )
        dropped = {removable[int((place + 0.5) * len(removable) / excess)] for place in range(excess)}
        chosen = [layer for index, layer in enumerate(layers) if index not in dropped]
        parent, _, last = name.rpartition(".")
        shorter = nn.Sequential(*chosen) if isinstance(model.get_submodule(name), nn.Sequential) else nn.ModuleList(chosen)
        setattr(model.get_submodule(parent), last, shorter)
        model.eval()
        if (reason := difference(candidate, model)) is not None:
            raise CompileError(f"drop_layers cannot drop layers of {name} in this model: {reason}.")
        return candidate.with_model(model)


def _removable(candidate: Candidate, model: nn.Module, layers: Sequence[nn.Module]) -> list[int]:
    """The ``layers`` of ``model`` between the first and the last that do not change the shape of their first input.

    A layer that is not called as a module, such as a ``ModuleDict``, counts as one of them.
    """
    changing = set()

    def note(index: int, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        inputs, outputs = tensors_of((args, kwargs)), tensors_of(output)
        if inputs and outputs and inputs[0].shape != outputs[0].shape:
            changing.add(index)

    hooks = [
        layer.register_forward_hook(lambda _, *call, index=index: note(index, *call), with_kwargs=True)
        for index, layer in enumerate(layers)
    ]
    outputs_of(candidate, model)
    for hook in hooks:
        hook.remove()
    return [index for index in range(1, len(layers) - 1) if index not in changing]


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
