"""The state of torch that a run needs, put back afterwards."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.attention import sdpa_kernel

from trimtab import _machine
from trimtab.candidate import Settings
from trimtab.passes.attention import KERNELS


@contextlib.contextmanager
def running(settings: Settings) -> Iterator[None]:
    """A block in which torch runs as ``settings`` say: threads, TF32, cuDNN's search, attention.

    An allocator that was told to keep freed memory goes on doing so; there is no way back.
    """
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    kernels = sdpa_kernel(KERNELS[settings.attention]) if settings.attention in KERNELS else contextlib.nullcontext()
    try:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        if settings.keep_memory:
            _machine.keep_freed_memory()
        torch.backends.cudnn.benchmark = settings.cudnn_benchmark is True or benchmark
        with _tf32() if settings.tf32 is True else contextlib.nullcontext(), kernels:
            yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = benchmark


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    """A block with TF32, set by whichever of torch's two interfaces the process uses, because mixing them is an error."""
    backends: Any = torch.backends
    places = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul]
    before = [place.fp32_precision for place in places]
    older: tuple[str, bool] | None
    try:
        older = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    except RuntimeError:  # somebody has set an fp32_precision, which the older interface has no word for
        older = None
    try:
        if older is None:
            _set_precisions(places[:3], ["tf32"] * 3)
        else:
            torch.set_float32_matmul_precision("high")
            backends.cudnn.allow_tf32 = True
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older[0])
            backends.cudnn.allow_tf32 = older[1]
        _set_precisions(places, before)


def _set_precisions(places: Sequence[Any], wanted: Sequence[str]) -> None:
    """Of torch's parts; those that have theirs, perhaps from a setting above them, are left alone."""
    for place, precision in zip(places, wanted, strict=True):
        if place.fp32_precision != precision:
            place.fp32_precision = precision


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
