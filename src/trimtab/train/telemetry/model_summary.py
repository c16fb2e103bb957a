"""A table of the layers of a model: output shapes, parameters, activations and floating-point operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trimtab._internal.notebook import preformatted
from trimtab._internal.user_code import user_code
from trimtab.measure.flops import count_flops
from trimtab.tensors.structure import tensors_of
from trimtab.train.data.peek import preserved_random_state
from trimtab.train.loss.adapter import Batch, call, is_pair


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One module without modules in it, or with parameters of its own."""

    name: str
    kind: str
    output: str
    """Shapes of its output tensors, in its last call; empty if it was not called."""
    parameters: int
    """Of its own. A parameter that several layers share counts for the first."""
    trained: int
    """Those of them that require a gradient."""
    activations_mb: float
    """Its output tensors of one forward pass, in MB (10**6 bytes)."""
    flops: int
    """Floating-point operations of its calls in one forward pass; a multiply-add counts as two."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """The layers of a model, for one batch."""

    layers: tuple[Layer, ...]
    flops: int
    """Of the whole forward pass, those outside of layers included."""
    uncounted: tuple[str, ...]
    """Heavy operators that have no formula: with any, ``flops`` is a lower bound."""

    @property
    def parameters(self) -> int:
        """All parameters."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def activations_mb(self) -> float:
        """The outputs of all layers, in MB (10**6 bytes)."""
        return sum(layer.activations_mb for layer in self.layers)

    def __str__(self) -> str:
        rows = [("layer", "type", "output", "parameters", "activations MB", "MFLOP")]
        rows += [
            (
                each.name,
                each.kind,
                each.output,
                f"{each.parameters:,}",
                f"{each.activations_mb:.3f}",
                f"{each.flops / 1e6:,.2f}",
            )
            for each in self.layers
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                value.ljust(width) if place < 3 else value.rjust(width)
                for place, (value, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        trained = sum(layer.trained for layer in self.layers)
        least = f", at least: {', '.join(self.uncounted)} could not be counted" if self.uncounted else ""
        return "\n".join(
            [
                *lines,
                f"{self.parameters:,} parameters, {trained:,} of them trained; activations {self.activations_mb:.3f} MB; "
                f"{self.flops / 1e6:,.2f} MFLOP in a forward pass{least}.",
            ]
        )

    def _repr_html_(self) -> str:
        """The table for notebooks."""
        return preformatted(str(self))


def model_summary(model: nn.Module, batch: Batch) -> ModelSummary:
    """The layers of ``model``, with their outputs and operations in one forward pass over ``batch``.

    The model runs in evaluation mode and without gradients; its modes and the random generators are as before.

    Args:
        model: any module.
        batch: inputs, or a pair of inputs and targets, as a loader gives it: a tensor, a tuple of arguments, or a mapping of
            keywords.

    Raises:
        WorkloadError: the model raised.
    """
    recorder = _Recorder(model)
    inputs = batch[0] if is_pair(batch) else batch
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with user_code("In model_summary() the model raised"), preserved_random_state(), torch.no_grad():
            with recorder:
                call(model, inputs)
            whole = count_flops(lambda: call(model, inputs))
    finally:
        for module, mode in modes:
            module.training = mode
    return ModelSummary(layers=recorder.layers(), flops=whole.total, uncounted=whole.uncounted)


class _Recorder:
    """A block that records the outputs and operations of every layer of ``model``."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {
            module: name
            for name, module in model.named_modules()
            if not any(True for _ in module.children()) or any(True for _ in module.parameters(recurse=False))
        }
        self._outputs: dict[nn.Module, list[torch.Tensor]] = {}
        self._flops: dict[nn.Module, int] = {}
        self._counting = False
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        for module in self.modules:
            handle = module.register_forward_hook(self._record, with_kwargs=True)
            self._undo.append(handle.remove)

    def __exit__(self, *_: object) -> None:
        for undo in self._undo:
            undo()

    def _record(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._counting:  # count_flops() calls the layer
            return
        self._outputs.setdefault(module, []).extend(tensors_of(output))
        if any(True for _ in module.children()):  # its own operations cannot be told from those of its parts
            return
        self._counting = True
        try:
            self._flops[module] = self._flops.get(module, 0) + count_flops(module, args, kwargs).total
        finally:
            self._counting = False

    def layers(self) -> tuple[Layer, ...]:
        """A row per layer, in the order of the model."""
        known: set[int] = set()
        found = []
        for module, name in self.modules.items():
            own = [value for value in module.parameters(recurse=False) if id(value) not in known]
            known |= set(map(id, own))
            outputs = self._outputs.get(module, [])
            found.append(
                Layer(
                    name=name or "(model)",
                    kind=type(module).__name__,
                    output=", ".join(dict.fromkeys(str(tuple(each.shape)) for each in outputs)),
                    parameters=sum(value.numel() for value in own),
                    trained=sum(value.numel() for value in own if value.requires_grad),
                    activations_mb=sum(each.numel() * each.element_size() for each in outputs) / 1e6,
                    flops=self._flops.get(module, 0),
                )
            )
        return tuple(found)
