"""One update of the parameters: :meth:`Step.__call__` shows everything that happens in it, in order."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from trimtab._internal.user_code import user_code
from trimtab.core.settings import Settings
from trimtab.errors import NonFiniteError
from trimtab.train.data.micro_batches import MicroBatcher
from trimtab.train.engine.autocast_errors import explaining_autocast
from trimtab.train.engine.gradient_scaler import LEAST_SCALE, Scaler
from trimtab.train.engine.gradients import clip_values, discard, gradients_of, has_zero_weight, zeroed_gradients
from trimtab.train.engine.hooks import Hooks
from trimtab.train.loss.adapter import Batch, LossAdapter, Weight, examples, in_step
from trimtab.train.memory.activation_checkpointing import buffers_of
from trimtab.train.optim import schedules
from trimtab.train.optim.optimizer_dict import needs_closure
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.async_scalar import AsyncScalar
from trimtab.train.runtime.memory_errors import gpu_assert_failed, no_retry, out_of_memory
from trimtab.train.runtime.random_generators import set_states, states_of
from trimtab.train.runtime.snapshots import Snapshot, forward_snapshot, generators_of_both, modules_of_both
from trimtab.train.runtime.step_clock import Clock
from trimtab.train.runtime.torch_settings import random_state, set_random_state
from trimtab.train.runtime.world import NO_OP, World

_NO_ROOM = (
    "The gradients fit into memory, but what the optimizer needs beside them does not ({words}). Share them out with "
    "DistributedSettings(sharding='shard'), take an optimizer with less state, or one without temporary copies of it, with "
    "OptimizerSettings(implementation='loop') or 'fused'."
)


class Update(NamedTuple):
    """The result of one update. The tensors stay on their device: only reading them waits for the device."""

    loss: torch.Tensor
    """Mean over all batches of the update, on all processes."""
    check: torch.Tensor | float
    """A scalar that is finite if the whole gradient is: its norm, or if no norm is needed the sum of its elements, which takes
    half the time. With ``nonfinite="ignore"`` it may be the loss."""
    norm: torch.Tensor | None
    """Norm of the gradient before clipping; ``None`` if it was not computed."""
    applied: bool
    """Whether the optimizer made its step: not if the loss or gradient is not finite and the settings skip such updates."""
    overflowed: bool = False
    """Whether float16's loss scale was too large for the gradient of a finite loss: the step is skipped, the scale lowered."""

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are finite; waits for the device."""
        return math.isfinite(float(self.loss + self.check))


class MicroBatchLosses(NamedTuple):
    """Results of the backward passes of an update, besides the gradients in ``parameter.grad``."""

    losses: list[torch.Tensor]
    """One scalar per micro-batch."""
    weights: list[Weight]
    """The weight of each loss: what it is a mean over, such as its number of examples or tokens."""
    statistics: Snapshot | None
    """Running statistics before the forward passes, if updates can be skipped."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What an update of a run needs beyond one that is only timed: micro-batch sizes, schedule, EMA, position and events."""

    context: RunContext
    feed: MicroBatcher
    count: Callable[[Update, Sequence[Batch]], None]
    """Counts an update made from these batches, and emits :class:`~trimtab.train.telemetry.events.Progressed` when due."""
    saving: contextlib.AbstractContextManager[None]
    """A block that writes a checkpoint if it fails, so that the update before it is kept."""


class ForwardState:
    """A copy of what a forward pass changes: buffers, frozen parameters that it updates, and random generators."""

    def __init__(self, model: nn.Module, loss: nn.Module | None) -> None:
        self._snapshot = forward_snapshot(model, loss)
        self._generators = generators_of_both(model, loss)
        self._drawn = states_of(self._generators)
        self._random = random_state()

    def restore(self) -> None:
        """Restore the copy; unused memory of the GPU is given back first."""
        torch.cuda.empty_cache()  # no effect without a GPU
        self._snapshot.restore()
        set_states(self._generators, self._drawn)
        set_random_state(self._random)


class _updating(user_code):
    """Attributes errors to the optimizer, except those of memory and of the GPU, which may come from earlier kernels."""

    def explain(self, error: BaseException) -> None:
        """Raise what ``error`` becomes."""
        if not out_of_memory(error) and not gpu_assert_failed(error):
            super().explain(error)


