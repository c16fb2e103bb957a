"""How allocators say that they ran dry."""

from __future__ import annotations

import torch


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocator ran dry: that of a GPU, that of a library on it, or that of the host."""
    words = ("can't allocate memory", "not enough memory", "bad_alloc", "ALLOC_FAILED", "out_of_memory", "out of memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )
