"""Whether the loss of a batch is that of its parts, so that the batch can be taken apart and learnt from all the same.

It is not where a loss compares the examples of a batch with each other, as contrastive ones do, nor where it is a mean over
something that nobody has told of, such as tokens. Both show when some examples are looked at whole and in parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trimtab.errors import TrimtabError, WorkloadError
from trimtab.tensors.batch_axis import length
from trimtab.tensors.structure import items_of, tensors_of
from trimtab.train.data.batch_structure import join, split
from trimtab.train.loss.adapter import Batch, examples
from trimtab.train.loss.loss_parity import ROUNDING, rounding
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.memory_errors import go_on, out_of_memory
from trimtab.train.runtime.snapshots import Snapshot, rehearsal
from trimtab.train.runtime.world import weighted

if TYPE_CHECKING:
    from trimtab.train.engine.step import Step

FEW = 8
"""Examples of a second look, at pairs: where a mean is over tokens, its halves are too alike to show it."""
DRAWN = 5.0
"""How many times as far as it differs from itself a loss that draws random numbers must differ from that of its parts."""
_CANNOT_TELL = (TrimtabError, RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, ArithmeticError)
"""What a loss or a model raises that cannot be asked of other examples, or in evaluation mode; memory may also run out."""
ADVICE = (
    "Where the loss is a sum, return the mean; where it is a mean over something else than the examples, such as tokens, "
    "return (mean, weight) from loss(model, batch). Where it compares the examples of a batch, it now compares those of a part."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """The loss of some examples, and what those of their parts come to."""

    count: int
    """Examples."""
    parts: int
    whole: float
    apart: float
    allowed: float
    """Difference that rounding, or what the loss draws, explains."""

    @property
    def alike(self) -> bool:
        """Whether it makes no difference."""
        return abs(self.apart - self.whole) <= self.allowed

    def __str__(self) -> str:
        """A sentence for a person."""
        return (
            f"The loss of {self.count} examples is {self.whole:.6g}, and that of the same in {self.parts} parts, each by what "
            f"it counts for, {self.apart:.6g}."
        )


class Additive:
    """What is known of it in one run: found out once, when somebody needs it.

    Forward passes in evaluation mode are all that it takes, after which random generators and buffers are as before.
    """

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.found: Compared | None = None
        """``None`` where it was not asked for, or cannot be told, as of a loss that fails in evaluation mode."""
        self._asked = False

    @property
    def fails(self) -> bool:
        """Whether it is known to make a difference."""
        return self.found is not None and not self.found.alike

    def ask(self, step: Step, group: Sequence[Batch]) -> bool:
        """Whether the losses of batches like those of ``group`` differ from those of their parts.

        The first time all processes must ask together; they get the same answer.
        """
        if not self._asked:
            self._asked = True
            step.clock.enter("other")
            self.found = _asked(self.context, step, group)
        return self.fails


_Trial = tuple[Batch, list[Batch]]
"""Examples, and the same in parts."""


def _asked(context: RunContext, step: Step, group: Sequence[Batch]) -> Compared | None:
    """What shows a difference in any process; else what shows none in one."""
    world = step.world
    trials = _trials(group, fixed=world.shared)  # all must call a model that is shared out equally often
    if world.any(not trials or any(map(is_lazy, context.model.parameters()))):  # which the first update is to make
        return None
    try:
        with rehearsal(context.model, loss=context.objective.module) as kept, _evaluating(context), torch.no_grad():
            found = [one for trial in trials if (one := _compared(context, step, kept, *trial)) is not None]
    finally:
        world.rest()
    everybody = [one for ours in world.gathered(found) for one in ours]
    return next((one for one in everybody if not one.alike), next(iter(everybody), None))


def _trials(group: Sequence[Batch], *, fixed: bool) -> list[_Trial]:
    """Two batches as one, or else the largest and its halves; then a few examples and pairs of them. None where nothing is cut.

    Where their number is ``fixed``, only the halves, and so nothing that is larger than what an update is made from.
    """
    try:
        largest = max(group, key=examples)
        count = length(largest) or 0
        found = [] if fixed or not _join(group[:2]) else [(join(group[:2]), list(group[:2]))]
        if not found and count > 1:
            found = [(largest, split(largest, -(-count // 2)))]
        if not fixed and count > 4:
            few = split(largest, FEW)[0]
            found.append((few, split(few, 2)))
    except WorkloadError:  # who takes batches apart in earnest says so
        return []
    return found


def _join(batches: Sequence[Batch]) -> bool:
    """Whether these are several that make one: tensors of one shape with a row per example, and nothing else."""
    counts = [length(batch) for batch in batches]
    shapes = {tuple(tensor.shape[1:] for tensor in tensors_of(batch)) for batch in batches}
    rows = all(_is_rows(batch, count) for batch, count in zip(batches, counts, strict=True))
    return len(batches) > 1 and len(shapes) == 1 and rows


def _is_rows(batch: Batch, count: int | None) -> bool:
    if isinstance(batch, torch.Tensor):
        return bool(batch.dim()) and len(batch) == count
    items = items_of(batch)
    return bool(items) and all(_is_rows(item, count) for item in items)


def _compared(context: RunContext, step: Step, kept: Snapshot, whole: Batch, parts: Sequence[Batch]) -> Compared | None:
    """One look; ``None`` where it cannot be told."""
    world = step.world

    def loss(batches: Sequence[Batch]) -> float:
        kept.put_back()  # a state that is carried from batch to batch would be taken for random numbers
        with step.precision():
            pairs = world.looked(lambda: [context.objective(context.model, batch) for batch in batches])
        values, weights = [value for value, _ in pairs], [weight for _, weight in pairs]
        if context.objective.summed:
            return float(torch.stack(values).sum())
        count, value = weighted(values, weights)
        return float(value / count)

    try:
        wholes = [loss([whole]), loss([whole])]
        draws = wholes[0] != wholes[1]
        if world.any(draws) if world.shared else draws:
            wholes += [loss([whole]), loss([whole])]
        apart = loss(parts)
    except (*_CANNOT_TELL, MemoryError) as error:
        if out_of_memory(error):
            go_on(error, repeats=world.repeats)
            torch.cuda.empty_cache()  # does nothing where there is no GPU
        return None
    middle, spread = statistics.fmean(wholes), max(wholes) - min(wholes)
    if not math.isfinite(middle):
        return None
    return Compared(
        count=examples(whole),
        parts=len(parts),
        whole=middle,
        apart=apart,
        allowed=max(max(ROUNDING, rounding(context.model, step.settings)) * abs(middle), DRAWN * spread),
    )


@contextlib.contextmanager
def _evaluating(context: RunContext) -> Iterator[None]:
    """A block with model and loss in evaluation mode, and whatever their owner has compiled as it was written."""
    loss = context.objective.loss
    modules = [*context.model.modules(), *(loss.modules() if isinstance(loss, nn.Module) else ())]
    modes = [(module, module.training) for module in modules]
    for module in modules:
        module.training = False
    try:
        with _uncompiled():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _uncompiled() -> contextlib.AbstractContextManager[object]:
    """A block in which nothing is compiled for a few calls; where nobody has asked torch to, importing that takes a second."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: Callable[[str], contextlib.AbstractContextManager[object]] = torch.compiler.set_stance
    return stance("force_eager")
