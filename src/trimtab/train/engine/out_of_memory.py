"""Memory in a run: what is recomputed, micro-batches that were found, steps that do not fit, and the peak of it all."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from trimtab.errors import WorkloadError
from trimtab.measure.memory import PeakMemory, PeakUse
from trimtab.tensors.batch_axis import length
from trimtab.tensors.structure import tensors_of
from trimtab.train.autotune.batch_size import micro_batch, parts, plan_for
from trimtab.train.data.batch_structure import split
from trimtab.train.distributed.process_group import PeerMemoryError
from trimtab.train.engine.loss_additivity import ADVICE, Additive
from trimtab.train.engine.step import Step, Update
from trimtab.train.loss.adapter import Batch, examples
from trimtab.train.memory.activation_checkpointing import Recomputed, longest_chain
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.memory_errors import out_of_memory, said
from trimtab.train.runtime.random_generators import set_states, states_of
from trimtab.train.runtime.snapshots import generators_of_both, moving

if TYPE_CHECKING:
    from trimtab.train.engine.setup import Ready

AGAIN_AFTER = 100
"""Updates after which whole batches are tried again where memory did not suffice; twice as many after each failure."""
_SLACK = 1.05
"""A batch of so many times the elements of the one that the plan was made for gets a new plan."""
_LARGER = (
    "A later batch is larger than those of the first update, which several processes plan activation_mb by, once: it may take "
    "more. Begin with the largest, or have batches of one size."
)
_UNTOLD = (
    "data.micro_batch={}: batches are not taken apart of which nothing tells how many examples they have. Make the "
    "loader's smaller."
)
_INSEPARABLE = "data.micro_batch=None: batches stay whole. {}"
_APART = "An update from parts is not that of the whole."


class MemoryPlan:
    """The memory that one call of ``fit`` lives in: entered before its first update, left when it is over.

    Args:
        trainer: told of what happens, and asked for its settings.
    """

    def __init__(self, context: RunContext) -> None:
        self.context = context = weakref.proxy(context)  # which has it: both are to go when nobody else has the trainer
        self.additive = Additive(context)
        self.fitting = OomRetry(context, self.additive)
        self._recomputed: Recomputed | None = None
        self._planned: int | None = None
        """Elements of the largest batch that there is a plan for."""
        self._memory = PeakMemory(collect=False)  # which takes half a second, longer than some runs
        self._use: PeakUse | None = None
        self._begun = self._looked = False
        self._group: Sequence[Batch] = ()
        """What the last update was made from."""

    def __enter__(self) -> Self:
        self._memory.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._recomputed is not None:
            self._recomputed.undo()
            self._recomputed = None
        self.use()

    def use(self) -> PeakUse:
        """The highest memory so far above the level before the run; what comes later is not measured."""
        if self._use is None:
            self._memory.__exit__(None, None, None)
            self._use = self._memory.result
        return self._use

    @property
    def peak_mb(self) -> float:
        """Of the GPU's allocator where the model is on one, else of the process."""
        use = self.use()
        return use.device_mb if self.context.device.type == "cuda" and use.device_mb is not None else use.host_mb

    def update(self, ready: Ready, group: Sequence[Batch]) -> Update:
        """The update from ``group``, in as much memory as there is.

        Raises:
            UsageError: the activations cannot keep the budget.
            WorkloadError: a single example does not fit.
        """
        if not self._begun:
            group = self._begin(ready, group)
        if not self._looked and self._in_parts(group):
            self._look(ready.step, group)
        self._begun, self._group = True, group
        if self.context.settings.memory.activation_mb is not None:
            self._plan(ready.step, group)
        return self.fitting(ready.step, group)

    def _begin(self, ready: Ready, group: Sequence[Batch]) -> Sequence[Batch]:
        """Recompute fixed segments; find the micro-batch where it is open, which a run that goes on has kept."""
        settings, model = self.context.settings, self.context.model
        if settings.memory.segments is not None:
            self._recomputed = Recomputed([longest_chain(model)], model.buffers(), segments=settings.memory.segments)
        untold = settings.data.micro_batch is not None and any(length(batch) is None for batch in group)
        if settings.data.micro_batch != "auto":
            self.context.note_once(_UNTOLD.format(settings.data.micro_batch) if untold else None)
            return group
        whole = None if untold else next(filter(None, map(_inseparable, group)), None)
        if self.context.world.any(untold or whole is not None):
            self._leave_whole()
            self.context.note_once(_INSEPARABLE.format(whole) if whole else _UNTOLD.format(None))
            return group
        if self.additive.ask(ready.step, group):
            self._looked = self.context.objective.doubted = True
            self._leave_whole()
            self.context.note(
                f"data.micro_batch=None: batches are not taken apart, because that would change what is learnt. {self._why}"
            )
            return group
        ready.feed.micro = micro_batch(self.context, ready.step, group, updates=ready.updates)
        return parts(group, ready.feed.micro)

    def _leave_whole(self) -> None:
        """Decide that batches are not taken apart."""
        self.context.settings = self.context.settings.replaced({"data.micro_batch": None})
        self.context.decided["data.micro_batch"] = None

    def _in_parts(self, group: Sequence[Batch]) -> bool:
        """Whether this update is made from parts whose losses might not add up; the same in all processes.

        Those cannot ask each other at every update, so that they go by the settings, and look as the run begins.
        """
        settings, objective = self.context.settings, self.context.objective
        if self.context.world.processes == 1:
            return len(group) > 1 and (settings.data.micro_batch is not None or not objective.known)
        apart = settings.data.micro_batch is not None or (settings.data.accumulate > 1 and not objective.known)
        return not self._begun and (apart or settings.adjust)

    def _look(self, step: Step, group: Sequence[Batch]) -> None:
        """Tell where an update from parts is another than that from the whole."""
        self._looked, context = True, self.context
        data = context.settings.data
        if not self.additive.ask(step, group) or (data.micro_batch is None and data.accumulate == 1):
            return
        context.objective.doubted = True
        if not any(note.startswith(_APART) for note in context.notes):  # by a run before
            context.note(f"{_APART} {self._why}")

    @property
    def _why(self) -> str:
        return f"{self.additive.found} {ADVICE}"

    def against_parts(self, step: Step) -> str | None:
        """Why batches like those of the last update must not be taken apart in another way, in a sentence."""
        alone = self.context.world.processes == 1  # several have looked by now, or nobody has
        fails = self.additive.ask(step, self._group) if alone and self._group else self.additive.fails
        return f"other updates would come of it. {self.additive.found}" if fails else None

    def _plan(self, step: Step, group: Sequence[Batch]) -> None:
        """Choose what is recomputed, by the largest batch so far.

        Several processes do it once, at the first update, because they would have to ask each other at every one.
        """
        largest = max(group, key=_elements)
        if self._planned is not None and _elements(largest) <= self._planned * _SLACK:
            return
        if self._planned is not None and step.world.processes > 1:
            self.context.note_once(_LARGER)
            return
        if self._recomputed is not None:
            self._recomputed.undo()
        context, self._planned = self.context, _elements(largest)
        step.clock.enter("other")
        budget = context.settings.memory.activation_mb or 0.0
        found = plan_for(step, context.model, largest, budget, context.device)
        self._recomputed = found.apply()
        context.note(found.note(budget))


