"""Whether the first axis of a model's inputs counts examples: whether a row's answer is the same without the other rows.

That axis may as well be the time of a recurrent network, the samples of a sound or the points of a cloud, which must not be
taken apart. The model is asked: for a few rows, and for some of these in another order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch

from trimtab.core.workload import user_code
from trimtab.data.batches import Batch
from trimtab.errors import WorkloadError
from trimtab.tensors.comparison import errors, is_discrete
from trimtab.tensors.structure import cloned, flatten

FEW, MANY = 4, 64
"""Rows that the model is asked for; the second where it answers with whole numbers only, which may be the same by chance."""

ROUNDING = 1e-3
"""What a row's answer may differ by, relative to the largest value, when it is computed among others: by rounding alone."""

Answer = Callable[[torch.Tensor], Any]
"""The model's output for the rows at these positions."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the rows of a batch are.

    ``own``: each has an answer of its own. ``fixed``: they are examples, but the model does not take just any number of them.
    ``shared``: the answer changes with the other rows. ``ordered``: it changes with their order too, so they are no examples.
    """

    kind: Literal["own", "fixed", "shared", "ordered"]
    reason: str = ""

    @property
    def counted(self) -> bool:
        """Whether the rows are examples of which a call may have more or fewer."""
        return self.kind in ("own", "fixed")


class Judge:
    """Asks ``model`` once, about the first batch that has rows to take apart, and keeps the verdict.

    ``stated`` is the reason, if there is one, why its owner's words alone say that the first axis is not that of the examples.
    """

    def __init__(self, model: Callable[..., Any], allowed: float, stated: str | None = None) -> None:
        self._model, self._allowed = model, allowed
        self.verdict = None if stated is None else Verdict("ordered", stated)

    def __call__(self, batch: Batch) -> Verdict:
        """The verdict on the rows of ``batch``, of which it has two at least."""
        return self.about(lambda index: self._ask(batch.take(index)), batch.rows)

    def about(self, answer: Answer, rows: int) -> Verdict:
        """The verdict on ``rows`` rows, two at least, for some of which ``answer`` gives the output."""
        if self.verdict is None:
            self.verdict = _verdict(answer, rows, self._allowed)
        return self.verdict

    def _ask(self, batch: Batch) -> Any:
        args, kwargs = cloned(batch.call)
        with torch.no_grad():
            return self._model(*args, **kwargs)


def _verdict(answer: Answer, rows: int, allowed: float) -> Verdict:
    try:
        with user_code("it fails on some of its rows"):
            reason = _mixing(answer, rows, allowed)
    except WorkloadError as error:
        return _of_all(answer, rows, allowed, Verdict("fixed", str(error).rstrip(".")))
    if reason is None:
        return Verdict("own")
    return _of_all(answer, min(rows, FEW), allowed, Verdict("shared", reason))


def _of_all(answer: Answer, rows: int, allowed: float, otherwise: Verdict) -> Verdict:
    """``ordered`` where the answers for ``rows`` do not follow their order, else the verdict that there would be without it."""
    forward = torch.arange(rows)
    try:
        with user_code("it fails"):
            first, turned = _leaves(answer(forward)), _leaves(answer(forward.flip(0)))
            if len(first) != len(turned):
                return otherwise
            if _follow(first, turned, rows, allowed):
                return otherwise
            again = _leaves(answer(forward))
    except WorkloadError:
        return otherwise
    # what is random is found, and said, where the model is asked the same twice
    if not all(_same(a, b, allowed) for a, b in zip(first, again, strict=True)):
        return Verdict("own")
    return Verdict("ordered", otherwise.reason if otherwise.kind == "shared" else "its answer changes with their order")


def _mixing(answer: Answer, rows: int, allowed: float) -> str | None:
    """How the answer for a row depends on other rows, in words; ``None`` where it does not."""
    for most in (FEW, MANY):
        some = torch.linspace(0, rows - 1, min(rows, most)).long()
        picked = torch.arange(len(some) - 1, -1, -2)[: max(len(some) // 2, 1)]
        whole, part = _leaves(answer(some)), _leaves(answer(some[picked]))
        if [a.dim() for a in whole] != [b.dim() for b in part]:
            return "its output has other tensors for another number of rows"
        pairs = list(zip(whole, part, strict=True))
        if not pairs:
            return None  # what has no tensors is refused elsewhere
        if all(a.shape == b.shape for a, b in pairs):
            return "its output has no part for each row"
        if not all(_own(a, b, picked, len(some), allowed) for a, b in pairs):
            return "its answer for a row changes with the other rows"
        if rows <= most or not all(is_discrete(a.dtype) for a, _ in pairs):
            break
    return None


def _own(whole: torch.Tensor, part: torch.Tensor, picked: torch.Tensor, rows: int, allowed: float) -> bool:
    """Whether ``part`` is what ``whole``, an output for ``rows`` rows, has for those at ``picked``."""
    axes = [axis for axis, (a, b) in enumerate(zip(whole.shape, part.shape, strict=True)) if a != b]
    if not axes:
        return _same(whole, part, allowed)  # what does not follow the rows, such as a constant
    axis = axes[0]
    if len(axes) > 1 or whole.shape[axis] % rows or part.shape[axis] * rows != whole.shape[axis] * len(picked):
        return False
    return _same(_at(whole, axis, picked.to(whole.device), rows), part, allowed)


def _follow(first: list[torch.Tensor], turned: list[torch.Tensor], rows: int, allowed: float) -> bool:
    """Whether the outputs for rows in turned order are the outputs in turned order."""
    led = False
    for a, b in zip(first, turned, strict=True):
        if a.shape != b.shape:
            return False
        back = torch.arange(rows - 1, -1, -1, device=a.device)
        axes = [axis for axis, size in enumerate(a.shape) if size and size % rows == 0]
        if any(_same(_at(a, axis, back, rows), b, allowed) for axis in axes):
            led = True
        elif not _same(a, b, allowed):
            return False
    return led


def _at(leaf: torch.Tensor, axis: int, index: torch.Tensor, rows: int) -> torch.Tensor:
    """The parts of ``leaf`` for the rows at ``index``; each of the ``rows`` may have several values on ``axis``."""
    apart = leaf.reshape(*leaf.shape[:axis], rows, leaf.shape[axis] // rows, *leaf.shape[axis + 1 :])
    return apart.index_select(axis, index).flatten(axis, axis + 1)


def _same(a: torch.Tensor, b: torch.Tensor, allowed: float) -> bool:
    if a.shape != b.shape:
        return False
    if is_discrete(a.dtype):
        return torch.equal(a, b)
    found = errors(a, b)
    return found is not None and all(error <= allowed * size for error, size in found)


def _leaves(output: Any) -> list[torch.Tensor]:
    # copies, because a model may give memory that its next call writes to
    return [leaf.detach().clone() for leaf in flatten(output, "the output")[0]]
