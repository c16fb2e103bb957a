"""Shadow run: real training steps on copies of model, loss and optimizer, for benchmarking; the run is not changed."""

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
from trimtab.core.signature import STORED, dtype_name
from trimtab.errors import CompileError
from trimtab.measure.timer import LocalRunner, synchronizer
from trimtab.tensors.deepcopy import copied
from trimtab.tensors.structure import tensors_of
from trimtab.train.autotune.batch_size import plan_for
from trimtab.train.data.device_prefetch import mover
from trimtab.train.data.peek import preserved_random_state
from trimtab.train.engine import setup
from trimtab.train.loss.adapter import Batch, LossAdapter
from trimtab.train.loss.loss_parity import perturb, too_coarse
from trimtab.train.optim.kernels import use_kernels
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.snapshots import Snapshot, forward_snapshot, zero_learning_rates
from trimtab.train.runtime.step_clock import HostClock
from trimtab.train.runtime.torch_settings import running
from trimtab.train.runtime.train_modes import DropoutOff, changed_modules, float_buffers
from trimtab.train.runtime.world import World

if TYPE_CHECKING:
    from trimtab.train.engine.step import Update


@dataclasses.dataclass(frozen=True)
class Round:
    """One update from each group of batches."""

    updates: list[Update]
    gradient: list[torch.Tensor | None]
    """Gradient of each parameter in the first update that was applied; empty if none was."""

    @property
    def losses(self) -> list[float]:
        """The loss of each update."""
        return [float(update.loss) for update in self.updates]


class ShadowRun:
    """A copy of the run in ``context`` under ``settings``, in this process alone, with all learning rates set to 0.

    It trains on the same batches again and again. At a learning rate of 0 the parameters stay, so that every round costs the
    same and nothing diverges.

    Raises:
        CompileError: the model, the loss or the optimizer cannot be copied, or the optimizer has no ``lr``.
        RuntimeError: the settings fail here; memory may run out, too.
    """

    def __init__(self, context: RunContext, settings: Settings, batches: Sequence[Batch]) -> None:
        self.settings = settings
        self.model: nn.Module
        self.model, objective, optimizer = copies(context.model, context.objective, context.optimizer)
        self.modes = context.modes
        self.modes.train(self.model)
        if any(group.get("lr") is None for group in optimizer.param_groups):
            raise CompileError("The optimizer finds its own learning rate, so that no copy of the run can stand still.")
        zero_learning_rates(optimizer)
        with running(settings):
            move = setup.apply_memory_format(self.model, settings, context.device)
            self.step = setup.step_for(settings, objective)(self.model, objective, optimizer, settings, World(), HostClock())
            if settings.optimizer.implementation is not None and settings.optimizer.implementation != "auto":
                use_kernels(optimizer, settings.optimizer.implementation)
            self.feed = setup.feed_for(batches, settings, HostClock(), move)
            self._apply_budget(context.device)
        self._initial = forward_snapshot(self.model, objective.module)

    def _apply_budget(self, device: torch.device) -> None:
        """Recompute activations as the run will, by the largest of the batches."""
        budget = self.settings.memory.activation_mb
        if budget is None:
            return
        with preserved_random_state():
            self.feed.begin(0)
            batches = [batch for group in self.feed.groups() for batch in group]
            largest = max(batches, key=lambda batch: sum(tensor.numel() for tensor in tensors_of(batch)))
            plan_for(self.step, self.model, largest, budget, device).apply()

    @property
    def runner(self) -> LocalRunner:
        """Times rounds. It is made anew for each use: stored, it would form a reference cycle with this object."""
        return LocalRunner(self.round, synchronizer(self.settings.device))

    def round(self) -> list[Update]:
        """One update from each group of the batches."""
        with running(self.settings):
            self.feed.begin(0)
            return [self.step(group) for group in self.feed.groups()]

    def timed_round(self) -> float:
        """Wall-clock seconds of a round."""
        return sum(self.runner.block(1)) / 1e9

    def reset_round(self) -> Round:
        """A round from the buffers that the run has now; the state of the random generators is restored afterwards.

        Two shadow runs of one run can be compared by it, however many rounds each has made before.
        """
        self._initial.restore()
        with preserved_random_state(), _first_gradient(self.step.optimizer) as gradient:
            return Round(self.round(), gradient)

    @contextlib.contextmanager
    def without_dropout(self) -> Iterator[None]:
        """A block in which dropout and other random layers are off, so that rounds draw no random numbers."""
        before, modes = float_buffers(self.model), self.modes
        self.round()
        self.modes = off = DropoutOff(self.model, changed_modules(self.model, before))
        try:
            off.find_frozen()
            off.train()
            yield
        finally:
            off.end()
            self.modes = modes
            modes.train(self.model)

    @contextlib.contextmanager
    def with_noise(self, size: float) -> Iterator[None]:
        """A block in which noise of relative size ``size`` is added to the parameters."""
        kept = Snapshot(self.model.parameters())
        perturb(self.model, 0, size)
        try:
            yield
        finally:
            kept.restore()


