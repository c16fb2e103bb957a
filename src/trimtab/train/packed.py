"""Packed sequences: their fields are laid out by time step, so that examples are cut from them, and joined, as sequences."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from trimtab.errors import WorkloadError


def part(packed: PackedSequence, start: int, end: int) -> PackedSequence:
    """The sequences from ``start`` to before ``end``, in the order in which they were packed."""
    kept = unpack_sequence(packed)[start:end]
    return pack_sequence(kept, enforce_sorted=packed.sorted_indices is None)  # some of sorted ones in a row are sorted too


def joined(batches: Sequence[PackedSequence]) -> PackedSequence:
    """The sequences of all ``batches``, one after the other.

    Raises:
        WorkloadError: their elements differ in shape or type.
    """
    if len({(batch.data.dtype, batch.data.shape[1:]) for batch in batches}) > 1:
        shapes = ", ".join(f"{tuple(batch.data.shape[1:])} of {batch.data.dtype}" for batch in batches)
        raise WorkloadError(f"Packed sequences can be joined that are of one kind, but the elements of these are {shapes}.")
    rows = [row for batch in batches for row in unpack_sequence(batch)]
    return pack_sequence(rows, enforce_sorted=False)
