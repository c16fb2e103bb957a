"""torch's implementations of scaled dot-product attention, by their names in settings."""

from __future__ import annotations

from torch.nn.attention import SDPBackend

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Names in settings -> torch's."""
