"""Which modules to recompute, so that the activations of a training step keep within a budget of bytes at the least cost.

A forward pass is traced (:mod:`trimtab.train.memory.activation_trace`), and from that comes a row of plans whose peak is
predicted
(:mod:`trimtab.train.memory.checkpoint_plans`). Which one is taken is decided by running plans for real, forward and backward,
and measuring.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from trimtab.errors import UsageError, WorkloadError
from trimtab.train.loss.loss_parity import MARGIN, ROUNDING
from trimtab.train.memory.activation_checkpointing import Recomputed
from trimtab.train.memory.activation_trace import DifferentiatedError, trace
from trimtab.train.memory.checkpoint_plans import Plan, front
from trimtab.train.memory.peak_activations import peak_activations
from trimtab.train.runtime import gradient_parity
from trimtab.train.runtime.memory_errors import go_on
from trimtab.train.runtime.snapshots import rehearsal
from trimtab.train.runtime.world import World

_OTHER = (
    "activation_mb cannot be kept: computing {} again for the backward pass gives another gradient, by {:.2g} of what it is. A "
    "state that the first time has moved may be read again, as one in a plain attribute: keep it in a buffer, with "
    "register_buffer. Or leave activation_mb out, and make micro-batches smaller: DataSettings(micro_batch=...)."
)
_LAST = 3
"""Plans at the frugal end that are measured before a budget is called impossible."""


@dataclasses.dataclass(frozen=True)
class Verified:
    """A plan that keeps the budget."""

    plan: Plan
    names: tuple[str, ...]
    peak: int
    """Bytes at the peak, measured."""
    changing: tuple[torch.Tensor, ...]
    """Buffers that a forward pass changes."""
    measured: int
    """How many plans were run to find it."""

    def apply(self) -> Recomputed:
        """Recompute the modules from now on."""
        return Recomputed(self.plan.modules, self.changing)


def choose(
    model: nn.Module,
    forward: Callable[[], torch.Tensor],
    budget: float,
    device: torch.device,
    *,
    beside: nn.Module | None = None,
    world: World | None = None,
) -> Verified:
    """The cheapest plan found whose measured peak is at most ``budget`` bytes.

    Buffers and random generators are as before afterwards, and there are no gradients.

    Args:
        forward: the loss of the batch that the budget is meant for.
        beside: the module that computes it from what ``model`` gives, if it is one.
        world: the processes that train together; all of them run the same plans, those of the first.

    Raises:
        UsageError: no plan keeps the budget; the message names the smallest that one does keep.
        WorkloadError: the forward pass has a backward pass in it, or is another one the second time; or memory ran out where
            other processes cannot be told of it.
    """
    world = world or World()
    failed: BaseException | None = None
    with rehearsal(model, loss=beside) as kept:
        try:
            traced = trace(model, forward, device)
        except DifferentiatedError as error:
            raise WorkloadError(
                "activation_mb cannot be kept where the model or the loss differentiates within the forward pass, as a "
                "gradient penalty does. Leave it out, and make micro-batches smaller: DataSettings(micro_batch=...)."
            ) from error
        except (RuntimeError, MemoryError) as error:
            go_on(error, repeats=world.repeats)
            failed = error
        if world.any(failed is not None):  # all of them, because what follows asks all
            raise UsageError(_impossible(budget, {})) from failed
        changing = tuple(kept.changed())
        kept.put_back()  # a forward pass may have put other tensors in the place of these
        plans = front(model, traced)
        if world.processes > 1:
            plans = _those_of_the_first(model, plans, world)
        search = _Search(model, forward, device, plans, changing, budget, world, beside)
        index = search.run()
        if index is None:
            raise UsageError(_impossible(budget, search.peaks))
        plan, names = plans[index], _names(model, plans[index])
        if world.processes == 1 and (strayed := search.strayed(plan)):
            raise WorkloadError(_OTHER.format(", ".join(names[:3]) + (" and others" if len(names) > 3 else ""), strayed))
    return Verified(plan, names, int(search.peaks[index]), changing, len(search.peaks))


def _names(model: nn.Module, plan: Plan) -> tuple[str, ...]:
    names = {module: name for name, module in model.named_modules()}
    return tuple(names[module] for module in plan.modules)


def _those_of_the_first(model: nn.Module, plans: Sequence[Plan], world: World) -> list[Plan]:
    modules = dict(model.named_modules())
    first = world.gathered([(_names(model, plan), plan.predicted, plan.seconds) for plan in plans])[0]
    return [Plan(tuple(modules[name] for name in names), predicted, seconds) for names, predicted, seconds in first]


class _Search:
    """Runs plans, from those that should do towards cheaper or more frugal ones."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[], torch.Tensor],
        device: torch.device,
        plans: Sequence[Plan],
        changing: Sequence[torch.Tensor],
        budget: float,
        world: World,
        beside: nn.Module | None,
    ) -> None:
        self.model, self.forward, self.device, self.beside = model, forward, device, beside
        self.plans, self.changing, self.budget, self.world = plans, changing, budget, world
        self.peaks: dict[int, float] = {}

    def run(self) -> int | None:
        """The index of the cheapest plan that keeps the budget, as far as bisection finds it; ``None`` if none does."""
        last = len(self.plans) - 1
        guess = next((i for i, plan in enumerate(self.plans) if plan.predicted <= self.budget), last)
        low, high, best, stride = 0, last, None, 1
        while low <= high:
            if self._keeps(guess):
                best, high = guess, guess - 1
                guess, stride = max(guess - stride, (low + high) // 2, low), stride * 2
            else:
                low = guess + 1
                guess, stride = min(guess + stride, -(-(low + high) // 2), high), stride * 2
        if best is None:
            best = next((i for i in range(last, max(last - _LAST, -1), -1) if self._keeps(i)), None)
        return best

    def _keeps(self, index: int) -> bool:
        if index not in self.peaks:
            self.peaks[index] = self._peak(self.plans[index])
        return not self.world.any(self.peaks[index] > self.budget)

    def _step(self) -> None:
        self.forward().backward()  # type: ignore[no-untyped-call]

    def _peak(self, plan: Plan) -> float:
        """Bytes, measured; infinite where memory does not suffice to find out."""
        recomputed = Recomputed(plan.modules, self.changing)
        try:
            with rehearsal(self.model, loss=self.beside):
                return peak_activations(self._step, self.model.parameters(), self.device)
        except (RuntimeError, MemoryError) as error:
            go_on(error, repeats=self.world.repeats)
            return math.inf
        finally:
            recomputed.undo()

    def strayed(self, plan: Plan) -> float:
        """How far the gradient under ``plan`` is from that without it, relative to it; 0 where that is no more than from run to
        run, or where there is no memory to find out."""
        if not plan.modules:
            return 0.0
        try:
            plain, again, found = self._gradient(()), self._gradient(()), self._gradient(plan.modules)
        except (RuntimeError, MemoryError) as error:
            go_on(error, repeats=self.world.repeats)
            return 0.0
        apart = gradient_parity.apart(plain, found)
        return apart if apart > max(ROUNDING, MARGIN * gradient_parity.apart(plain, again)) else 0.0

    def _gradient(self, modules: Sequence[nn.Module]) -> list[torch.Tensor | None]:
        """By parameter, with ``modules`` recomputed; leaves no trace."""
        recomputed = Recomputed(modules, self.changing)
        try:
            with rehearsal(self.model, loss=self.beside):
                self._step()
                return [parameter.grad for parameter in self.model.parameters()]
        finally:
            recomputed.undo()


def _impossible(budget: float, peaks: dict[int, float]) -> str:
    least = min(peaks.values(), default=math.inf)
    if math.isinf(least):
        return (
            f"activation_mb={budget / 1e6:g} cannot be kept: even with all that recomputing saves, this batch does not fit "
            "into memory. Make it smaller, or take it apart with DataSettings(micro_batch=...)."
        )
    return (
        f"activation_mb={budget / 1e6:g} cannot be kept: with all that recomputing saves, this batch still takes "
        f"{math.ceil(least / 1e4) / 100:.2f} MB. Give at least that, or smaller micro-batches: DataSettings(micro_batch=...)."
    )
