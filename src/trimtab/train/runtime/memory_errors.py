"""How allocators say that they ran dry, how a GPU says that it stopped, and what is told where that ends a run."""

from __future__ import annotations

import torch

from trimtab.errors import WorkloadError

_ASSERTED = (
    "The GPU stopped at an index that is out of range (CUDA error: device-side assert triggered): most often a label that the "
    "model has no output for, or a token that its embedding has no row for. Run a few updates with Settings(device='cpu'), "
    "which says which one it is. This process cannot use the GPU any more."
)


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocator ran dry: that of a GPU, that of a library on it, or that of the host."""
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


def said(error: BaseException) -> str:
    """The first line of what ``error`` says."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def stopped(error: BaseException) -> bool:
    """Whether a kernel met an impossible index, after which nothing can be computed, copied or saved in this process."""
    return "device-side assert" in str(error)


class telling_stops:
    """A block on a GPU, which says that a kernel stopped when it is next waited for, wherever that is.

    Raises:
        WorkloadError: one did.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and stopped(error):
            raise WorkloadError(_ASSERTED) from error


class final:
    """Blocks that cannot be tried again, because they have begun to change what a second try would begin with.

    Raises:
        WorkloadError: memory ran out in one; the error says ``sentence``, with the allocator's words for its ``{words}``.
    """

    def __init__(self, sentence: str) -> None:
        self.sentence = sentence

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and out_of_memory(error):
            raise WorkloadError(self.sentence.format(words=said(error))) from error


def no_second_try(error: BaseException) -> WorkloadError:
    """What ends a run of several processes in which memory ran out where the others cannot be told of it."""
    return WorkloadError(
        f"This process ran out of memory ({said(error)}), and several processes cannot make this update again in smaller "
        "parts, because the others wait for this one in the middle of it. Give smaller batches, or recompute activations with "
        "MemorySettings(activation_mb=...)."
    )


def go_on(error: BaseException, *, repeats: bool) -> None:
    """Return if ``error`` says that memory ran out, in something that can be tried in another way.

    Raises:
        BaseException: it says something else: ``error`` itself.
        WorkloadError: the other processes of the run are left waiting, so that nothing is repeated.
    """
    if not out_of_memory(error):
        raise error
    if not repeats:
        raise no_second_try(error) from error
