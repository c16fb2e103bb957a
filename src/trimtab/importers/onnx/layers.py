"""Neural-network operators of ONNX: functions for all of them, modules where passes look for weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trimtab.importers.onnx.operators import op
from trimtab.importers.onnx.values import ints, tensor, unsupported

Attributes = dict[str, Any]
CONVOLUTIONS = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def padding(x: torch.Tensor, pads: Sequence[int] | None, auto: str, window: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The amounts for :func:`torch.nn.functional.pad`. ``window`` is the kernel size including dilation."""
    rank = len(window)
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        amounts = []
        for size, reach, by in zip(x.shape[2:], window, strides, strict=True):
            whole = max((-(-size // by) - 1) * by + reach - size, 0)
            small, large = whole // 2, whole - whole // 2
            amounts.append((small, large) if auto == "SAME_UPPER" else (large, small))
    else:
        given = list(pads) if pads and auto == "NOTSET" else [0] * 2 * rank
        amounts = list(zip(given[:rank], given[rank:], strict=True))
    return [n for pair in reversed(amounts) for n in pair]


def _window(kernel: Sequence[int], dilations: Sequence[int]) -> list[int]:
    return [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]


@op("Conv")
def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> torch.Tensor:
    rank = weight.dim() - 2
    by, spacing = strides or [1] * rank, dilations or [1] * rank
    x = functional.pad(x, padding(x, pads, auto_pad, _window(list(weight.shape[2:]), spacing), by))
    compute = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}[rank]
    return compute(x, weight, bias, by, 0, spacing, group)


def conv_module(weight: torch.Tensor, bias: torch.Tensor | None, attributes: Attributes) -> nn.Module | None:
    """A convolution layer with these weights; ``None`` for asymmetric padding."""
    rank = weight.dim() - 2
    pads = attributes.get("pads") or [0] * 2 * rank
    if (
        attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
        or pads[:rank] != pads[rank:]
        or rank + 2 not in CONVOLUTIONS
    ):
        return None
    group = attributes.get("group", 1)
    module = CONVOLUTIONS[
        rank + 2
    ](
        weight.shape[1] * group,
        weight.shape[0],
        tuple(weight.shape[2:]),  # type: ignore[arg-type]
        tuple(attributes.get("strides") or [1] * rank),  # type: ignore[arg-type]
        tuple(pads[:rank]),  # type: ignore[arg-type]
        tuple(attributes.get("dilations") or [1] * rank),  # type: ignore[arg-type]
        group,
        bias is not None,
        device="meta",
    )
    return with_weights(module, weight=weight, bias=bias)


def linear_module(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    """A linear layer; ``weight`` has the shape (out, in)."""
    module = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    return with_weights(module, weight=weight, bias=bias)


def norm_module(tensors: Sequence[torch.Tensor], rank: int, epsilon: float) -> nn.Module:
    """A batch normalization layer in evaluation mode; ``tensors`` are scale, bias, mean and variance."""
    module = NORMS[rank](len(tensors[0]), eps=epsilon, device="meta")
    with_weights(module, weight=tensors[0], bias=tensors[1])
    module.running_mean, module.running_var = tensors[2].clone(), tensors[3].clone()
    module.num_batches_tracked = torch.tensor(0)
    return module.eval()


def with_weights(module: nn.Module, **weights: torch.Tensor | None) -> nn.Module:
    """Set copies of ``weights`` as the parameters of ``module``."""
    for name, value in weights.items():
        if value is not None:
            setattr(module, name, nn.Parameter(value.clone(), requires_grad=False))
    return module.eval()


@op("ConvTranspose")
def conv_transpose(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: list[int] | None = None,
    group: int = 1,
    kernel_shape: list[int] | None = None,
    output_padding: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> torch.Tensor:
    rank = weight.dim() - 2
    around = pads or [0] * 2 * rank
    if auto_pad not in ("NOTSET", "VALID"):
        raise unsupported(f"a ConvTranspose in it pads by itself ({auto_pad})")
    compute = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}[rank]
    more, by, spacing = output_padding or [0] * rank, strides or [1] * rank, dilations or [1] * rank
    both = [min(pair) for pair in zip(around[:rank], around[rank:], strict=True)]
    found = compute(x, weight, bias, by, both, more, group, spacing)
    beyond = [both[i % rank] - amount for i, amount in enumerate(around)]  # the asymmetric part of the padding
    return functional.pad(found, [n for i in reversed(range(rank)) for n in (beyond[i], beyond[i + rank])])


@op("MaxPool")
def max_pool(
    x: torch.Tensor,
    *,
    kernel_shape: list[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: list[int] | None = None,
    pads: list[int] | None = None,
    storage_order: int = 0,
    strides: list[int] | None = None,
) -> torch.Tensor:
    rank = len(kernel_shape)
    by, spacing = strides or [1] * rank, dilations or [1] * rank
    amounts = padding(x, pads, auto_pad, _window(kernel_shape, spacing), by)
    own = amounts[::2][::-1]
    if any(amounts) and (amounts[::2] != amounts[1::2] or any(2 * p > k for p, k in zip(own, kernel_shape, strict=True))):
        x, own = functional.pad(x, amounts, value=float("-inf")), [0] * rank
    compute = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}[rank]
    return compute(x, kernel_shape, by, own, spacing, bool(ceil_mode))


@op("AveragePool")
def average_pool(
    x: torch.Tensor,
    *,
    kernel_shape: list[int],
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: list[int] | None = None,
    pads: list[int] | None = None,
    strides: list[int] | None = None,
) -> torch.Tensor:
    rank = len(kernel_shape)
    by = strides or [1] * rank
    amounts = padding(x, pads, auto_pad, kernel_shape, by)
    if set(dilations or [1]) != {1}:
        raise unsupported("an AveragePool in it is dilated")
    compute: Any = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}[rank]
    found: torch.Tensor
    if amounts[::2] == amounts[1::2]:
        found = compute(x, kernel_shape, by, amounts[::2][::-1], bool(ceil_mode), bool(count_include_pad))
        return found
    if ceil_mode:
        raise unsupported("an AveragePool in it pads one side more than the other, and rounds its size up")
    found = compute(functional.pad(x, amounts), kernel_shape, by)
    return found if count_include_pad else found / compute(functional.pad(torch.ones_like(x), amounts), kernel_shape, by)


@op("GlobalAveragePool")
def global_average_pool(x: torch.Tensor) -> torch.Tensor:
    return torch.mean(x, list(range(2, x.dim())), keepdim=True)


@op("GlobalMaxPool")
def global_max_pool(x: torch.Tensor) -> torch.Tensor:
    return torch.amax(x, list(range(2, x.dim())), keepdim=True)


@op("BatchNormalization")
def batch_normalization(
    x: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> torch.Tensor:
    if training_mode:
        raise unsupported("a BatchNormalization in it is in training mode")
    return functional.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)


@op("InstanceNormalization")
def instance_normalization(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, *, epsilon: float = 1e-5) -> torch.Tensor:
    return functional.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


@op("LayerNormalization")
def layer_normalization(
    x: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> torch.Tensor:
    shape = x.shape[axis % x.dim() :]
    return functional.layer_norm(x, shape, scale.expand(shape), None if bias is None else bias.expand(shape), epsilon)


@op("RMSNormalization")
def rms_normalization(
    x: torch.Tensor, scale: torch.Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[axis % x.dim() :], scale, epsilon)


@op("GroupNormalization")
def group_normalization(
    x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1
) -> torch.Tensor:
    if len(scale) != x.shape[1]:
        raise unsupported("a GroupNormalization in it has one scale per group, as before opset 21")
    return functional.group_norm(x, num_groups, scale, bias, epsilon)


@op("Resize")
def resize(
    x: torch.Tensor,
    roi: Any = None,
    scales: Any = None,
    sizes: Any = None,
    *,
    coordinate_transformation_mode: str = "half_pixel",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
    cubic_coeff_a: float = -0.75,
    antialias: int = 0,
    axes: list[int] | None = None,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
) -> torch.Tensor:
    rank = x.dim() - 2
    factors = scales if scales is None or isinstance(scales, list) else tensor(scales).tolist()
    given = [int(factor) if factor == int(factor) else factor for factor in factors][-rank:] if factors else None
    whole = given is not None and all(isinstance(factor, int) for factor in given)
    wanted = (  # a traced size times an integer stays symbolic; a rounded product does not
        [n * s if isinstance(s, int) else int(n * s) for n, s in zip(x.shape[2:], given, strict=True)]
        if given is not None
        else ints(sizes)[-rank:]
    )
    even = given is None or whole or all(n * s == w for n, s, w in zip(x.shape[2:], given, wanted, strict=True))
    aligned = coordinate_transformation_mode == "align_corners" and mode != "nearest" and even
    half = coordinate_transformation_mode == "half_pixel" or (
        coordinate_transformation_mode == "pytorch_half_pixel" and 1 not in wanted
    )
    floor = coordinate_transformation_mode == "asymmetric" and nearest_mode == "floor"
    whole = whole and coordinate_transformation_mode != "align_corners"
    known = (floor or whole) if mode == "nearest" else (aligned or half)  # for integer factors all rules choose the same pixel
    plain = not antialias and not exclude_outside and axes is None and keep_aspect_ratio_policy == "stretch"
    if not known or not plain or (mode == "cubic" and (cubic_coeff_a != -0.75 or rank != 2)):
        raise unsupported(
            f"a Resize in it works as {mode}, {coordinate_transformation_mode}, {nearest_mode}, which torch cannot"
        )
    kind = {"nearest": "nearest", "linear": ["linear", "bilinear", "trilinear"][rank - 1], "cubic": "bicubic"}[mode]
    corners = aligned if mode != "nearest" else None
    if even:
        return functional.interpolate(x, wanted, mode=kind, align_corners=corners)
    return functional.interpolate(x, scale_factor=given, mode=kind, align_corners=corners, recompute_scale_factor=False)


class Recurrent(nn.Module):
    """An LSTM or GRU with ONNX's layout: input (steps, batch, features), states (directions, batch, hidden)."""

    def __init__(self, layer: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.layer = layer
        self.directions = 2 if layer.bidirectional else 1

    def forward(self, x: torch.Tensor, *states: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Returns ``(outputs (steps, directions, batch, hidden), final states...)``."""
        given = [state for state in states if state is not None]
        state = None if not given else tuple(given) if isinstance(self.layer, nn.LSTM) else given[0]
        found, last = self.layer(x, state)
        found = found.unflatten(-1, (self.directions, self.layer.hidden_size)).transpose(1, 2)
        return (found, *last) if isinstance(last, tuple) else (found, last)


def recurrent_module(kind: str, tensors: Sequence[torch.Tensor | None], attributes: Attributes) -> nn.Module:
    """The layer of an LSTM or GRU node. ``tensors`` are W, R and B (or ``None``). The gates are reordered for torch."""
    w, r, b = tensors
    assert w is not None
    assert r is not None
    allowed = {"direction", "hidden_size", "layout", "linear_before_reset", "input_forget"}
    direction = attributes.get("direction", "forward")
    reset_first = kind == "GRU" and not attributes.get("linear_before_reset", 0)
    odd = sorted(set(attributes) - allowed)
    if odd or attributes.get("layout", 0) or attributes.get("input_forget", 0) or direction == "reverse" or reset_first:
        raise unsupported(f"the {kind} in it is not the usual one ({', '.join(odd) or direction})")
    order = [0, 2, 3, 1] if kind == "LSTM" else [1, 0, 2]
    hidden = r.shape[2]
    layer: nn.LSTM | nn.GRU = (nn.LSTM if kind == "LSTM" else nn.GRU)(
        w.shape[2], hidden, bidirectional=direction == "bidirectional", dtype=w.dtype
    )
    gates = len(order)
    with torch.no_grad():
        for number in range(w.shape[0]):
            suffix = "_l0_reverse" if number else "_l0"
            bias = torch.zeros(2 * gates * hidden, dtype=w.dtype) if b is None else b[number]
            parts = {"weight_ih": w[number], "weight_hh": r[number]}
            parts |= {"bias_ih": bias[: gates * hidden], "bias_hh": bias[gates * hidden :]}
            for name, value in parts.items():
                getattr(layer, name + suffix).copy_(torch.cat([value.chunk(gates)[i] for i in order]))
    layer.requires_grad_(False)
    return Recurrent(layer).eval()