@contextlib.contextmanager
def _first_gradient(optimizer: torch.optim.Optimizer) -> Iterator[list[torch.Tensor | None]]:
    """A block that gets a list, into which the first ``optimizer.step()`` copies the gradient of each parameter."""
    found: list[torch.Tensor | None] = []

    def record(*_: Any) -> None:
        if not found:
            given = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
            found.extend(None if grad is None else grad.detach().clone() for grad in given)

    handle = optimizer.register_step_pre_hook(record)
    try:
        yield found
    finally:
        handle.remove()


class _Loss(nn.Module):
    """The loss of one batch as a function of the tensors in that batch, in the form that passes can inspect."""

    def __init__(self, model: nn.Module, objective: LossAdapter, batch: Batch) -> None:
        super().__init__()
        self.model, self._objective, self._batch = model, objective, batch

    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        """The loss; ``leaves`` are the tensors of the batch already. Gradients are on, because the loss may use them."""
        with torch.enable_grad():
            return self._objective(self.model, self._batch)[0].detach()


def candidate(context: RunContext, settings: Settings, batch: Batch) -> Candidate:
    """The training step as a candidate for passes: a copy of the model whose output is the loss of ``batch``.

    Its inputs are the tensors of ``batch``, except those that a runtime cannot take, such as sparse ones.
    """
    model, objective = copies(context.model, context.objective)
    moved = mover(context.device)(batch)
    context.modes.train(model)
    inputs = tuple(
        tensor for tensor in tensors_of(moved) if tensor.layout is torch.strided and dtype_name(tensor.dtype) in STORED
    )
    enabled = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False  # torch would keep its choice per shape, so that cudnn_benchmark would not search
    try:
        made = Candidate.of(_Loss(model, objective, moved), inputs)
    finally:
        torch.backends.cudnn.enabled = enabled
    return made.with_settings({name: settings.value(name) for name in ("device", "threads", "precision.autocast")})


def why_too_coarse(model: nn.Module, objective: LossAdapter, settings: Settings, batch: Batch, limit: float) -> str | None:
    """Why outputs in the precision of ``settings`` cannot come close to the targets in ``batch``; see :func:`too_coarse`.

    ``model`` makes one forward pass, which may change its buffers: give a copy.
    """
    if settings.precision.autocast in (None, "auto") or objective.calls_model:  # then only the loss sees the outputs
        return None
    device, dtype = torch.device(settings.device), getattr(torch, str(settings.precision.autocast))
    moved = mover(device)(batch)
    with torch.enable_grad(), preserved_random_state(), running(settings), torch.autocast(device.type, dtype=dtype):
        outputs = objective.evaluate(model, moved)[2]
    return too_coarse(outputs.detach() if isinstance(outputs, torch.Tensor) else outputs, moved[1], dtype, limit)


def why_no_copy(context: RunContext) -> str | None:
    """Why a copy of the model cannot run in one process of several, as a clause; ``None`` if it can."""
    if any(hasattr(parameter, "to_local") for parameter in context.model.parameters()):  # DTensor: each process has a shard
        return "a model that is spread over processes cannot be tried out on copies"
    if context.world.size > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in context.model.modules()):
        return "a copy of a model with SyncBatchNorm would wait for the other processes"
    return None


def copies(*parts: Any) -> Any:
    """Deep copies with their references to each other: a copied optimizer updates the parameters of the copied model.

    Raises:
        CompileError: something in them cannot be copied.
    """
    try:
        return copied(parts)
    except (RuntimeError, TypeError, AttributeError, AssertionError, NotImplementedError) as error:
        names = ", ".join(type(part).__name__ for part in parts)
        raise CompileError(f"One of {names} cannot be copied: {error}") from error


def seconds_of(run: ShadowRun) -> tuple[float, float]:
    """Seconds of the first round of ``run``, compilation included, and of the faster of two later rounds.

    Rounds that float16's loss scaling leaves out, until its scale has come down, are not timed.
    """
    begun = time.perf_counter()
    updates = run.round()
    first = time.perf_counter() - begun
    while any(update.overflowed for update in updates):
        updates = run.round()
    return first, min(run.timed_round(), run.timed_round())
