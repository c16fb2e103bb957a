"""Operators of older opsets, and rare ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from trimtab.importers.onnx.layers import resize
from trimtab.importers.onnx.operators import OPS, op
from trimtab.importers.onnx.shape_operators import scatter_elements
from trimtab.importers.onnx.values import tensor, unsupported

OPS |= {
    "Asinh": torch.asinh,
    "Acosh": torch.acosh,
    "Atanh": torch.atanh,
    "Scatter": scatter_elements,  # the name before opset 11
}


@op("Upsample")
def upsample(x: torch.Tensor, scales: Any, *, mode: str = "nearest") -> torch.Tensor:
    """Also Resize before opset 11."""
    found: torch.Tensor = resize(x, None, scales, mode=mode, coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    return found


@op("LRN")
def local_response_normalization(
    x: torch.Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
) -> torch.Tensor:
    return functional.local_response_norm(x, size, alpha, beta, bias)


@op("ThresholdedRelu")
def thresholded_relu(x: torch.Tensor, *, alpha: float = 1.0) -> torch.Tensor:
    return torch.where(x > alpha, x, torch.zeros_like(x))


@op("Shrink")
def shrink(x: torch.Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> torch.Tensor:
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, torch.zeros_like(x)))


@op("IsInf")
def is_inf(x: torch.Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> torch.Tensor:
    return (torch.isneginf(x) & bool(detect_negative)) | (torch.isposinf(x) & bool(detect_positive))


@op("NonZero")
def non_zero(x: Any) -> torch.Tensor:
    return torch.nonzero(tensor(x)).t()


@op("LpNormalization")
def lp_normalization(x: torch.Tensor, *, axis: int = -1, p: int = 2) -> torch.Tensor:
    length = torch.linalg.vector_norm(x, p, axis, keepdim=True)
    return torch.where(length == 0, torch.zeros_like(x), x / length)


@op("MeanVarianceNormalization")
def mean_variance_normalization(x: torch.Tensor, *, axes: Sequence[int] = (0, 2, 3)) -> torch.Tensor:
    centred = x - torch.mean(x, list(axes), keepdim=True)
    return centred / (torch.sqrt(torch.mean(centred * centred, list(axes), keepdim=True)) + 1e-9)


@op("GridSample")
def grid_sample(
    x: torch.Tensor, grid: torch.Tensor, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> torch.Tensor:
    if mode in ("cubic", "bicubic") and x.dim() != 4:
        raise unsupported("a GridSample in it is cubic in three dimensions")
    kind = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    return functional.grid_sample(x, grid, kind, padding_mode, bool(align_corners))
