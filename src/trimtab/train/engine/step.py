"""One update of the parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trimtab.core.settings import Settings
from trimtab.core.workload import user_code
from trimtab.errors import NonFiniteError
from trimtab.train.loss.adapter import Batch, LossAdapter, Weight, examples
from trimtab.train.memory.activation_checkpointing import buffers_of
from trimtab.train.runtime.async_scalar import AsyncScalar
from trimtab.train.runtime.memory_errors import final, out_of_memory, stopped
from trimtab.train.runtime.snapshots import Snapshot, modules_of_both
from trimtab.train.runtime.step_clock import Clock
from trimtab.train.runtime.world import NOTHING, World

_NO_ROOM = (
    "The gradients fit into memory, but what the optimizer needs beside them does not ({words}). Share them out with "
    "DistributedSettings(sharding='shard'), take an optimizer with less state, or one without temporary copies of it, with "
    "OptimizerSettings(implementation='loop') or 'fused'."
)


_LEAST_SCALE = 2.0**-14
"""Of float16 losses. What still overflows at the smallest normal number that float16 has is no matter of scale."""


@dataclasses.dataclass(frozen=True)
class Update:
    """What one update did. The tensors stay on their device, so that nothing waits for them until somebody reads them."""

    loss: torch.Tensor
    """The mean over everything that the update stood for, on all processes."""
    check: torch.Tensor
    """A number that is finite if the whole gradient is: its norm, or where nobody needs that, the sum of its elements, which
    takes half the time. Where neither is asked for, it is the loss."""
    norm: torch.Tensor | None
    """Of the gradient before it was clipped; ``None`` where it was not taken."""
    applied: bool
    """Whether the parameters were changed: not where the loss or the gradient was not finite and such updates are left out."""
    overflowed: bool = False
    """Whether it was left out because float16's scale was too large for the gradient of a finite loss: so the right one is
    found. A gradient that is not finite at any scale is not that."""

    @property
    def finite(self) -> bool:
        """Whether the loss and the whole gradient are; waits for the device."""
        return math.isfinite(float(self.loss + self.check))


class _Scaler(torch.amp.GradScaler):
    """torch's, for gradients that may lie in parts on several processes, some of them on others than the rest."""

    world = World()

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Of each parameter the part that is here; what overflows in one part counts for all."""
        if not self.world.shared:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        here: Any = types.SimpleNamespace(param_groups=[{"params": _parts(optimizer)}])
        found = super()._unscale_grads_(here, inv_scale, found_inf, allow_fp16)
        for value in found.values():
            self.world.overflow(value)
        return found


def _parts(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Of each parameter that has a gradient, what this process holds of both, in the same memory."""
    found = []
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if (grad := parameter.grad) is not None:
            part = (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach()
            part.grad = (grad.to_local() if hasattr(grad, "to_local") else grad).detach()
            found.append(part)
    return found


class _updating(user_code):
    """Tells what the optimizer raises as that, but for what memory or a GPU has to say, which did not begin there."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not out_of_memory(error) and not stopped(error):
            super().__exit__(kind, error, trace)


_UPDATING, _FINAL = _updating("The optimizer raised"), final(_NO_ROOM)


class Step:
    """Forward and backward over the micro-batches of an update, then the update itself: call it with the batches.

    The gradient is that of the mean over everything the batches hold, however unequal they are: each loss counts by what it is
    a mean over. Gradients cross between processes, are clipped, checked and applied once.

    On a GPU an update that is not finite is an error one update later, because the loop does not wait for the device in
    between; ``nonfinite="skip"`` and ``"stop"`` do wait. They also put back the running statistics of normalisation layers,
    which the forward pass of an update that is left out has moved; other buffers stay as that pass left them.

    Args:
        model: what the objective calls, perhaps wrapped or compiled.
        optimizer: what updates the parameters.
        norm_every: of how many updates one tells the norm of its gradient; with ``clip_norm``, and on a GPU unless nobody looks
            at what is not finite, all do.
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
        self.scaler = _Scaler(settings.device, enabled=settings.precision.autocast == "float16")
        self.scaler.world = world
        self._known = len(self._parameters)
        world.meet(optimizer)
        self._statistics = buffers_of(model, set()) if settings.optimizer.nonfinite in ("skip", "stop") else []
        self._typical: float | None = None
        self._unread: Update | None = None
        self._verdict = AsyncScalar()
        self._norm_every, self._made = norm_every, 0

    def __call__(self, batches: Sequence[Batch]) -> Update:
        """Update the parameters from ``batches``, which are on the model's device.

        Raises:
            NonFiniteError: the loss or the gradient is not finite, and the settings make that an error.
            WorkloadError: memory ran out after the gradients were there, so that the update cannot be made again.
        """
        clock, world, parameters = self.clock, self.world, self._parameters
        if len(parameters) != self._known:
            self._known = len(parameters)
            world.meet(self.optimizer)
        _discard(parameters)  # what others have computed since, such as a callback that trains an adversary of the model
        if self._typical is None and world.size > 1:
            self._typical = world.agreed(max(map(examples, batches)))
        alone = len(batches) == 1 and world.size == 1  # then what the loss is a mean over makes no difference
        losses: list[torch.Tensor] = []
        weights: list[Weight] = []
        count = world.most(len(batches)) if world.shared else len(batches)
        with world.together(update=True):
            before = self._kept_statistics() if self._statistics else None
            counted = len(batches) if world.counts else 0
            for index in range(count):
                if index == counted:  # from here on it only keeps step with others
                    idle = self._kept_buffers()
                with world.exchanging(now=index == count - 1):  # gradients cross once per update
                    batch = batches[min(index, len(batches) - 1)]
                    clock.enter("forward")
                    with self.precision():
                        loss, weight = world.asked(functools.partial(self.objective, self.model, batch, weighed=not alone))
                    if alone:
                        loss = self._of_something(loss, weight)
                    if index >= counted:
                        loss, weight = loss.nan_to_num() * 0, weight * 0
                    losses.append(loss.detach())
                    weights.append(weight)
                    clock.enter("backward")
                    with _left_out(parameters) if _known_to_be_nothing(weight) else NOTHING:
                        self.scaler.scale(self._weighted(loss, weight, count)).backward()  # type: ignore[no-untyped-call]
            if counted < count:
                idle.put_back()
        if not world.used:
            _discard(parameters)
            return Update(torch.stack(losses).sum(), torch.zeros(()), None, applied=False)
        with _FINAL:  # others may have made the update by now, and parameters or the optimizer's state may be changed
            update = self._finish(losses, weights, parameters)
            if not update.applied and before is not None:
                before.put_back()
        _discard(parameters)
        clock.enter("other")
        return update

    def _finish(self, losses: list[torch.Tensor], weights: list[Weight], parameters: list[nn.Parameter]) -> Update:
        """The update from the gradients that all processes have now."""
        clock, world = self.clock, self.world
        clock.enter("communication")
        loss, total = world.mean(losses, weights, summed=self.objective.summed)
        clock.enter("optimizer")
        self.scaler.unscale_(self.optimizer)
        grads = _gradients(parameters)
        self._unweight(grads, total)
        clip_norm = self.settings.optimizer.clip_norm
        wanted = (
            clip_norm is not None
            or self._made % self._norm_every == 0
            or (bool(grads) and grads[0].is_cuda and self.settings.optimizer.nonfinite != "ignore")
        )
        norm = world.norm(grads) if wanted else None  # a GPU takes all norms at once, but one sum after the other
        self._made += 1
        if clip_norm is not None and norm is not None:
            world.scale(grads, (clip_norm / (norm + 1e-6)).clamp(max=1.0))  # as torch does it
        check = norm
        if check is None:
            check = loss if self.settings.optimizer.nonfinite == "ignore" else world.total(grads)
        return self._apply(Update(loss, check, norm, True))

    def _kept_statistics(self) -> Snapshot:
        """What normalisation layers gather, as it is now."""
        return Snapshot(buffer for module, name in self._statistics if (buffer := module._buffers[name]) is not None)

    def _kept_buffers(self) -> Snapshot:
        """The buffers as they are now; the statistics of SyncBatchNorm are those of all, and stay alike."""
        loss = self.objective.module
        own = () if loss is None else loss.modules()
        return Snapshot((), own if self.settings.data.exact_batchnorm else modules_of_both(self.model, loss))

    def precision(self) -> contextlib.AbstractContextManager[object]:
        """The precision that the forward pass runs in."""
        dtype = self.settings.precision.autocast
        if dtype is None:
            return NOTHING
        return torch.autocast(self.settings.device, dtype=getattr(torch, dtype))

    def check(self) -> None:
        """Read what was not read yet.

        Raises:
            NonFiniteError: the last update was not finite.
        """
        unread, self._unread = self._unread, None
        if unread is not None and not math.isfinite(self._verdict.read()):
            what = "sum" if unread.norm is None else "norm"
            raise NonFiniteError(
                f"The loss was {float(unread.loss)} and the {what} of its gradient {float(unread.check)}, which is not finite. "
                "Lower the learning rate, clip with OptimizerSettings(clip_norm=1.0), or leave such updates out: "
                'nonfinite="skip".'
            )

    def _watch(self, update: Update) -> None:
        """Have :meth:`check` look at ``update``. What it reads is made now, before the device has other work."""
        self._unread = update
        self._verdict.send(update.loss + update.check)

    def discard(self) -> None:
        """Forget the gradients of an update that was cut off."""
        _discard(self._parameters)

    def state_dict(self) -> dict[str, Any]:
        """The scale of float16 losses, and the weight that others are relative to."""
        return {"scaler": self.scaler.state_dict(), "typical": self._typical}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`state_dict`."""
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self._typical = state["typical"]

    @property
    def _parameters(self) -> list[nn.Parameter]:
        """What the optimizer has now: a run may add to it, as one that thaws its model layer by layer does."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _weighted(self, loss: torch.Tensor, weight: Weight, count: int) -> torch.Tensor:
        """The loss by its weight, relative to a typical one, so that float16 gradients keep their range."""
        if self.objective.summed or (count == 1 and self.world.size == 1):
            return loss
        if self._typical is None:
            self._typical = float(weight) or 1.0
        return self._of_something(loss, weight) * (weight / self._typical)

    def _of_something(self, loss: torch.Tensor, weight: Weight) -> torch.Tensor:
        """``loss``, or 0 where it is a mean over nothing, as where all labels are ignored, which is no number."""
        if _known_to_be_nothing(weight):
            return loss.nan_to_num() * 0
        return torch.where(weight > 0, loss, torch.zeros_like(loss)) if isinstance(weight, torch.Tensor) else loss

    def _unweight(self, grads: list[torch.Tensor], total: Weight | None) -> None:
        """Turn the sum of weighted gradients into that of the mean; ``total`` is ``None`` where nothing was weighted."""
        factor: Weight = float(self.world.size) if self.world.averages else 1.0
        if total is not None and not self.objective.summed and self._typical is not None:
            factor = factor * self._typical / total
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            self.world.scale(grads, factor)

    def _found_inf(self) -> bool:
        """Whether float16's scaler has met a gradient that is not finite, so that it leaves this update out."""
        return any(map(float, self.scaler._found_inf_per_device(self.optimizer).values()))

    def _apply(self, update: Update) -> Update:
        """Run the optimizer unless the settings keep it from an update that is not finite."""
        self.check()
        if self.scaler.is_enabled():  # it leaves out what overflowed, and lowers its scale: that is how float16 works
            left_out = self._found_inf()
            scale = self.scaler.get_scale() if left_out else math.inf
            overflowed = left_out and scale > _LEAST_SCALE and bool(torch.isfinite(update.loss))
            if not left_out:  # torch's fused SGD would make a momentum of uninitialised memory in an update that it leaves out
                with _UPDATING:
                    self.scaler.step(self.optimizer)
            self.scaler.update(scale if left_out and not overflowed else None)  # what a lower one does not mend
            update = dataclasses.replace(update, applied=not left_out, overflowed=overflowed)
            if self.settings.optimizer.nonfinite == "raise" and left_out and not overflowed:
                self._watch(update)
                self.check()
            return update
        if self.settings.optimizer.nonfinite in ("skip", "stop"):
            update = dataclasses.replace(update, applied=update.finite)
        elif self.settings.optimizer.nonfinite == "raise":
            self._watch(update)
            if update.loss.device.type == "cpu":
                self.check()
        if update.applied:
            with _UPDATING:
                self.optimizer.step()
        return update


def _known_to_be_nothing(weight: Weight) -> bool:
    """Whether a loss stands for nothing, as far as can be said without waiting for a GPU."""
    return (not isinstance(weight, torch.Tensor) or weight.device.type == "cpu") and not weight


@contextlib.contextmanager
def _left_out(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """A block whose backward pass goes its way, since others may wait for what it exchanges, and adds nothing to gradients.

    Those of a mean over nothing are no numbers, even where it is multiplied by 0.
    """
    hooks = [p.register_hook(torch.zeros_like) for p in parameters if p.requires_grad]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """The gradients, in memory that may be changed in place: of a sparse one, as an embedding's may be, its values."""
    found = []
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            if grad.is_sparse:
                grad = parameter.grad = grad.coalesce()  # so that no row stands in it twice
            found.append(grad._values() if grad.is_sparse else grad)
    return found


def _discard(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