class OomRetry:
    """Makes updates; where memory does not suffice, from smaller batches, and so that no update is lost.

    The update is the same, because each part counts by what it stands for; only BatchNorm sees smaller batches, and a loss that
    compares the examples of a batch, which is told. The size that worked is used for the updates that follow. Whole batches are
    tried again after :data:`AGAIN_AFTER` updates, because an unusually long batch or a neighbour may have been the reason, and
    ever more rarely where that fails.

    Where batches are larger than any that fitted so far, torch's random generators are kept, with those that model and loss
    have, and what a forward pass may change, and put back before a second try. Elsewhere, where hardly ever anything fails,
    that would only take time.
    """

    def __init__(self, context: RunContext, additive: Additive) -> None:
        self.context, self.additive = context, additive
        self.limit: int | None = None
        """Most examples at once."""
        self._least: int | None = None
        self._wait, self._since = AGAIN_AFTER, 0
        self._fitted = -1
        """Elements of the largest batch that fitted."""

    def __call__(self, step: Step, group: Sequence[Batch]) -> Update:
        """The update from ``group``.

        Raises:
            WorkloadError: a single example does not fit, or batches may not be taken apart.
        """
        whole, size, before = group, None, None
        if self.limit is not None and self._since < self._wait:
            size = min(_largest(group), self.limit)
            group = parts(group, self.limit)
        while True:
            elements = max(map(_elements, group))
            if before is None and elements > self._fitted:
                before = _Before(self.context)
            try:
                update = step(group)
                break
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                size = size or _largest(group)  # which nobody needs where all goes well
                self._may_split(step, size, group, error)
            step.discard()  # outside the except block, whose traceback keeps the step's tensors alive
            if before is not None:
                before.put_back()
            size = -(-size // 2)
            group = parts(group, size)
        self._fitted = max(self._fitted, elements)
        if self.limit is not None or size is not None:
            largest = _largest(whole)
            self._remember(size or largest, largest, step, group)
        return update

    def _may_split(self, step: Step, size: int, group: Sequence[Batch], error: BaseException) -> None:
        words = said(error)
        if step.world.any(size == 1 and not isinstance(error, PeerMemoryError)):  # whoever ran out of memory has a larger one
            if any(length(batch) is None for batch in group):
                raise WorkloadError(
                    f"A batch does not fit into memory ({words}), and nothing tells how many examples it has, so it cannot be "
                    "taken apart. Make the loader's batches smaller, or recompute activations with "
                    "MemorySettings(activation_mb=...)."
                ) from error
            raise WorkloadError(
                f"A single example does not fit into memory ({words}). Recompute activations with "
                "MemorySettings(activation_mb=...), use a smaller model or shorter inputs."
            ) from error
        if self.context.settings.data.exact_batchnorm:
            raise WorkloadError(
                f"An update of {size} examples does not fit into memory ({words}), and with exact_batchnorm it cannot be taken "
                "apart. Recompute activations with MemorySettings(activation_mb=...), or accumulate less."
            ) from error

    def _remember(self, size: int, largest: int, step: Step, group: Sequence[Batch]) -> None:
        """Note that an update was made from batches of at most ``size`` examples, where they had up to ``largest``."""
        whole = self.limit is not None and self._since >= self._wait  # it was tried without the limit
        if whole and size == largest:
            self.limit, self._wait, self._since = None, AGAIN_AFTER, 0
            return
        if whole:
            self._wait, self._since = self._wait * 2, 0
        self._since += 1
        if size < largest:
            self.limit = size
        if size < (self._least or largest):
            self._least = size
            self.context.note(
                f"A batch of {largest} did not fit into memory: such batches now run in parts of at most {size}, with "
                f"{self._with(step, group)}"
            )

    def _with(self, step: Step, group: Sequence[Batch]) -> str:
        """With which updates batches run in parts."""
        if step.world.processes == 1:  # others need not have run out of memory, and would not be asked
            self.additive.ask(step, group)
        if self.additive.fails:
            return f"other updates than those of whole batches. {self.additive.found} {ADVICE}"
        if self.additive.found is None:
            return "the same updates, except that BatchNorm, and a loss that compares examples, see smaller batches."
        return "the same updates, except that BatchNorm sees smaller batches."


class _Before:
    """What a try may change that is not made anew: random generators of torch, the model and the loss, and what these move."""

    def __init__(self, context: RunContext) -> None:
        self._device = context.device
        model, loss = context.model, context.objective.module
        self._moving = moving(model, loss)
        self._generators = generators_of_both(model, loss)
        self._drawn = states_of(self._generators)
        self._host = torch.get_rng_state()
        self._gpu = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None

    def put_back(self) -> None:
        """As it was; memory of the GPU that is held but not used is given back."""
        self._moving.put_back()
        set_states(self._generators, self._drawn)
        torch.set_rng_state(self._host)
        if self._gpu is not None:
            torch.cuda.empty_cache()
            torch.cuda.set_rng_state(self._gpu, self._device)


def _largest(group: Sequence[Batch]) -> int:
    """Examples in the largest batch."""
    return max(map(examples, group))


def _inseparable(batch: Batch) -> str | None:
    """Why ``batch`` cannot be taken apart, if it cannot."""
    try:
        split(batch, -(-examples(batch) // 2))
    except WorkloadError as error:
        return str(error)
    return None


def _elements(batch: Batch) -> int:
    return sum(map(torch.Tensor.numel, tensors_of(batch)))
