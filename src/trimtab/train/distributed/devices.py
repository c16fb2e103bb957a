"""The device of this process among those of its host."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def local_device(name: str) -> torch.device:
    """The device for ``Settings(device=name)`` in this process; ``cuda`` without an index is the GPU of this process.

    That is the only visible GPU, or the one of ``LOCAL_RANK``, which torchrun sets. Without that it is the current GPU of a
    script that has made the process group itself, or the one of ``SLURM_LOCALID`` or ``RANK``.
    """
    device = torch.device(name)
    if device.type != "cuda" or device.index is not None:
        return device
    if (count := torch.cuda.device_count()) == 1:
        return torch.device("cuda", 0)
    if "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if dist.is_available() and dist.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    if count and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return torch.device("cuda", int(os.environ.get("SLURM_LOCALID", os.environ.get("RANK", "0"))) % count)
    return device
