"""Layers that round their inputs, weights and outputs to 8 bits, with operators that every runtime converts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional

from trimtab.hardware import environment
from trimtab.tensors.deepcopy import copied

Ranges = Literal["minmax", "percentile", "mse"]

LEVELS = 255
"""Largest number of an unsigned byte."""
SAMPLES = 1 << 16
"""Most values of a call from which percentiles and squared errors are taken."""
PERCENTILE = 0.9999
RANGE_FACTORS = tuple(1 - i / 40 for i in range(21))
"""Factors on the full range that are tried for the least squared error."""


class Range:
    """Observer of a tensor: its range over several calls, and the scale and zero point for unsigned bytes."""

    def __init__(self) -> None:
        self._low, self._high = 0.0, 0.0
        self._samples: list[torch.Tensor] = []

    def observe(self, values: torch.Tensor, *, keep: bool = False) -> None:
        """Widen the range to the finite ``values``. ``keep`` also stores a sample, which ``percentile`` and ``mse`` need."""
        flat = values.detach().flatten().float()
        flat = flat[flat.isfinite()]
        if flat.numel():
            self._low, self._high = min(self._low, float(flat.min())), max(self._high, float(flat.max()))
            self._samples += [flat[:: max(1, flat.numel() // SAMPLES)]] if keep else []

    def scale(self, method: Ranges) -> tuple[float, int]:
        """Scale and zero point, with the bounds by ``method``. Zero itself is always exact."""
        low, high = self._low, self._high
        values = torch.cat(self._samples) if method != "minmax" and self._samples else torch.empty(0)
        if method == "percentile" and values.numel():
            values = values[:: max(1, values.numel() // (1 << 22))]  # most that torch.quantile takes is 2**24
            bounds = values.quantile(torch.tensor([1 - PERCENTILE, PERCENTILE]))
            low, high = min(0.0, float(bounds[0])), max(0.0, float(bounds[1]))
        elif method == "mse" and values.numel():
            share = min(RANGE_FACTORS, key=lambda share: _squared_error(values, low * share, high * share))
            low, high = low * share, high * share
        return _affine(low, high)


def _affine(low: float, high: float) -> tuple[float, int]:
    scale = max((high - low) / LEVELS, 1e-8)
    return scale, max(0, min(LEVELS, round(-low / scale)))


def _squared_error(values: torch.Tensor, low: float, high: float) -> float:
    scale, zero = _affine(low, high)
    return float((torch.fake_quantize_per_tensor_affine(values, scale, zero, 0, LEVELS) - values).square().mean())


class Quantized(nn.Module):
    """Base of the quantized layers: fixed ranges of activations, and a weight scale that follows the weight in training."""

    bits: ClassVar[int] = 8
    """Bits of a weight in computation."""
    weight_scale: torch.Tensor
    weight_zero: torch.Tensor
    ranges: tuple[tuple[float, int], tuple[float, int]]
    """Scale and zero point of the input and of the output."""
    largest: int
    """Largest absolute value of a weight: 127, or 63 on CPUs where sums of 8-bit products saturate."""
    enabled: bool
    """Whether inputs, weights and outputs are rounded; ``False`` in a model from :func:`without_rounding`."""

    def train(self, mode: bool = True) -> Any:
        """Switch the mode; as training ends, the scale of the weights becomes a constant."""
        super().train(mode)
        if not mode:
            self.weight_scale.copy_(self._scale())
        return self

    def extra_repr(self) -> str:
        """Names the ranges, which decide the outputs as much as the weights do."""
        return f"{super().extra_repr()}, ranges={self.ranges}, largest={self.largest}"

    def _scale(self) -> torch.Tensor:
        """The scale of each output channel."""
        weight: Any = self.weight
        scale: torch.Tensor = weight.detach().flatten(1).abs().amax(1).clamp_min(1e-8) / self.largest
        return scale

    def _activation(self, x: torch.Tensor, index: int) -> torch.Tensor:
        if not self.enabled:
            return x
        return torch.fake_quantize_per_tensor_affine(x, *self.ranges[index], 0, LEVELS)

    def _rounded_weight(self) -> torch.Tensor:
        weight: Any = self.weight
        scale = self._scale() if self.training else self.weight_scale
        return torch.fake_quantize_per_channel_affine(weight, scale, self.weight_zero, 0, -128, 127) if self.enabled else weight


class _QuantizedConv:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        """The forward pass of the float layer, with rounded input, weight and output."""
        found: torch.Tensor = self._activation(self._conv_forward(self._activation(x, 0), self._rounded_weight(), self.bias), 1)
        return found


class QuantizedConv1d(_QuantizedConv, Quantized, nn.Conv1d):
    """A 1-D convolution in 8 bits."""


class QuantizedConv2d(_QuantizedConv, Quantized, nn.Conv2d):
    """A 2-D convolution in 8 bits."""


class QuantizedConv3d(_QuantizedConv, Quantized, nn.Conv3d):
    """A 3-D convolution in 8 bits."""


class QuantizedLinear(Quantized, nn.Linear):
    """A linear layer in 8 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The forward pass of the float layer, with rounded input, weight and output."""
        return self._activation(functional.linear(self._activation(x, 0), self._rounded_weight(), self.bias), 1)


QUANTIZED_CLASSES: Mapping[type[nn.Module], type[Quantized]] = {
    nn.Conv1d: QuantizedConv1d,
    nn.Conv2d: QuantizedConv2d,
    nn.Conv3d: QuantizedConv3d,
    nn.Linear: QuantizedLinear,
}


def quantizable(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of ``model`` that have an 8-bit form, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in QUANTIZED_CLASSES and type(module.weight) is nn.Parameter and module.weight.dtype is torch.float32
    }


def quantize(model: nn.Module, ranges: Mapping[str, tuple[tuple[float, int], tuple[float, int]]]) -> None:
    """Convert the layers that ``ranges`` names to their 8-bit form, in place. Parameters stay the same objects: ties remain."""
    for name, found in ranges.items():
        layer: Any = model.get_submodule(name)
        layer.__class__ = QUANTIZED_CLASSES[type(layer)]
        layer.ranges, layer.enabled = found, True
        layer.largest = 127 if environment.has_vnni() else 63
        layer.register_buffer("weight_scale", layer._scale())
        layer.register_buffer("weight_zero", torch.zeros(len(layer.weight_scale), dtype=torch.int32))
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # its fused form reads the weights, and skips the layers


def is_quantized(model: nn.Module) -> bool:
    """Whether ``model`` has layers in 8 bits."""
    return any(isinstance(module, Quantized) for module in model.modules())


def without_rounding(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose quantized layers do not round."""
    copy = copied(model)
    for module in copy.modules():
        if isinstance(module, Quantized):
            module.enabled = False
    return copy


@contextlib.contextmanager
def observed_ranges(
    model: nn.Module, names: Mapping[str, Any] | list[str], *, keep: bool = False
) -> Iterator[dict[str, tuple[Range, Range]]]:
    """Collect the ranges of the inputs and outputs of the layers ``names`` that run in the block."""
    seen: dict[str, tuple[Range, Range]] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            for found, values in zip(seen.setdefault(name, (Range(), Range())), (args[0], output), strict=True):
                found.observe(values, keep=keep)

        return hook

    handles = [model.get_submodule(name).register_forward_hook(watch(name)) for name in names]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def fake_quantize_meta_kernels() -> Iterator[None]:
    """Register the missing meta kernels of fake quantization in the block, so that torch.export can infer output shapes."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for form in ("tensor", "channel"):
            library.impl(f"fake_quantize_per_{form}_affine_cachemask", _rounded_like, "Meta")
        yield


def _rounded_like(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
