"""Linear layers with 8-bit weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from trimtab.core.candidate import Candidate, call_model
from trimtab.core.technique import Pass, require
from trimtab.errors import CompileError
from trimtab.tensors.weights import is_composed

MIN_FEATURES = 17
"""Smallest number of input features for dynamic quantization of activations; torchao skips smaller layers."""


@dataclass(frozen=True, kw_only=True)
class Int8Weights(Pass):
    """Store the weights of linear layers as 8-bit integers with one scale per output channel, with torchao.

    The result consists of plain tensors and operators, so every backend can export it, and the artifact is about four times
    smaller. Pays off if the weights exceed the cache and are read once per call (large linear layers, batch 1). With
    ``activations="int8"`` the inputs are quantized as well, per row at run time, and products are computed in integers: faster
    on CPUs with VNNI and a compiler that fuses the conversions (``inductor``, ``aoti``), slower in eager mode.
    Source: Dettmers et al. 2022, https://arxiv.org/abs/2208.07339; https://docs.pytorch.org/ao/stable/
    """

    exact = False  # 8-bit rounding changes the outputs
    quantizes = True
    requires = ("torchao",)

    activations: Literal["float", "int8"] = "float"
    """Precision of the layers' inputs."""

    def describe(self) -> str:
        """Says whether activations are quantized as well."""
        both = " and activations" if self.activations == "int8" else ""
        return f"int8 weights{both} in linear layers"

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs linear layers with floating-point weights."""
        if not any(map(self._takes, candidate.model.modules())):
            return f"int8_weights needs a linear layer with float weights{self._width()}, and the model has none."
        return None

    def apply(self, candidate: Candidate) -> Candidate:
        """A copy of the model with quantized linear layers."""
        require("torchao")
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
        from torchao.utils import unwrap_tensor_subclass

        chosen = Int8WeightOnlyConfig if self.activations == "float" else Int8DynamicActivationInt8WeightConfig
        model = candidate.own_model()
        try:
            # without set_inductor_config=False torchao changes inductor's global configuration permanently
            quantize_(model, chosen(set_inductor_config=False), filter_fn=lambda module, _: self._takes(module))
            model = unwrap_tensor_subclass(model)
            model.eval()
            call_model(model, candidate.signature.input_structure, candidate.leaves)
        except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, LookupError) as error:
            raise CompileError(f"torchao cannot quantize this model: {type(error).__name__}: {error}") from error
        return candidate.with_model(model)

    def _takes(self, module: nn.Module) -> bool:
        # nn.MultiheadAttention reads the weight of this layer directly
        if not isinstance(module, nn.Linear) or isinstance(module, NonDynamicallyQuantizableLinear):
            return False
        if hasattr(module, "parametrizations") or is_composed(module.weight):
            return False
        wide = self.activations == "float" or module.in_features >= MIN_FEATURES
        return wide and module.weight.dtype in (torch.float32, torch.bfloat16, torch.float16)

    def _width(self) -> str:
        return "" if self.activations == "float" else f" and at least {MIN_FEATURES} inputs"
