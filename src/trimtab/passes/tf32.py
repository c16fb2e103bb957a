"""TensorFloat-32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab.core.candidate import Candidate
from trimtab.core.technique import SettingPass

MIN_CAPABILITY = (8, 0)
"""Compute capability of Ampere GPUs."""


@dataclass(frozen=True, kw_only=True)
class Tf32(SettingPass):
    """Round the inputs of float32 products to 10 bits of mantissa, so that tensor cores can multiply them.

    Pays off on NVIDIA GPUs since Ampere, for all products in float32, with or without mixed precision for the others.
    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
    """

    words = "products in TensorFloat-32"
    exact = False  # 10 bits of mantissa instead of 23 change the outputs
    modes = frozenset({"train"})
    sets = frozenset({"precision.tf32"})

    def why_not_here(self) -> str | None:
        """Needs an Ampere GPU or a newer one."""
        if not torch.cuda.is_available():
            return "tf32 needs an NVIDIA GPU, and PyTorch finds none here."
        if all(torch.cuda.get_device_capability(index) < MIN_CAPABILITY for index in range(torch.cuda.device_count())):
            return "tf32 needs compute capability 8.0 or more, and no GPU here has it."
        return None

    def why_not(self, candidate: Candidate) -> str | None:
        """Needs training on such a GPU."""
        device = candidate.settings.device
        if not device.startswith("cuda"):
            return f"tf32 needs an NVIDIA GPU, and this runs on {device!r}."
        if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
            return f"tf32 needs compute capability 8.0 or more, and {torch.cuda.get_device_name(device)} has less."
        return None
