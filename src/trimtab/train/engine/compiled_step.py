"""Training through :func:`torch.compile`: what cannot be compiled runs as it is, and what is compiled again is told of."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trimtab.core.settings import Settings
from trimtab.core.technique import require
from trimtab.tensors.structure import tensors_of
from trimtab.train.engine.step import Step, Update
from trimtab.train.loss.adapter import Batch, LossAdapter
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.snapshots import moving
from trimtab.train.runtime.step_clock import Clock
from trimtab.train.runtime.torch_settings import random_state, set_random_state
from trimtab.train.runtime.world import World
from trimtab.train.telemetry.events import Ended, Event, Progressed, Remarked

_TWICE = "The loss takes gradients of gradients, or goes backward twice, and torch does neither through what is compiled."
_BEGUN = "One update was begun twice: what its forward pass moves, such as BatchNorm's statistics, went on both times."
WORTH_S = 120.0
"""Where nobody asked for it, compilation is tried only if so much of the run is left: it takes from some seconds to minutes."""
MOST_REMARKS = 4
"""Compilations that a person is told of one by one; those who keep being compiled again are told so once."""


class CompiledStep(Step):
    """A :class:`Step` through a compiled model, which goes on without compilation where that fails.

    Compilation may fail whenever a batch has shapes that none had before. So then, what a forward pass changes is kept, and
    put back before the update is made as the model was written; the update is the one that it would have been.
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
        """Why the model is not compiled after all."""
        self._met: set[tuple[torch.Size, ...]] = set()
        self._called = False
        compiled: Any = torch.compile(model)
        compiled.register_forward_pre_hook(self._hear)
        self.model = compiled

    def __call__(self, batches: Sequence[Batch]) -> Update:
        """Update the parameters from ``batches``, compiled if that is possible."""
        if self.model is self.plain:
            return super().__call__(batches)
        shapes = tuple(tensor.shape for batch in batches for tensor in tensors_of(batch))
        new = shapes not in self._met
        before = (moving(self.plain, self.objective.module), random_state()) if new else None
        try:
            update = super().__call__(batches)
        except RuntimeError as error:
            failure = _failure(error)
            if failure is None:
                raise
            self.failure = failure
        else:
            self._met.add(shapes)
            if not self._called:
                self.failure = "The loss calls methods of the model, of which only model(...) itself is compiled."
                self.model = self.plain
            return update
        self.discard()
        if before is None:  # the loss went another way than with all batches of these shapes before
            self.failure += f" {_BEGUN}"
        else:
            kept, random = before
            kept.put_back()
            set_random_state(random)
        self.model = self.plain
        return super().__call__(batches)

    def _hear(self, *_: object) -> None:
        """The compiled model is called, and not only a method of it, which would run as it was written."""
        self._called = True


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One graph that was compiled."""

    function: str
    seconds: float
    again: str | None
    """Why one that was there before would not do; ``None`` where there was none."""


class Compilations:
    """Asks torch what it compiled; each answer begins where the one before ended."""

    def __init__(self) -> None:
        self._last: Any = None
        if "torch._dynamo" in sys.modules:  # else nothing was compiled yet, and importing it takes a second
            self.news()

    def news(self) -> list[Compilation]:
        """The compilations since the last call, at most torch's last 64 in order."""
        known = list(require("torch._dynamo.utils").get_compilation_metrics())
        after = next((index + 1 for index, one in enumerate(known) if one is self._last), 0)
        self._last = known[-1] if known else None
        return [
            Compilation(str(one.co_name), float(one.entire_frame_compile_time_s or 0.0), _reason(one.recompile_reason))
            for one in known[after:]
        ]


class CompileWatch:
    """A callback that tells of what is compiled again in a run, and of what could not be compiled."""

    def __init__(self, step: CompiledStep) -> None:
        self.step, self.again = step, 0
        self._compilations, self._told = Compilations(), False

    def __call__(self, context: RunContext, event: Event) -> None:
        """Look what was compiled since the last time."""
        if not isinstance(event, (Progressed, Ended)) or "torch._dynamo" not in sys.modules:
            return
        for one in self._compilations.news():
            if one.again is not None:
                self.again += 1
                self._remark(context, one.again, one)
        if self.step.failure is not None and not self._told:
            self._told = True
            text = f"compile is off: the model cannot be compiled. {self.step.failure}"
            context.notes.append(text)
            context.emit(Remarked(update=event.update, epoch=event.epoch, text=text))

    def _remark(self, context: RunContext, reason: str, one: Compilation) -> None:
        position = context.position
        text = f"{one.function} was compiled again by update {position.update} ({one.seconds:.1f} s): {reason}."
        if self.again == MOST_REMARKS:
            text += " Further ones are not told of. Batches of few shapes, as buckets of lengths give, are compiled once each."
            context.notes.append(text)
        if self.again <= MOST_REMARKS:
            context.emit(Remarked(update=position.update, epoch=position.epoch, text=text))


def first_line(error: BaseException) -> str:
    """The first line of what an error says, as a sentence."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line.rstrip(".:") + "."


def _failure(error: RuntimeError) -> str | None:
    """Why the model is not compiled, in a sentence; ``None`` where that is not what ``error`` says."""
    if isinstance(error, require("torch._dynamo.exc").TorchDynamoException):
        return first_line(error)
    words = str(error)  # torch has no class for these: gradients of gradients, and a graph that is kept for a second pass
    return _TWICE if "support double backward" in words or "non-empty donated buffers" in words else None


def _reason(words: Any) -> str | None:
    """torch's reason for compiling again, without the numbers of its graphs."""
    if not words:
        return None
    line = next((line for line in str(words).splitlines() if ":" in line), str(words)).strip().lstrip("- ")
    head, _, rest = line.partition(":")
    return (rest if head.strip().replace("/", "").isdigit() else line).strip().rstrip(".")
