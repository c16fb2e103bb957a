"""The memory format of a model's weights."""

from __future__ import annotations

import torch
from torch import nn


def to_channels_last(model: nn.Module) -> None:
    """Put the 4-D weights of ``model`` into channels-last (NHWC) layout, in place.

    ``model.to(memory_format=...)`` fails on the 5-D weights of 3-D convolutions.
    """
    model._apply(_channels_last)  # type: ignore[no-untyped-call]


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
