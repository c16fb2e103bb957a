"""Layers of a compressed model: widths, zeros and bits, compared with the original."""

from __future__ import annotations

import dataclasses

from torch import nn

from trimtab.tensors.structure import tensors_of

MOST_LAYERS = 200
"""Most layers that are described."""
FLOAT_BITS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer with weights."""

    name: str
    kind: str
    """Its class, such as ``Conv2d``."""
    shape: tuple[int, ...]
    """Shape of its largest weight."""
    original: tuple[int, ...] | None
    """Shape of that weight in the original; ``None`` if the original has no such layer."""
    zeros: float
    """Share of zeros in its weights."""
    bits: int
    """Bits of a weight in computation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """A compressed network."""

    parameters: int
    original: int
    """Parameters of the original."""
    zeros: float
    """Share of zeros among all weights."""
    layers: tuple[Layer, ...]
    """The first 200 layers with weights."""

    @property
    def share(self) -> float:
        """Parameters, relative to the original's."""
        return self.parameters / max(self.original, 1)


def describe_network(model: nn.Module, original: nn.Module) -> Network:
    """Compare ``model`` with the ``original`` that it was derived from."""
    before = dict(original.named_modules())
    layers = [found for name, module in model.named_modules() if (found := _layer(name, module, before.get(name)))]
    sizes = [sum(parameter.numel() for parameter in each.parameters()) for each in (model, original)]
    weights = list(model.parameters())
    zeros = sum(int((weight == 0).sum()) for weight in weights) / max(sizes[0], 1)
    return Network(parameters=sizes[0], original=sizes[1], zeros=zeros, layers=tuple(layers[:MOST_LAYERS]))


def _layer(name: str, module: nn.Module, before: nn.Module | None) -> Layer | None:
    shape = _shape(module)
    if shape is None:
        return None
    weights = [weight for weight in module.parameters(recurse=False) if weight.dim() > 1]
    zeros = sum(int((weight == 0).sum()) for weight in weights) / max(sum(weight.numel() for weight in weights), 1)
    kind = type(before if before is not None and isinstance(module, type(before)) else module).__name__
    bits = int(getattr(module, "bits", FLOAT_BITS))
    return Layer(name=name, kind=kind, shape=shape, original=None if before is None else _shape(before), zeros=zeros, bits=bits)


def _shape(module: nn.Module) -> tuple[int, ...] | None:
    """Shape of the module's own largest weight; ``None`` if it has none."""
    own = [tensor for tensor in tensors_of(list(module.parameters(recurse=False))) if tensor.dim() > 1]
    return tuple(max(own, key=lambda weight: weight.numel()).shape) if own else None
