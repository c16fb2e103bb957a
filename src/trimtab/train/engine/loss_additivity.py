"""Measure whether splitting a batch changes its loss.

Splitting changes a loss that compares the examples of a batch, as contrastive losses do, and a mean over something unknown,
such as tokens. Both show when the loss of some examples is compared with the weighted mean of the losses of their parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trimtab.errors import TrimtabError, WorkloadError
from trimtab.tensors.batch_axis import length
from trimtab.train.data.batch_structure import split
from trimtab.train.engine.step import Step
from trimtab.train.loss.adapter import Batch, examples
from trimtab.train.loss.loss_parity import ROUNDING, rounding
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.memory_errors import out_of_memory, raise_unless_retryable
from trimtab.train.runtime.snapshots import Snapshot, rolled_back
from trimtab.train.runtime.world import weighted

FEW = 8
"""Examples in the second comparison, split into pairs: the halves of a large batch have nearly equal token counts."""
DRAWN = 5.0
"""A loss that draws random numbers must differ from its parts by more than this many times its spread."""
_CANNOT_TELL = (TrimtabError, RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, ArithmeticError)
"""Raised by losses and models that do not work in evaluation mode or on other examples; memory may run out too."""
ADVICE = (
    "Where the loss is a sum, return the mean; where it is a mean over something else than the examples, such as tokens, "
    "return (mean, weight) from loss(model, batch). Where it compares the examples of a batch, it now compares those of a part."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """The loss of some examples, against the weighted mean of the losses of their parts."""

    count: int
    """Examples."""
    parts: int
    whole: float
    of_parts: float
    allowed: float
    """Difference that rounding or random numbers explain."""

    @property
    def additive(self) -> bool:
        """Whether splitting does not change the loss."""
        return abs(self.of_parts - self.whole) <= self.allowed

    def __str__(self) -> str:
        """A sentence for a person."""
        return (
            f"The loss of {self.count} examples is {self.whole:.6g}, and the weighted mean of their {self.parts} parts is "
            f"{self.of_parts:.6g}."
        )


def compare(context: RunContext, step: Step, batch: Batch) -> Compared | None:
    """The comparison that shows a difference in any process, else one that shows none; ``None`` if it cannot be measured.

    Only forward passes in evaluation mode run; gradients are cleared, random generators and buffers are put back. All processes
    must call it together, and get the same answer.
    """
    world = step.world
    trials = _trials(batch, few=not world.shared)  # processes that share a model must call it equally often
    if world.any(not trials or any(map(is_lazy, context.model.parameters()))):  # lazy ones are made by the first update
        return None
    try:
        with rolled_back(context.model, loss=context.objective.module) as kept, _eager_evaluation(context), torch.no_grad():
            found = [one for parts in trials if (one := _compared(context, step, kept, *parts)) is not None]
    finally:
        world.free_gathered()
    everybody = [one for ours in world.gathered(found) for one in ours]
    return next((one for one in everybody if not one.additive), next(iter(everybody), None))


def _trials(batch: Batch, *, few: bool) -> list[tuple[Batch, list[Batch]]]:
    """``batch`` and its halves; with ``few``, also a few examples and pairs of them. Empty if ``batch`` cannot be split."""
    count = length(batch) or 0
    try:
        found = [(batch, split(batch, -(-count // 2)))] if count > 1 else []
        if few and count > 4:
            some = split(batch, FEW)[0]
            found.append((some, split(some, 2)))
    except WorkloadError:  # the split for an update raises it again
        return []
    return found


def _compared(context: RunContext, step: Step, kept: Snapshot, whole: Batch, parts: Sequence[Batch]) -> Compared | None:
    """One comparison; ``None`` if it cannot be measured."""
    world = step.world

    def loss(batches: Sequence[Batch]) -> float:
        kept.restore()  # state that is carried from batch to batch would look like random numbers
        with step.precision():
            pairs = world.forward_alone(lambda: [context.objective(context.model, batch) for batch in batches])
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
        of_parts = loss(parts)
    except (*_CANNOT_TELL, MemoryError) as error:
        if out_of_memory(error):
            raise_unless_retryable(error, repeats=world.repeats)
            torch.cuda.empty_cache()  # no effect without a GPU
        return None
    middle, spread = statistics.fmean(wholes), max(wholes) - min(wholes)
    if not math.isfinite(middle):
        return None
    allowed = max(max(ROUNDING, rounding(context.model, step.settings)) * abs(middle), DRAWN * spread)
    return Compared(count=examples(whole), parts=len(parts), whole=middle, of_parts=of_parts, allowed=allowed)


@contextlib.contextmanager
def _eager_evaluation(context: RunContext) -> Iterator[None]:
    """A block with model and loss in evaluation mode; modules that the user compiled run uncompiled."""
    loss = context.objective.loss
    modules = [*context.model.modules(), *(loss.modules() if isinstance(loss, nn.Module) else ())]
    modes = [(module, module.training) for module in modules]
    stance: Any = torch.compiler.set_stance if "torch._dynamo" in sys.modules else contextlib.nullcontext  # importing takes 1 s
    for module in modules:
        module.training = False
    try:
        with stance("force_eager"):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