UPDATING, _NO_RETRY, STEP = _updating("The optimizer raised"), no_retry(_NO_ROOM), in_step("The model or its loss raised")


class Step:
    """Makes updates: call it with the batches of one update.

    The gradient is that of the mean over all examples of the batches, however unequal the batches are: each loss counts by its
    weight. Gradients are exchanged between processes, clipped, checked and applied once per update.

    On a GPU an update that is not finite raises one update later, because the loop does not wait for the device in between;
    ``nonfinite="skip"`` and ``"stop"`` do wait. These also put back the running statistics of normalisation layers, which the
    forward pass of a skipped update has changed; other buffers stay as that pass left them.

    Args:
        model: the model that the objective calls, perhaps wrapped or compiled.
        objective: gives the loss of a micro-batch and its weight.
        optimizer: updates the parameters.
        norm_every: the gradient's norm is computed in one of so many updates; in all of them with ``clip_norm``, and on a GPU
            unless ``nonfinite="ignore"``.
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
        self.model, self.objective, self.optimizer = model, objective, optimizer
        self.settings, self.world, self.clock = settings, world, clock
        self.scaler = Scaler(settings.device, enabled=settings.precision.autocast == "float16")
        self.scaler.world = world
        self._scales_loss = self.scaler.is_enabled()
        self.hooks: Hooks | None = None
        self._needs_closure = needs_closure(optimizer)
        self._parameter_count = len(self._parameters)
        world.attach_optimizer(optimizer)
        self._statistics = buffers_of(model, set()) if settings.optimizer.nonfinite in ("skip", "stop") else []
        self._typical_weight: float | None = None
        self.intact = True
        """Whether parameters and optimizer are as the last whole update left them."""
        self._unchecked: Update | None = None
        self._pending_check = AsyncScalar()
        self._norm_every, self._update_count = norm_every, 0

    def __call__(self, batches: Sequence[Batch], run: Run | None = None) -> Update:
        """Update the parameters from ``batches``, which are on the model's device; everything that happens is here, in order.

        Args:
            batches: of one update.
            run: its position, schedule, EMA and events follow the update; ``None`` for an update that is only timed.

        Raises:
            NonFiniteError: the loss or the gradient is not finite, and the settings make that an error.
            WorkloadError: the model, the loss or the optimizer raised; or memory ran out after the backward passes.
        """
        clock, world = self.clock, self.world
        with STEP if run is not None else NO_OP:
            # Micro-batch size and recomputed activations are chosen from the first batches, which show their sizes. Processes
            # exchange gradients in the last backward pass. No parameter has changed until then: a run that is out of memory
            # repeats this with smaller micro-batches.
            if run is None:
                compute = functools.partial(self.gradients, batches)
            else:
                memory = run.context.fit.memory_plan
                compute = functools.partial(memory.sizer.gradients, self, memory.prepare(self, run.feed, batches))
            found = compute()
            parameters = self._parameters
            if not world.used:  # a signal ended the loaders of all processes: this update does not count
                discard(parameters)
                return Update(torch.stack(found.losses).sum(), torch.zeros(()), None, applied=False)
            with _NO_RETRY:  # from here on nothing can be repeated: other processes may have changed their parameters
                update = self._mean_gradients(found, parameters)
                self._update_count += 1
                # The optimizer's step; then float16's scale, because the scaler evaluates the step that was made.
                if update.applied:
                    self.intact = False
                    self._step(update, compute)
                elif found.statistics is not None:
                    found.statistics.restore()
                if self._scales_loss:
                    self._adapt_scale(update)
            # Gradients are freed, so that the next forward pass has their memory.
            discard(parameters)
            clock.enter("other")
        return update if run is None else self._finish(update, batches, run, [run.context.fit.memory_plan.sizer.remark(self)])

    def _finish(self, update: Update, batches: Sequence[Batch], run: Run, remarks: list[str | None]) -> Update:
        """Advance schedule, EMA, position, notes and events of a run after an ``update`` made from ``batches``."""
        context, position, world = run.context, run.context.position, self.world
        remarks.append(context.objective.weight_warning(batches, alone=world.size == 1))
        # The schedule sets the learning rate of the next update: it counts updates that were applied.
        if context.scheduler is not None and update.applied:
            remarks.append(schedules.advance(context.scheduler))
        # The EMA averages the parameters that the optimizer has just set.
        if context.ema is not None and update.applied:
            context.ema.update(context.model)
        # The position moves before notes and events: a checkpoint that a failing callback causes includes the update.
        position.batch, position.update = run.feed.taken, position.update + 1
        position.skipped += not update.applied
        # Notes and events come last, because callbacks read the state after the update.
        self.intact = True
        with run.saving:
            for remark in filter(None, remarks):
                context.note_once(remark)
            run.count(update, batches if world.counts else [])
        if not (update.applied or update.overflowed) and self.settings.optimizer.nonfinite == "stop":
            context.stop("The loss was not finite.")
        return update

    def _mean_gradients(self, found: MicroBatchLosses, parameters: Sequence[nn.Parameter]) -> Update:
        """Turn gradients that the backward passes left in ``parameters`` into those of the mean loss, clip and check them.

        Raises:
            NonFiniteError: the loss or the gradient is not finite, and the settings make that an error.
        """
        # The reported loss is the mean over all micro-batches of all processes.
        if self.world.processes > 1:
            self.clock.enter("communication")
        loss, total = self.world.mean(found.losses, found.weights, summed=self.objective.summed)
        # Gradients become those of that mean: divided by float16's loss scale, then by the sum of the weights. Clipping and the
        # check for finite values apply to these gradients.
        self.clock.enter("optimizer")
        if self._scales_loss:
            self.scaler.unscale_(self.optimizer)
        if total is not None or self.world.averages:
            self._unweight(gradients_of(parameters), total)
        if self.hooks is not None:
            self.hooks.call("after_backward")
            parameters = self._parameters
        check, norm = self._clip_and_check(parameters)
        return self._checked(Update(loss, loss if check is None else check, norm, applied=True))

    def _clip_and_check(self, parameters: Sequence[nn.Parameter]) -> tuple[torch.Tensor | float | None, torch.Tensor | None]:
        """Clip the gradients of ``parameters``, by the norm of all of them.

        Returns:
            A scalar that is finite if all gradients are, ``None`` without a check; and the norm before clipping, if computed.
        """
        asked = self.settings.optimizer
        grads = gradients_of(parameters)  # in each update: coalescing sparse gradients changes their rounding
        norm = self.world.norm(grads) if self._norm_wanted() else None
        if asked.clip_norm is not None and norm is not None:
            self.world.scale(grads, (asked.clip_norm / (norm + 1e-6)).clamp(max=1.0))  # torch's formula
        check = self.world.total(grads) if norm is None and asked.nonfinite != "ignore" else norm
        if asked.clip_value is not None:
            clip_values(grads, asked.clip_value)
        return check, norm

    def _step(self, update: Update, compute: Callable[[], MicroBatchLosses]) -> None:
        """The optimizer's step; ``compute`` makes the gradients anew for one that needs a closure."""
        if self.hooks is not None:
            self.hooks.call("before_step")
        try:
            if self._needs_closure:
                self._step_with_closure(update, compute)
            elif self._scales_loss:
                self.scaler.step(self.optimizer)
            else:
                self.optimizer.step()
        except BaseException as error:
            UPDATING.explain(error)
            raise
        if self.hooks is not None:
            self.hooks.call("after_step")

    def _step_with_closure(self, update: Update, compute: Callable[[], MicroBatchLosses]) -> None:
        """The step of an optimizer that computes loss and gradients several times.

        Its first evaluation gives those of ``update``, unless it has moved parameters before, as sharpness-aware
        minimization does.
        """
        evaluated_at: list[tuple[torch.Tensor, ...]] = [tuple(each.detach().clone() for each in self._parameters)]

        def closure() -> torch.Tensor:
            if evaluated_at and all(map(torch.equal, evaluated_at.pop(), self._parameters)):
                return update.loss
            with torch.enable_grad():
                found = compute()
            return self._mean_gradients(found, self._parameters).loss

        self.optimizer.step(closure)  # type: ignore[arg-type]

    def gradients(self, batches: Sequence[Batch]) -> MicroBatchLosses:
        """Forward and backward pass of each of ``batches``; leaves the sum of weighted gradients of all processes.

        Parameters and optimizer are unchanged, so it can be called again after an error.
        """
        world, parameters = self.world, self._parameters
        if len(parameters) != self._parameter_count:
            self._parameter_count = len(parameters)
            world.attach_optimizer(self.optimizer)
        discard(parameters)  # gradients of other computations, such as a callback that trains an adversary of the model
        if self._typical_weight is None and world.size > 1:
            self._typical_weight = world.average(max(map(examples, batches)))
        alone = len(batches) == 1 and world.size == 1  # the weight of a single loss makes no difference
        if alone and world.processes == 1:
            before = self._kept_statistics() if self._statistics else None
            loss, weight = self._forward_backward(batches[0], parameters, 1, alone=True)
            return MicroBatchLosses([loss], [weight], before)
        losses: list[torch.Tensor] = []
        weights: list[Weight] = []
        count = world.maximum(len(batches)) if world.shared else len(batches)
        with world.together(update=True):
            before = self._kept_statistics() if self._statistics else None
            counted = len(batches) if world.counts else 0
            for index in range(count):
                if index == counted:  # from here on it only keeps step with processes that have more batches
                    kept = self._kept_buffers()
                batch = batches[min(index, len(batches) - 1)]
                with world.exchanging(now=index == count - 1):  # gradients cross once per update
                    loss, weight = self._forward_backward(batch, parameters, count, alone=alone, counts=index < counted)
                losses.append(loss)
                weights.append(weight)
            if counted < count:
                kept.restore()
        return MicroBatchLosses(losses, weights, before)

    def _forward_backward(
        self, batch: Batch, parameters: Sequence[nn.Parameter], count: int, *, alone: bool, counts: bool = True
    ) -> tuple[torch.Tensor, Weight]:
        """Forward and backward pass of ``batch``, one of ``count``; returns its loss without the graph, and its weight."""
        self.clock.enter("forward")
        explained = self._explaining_autocast(batch, parameters)
        with explained, self.precision():
            loss, weight = self.world.forward(functools.partial(self.objective, self.model, batch, weighed=not alone))
        nothing = has_zero_weight(weight)
        if alone and (nothing or isinstance(weight, torch.Tensor)):
            loss = self._zero_if_empty(loss, weight)
        if not counts:
            loss, weight = loss.nan_to_num() * 0, weight * 0
        self.clock.enter("backward")
        if self.hooks is not None:
            self.hooks.call("before_backward", loss)
        scaled = self.scaler.scale(self._weighted(loss, weight, count)) if self._scales_loss or not alone else loss
        with explained, zeroed_gradients(parameters) if nothing or not counts else NO_OP:
            scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), weight

    def _explaining_autocast(self, batch: Batch, parameters: Sequence[nn.Parameter]) -> contextlib.AbstractContextManager[None]:
        """A block that tells an error that only autocast causes. With several processes there is none, because all of them
        would have to repeat the passes without autocast."""
        dtype = self.settings.precision.autocast
        if dtype is None or self.world.size > 1:
            return NO_OP

        def without_autocast() -> None:
            loss, _ = self.objective(self.model, batch, weighed=False)
            torch.autograd.grad(loss, [each for each in parameters if each.requires_grad], allow_unused=True)

        return explaining_autocast(dtype, without_autocast)

    def _norm_wanted(self) -> bool:
        """Whether this update computes the norm; a GPU computes all norms in one kernel, but sums one by one."""
        asked = self.settings.optimizer
        if self._update_count % self._norm_every == 0 or asked.clip_norm is not None:
            return True
        return asked.nonfinite != "ignore" and self.settings.device.startswith("cuda")

    def _kept_statistics(self) -> Snapshot:
        """A copy of the running statistics of normalisation layers."""
        return Snapshot(buffer for module, name in self._statistics if (buffer := module._buffers[name]) is not None)

    def _kept_buffers(self) -> Snapshot:
        """A copy of the buffers; with SyncBatchNorm only of the loss's, because all processes must keep the same statistics."""
        loss = self.objective.module
        own = () if loss is None else loss.modules()
        return Snapshot((), own if self.settings.data.exact_batchnorm else modules_of_both(self.model, loss))

    def precision(self) -> contextlib.AbstractContextManager[object]:
        """A block in the precision of the forward pass."""
        dtype = self.settings.precision.autocast
        if dtype is None:
            return NO_OP
        return torch.autocast(self.settings.device, dtype=getattr(torch, dtype))

    def check(self) -> None:
        """Check that the last update was finite, if that was not checked yet; waits for the device.

        Raises:
            NonFiniteError: the last update was not finite.
        """
        unread, self._unchecked = self._unchecked, None
        if unread is not None and not math.isfinite(self._pending_check.read()):
            what = "sum" if unread.norm is None else "norm"
            raise NonFiniteError(
                f"The loss was {float(unread.loss)} and the {what} of its gradient {float(unread.check)}, which is not finite. "
                "Lower the learning rate, clip with OptimizerSettings(clip_norm=1.0), or leave such updates out: "
                'nonfinite="skip".'
            )

    def _check_later(self, update: Update) -> None:
        """Let :meth:`check` examine ``update`` later; the device computes its check value now, before other work."""
        self._unchecked = update
        self._pending_check.send(update.loss + update.check)

    def discard(self) -> None:
        """Free the gradients of an update that failed."""
        discard(self._parameters)

    def state_dict(self) -> dict[str, Any]:
        """The scale of float16 losses, and the weight that the weights of losses are divided by."""
        return {"scaler": self.scaler.state_dict(), "typical": self._typical_weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self._typical_weight = state["typical"]

    @property
    def _parameters(self) -> list[nn.Parameter]:
        """The optimizer's parameters now: a run may add some, as one that unfreezes its model layer by layer does."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _weighted(self, loss: torch.Tensor, weight: Weight, count: int) -> torch.Tensor:
        """The loss times its weight, divided by a typical weight so that float16 gradients keep their range."""
        if self.objective.summed or (count == 1 and self.world.size == 1):
            return loss
        if self._typical_weight is None:
            self._typical_weight = float(weight) or 1.0
        return self._zero_if_empty(loss, weight) * (weight / self._typical_weight)

    def _zero_if_empty(self, loss: torch.Tensor, weight: Weight) -> torch.Tensor:
        """``loss``, or 0 if it is a mean over nothing and so NaN, as when all labels are ignored."""
        if has_zero_weight(weight):
            return loss.nan_to_num() * 0
        return torch.where(weight > 0, loss, torch.zeros_like(loss)) if isinstance(weight, torch.Tensor) else loss

    def _unweight(self, grads: list[torch.Tensor], total: Weight | None) -> None:
        """Turn the sum of weighted gradients into the gradient of the mean; ``total`` is ``None`` if nothing was weighted."""
        factor: Weight = float(self.world.size) if self.world.averages else 1.0
        if total is not None and not self.objective.summed and self._typical_weight is not None:
            factor = factor * self._typical_weight / total
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            self.world.scale(grads, factor)

    def _checked(self, update: Update) -> Update:
        """``update``, not to be applied if it is not finite and the settings skip such updates, or float16 overflowed.

        Raises:
            NonFiniteError: this update is not finite and on the CPU, or the one before it is not finite and on a GPU.
        """
        if self._unchecked is not None:
            self.check()
        nonfinite = self.settings.optimizer.nonfinite
        if self._scales_loss:  # torch's fused SGD would write uninitialised momentum in a step with overflow
            found_inf = any(map(float, self.scaler._found_inf_per_device(self.optimizer).values()))
            overflowed = found_inf and self.scaler.get_scale() > LEAST_SCALE and bool(torch.isfinite(update.loss))
            return update._replace(applied=not found_inf, overflowed=overflowed)
        if nonfinite in ("skip", "stop"):
            return update._replace(applied=update.finite)
        if nonfinite == "raise":
            self._check_later(update)
            if update.loss.device.type == "cpu":
                self.check()
        return update

    def _adapt_scale(self, update: Update) -> None:
        """Let float16's scaler grow or lower its scale; a lower one does not help a loss that is not finite itself.

        Raises:
            NonFiniteError: loss or gradient is not finite at any scale, and the settings make that an error.
        """
        hopeless = not (update.applied or update.overflowed)
        self.scaler.update(self.scaler.get_scale() if hopeless else None)
        if hopeless and self.settings.optimizer.nonfinite == "raise":
            self._check_later(update)
            self.check()
