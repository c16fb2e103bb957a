"""An update whose backward passes and steps the user's function makes: ``loss=step`` with ``def step(run, batch)``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from trimtab.core.settings import Settings
from trimtab.errors import NonFiniteError, UsageError, WorkloadError
from trimtab.train.engine.gradient_scaler import LEAST_SCALE
from trimtab.train.engine.gradients import discard, gradients_of
from trimtab.train.engine.step import STEP, UPDATING, Run, Step, Update
from trimtab.train.loss.adapter import Batch, LossAdapter, Weight, copy_containers, examples
from trimtab.train.loss.manual_run import Closure, ManualRun
from trimtab.train.optim.optimizer_dict import PAGE, named
from trimtab.train.runtime.step_clock import Clock
from trimtab.train.runtime.world import World

T = TypeVar("T")

_UNUSED = (
    "The gradients of {} were used by no step of their update, and were dropped with its end. To collect the gradients of "
    "several batches, give DataSettings(accumulate=...)."
)


class ManualStep(Step):
    """A :class:`Step` whose backward passes and steps the user's function makes, with the run's precision, clipping and checks.

    The gradient of each optimizer is that of the mean over all examples of the update's batches. It is clipped and checked as
    the optimizer makes its step. An update in which a step was left out, because its gradient was not finite, is skipped.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: LossAdapter,
        optimizer: Optimizer,
        settings: Settings,
        world: World,
        clock: Clock,
        norm_every: int = 50,
    ) -> None:
        super().__init__(model, objective, optimizer, settings, world, clock, norm_every)
        self.optimizers = named(optimizer)
        self.update, self.last = 0, True
        self._run: Run | None = None
        self._totals: dict[str, Weight] = {}
        """Sum of the weights of the batches whose gradients an optimizer has, by name."""
        self._batch_weight: dict[str, Weight] = {}
        """Weight of this batch, by the name of the optimizers that have its gradients."""
        self._count = self._examples = 1
        self._weighted_losses = False
        """Whether the losses of this update count by their weights, because there are several."""
        self._autocasts = settings.precision.autocast is not None
        self._no_step = self._result = Update(torch.zeros(()), 0.0, None, applied=True)
        self._stepped: set[str] = set()
        self._unscaled = False
        """Whether float16's scaler has seen gradients of this update."""
        self._manual = ManualRun(model, self.optimizers, self)

    def __call__(self, batches: Sequence[Batch], run: Run | None = None) -> Update:
        """Call the function with each of ``batches``; raises as :meth:`Step.__call__` does."""
        if run is None:
            raise UsageError(f"An update that a function drives cannot be tried out on a copy of the model. {PAGE}")
        self.check()
        self._run, self.update, self._count = run, run.context.position.update, len(batches)
        self._weighted_losses = self._count > 1 or self.world.size > 1
        self._totals.clear()
        self._stepped.clear()
        self._unscaled = False
        self._update_count += 1
        discard(parameters := self._parameters)
        self._result = self._no_step
        losses: list[torch.Tensor] = []
        weights: list[Weight] = []
        with self.world.manual_update(), STEP:
            if self._typical_weight is None and self.world.size > 1:
                self._typical_weight = self.world.average(max(map(examples, batches)))
            kept = None if self.world.counts else self._kept_buffers()
            for index, batch in enumerate(batches):
                loss, weight = self._run_function(batch, last=index == len(batches) - 1)
                losses.append(loss)
                weights.append(weight if self.world.counts else 0.0)
            if kept is not None:
                kept.restore()
            if self._unscaled:
                self._adapt_scale(self._result._replace(loss=losses[-1]))
        if not self.world.used:  # a signal ended the loaders of all processes: this update does not count
            discard(parameters)
            return self._result._replace(loss=losses[-1], applied=False)
        unused = ""
        if left := {*self._totals, *self._batch_weight} - self._stepped:
            unused = _UNUSED.format(", ".join(name for name in self.optimizers if name in left))
        if self._totals or self._batch_weight:  # a step drops the gradients of its optimizer
            discard(parameters)
        self.clock.enter("other")
        loss, _ = self.world.mean(losses, weights, summed=False)
        update = self._result._replace(loss=loss)
        if self.settings.optimizer.nonfinite == "raise" and loss.device.type != "cpu":
            self._check_later(update)
        return self._finish(update, batches, run, [unused])

    def backward(self, loss: torch.Tensor, names: list[str], weight: float | None, *, retain_graph: bool) -> None:
        """Add the gradients of ``loss`` to those of the optimizers ``names``."""
        self.clock.enter("backward")
        if self.hooks is not None:
            self.hooks.call("before_backward", loss)
        counts: Weight = self._examples if weight is None else weight
        for name in names:
            before = self._batch_weight.setdefault(name, counts)
            if before != counts:
                raise WorkloadError(
                    f"run.backward got losses of one batch with the weights {before} and {counts} for {name!r}. Give all "
                    "losses of a batch one weight."
                )
        if not self.world.counts:  # it only keeps step with processes that have more batches
            loss = loss.nan_to_num() * 0
        elif self._weighted_losses:
            if self._typical_weight is None:
                self._typical_weight = float(counts) or 1.0
            loss = loss * (counts / self._typical_weight)
        if self._scales_loss:
            loss = self.scaler.scale(loss)
        inputs = None
        if len(names) != len(self.optimizers):
            inputs = [each for name in names for each in self._parameters_of(name) if each.requires_grad]
        self._without_autocast(torch.autograd.backward, loss, retain_graph=retain_graph, inputs=inputs)
        self.clock.enter("forward")

    def step(self, names: list[str], closure: Closure | None) -> bool:
        """Make the steps of the optimizers ``names``, unless a further batch of the update follows."""
        if closure is not None and (self._weighted_losses or self._scales_loss):
            several = f"{self.world.size} processes" if self.world.size > 1 else f"an update of {self._count} batches"
            what = several if self._weighted_losses else "float16's loss scale"
            raise WorkloadError(
                f"run.step got a closure, which computes one batch anew, in {what}. Leave that setting out. {PAGE}"
            )
        if closure is not None and self.settings.optimizer.nonfinite in ("skip", "stop"):
            raise WorkloadError(
                f"run.step got a closure, which changes parameters between its evaluations, so that its step cannot be left "
                f"out, as optimizer.nonfinite={self.settings.optimizer.nonfinite!r} asks. Use 'raise' or 'ignore'. {PAGE}"
            )
        if not self.last:
            return False
        self.clock.enter("optimizer")
        made = [self._step_one(name, closure) for name in names]
        self.clock.enter("forward")
        return all(made)

    def stop(self, reason: str) -> None:
        """End the run after this update."""
        assert self._run is not None
        self._run.context.stop(reason)

    def _run_function(self, batch: Batch, *, last: bool) -> tuple[torch.Tensor, Weight]:
        """Call the function with ``batch``; returns the loss to report and its weight."""
        self.last, self._examples = last, examples(batch)
        self._batch_weight.clear()
        self.clock.enter("forward")
        with self.precision():
            loss, weight = self.objective.manual_loss(self._manual, copy_containers(batch))
        if not self.last:
            for name, counts in self._batch_weight.items():
                self._totals[name] = self._totals.get(name, 0.0) + counts
        return loss.detach(), self._examples if weight is None else weight

    def _step_one(self, name: str, closure: Closure | None) -> bool:
        """The step of the optimizer ``name``."""
        optimizer, parameters = self.optimizers[name], self._parameters_of(name)
        if name in self._stepped and self._scales_loss:
            raise WorkloadError(
                f"run.step was called twice for {name!r} in one update, between which float16's loss scale cannot change. Use "
                "precision.autocast='bfloat16', or one step per update."
            )
        self._stepped.add(name)
        self.intact = False
        applied = self._without_autocast(self._apply, name, optimizer, parameters, closure)
        discard(parameters)
        return applied

    def _apply(self, name: str, optimizer: Optimizer, parameters: list[nn.Parameter], closure: Closure | None) -> bool:
        """Finish the gradients and make the step, in ``closure`` if that computes them; returns whether the step was made."""
        if closure is None and not self._finish_gradients(name, parameters):
            return False
        if self.hooks is not None:
            self.hooks.call("before_step")
        try:
            if closure is not None:
                self._with_closure(optimizer, parameters, closure)
            elif self._scales_loss:
                self.scaler.step(optimizer)
            else:
                optimizer.step()
        except BaseException as error:
            UPDATING.explain(error)
            raise
        if self.hooks is not None:
            self.hooks.call("after_step")
        return True

    def _finish_gradients(self, name: str, parameters: list[nn.Parameter]) -> bool:
        """Turn the gradients into those of the mean, clip and check them; returns whether the optimizer makes its step."""
        optimizer, total = self.optimizers[name], self._totals.pop(name, 0.0) + self._batch_weight.pop(name, 0.0)
        if self.world.size > 1:
            self.clock.enter("communication")
            trained = [each for each in parameters if each.requires_grad]
            weight, place = total if self.world.counts else 0.0, list(self.optimizers).index(name)
            total = self.world.average_gradients(trained, weight, place)
            self.clock.enter("optimizer")
            if not total:  # the gradients of no process count
                return False
        if self._scales_loss:
            self.scaler.unscale_(optimizer)
            self._unscaled = True
        if self._weighted_losses:
            self._unweight(gradients_of(parameters), total)
        if self.hooks is not None:
            self.hooks.call("after_backward")
        check, norm = self._clip_and_check(parameters)
        check = 0.0 if check is None else _number(check)
        applied, overflowed = self._may_step(check, optimizer)
        done, latest = self._result, self._result.norm if norm is None else norm
        self._result = Update(done.loss, done.check + check, latest, done.applied and applied, done.overflowed or overflowed)
        return applied

    def _may_step(self, check: torch.Tensor | float, optimizer: Optimizer) -> tuple[bool, bool]:
        """Whether ``optimizer`` makes its step; if not, whether float16's loss scale was too large."""
        nonfinite = self.settings.optimizer.nonfinite
        if self._scales_loss:
            found_inf = any(map(float, self.scaler._found_inf_per_device(optimizer).values()))
            return not found_inf, found_inf and self.scaler.get_scale() > LEAST_SCALE
        if nonfinite in ("skip", "stop"):
            return math.isfinite(float(check)), False
        if nonfinite == "raise" and isinstance(check, float) and not math.isfinite(check):  # a number: on the CPU
            name = next(name for name, each in self.optimizers.items() if each is optimizer)
            raise NonFiniteError(
                f"The gradient for the optimizer {name!r} is not finite: its norm or sum is {check}. Lower the learning "
                'rate, clip with OptimizerSettings(clip_norm=1.0), or leave such steps out: nonfinite="skip".'
            )
        return True, False

    def _with_closure(self, optimizer: Any, parameters: list[nn.Parameter], closure: Closure) -> None:
        """The step of an ``optimizer`` that computes loss and gradients several times."""

        def computed() -> torch.Tensor:
            discard(parameters)
            with torch.enable_grad(), self.precision():
                loss = closure()
            if self.hooks is not None:
                self.hooks.call("after_backward")
            check, _ = self._clip_and_check(parameters)
            if check is not None:
                self._may_step(_number(check), optimizer)
            return loss.detach()

        optimizer.step(computed)

    def _without_autocast(self, compute: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """The result of ``compute`` outside of the run's autocast.

        The cache of autocast, the function's own included, is emptied: it holds casts of parameters before a step, with a graph
        that a backward pass has freed.
        """
        if self._autocasts:
            with torch.autocast(self.settings.device, enabled=False):
                found = compute(*arguments, **options)
        else:
            found = compute(*arguments, **options)
        torch.clear_autocast_cache()
        return found

    def _parameters_of(self, name: str) -> list[nn.Parameter]:
        """The parameters of the optimizer ``name`` now: the function may add some."""
        groups = self.optimizers[name].param_groups
        if len(groups) == 1:
            found: list[nn.Parameter] = groups[0]["params"]
            return found
        return [parameter for group in groups for parameter in group["params"]]


def _number(check: torch.Tensor | float) -> torch.Tensor | float:
    """``check`` as a number, unless reading it would wait for a GPU. Adding numbers takes less time than adding tensors."""
    return check.item() if isinstance(check, torch.Tensor) and check.device.type == "cpu" else check
