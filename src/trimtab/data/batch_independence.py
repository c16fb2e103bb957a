"""Test whether axis 0 of a model's inputs counts examples, so that the output for a row does not depend on other rows.

Axis 0 may also be the time of a recurrent network, the samples of a sound or the points of a cloud, which must stay whole. The
model is called with a few rows, and with some of these in another order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch

from trimtab._internal.user_code import user_code
from trimtab.data.batches import Batch
from trimtab.errors import WorkloadError
from trimtab.tensors.comparison import errors, is_discrete
from trimtab.tensors.structure import cloned, flatten

FEW, MANY = 4, 64
"""Rows per call; ``MANY`` if all outputs are integers, which may be equal by chance with ``FEW``."""

ROUNDING = 1e-3
"""Largest rounding difference, relative to the largest value, between a row computed alone and the row in a batch."""

RowOutputs = Callable[[torch.Tensor], Any]
"""The model's output for the rows at these positions."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether the rows of a batch are independent examples.

    ``own``: the output for a row does not depend on other rows. ``fixed``: as ``own``, but the model does not take every number
    of rows. ``shared``: it depends on the other rows. ``ordered``: it depends on their order, so that rows are no examples.
    """

    kind: Literal["own", "fixed", "shared", "ordered"]
    reason: str = ""

    @property
    def independent(self) -> bool:
        """True if the rows are examples whose outputs do not depend on each other."""
        return self.kind in ("own", "fixed")


class Judge:
    """Tests ``model`` on the first batch with two or more rows, and keeps the verdict.

    ``stated``: the reason why the workload itself says that axis 0 does not count examples; no test is then made.
    """

    def __init__(self, model: Callable[..., Any], allowed: float, stated: str | None = None) -> None:
        self._model, self._allowed = model, allowed
        self.verdict = None if stated is None else Verdict("ordered", stated)

    def __call__(self, batch: Batch) -> Verdict:
        """The verdict on the rows of ``batch``, at least two."""
        return self.verdict_on(lambda index: self._call(batch.take(index)), batch.rows)

    def verdict_on(self, outputs: RowOutputs, rows: int) -> Verdict:
        """The verdict on ``rows`` rows, at least two; ``outputs`` computes the outputs for some of them."""
        if self.verdict is None:
            self.verdict = _verdict(outputs, rows, self._allowed)
        return self.verdict

    def _call(self, batch: Batch) -> Any:
        args, kwargs = cloned(batch.call)
        with torch.no_grad():
            return self._model(*args, **kwargs)


def _verdict(outputs: RowOutputs, rows: int, allowed: float) -> Verdict:
    try:
        with user_code("it fails on some of its rows"):
            reason = _row_dependence(outputs, rows, allowed)
    except WorkloadError as error:
        return _unless_ordered(outputs, rows, allowed, Verdict("fixed", str(error).rstrip(".")))
    if reason is None:
        return Verdict("own")
    return _unless_ordered(outputs, min(rows, FEW), allowed, Verdict("shared", reason))


def _unless_ordered(outputs: RowOutputs, rows: int, allowed: float, otherwise: Verdict) -> Verdict:
    """``ordered`` if the outputs for reversed rows are not the reversed outputs, else the verdict ``otherwise``."""
    forward = torch.arange(rows)
    try:
        with user_code("it fails"):
            first, reversed_ = _leaves(outputs(forward)), _leaves(outputs(forward.flip(0)))
            if len(first) != len(reversed_):
                return otherwise
            if _follows_order(first, reversed_, rows, allowed):
                return otherwise
            again = _leaves(outputs(forward))
    except WorkloadError:
        return otherwise
    # a random model is reported elsewhere, by two equal calls
    if not all(_close(a, b, allowed) for a, b in zip(first, again, strict=True)):
        return Verdict("own")
    return Verdict("ordered", otherwise.reason if otherwise.kind == "shared" else "its answer changes with their order")


def _row_dependence(outputs: RowOutputs, rows: int, allowed: float) -> str | None:
    """A clause about how the output for a row depends on other rows; ``None`` if it does not."""
    for most in (FEW, MANY):
        some = torch.linspace(0, rows - 1, min(rows, most)).long()
        picked = torch.arange(len(some) - 1, -1, -2)[: max(len(some) // 2, 1)]
        whole, part = _leaves(outputs(some)), _leaves(outputs(some[picked]))
        if [a.dim() for a in whole] != [b.dim() for b in part]:
            return "its output has other tensors for another number of rows"
        pairs = list(zip(whole, part, strict=True))
        if not pairs:
            return None  # outputs without tensors are refused elsewhere
        if all(a.shape == b.shape for a, b in pairs):
            return "its output has no part for each row"
        if not all(_rows_equal(a, b, picked, len(some), allowed) for a, b in pairs):
            return "its answer for a row changes with the other rows"
        if rows <= most or not all(is_discrete(a.dtype) for a, _ in pairs):
            break
    return None


def _rows_equal(whole: torch.Tensor, part: torch.Tensor, picked: torch.Tensor, rows: int, allowed: float) -> bool:
    """True if ``part`` equals the rows ``picked`` of ``whole``, an output for ``rows`` rows."""
    axes = [axis for axis, (a, b) in enumerate(zip(whole.shape, part.shape, strict=True)) if a != b]
    if not axes:
        return _close(whole, part, allowed)  # an output without a batch axis, such as a constant
    axis = axes[0]
    if len(axes) > 1 or whole.shape[axis] % rows or part.shape[axis] * rows != whole.shape[axis] * len(picked):
        return False
    return _close(_select_rows(whole, axis, picked.to(whole.device), rows), part, allowed)


def _follows_order(first: list[torch.Tensor], reversed_: list[torch.Tensor], rows: int, allowed: float) -> bool:
    """True if the outputs for reversed rows are the reversed outputs."""
    along_rows = False
    for a, b in zip(first, reversed_, strict=True):
        if a.shape != b.shape:
            return False
        back = torch.arange(rows - 1, -1, -1, device=a.device)
        axes = [axis for axis, size in enumerate(a.shape) if size and size % rows == 0]
        if any(_close(_select_rows(a, axis, back, rows), b, allowed) for axis in axes):
            along_rows = True
        elif not _close(a, b, allowed):
            return False
    return along_rows


def _select_rows(leaf: torch.Tensor, axis: int, index: torch.Tensor, rows: int) -> torch.Tensor:
    """The entries of ``leaf`` for the rows at ``index``; each of the ``rows`` may have several entries along ``axis``."""
    by_row = leaf.reshape(*leaf.shape[:axis], rows, leaf.shape[axis] // rows, *leaf.shape[axis + 1 :])
    return by_row.index_select(axis, index).flatten(axis, axis + 1)


def _close(a: torch.Tensor, b: torch.Tensor, allowed: float) -> bool:
    if a.shape != b.shape:
        return False
    if is_discrete(a.dtype):
        return torch.equal(a, b)
    found = errors(a, b)
    return found is not None and all(error <= allowed * size for error, size in found)


def _leaves(output: Any) -> list[torch.Tensor]:
    # copies: the next call may write to the same memory
    return [leaf.detach().clone() for leaf in flatten(output, "the output")[0]]
