"""Training through :func:`torch.compile`, with a fallback to eager execution, and notes about recompilations."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trimtab.core.settings import Settings
from trimtab.core.technique import require
from trimtab.errors import UsageError
from trimtab.tensors.structure import tensors_of
from trimtab.train.engine.step import ForwardState, MicroBatchLosses, Step
from trimtab.train.loss.adapter import Batch, LossAdapter
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.memory_errors import first_line
from trimtab.train.runtime.step_clock import Clock
from trimtab.train.runtime.world import World
from trimtab.train.telemetry.events import Ended, Event, Progressed, Remarked

_DOUBLE = "The loss takes gradients of gradients, or goes backward twice, and torch does neither through what is compiled."
_REPEATED = "One update was begun twice: what its forward pass moves, such as BatchNorm's statistics, went on both times."
MIN_RUN_S = 120.0
"""With ``compile="auto"``, seconds of the run that must be left to try compilation, which takes seconds to minutes."""
MAX_REMARKS = 4
"""Recompilations that are noted one by one; the last of them says that further ones are not."""


class CompiledStep(Step):
    """A :class:`Step` through a compiled model, which falls back to the model as written if compilation fails.

    Compilation may fail at the first batch of each shape. Before such a batch, what a forward pass changes is copied;
    after a failure it is restored, and the update is repeated without compilation, with the same result.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: LossAdapter,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        world: World,
        clock: Clock,
        norm_every: int = 50,
    ) -> None:
        super().__init__(model, objective, optimizer, settings, world, clock, norm_every)
        self.plain = model
        self.failure: str | None = None
        """Why the model is not compiled."""
        self._seen_shapes: set[tuple[torch.Size, ...]] = set()
        self._called = False
        asked = settings.compiler
        options: Any = None if asked.options is None else dict(asked.options)
        try:
            compiled: Any = torch.compile(model, mode=asked.mode, dynamic=asked.dynamic, options=options)
        except RuntimeError as error:  # torch looks at the options now, and compiles later
            if options is None:
                raise
            why = first_line(error).partition(", known options are")[0]
            raise UsageError(f"torch.compile does not take Settings compiler.options={options}: {why}.") from error
        compiled.register_forward_pre_hook(self._record_call)
        self.model = compiled

    def gradients(self, batches: Sequence[Batch]) -> MicroBatchLosses:
        """:meth:`Step.gradients`, compiled if that is possible."""
        if self.model is self.plain:
            return super().gradients(batches)
        shapes = tuple(tensor.shape for batch in batches for tensor in tensors_of(batch))
        before = None if shapes in self._seen_shapes else ForwardState(self.plain, self.objective.module)
        try:
            found = super().gradients(batches)
        except RuntimeError as error:
            failure = _failure(error)
            if failure is None:
                raise
            self.failure = failure
        else:
            self._seen_shapes.add(shapes)
            if not self._called:
                self.failure = "The loss calls methods of the model, of which only model(...) itself is compiled."
                self.model = self.plain
            return found
        self.discard()
        if before is None:  # the loss took another path than with all earlier batches of these shapes
            self.failure += f" {_REPEATED}"
        else:
            before.restore()
        self.model = self.plain
        return super().gradients(batches)

    def _record_call(self, *_: object) -> None:
        """Record that the compiled model itself is called: methods of it run uncompiled."""
        self._called = True


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One graph that was compiled."""

    function: str
    seconds: float
    reason: str | None
    """Why an earlier graph did not fit; ``None`` if there was none."""


class Compilations:
    """Reads torch's log of compilations."""

    def __init__(self) -> None:
        self._last: Any = None
        if "torch._dynamo" in sys.modules:  # else nothing was compiled yet, and importing it takes a second
            self.new()

    def new(self) -> list[Compilation]:
        """The compilations since the last call, at most torch's last 64 in order."""
        known = list(require("torch._dynamo.utils").get_compilation_metrics())
        after = next((index + 1 for index, one in enumerate(known) if one is self._last), 0)
        self._last = known[-1] if known else None
        return [
            Compilation(str(one.co_name), float(one.entire_frame_compile_time_s or 0.0), _reason(one.recompile_reason))
            for one in known[after:]
        ]


class CompileWatch:
    """A callback that notes recompilations, and why the model could not be compiled."""

    def __init__(self, step: CompiledStep) -> None:
        self.step, self.recompilations = step, 0
        self._compilations, self._noted_failure = Compilations(), False

    def __call__(self, context: RunContext, event: Event) -> None:
        """Note what was compiled since the last event."""
        if not isinstance(event, (Progressed, Ended)) or "torch._dynamo" not in sys.modules:
            return
        for one in self._compilations.new():
            if one.reason is not None:
                self.recompilations += 1
                self._remark(context, one.reason, one)
        if self.step.failure is not None and not self._noted_failure:
            self._noted_failure = True
            text = f"compile is off: the model cannot be compiled. {self.step.failure}"
            context.notes.append(text)
            context.emit(Remarked(update=event.update, epoch=event.epoch, text=text))

    def _remark(self, context: RunContext, reason: str, one: Compilation) -> None:
        position = context.position
        text = f"{one.function} was compiled again by update {position.update} ({one.seconds:.1f} s): {reason}."
        if self.recompilations == MAX_REMARKS:
            text += " Further ones are not told of. Batches of few shapes, as buckets of lengths give, are compiled once each."
            context.notes.append(text)
        if self.recompilations <= MAX_REMARKS:
            context.emit(Remarked(update=position.update, epoch=position.epoch, text=text))


def _failure(error: RuntimeError) -> str | None:
    """Why the model cannot be compiled, in a sentence; ``None`` if ``error`` is not about compilation."""
    if isinstance(error, require("torch._dynamo.exc").TorchDynamoException):
        return f"{first_line(error)}."
    words = str(error)  # torch has no error class for double backward and for a retained graph
    return _DOUBLE if "support double backward" in words or "non-empty donated buffers" in words else None


def _reason(words: Any) -> str | None:
    """torch's reason for a recompilation, without graph numbers."""
    if not words:
        return None
    line = next((line for line in str(words).splitlines() if ":" in line), str(words)).strip().lstrip("- ")
    head, _, rest = line.partition(":")
    return (rest if head.strip().replace("/", "").isdigit() else line).strip().rstrip(".")
