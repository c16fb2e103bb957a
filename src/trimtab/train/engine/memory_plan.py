"""The memory of one call of ``fit``: recomputed activations, the size of micro-batches, and the peak."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from trimtab.measure.memory import PeakMemory, PeakUse
from trimtab.train.autotune.batch_size import plan_for
from trimtab.train.data.micro_batches import MicroBatcher
from trimtab.train.engine.micro_batch_sizer import MicroBatchSizer, elements_of
from trimtab.train.engine.step import Step
from trimtab.train.loss.adapter import Batch
from trimtab.train.memory.activation_checkpointing import Recomputed
from trimtab.train.run_context import RunContext

_SLACK = 1.05
"""A batch with this many times the elements of the planned one gets a new plan."""
_LARGER = (
    "A later batch is larger than those of the first update, which several processes plan activation_mb by, once: it may take "
    "more. Begin with the largest, or have batches of one size."
)


class MemoryPlan:
    """A block around one call of ``fit``: measures peak memory, and stops recomputing activations at the end."""

    def __init__(self, context: RunContext) -> None:
        self.context = context = weakref.proxy(context)  # the context holds this object: no cycle keeps either alive
        self.sizer = MicroBatchSizer(context)
        self._recomputed: Recomputed | None = None
        self._planned: int | None = None
        """Elements of the largest batch that there is a plan for."""
        self._memory = PeakMemory(collect=False)  # collecting garbage takes half a second, longer than some runs
        self._use: PeakUse | None = None

    def __enter__(self) -> Self:
        self._memory.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._recomputed is not None:
            self._recomputed.undo()
            self._recomputed = None
        self.use()

    def use(self) -> PeakUse:
        """The peak so far above the level before the run. The first call ends the measurement."""
        if self._use is None:
            self._memory.__exit__(None, None, None)
            self._use = self._memory.result
        return self._use

    @property
    def peak_mb(self) -> float:
        """Peak in MB (10**6 bytes): of the GPU's allocator if the model is on a GPU, else of the process."""
        use = self.use()
        return use.device_mb if self.context.device.type == "cuda" and use.device_mb is not None else use.host_mb

    def prepare(self, step: Step, feed: MicroBatcher, group: Sequence[Batch]) -> Sequence[Batch]:
        """The micro-batches of an update from ``group``, after choosing what is recomputed.

        Raises:
            UsageError: the activations cannot keep the budget ``activation_mb``.
            WorkloadError: a single example does not fit.
        """
        group = self.sizer.begin(step, feed, group)
        if (budget := self.context.settings.memory.activation_mb) is not None:
            self._plan(step, group, budget)
        return group

    def _plan(self, step: Step, group: Sequence[Batch], budget: float) -> None:
        """Choose what is recomputed, by the largest batch so far.

        Several processes plan once, at the first update: later plans would cost a message between processes in every update.
        """
        largest = max(group, key=elements_of)
        if self._planned is not None and elements_of(largest) <= self._planned * _SLACK:
            return
        if self._planned is not None and step.world.processes > 1:
            self.context.note_once(_LARGER)
            return
        if self._recomputed is not None:
            self._recomputed.undo()
        context, self._planned = self.context, elements_of(largest)
        step.clock.enter("other")
        found = plan_for(step, context.model, largest, budget, context.device)
        self._recomputed = found.apply()
        context.note(found.note(budget))
