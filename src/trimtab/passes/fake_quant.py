"""Round inputs, weights and outputs of layers to 8 bits, in a form that can be trained."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from trimtab._internal.text import counted
from trimtab.core.candidate import MODEL_ERRORS, Candidate
from trimtab.core.technique import Pass
from trimtab.errors import CompileError, UsageError
from trimtab.passes.common.quantized import observed_ranges, quantizable, quantize
from trimtab.passes.common.sensitivity import most_sensitive
from trimtab.passes.common.structure import difference
from trimtab.passes.fold_bn import folded
from trimtab.tensors.structure import cloned

MOST_CALLS = 64
"""Most calibration calls that ranges are observed on."""


@dataclass(frozen=True, kw_only=True)
class FakeQuant(Pass):
    """Round the inputs, weights and outputs of convolutions and linear layers to 8 bits, in the model itself.

    ONNX Runtime and OpenVINO run the result in int8. This pass followed by ``recover`` is quantization-aware training. Pays off
    where the runtime's own int8 form is fast and misses the accuracy limit; on CPUs with VNNI int8 gained 2 to 4 times, and
    without it seldom anything. It cannot pay in eager mode, which only simulates int8. Activation ranges come from the
    calibration inputs and are fixed. Weights have one scale per output channel, which follows the weights in training, and 7
    bits on CPUs where sums of 8-bit products saturate. Batch norms are folded first.
    Source: Jacob et al. 2018, https://arxiv.org/abs/1712.05877
    """

    exact = False  # rounding changes the outputs
    quantizes = True
    needs = frozenset({"calibration"})
    compresses = True
    pays_for = frozenset({"onnxruntime", "openvino"})

    float_layers: int = 0
    """Number of layers that stay float: those whose rounding changes the outputs most."""
    ranges: Literal["minmax", "percentile", "mse"] = "minmax"
    """Bounds of activations: their extremes, all but one value in ten thousand, or those with the least squared error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.float_layers < 0:
            raise UsageError(f"fake_quant: float_layers is {self.float_layers!r}; it is a number of layers, 0 or more.")

    def describe(self) -> str:
        """Says which layers stay float."""
        but = f", but {counted(self.float_layers, 'layer')} in float" if self.float_layers else ""
        how = "" if self.ranges == "minmax" else f", ranges by {self.ranges}"
        return f"int8 weights and activations in the model{but}{how}"

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs convolutions or linear layers in float32."""
        if not quantizable(candidate.model):
            return "fake_quant needs a convolution or linear layer with float32 weights, and the model has none."
        return None

    def apply(self, candidate: Candidate) -> Candidate:
        """A copy of the model with quantized layers."""
        candidate = folded(candidate)
        model = candidate.own_model()
        scales = _ranges(candidate, model, self.ranges)
        kept = most_sensitive(candidate, self.float_layers)
        if not (chosen := {name: found for name, found in scales.items() if name not in kept}):
            raise CompileError(f"fake_quant has no layer left to quantize: float_layers is {self.float_layers}.")
        quantize(model, chosen)
        model.eval()
        if (reason := difference(candidate, model)) is not None:
            raise CompileError(f"fake_quant cannot quantize this model: {reason}.")
        notes = (f"Layers in float, which rounding harms most: {', '.join(kept)}.",) if kept else ()
        return dataclasses.replace(candidate, model=model, notes=(*candidate.notes, *notes))


def _ranges(
    candidate: Candidate, model: nn.Module, method: Literal["minmax", "percentile", "mse"]
) -> dict[str, tuple[tuple[float, int], tuple[float, int]]]:
    """Scale and zero point of the input and output of each layer that the calibration inputs reach."""
    try:
        with torch.no_grad(), observed_ranges(model, quantizable(model), keep=method != "minmax") as seen:
            for args, kwargs in candidate.calibration[:MOST_CALLS]:
                model(*cloned(args), **cloned(dict(kwargs)))
    except MODEL_ERRORS as error:
        raise CompileError(f"fake_quant cannot run this model on the calibration inputs: {error}") from error
    return {name: (before.scale(method), after.scale(method)) for name, (before, after) in seen.items()}
