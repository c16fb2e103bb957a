"""Recognize errors of allocators and of GPU kernels, and raise them as errors that name a remedy."""

from __future__ import annotations

import torch

from trimtab._internal.text import message_line
from trimtab._internal.user_code import explaining
from trimtab.errors import WorkloadError

_ASSERTED = (
    "The GPU stopped at an index that is out of range (CUDA error: device-side assert triggered): most often a label that the "
    "model has no output for, or a token that its embedding has no row for. Run a few updates with Settings(device='cpu'), "
    "which says which one it is. This process cannot use the GPU any more."
)


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocator has run out of memory: that of a GPU, of a library on it, or of the host."""
    words = (
        "can't allocate memory",
        "not enough memory",
        "bad_alloc",
        "ALLOC_FAILED",
        "ALLOCATION_FAILED",
        "out_of_memory",
        "out of memory",
    )
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def first_line(error: BaseException) -> str:
    """The first line of the message of ``error``, without a full stop."""
    return message_line(error).rstrip(".")


def gpu_assert_failed(error: BaseException) -> bool:
    """Whether a device-side assertion failed, after which this process cannot use the GPU any more."""
    return "device-side assert" in str(error)


class explaining_gpu_asserts(explaining):
    """A block of work on a GPU, in which a failed device-side assertion gets a message that names likely causes.

    Raises:
        WorkloadError: a kernel failed an assertion.
    """

    def explain(self, error: BaseException) -> None:
        """Raise what ``error`` becomes; return if that is itself."""
        if gpu_assert_failed(error):
            raise WorkloadError(_ASSERTED) from error


class no_retry(explaining):
    """A block that cannot be repeated, because it has changed the state that a second attempt would begin with.

    Raises:
        WorkloadError: memory ran out; the message is ``sentence``, in which ``{words}`` is that of the allocator.
    """

    def __init__(self, sentence: str) -> None:
        self.sentence = sentence

    def explain(self, error: BaseException) -> None:
        """Raise what ``error`` becomes; return if that is itself."""
        if out_of_memory(error):
            raise WorkloadError(self.sentence.format(words=first_line(error))) from error


def collective_memory_error(error: BaseException) -> WorkloadError:
    """The error of a process that ran out of memory while the others wait for it in a collective operation."""
    return WorkloadError(
        f"This process ran out of memory ({first_line(error)}), and several processes cannot make this update again in smaller "
        "parts, because the others wait for this one in the middle of it. Give smaller batches, or recompute activations with "
        "MemorySettings(activation_mb=...)."
    )


def raise_unless_retryable(error: BaseException, *, repeats: bool) -> None:
    """Return if ``error`` is an allocation failure after which the caller can try another way; else raise.

    Args:
        error: what was raised.
        repeats: whether the work can be repeated while no other process waits for this one.

    Raises:
        BaseException: ``error`` itself, if it is no allocation failure.
        WorkloadError: memory ran out, and the work cannot be repeated.
    """
    if not out_of_memory(error):
        raise error
    if not repeats:
        raise collective_memory_error(error) from error
