"""The size of a run's micro-batches: stated, searched for, or halved after running out of memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trimtab.errors import WorkloadError
from trimtab.tensors.batch_axis import length
from trimtab.tensors.structure import tensors_of
from trimtab.train.autotune.batch_size import parts, search_micro_batch
from trimtab.train.data.batch_structure import split
from trimtab.train.data.micro_batches import MicroBatcher
from trimtab.train.distributed.process_group import PeerMemoryError
from trimtab.train.engine.loss_additivity import ADVICE, Compared, compare
from trimtab.train.engine.step import ForwardState, MicroBatchLosses, Step
from trimtab.train.loss.adapter import Batch, examples
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.memory_errors import first_line, out_of_memory

RETRY_AFTER = 100
"""Updates with the halved size before whole batches are tried again; doubled after each failure."""
_UNKNOWN_COUNT = (
    "data.micro_batch={}: batches are not taken apart of which nothing tells how many examples they have. Make the "
    "loader's smaller."
)
_INSEPARABLE = "data.micro_batch=None: batches stay whole. {}"
_NOT_ADDITIVE = "data.micro_batch=None: batches are not taken apart, because that would change what is learnt. {}"
_APART = "An update from parts is not that of the whole."


class MicroBatchSizer:
    """Chooses the number of examples per micro-batch, in one call of ``fit``.

    - ``DataSettings(micro_batch=4)``: the loader's batches are split into micro-batches of at most 4 examples.
    - ``DataSettings(micro_batch="auto")``: the first update searches for the fastest size that fits into memory.
    - Memory runs out: batches are halved until the update fits. No update is lost, and the size is kept for the updates that
      follow. Whole batches are tried again after :data:`RETRY_AFTER` updates, because one long batch may have been the reason.

    The update does not change, because each part counts by its weight. There are two exceptions: BatchNorm, and a loss that
    compares the examples of a batch, see smaller batches. trimtab measures whether the loss does so before it splits batches.
    Batches that the user accumulates are not measured.
    """

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.limit: int | None = None
        """Most examples per micro-batch since memory ran out; ``None`` while whole batches fit."""
        self.compared: Compared | None = None
        """The loss of a batch against that of its parts; ``None`` if not measured, or not measurable."""
        self._measured = self._decided = self._checked = False
        self._group: Sequence[Batch] = ()
        """The batches of the last update, before they were halved."""
        self._least: int | None = None
        """The smallest size that was noted."""
        self._retry_after, self._since_retry = RETRY_AFTER, 0
        """Updates between two tries of whole batches, and updates since the last try."""
        self._fitted = -1
        """Elements of the largest micro-batch that fitted."""
        self._remark: str | None = None

    @property
    def changes_loss(self) -> bool:
        """Whether the loss of parts was found to differ from the loss of the whole batch."""
        return self.compared is not None and not self.compared.additive

    def compare_loss(self, step: Step, group: Sequence[Batch]) -> bool:
        """Measure :attr:`changes_loss` on the largest batch of ``group``, once per run; a collective operation."""
        if not self._measured:
            self._measured = True
            step.clock.enter("other")
            self.compared = compare(self.context, step, max(group, key=examples))
        return self.changes_loss

    def why_not_split(self, step: Step) -> str | None:
        """Why batches like those of the last update must not be split in another way, in a sentence."""
        alone = self.context.world.processes == 1  # several have measured it in the first update, or never do
        changes = self.compare_loss(step, self._group) if alone and self._group else self.changes_loss
        return f"other updates would come of it. {self.compared}" if changes else None

    def begin(self, step: Step, feed: MicroBatcher, group: Sequence[Batch]) -> Sequence[Batch]:
        """The micro-batches of an update from ``group``; the first call decides ``micro_batch="auto"``.

        Raises:
            WorkloadError: not even one example fits into memory.
        """
        first, self._decided = not self._decided, True
        if first:
            group = self._decide(step, feed, group)
        self._group, context = group, self.context
        if not self._checked and self._splits(group, first=first):
            self._checked = True
            if self.compare_loss(step, group) and context.settings.data.micro_batch is not None:
                context.objective.weights_checked = True
                if not any(note.startswith(_APART) for note in context.notes):  # by an earlier call of fit
                    context.note(f"{_APART} {self.compared} {ADVICE}")
        return group

    def _decide(self, step: Step, feed: MicroBatcher, group: Sequence[Batch]) -> Sequence[Batch]:
        """Search for the size if it is ``"auto"``; leave batches whole if they cannot, or must not, be split."""
        context, batch = self.context, self.context.settings.data.micro_batch
        unknown = batch is not None and any(length(each) is None for each in group)
        if batch != "auto":
            context.note_once(_UNKNOWN_COUNT.format(batch) if unknown else None)
            return group
        whole = None if unknown else next(filter(None, map(_inseparable, group)), None)
        if context.world.any(unknown or whole is not None):
            reason = _INSEPARABLE.format(whole) if whole else _UNKNOWN_COUNT.format(None)
        elif self.compare_loss(step, group):
            context.objective.weights_checked = True
            reason = _NOT_ADDITIVE.format(f"{self.compared} {ADVICE}")
        else:
            feed.micro = search_micro_batch(context, step, group, updates=context.fit.planned)
            return parts(group, feed.micro)
        context.settings = context.settings.replaced({"data.micro_batch": None})
        context.decided["data.micro_batch"] = None
        context.note_once(reason)
        return group

    def _splits(self, group: Sequence[Batch], *, first: bool) -> bool:
        """Whether trimtab splits batches; equal in all processes, which communicate about it in the first update only."""
        settings = self.context.settings
        if self.context.world.processes == 1:
            return settings.data.micro_batch is not None and len(group) > settings.data.accumulate
        return first and (settings.data.micro_batch is not None or settings.adjust)

    def gradients(self, step: Step, group: Sequence[Batch]) -> MicroBatchLosses:
        """:meth:`Step.gradients` of ``group``; if memory runs out, repeated with micro-batches of half the size.

        Buffers and random generators are copied first only if a micro-batch is larger than any that fitted: otherwise memory
        hardly ever runs out, and the copies would take time.

        Raises:
            WorkloadError: a single example does not fit, or batches must not be split.
        """
        largest = 0
        size: int | None = None
        before: ForwardState | None = None
        again = self.limit is not None and self._since_retry >= self._retry_after
        if self.limit is not None:
            largest = _largest(group)
            if not again:
                size = min(largest, self.limit)
                group = parts(group, self.limit)
        while True:
            elements = max(map(elements_of, group))
            if before is None and elements > self._fitted:
                before = ForwardState(self.context.model, self.context.objective.module)
            try:
                found = step.gradients(group)
                break
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                largest = largest or _largest(group)
                size = size or largest
                self._refuse_split(step, size, group, error)
            step.discard()  # outside the except block, whose traceback keeps the step's tensors alive
            if before is not None:
                before.restore()
            size = -(-size // 2)
            group = parts(group, size)
        self._fitted = max(self._fitted, elements)
        if self.limit is not None or size is not None:
            self._remember(size or largest, largest, again=again)
        return found

    def _refuse_split(self, step: Step, size: int, group: Sequence[Batch], error: BaseException) -> None:
        words = first_line(error)
        if step.world.any(size == 1 and not isinstance(error, PeerMemoryError)):  # that process has a larger batch
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

    def _remember(self, size: int, largest: int, *, again: bool) -> None:
        """Keep ``size`` for the updates that follow, if batches of ``largest`` examples did not fit."""
        if again and size == largest:  # whole batches fit by now
            self.limit, self._retry_after, self._since_retry = None, RETRY_AFTER, 0
            return
        if again:
            self._retry_after, self._since_retry = self._retry_after * 2, 0
        self._since_retry += 1
        if size < largest:
            self.limit = size
        if size < (self._least or largest):
            self._least = size
            self._remark = (
                f"A batch of {largest} did not fit into memory: such batches now run in parts of at most {size}, with "
            )

    def remark(self, step: Step) -> str | None:
        """A sentence if memory ran out in the last update. Call it after the optimizer's step, because it clears gradients."""
        head, self._remark = self._remark, None
        if head is None:
            return None
        if step.world.processes == 1:  # others need not have run out of memory, and would not take part
            self.compare_loss(step, parts(self._group, 2 * (self._least or 1)))  # two parts as one may fit without gradients
        if self.changes_loss:
            return f"{head}other updates than those of whole batches. {self.compared} {ADVICE}"
        if self.compared is None:
            return f"{head}the same updates, except that BatchNorm, and a loss that compares examples, see smaller batches."
        return f"{head}the same updates, except that BatchNorm sees smaller batches."


def _largest(group: Sequence[Batch]) -> int:
    """Examples in the largest batch."""
    return max(map(examples, group))


def _inseparable(batch: Batch) -> str | None:
    """Why ``batch`` cannot be split, if it cannot."""
    try:
        split(batch, -(-examples(batch) // 2))
    except WorkloadError as error:
        return str(error)
    return None


def elements_of(batch: Batch) -> int:
    """Elements in all tensors of ``batch``."""
    return sum(map(torch.Tensor.numel, tensors_of(batch)))
