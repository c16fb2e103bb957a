"""The state of torch that a run needs, put back afterwards."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.attention import sdpa_kernel

from trimtab.candidate import Settings
from trimtab.passes.attention import KERNELS


@contextlib.contextmanager
def running(settings: Settings) -> Iterator[None]:
    """A block in which torch runs as ``settings`` say: threads, TF32, cuDNN's search, attention."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    tf32, benchmark = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    try:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        if settings.tf32 is True:
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = settings.cudnn_benchmark is True or benchmark
        with sdpa_kernel(KERNELS[settings.attention]) if settings.attention in KERNELS else contextlib.nullcontext():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = tf32, benchmark


def random_state() -> dict[str, Any]:
    """Every generator that a loader, an augmentation or a model may draw from: torch's, its GPUs', numpy's and Python's."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "python": random.getstate(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put back what :func:`random_state` gave."""
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([each.cpu() for each in state["cuda"]])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached))
    random.setstate(state["python"])
