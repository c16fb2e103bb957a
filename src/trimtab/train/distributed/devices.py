"""Which of a host's devices is that of this process."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def local_device(name: str) -> torch.device:
    """The device that Settings call ``name``, in this process: the GPU of its own where that is just ``cuda``.

    The launcher says which one that is, as torchrun does with ``LOCAL_RANK``; where each process is shown only its own, as
    under Slurm, it is the only one that there is. A script that has made the process group itself has chosen before.
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
