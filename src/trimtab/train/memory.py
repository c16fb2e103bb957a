"""Steps that do not fit into memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trimtab.train.feed import split
from trimtab.train.objective import Batch, examples
from trimtab.train.step import Step, Update


def split_if_too_large(step: Step, group: Sequence[Batch]) -> Update:
    """The update from ``group``; where memory does not suffice, its batches are halved until it does.

    The update is the same, because each part counts by what it stands for; only BatchNorm sees smaller batches.

    Raises:
        RuntimeError: a single example does not fit, or any other error of the model's.
    """
    size = max(examples(batch) for batch in group)
    while True:
        try:
            return step(group)
        except RuntimeError as error:
            if not out_of_memory(error) or size == 1:
                raise
        step.discard()  # outside the except block, whose traceback keeps the step's tensors alive
        size = -(-size // 2)
        group = [part for batch in group for part in split(batch, size)]


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocator ran dry: that of a GPU, or that of the host."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
