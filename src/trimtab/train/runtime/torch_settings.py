"""Global state of torch that settings change, and that is restored after a run; state of the random generators."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from trimtab.core.settings import Settings
from trimtab.errors import UsageError
from trimtab.hardware import system
from trimtab.tensors.attention_kernels import KERNELS
from trimtab.tensors.precision import float32_precision
from trimtab.train.runtime.memory_errors import first_line


@contextlib.contextmanager
def running(settings: Settings) -> Iterator[None]:
    """A block with the threads, TF32, cuDNN benchmark and attention kernel of ``settings``.

    All are restored at its end except ``memory.keep_freed``, which cannot be undone.
    """
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    kernels = _attention(settings.attention) if settings.attention in KERNELS else contextlib.nullcontext()
    try:
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        if settings.memory.keep_freed:
            system.keep_freed_memory()
        torch.backends.cudnn.benchmark = settings.cudnn_benchmark or benchmark
        tf32 = settings.precision.tf32  # as torch has it where None, and while "auto"
        with contextlib.nullcontext() if tf32 in (None, "auto") else float32_precision(tf32=tf32 is True), kernels:
            yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = benchmark


def _attention(kernel: str) -> contextlib.AbstractContextManager[object]:
    """A block in which attention uses ``kernel`` wherever it supports the inputs.

    The other kernels stay allowed, because later batches may not be supported: flash attention takes no mask on a GPU, and
    some models give a mask only where a row is padded. ``math`` supports everything, so it alone is allowed; torch would
    prefer the others on a CPU.
    """
    first = KERNELS[kernel]
    if first is SDPBackend.MATH:
        return sdpa_kernel(first)
    return sdpa_kernel([first, *(other for other in KERNELS.values() if other is not first)], set_priority=True)


def refuse_autocast(device: torch.device) -> None:
    """Refuse to train within the caller's ``torch.autocast``, whose cache keeps 16-bit copies of the first parameters.

    Raises:
        UsageError: autocast and its cache are on for ``device``.
    """
    if torch.is_autocast_enabled(device.type) and torch.is_autocast_cache_enabled():
        kind = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
        raise UsageError(
            "fit() was called within torch.autocast, which keeps the parameters in 16 bits until it ends, so that no update "
            f"would be seen. Call it outside, with PrecisionSettings(autocast={kind!r})."
        )


def allocate(settings: Settings) -> None:
    """Add the ``cuda_allocator`` options of ``settings`` to those of torch's CUDA allocator, for the rest of the process.

    Raises:
        UsageError: torch refuses the options.
    """
    options: str | None = settings.memory.cuda_allocator
    allocator: Any = torch._C
    if options is None or not settings.device.startswith("cuda"):
        return
    before = allocator._accelerator_getAllocatorSettings()
    if before.endswith(options):
        return
    both = f"{before},{options}" if before else options  # options that are not named may be reset
    try:
        allocator._accelerator_setAllocatorSettings(both)
    except (RuntimeError, ValueError) as error:
        allocator._accelerator_setAllocatorSettings(before)
        raise UsageError(
            f"Settings memory.cuda_allocator is {options!r}, which torch does not take: {first_line(error)}. Write it as for "
            "PYTORCH_CUDA_ALLOC_CONF, such as 'expandable_segments:True'."
        ) from error


def random_state() -> dict[str, Any]:
    """The state of the global random generators: torch's, those of its GPUs, numpy's and Python's.

    CUDA is not initialized for it: without that its generators have not been used.
    """
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
        "mps": torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
        "numpy": np.random.get_state(legacy=True),
        "python": random.getstate(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore a state from :func:`random_state`."""
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([each.cpu() for each in state["cuda"]])
    if torch.backends.mps.is_available() and state.get("mps") is not None:
        torch.mps.set_rng_state(state["mps"].cpu())
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
