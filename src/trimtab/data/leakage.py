"""Find test examples in the data that the search uses: the winner must be confirmed on new data."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from trimtab.core.workload import Evaluation
from trimtab.data.batches import Batch
from trimtab.data.splits import Splits
from trimtab.errors import UsageError
from trimtab.tensors.structure import leaves_of
from trimtab.tensors.weights import raw

MAX_OVERLAP = 0.5
"""Share of test examples in the selection data from which on data is refused; real sets often have a few duplicates."""
COMPARABLE = (bool, int, float, str, bytes, pathlib.PurePath)
"""Types other than tensors that are compared by their ``repr``."""


def check(splits: Splits, evaluation: Evaluation | None) -> list[str]:
    """Sentences about test, selection and calibration data that have inputs in common.

    Parts of one set have none. Sets that were given separately may, as when a function returns the same data twice.

    Raises:
        UsageError: at least the share :data:`MAX_OVERLAP` of the test data is in the selection data.
    """
    if evaluation is None:
        return []
    selection, test, calibration = ([*digests(part)] for part in (splits.selection, splits.test, splits.calibration))
    notes = []
    if evaluation.test is not None:
        both = _count_known(test, selection)
        if both >= MAX_OVERLAP * len(test):
            raise UsageError(
                f"Evaluation(test=...) holds what data=... holds: {both} of its {len(test)} inputs are the same, so that the "
                "winner would be confirmed on what it was chosen by. Give others, or leave test out, and data is divided."
            )
        if both:
            notes.append(f"{both} of the {len(test)} inputs of the test data are in the data that the search looks at too.")
    for name, part in (("data that the search looks at", selection), ("test data", test)):
        both = _count_known(part, calibration)
        if both >= MAX_OVERLAP * len(part):
            notes.append(
                f"{both} of the {len(part)} inputs of the {name} are in the calibration data too, which flatters what is "
                "quantized. Give others, or leave calibration out, and some of data is set aside for it."
            )
    return notes


def _count_known(part: list[bytes | None], other: Iterable[bytes | None]) -> int:
    known = set(other) - {None}
    return sum(each in known for each in part)


def digests(batches: Iterable[Batch]) -> Iterator[bytes | None]:
    """A digest per example, or per batch that must stay whole; ``None`` if it holds a value that cannot be compared."""
    for batch in batches:
        leaves = [leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves_of(batch.inputs)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if batch.rows and all(leaf.dim() and leaf.shape[0] == batch.rows for leaf in tensors):
            yield from (digest(_row(leaf, row) for leaf in leaves) for row in range(batch.rows))
        else:
            yield digest(leaves)


def _row(leaf: Any, row: int) -> Any:
    """The part of ``leaf`` for one row; constants belong to every row."""
    return leaf[row] if isinstance(leaf, torch.Tensor) else leaf


def digest(leaves: Iterable[Any]) -> bytes | None:
    """A digest of values and dtypes of ``leaves``; ``None`` if one of them cannot be compared."""
    found = hashlib.blake2b(digest_size=16)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.is_nested or leaf.is_quantized or leaf.layout is not torch.strided:
                return None  # such as the sparse edges of a graph
            found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            found.update(raw(leaf).numpy().data)
        elif leaf is None or isinstance(leaf, COMPARABLE):
            found.update(f"{type(leaf).__name__} {leaf!r}\n".encode(errors="surrogatepass"))
        else:
            return None
    return found.digest()
