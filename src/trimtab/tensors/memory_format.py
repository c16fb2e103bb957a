"""The memory format of a model's weights."""

from __future__ import annotations

import torch
from torch import nn


def lay_out(model: nn.Module) -> None:
    """Give ``model`` NHWC weights, in place.

    ``model.to(memory_format=...)`` fails where a 3-D convolution has weights of five dimensions.
    """
    model._apply(_laid_out)  # type: ignore[no-untyped-call]


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
