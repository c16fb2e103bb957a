"""A double of a run: copies of its model, loss and optimizer that make real updates, of which the run sees nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trimtab.core.candidate import Candidate
from trimtab.core.settings import Settings
from trimtab.core.signature import STORED
from trimtab.errors import CompileError
from trimtab.measure.timer import LocalRunner, synchronizer
from trimtab.tensors.deepcopy import copied
from trimtab.tensors.structure import tensors_of
from trimtab.train.autotune.batch_size import plan_for
from trimtab.train.data.device_prefetch import mover
from trimtab.train.data.peek import kept_random
from trimtab.train.engine import setup
from trimtab.train.loss.adapter import Batch, LossAdapter
from trimtab.train.loss.loss_parity import shaken, too_coarse
from trimtab.train.memory.activation_checkpointing import Recomputed, longest_chain
from trimtab.train.optim.kernels import use_kernels
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.cudnn_thread import thread_for
from trimtab.train.runtime.gradient_parity import seen
from trimtab.train.runtime.snapshots import Snapshot, averages, modules_of_both, moving, stand_still
from trimtab.train.runtime.step_clock import HostClock
from trimtab.train.runtime.torch_settings import running
from trimtab.train.runtime.train_modes import Still, floats, gathered
from trimtab.train.runtime.world import World

if TYPE_CHECKING:
    from trimtab.train.engine.step import Update


@dataclasses.dataclass(frozen=True)
class Watched:
    """One update from each group of batches."""

    updates: list[Update]
    gradient: list[torch.Tensor | None]
    """Of each parameter in the first of the updates that was made; none where all were left out."""


class ShadowRun:
    """What ``context`` would be under ``settings``, without its other processes, at a learning rate of nought.

    The same batches are gone through again and again; at nought they are as hard as they were, and nothing diverges.

    On a GPU, one that has cuDNN search runs in a thread of its own: see :mod:`trimtab.train.runtime.cudnn_thread`.

    Raises:
        CompileError: the model, the loss or the optimizer cannot be copied, or the optimizer finds its own learning rate.
        RuntimeError: and whatever else speaks against the settings, such as memory that runs out.
    """

    def __init__(self, context: RunContext, settings: Settings, batches: Sequence[Batch]) -> None:
        self.settings = settings
        self._where = thread_for(context.device, settings.cudnn_benchmark is True)
        self.model: nn.Module
        self.model, objective, optimizer = copies(context.model, context.objective, context.optimizer)
        self.modes = context.modes
        self.modes.train(self.model)
        if any(group.get("lr") is None for group in optimizer.param_groups):
            raise CompileError("The optimizer finds its own learning rate, so that no copy of the run can stand still.")
        stand_still(optimizer)
        with running(settings):
            move = setup.laid_out(self.model, settings, context.device)
            self.step = setup.step_for(settings)(self.model, objective, optimizer, settings, World(), HostClock())
            if settings.optimizer.implementation is not None and settings.optimizer.implementation != "auto":
                use_kernels(optimizer, settings.optimizer.implementation)
        self.feed = setup.feed_for(batches, settings, HostClock(), move)
        self._where(lambda: self._keep_budget(context.device))

    def _keep_budget(self, device: torch.device) -> None:
        """Recompute what the run will, as far as the batches here tell."""
        settings, budget = self.settings, self.settings.memory.activation_mb
        if settings.memory.segments is not None:
            Recomputed([longest_chain(self.model)], self.model.buffers(), segments=settings.memory.segments)
        if budget is None:
            return
        with running(settings), kept_random():
            self.feed.begin(0)
            batches = [batch for group in self.feed.groups() for batch in group]
            largest = max(batches, key=lambda batch: sum(tensor.numel() for tensor in tensors_of(batch)))
            plan_for(self.step, self.model, largest, budget, device).apply()

    @property
    def runner(self) -> LocalRunner:
        """Times rounds. It is not kept: it holds what holds it, and such rings stay in memory until somebody looks for them."""
        return LocalRunner(self.round, synchronizer(self.settings.device))

    def round(self) -> list[Update]:
        """One update from each group of the batches."""
        return self._where(self._round)

    def _round(self) -> list[Update]:
        with running(self.settings):
            self.feed.begin(0)
            return [self.step(group) for group in self.feed.groups()]

    def timed_round(self) -> float:
        """Seconds that a round takes, by the clock on the wall."""
        return sum(self.runner.block(1)) / 1e9

    @torch.no_grad()
    def take_buffers(self, other: ShadowRun) -> None:
        """Have the buffers of ``other``, such as running statistics, and its averages, which may have seen other rounds."""
        parts = [(each.model, each.step.objective.module) for each in (self, other)]
        for average, seen_by_other in zip(*(averages(*part) for part in parts), strict=True):
            average.copy_(seen_by_other)
        for mine, theirs in zip(*(modules_of_both(*part) for part in parts), strict=True):
            for name, buffer in theirs.named_buffers(recurse=False):
                if mine.get_buffer(name).shape == buffer.shape:  # some grow
                    mine.get_buffer(name).copy_(buffer)

    def watched(self) -> Watched:
        """A round that leaves buffers and random generators as they are."""
        kept = moving(self.model, self.step.objective.module)
        try:
            with kept_random(), seen(self.step.optimizer) as gradient:
                return Watched(self.round(), gradient)
        finally:
            kept.put_back()

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """A block in which dropout and the like are off, so that rounds draw no random numbers."""
        before, modes = floats(self.model), self.modes
        self.round()
        self.modes = still = Still(self.model, gathered(self.model, before))
        try:
            still.look()
            still.train()
            yield
        finally:
            still.end()
            self.modes = modes
            modes.train(self.model)

    @contextlib.contextmanager
    def shaken(self, size: float) -> Iterator[None]:
        """A block in which the parameters are others, by ``size`` relative to them."""
        kept = Snapshot(self.model.parameters())
        shaken(self.model, 0, size)
        try:
            yield
        finally:
            kept.put_back()


class _Loss(nn.Module):
    """The loss as a function of the tensors in a batch, which is what a pass can look at."""

    def __init__(self, model: nn.Module, objective: LossAdapter, batch: Batch) -> None:
        super().__init__()
        self.model, self._objective, self._batch = model, objective, batch

    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        """The loss; the tensors are those of the batch already. It may be made of gradients, whoever looks at it."""
        with torch.enable_grad():
            return self._objective(self.model, self._batch)[0].detach()


def candidate(context: RunContext, settings: Settings, batch: Batch) -> Candidate:
    """A copy of what is trained as passes know it, to ask them for reasons: the loss of ``batch`` as a model of its tensors.

    Those that a runtime could not take, such as sparse ones, are left out: a training may have them.
    """
    model, objective = copies(context.model, context.objective)
    moved = mover(context.device)(batch)
    context.modes.train(model)
    seen = tuple(tensor for tensor in tensors_of(moved) if tensor.layout is torch.strided and tensor.dtype in STORED)
    made = thread_for(context.device)(lambda: Candidate.of(_Loss(model, objective, moved), seen))
    return made.with_settings({name: settings.value(name) for name in ("device", "threads", "precision.autocast")})


def rounded(model: nn.Module, objective: LossAdapter, settings: Settings, batch: Batch, limit: float) -> str | None:
    """Why outputs in the precision of ``settings`` cannot come close to the targets in ``batch``; see :func:`too_coarse`.

    It is asked on a copy of the model, whose buffers may change.
    """
    if settings.precision.autocast in (None, "auto") or objective.calls_model:  # then nobody but the loss sees the outputs
        return None
    device, dtype = torch.device(settings.device), getattr(torch, str(settings.precision.autocast))
    moved = mover(device)(batch)
    with torch.enable_grad(), kept_random(), running(settings), torch.autocast(device.type, dtype=dtype):
        outputs = objective.answered(model, moved)[2]
    return too_coarse(outputs.detach() if isinstance(outputs, torch.Tensor) else outputs, moved[1], dtype, limit)


def why_not_alone(context: RunContext) -> str | None:
    """Why a copy of the model cannot run in this process without the others, in a clause."""
    if any(hasattr(parameter, "to_local") for parameter in context.model.parameters()):  # also where all have the same data
        return "a model that is spread over processes cannot be tried out on copies"
    if context.world.size > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in context.model.modules()):
        return "a copy of a model with SyncBatchNorm would wait for the other processes"
    return None


def copies(*parts: Any) -> Any:
    """Copies that belong together: a copied optimizer updates the parameters of the copied model.

    Raises:
        CompileError: something in them cannot be copied.
    """
    try:
        return copied(parts)
    except (RuntimeError, TypeError, AttributeError, AssertionError, NotImplementedError) as error:
        names = ", ".join(type(part).__name__ for part in parts)
        raise CompileError(f"One of {names} cannot be copied: {error}") from error


def seconds_of(double: ShadowRun) -> tuple[float, float]:
    """What the first round of a double takes, compilation included, and what the better of two later ones takes.

    Those wait until the scale of float16 losses, which begins too high, has come down: before that updates are left out.
    """
    begun = time.perf_counter()
    updates = double.round()
    first = time.perf_counter() - begun
    while any(update.overflowed for update in updates):
        updates = double.round()
    return first, min(double.timed_round(), double.timed_round())
