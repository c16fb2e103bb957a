"""Choose the modules to recompute, so that the activations of a training step keep within a budget of bytes at the least cost.

A forward pass is traced (:mod:`trimtab.train.memory.activation_trace`), which gives plans with a predicted peak
(:mod:`trimtab.train.memory.checkpoint_plans`). The plan that is taken was run, forward and backward, and its peak was measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from trimtab._internal.text import listed
from trimtab.errors import UsageError, WorkloadError
from trimtab.train.loss.loss_parity import ROUNDING, gradient_distance, gradients_differ
from trimtab.train.memory.activation_checkpointing import Recomputed
from trimtab.train.memory.activation_trace import trace
from trimtab.train.memory.checkpoint_plans import Plan, pareto_front
from trimtab.train.memory.peak_activations import peak_activations
from trimtab.train.runtime.memory_errors import raise_unless_retryable
from trimtab.train.runtime.snapshots import rolled_back
from trimtab.train.runtime.world import World

_DIFFERENT = (
    "activation_mb cannot be kept: the backward pass would compute {} again. {} A state that the first time has moved may be "
    "read again, as one in a plain attribute: keep it in a buffer, with register_buffer. Or leave activation_mb out, and make "
    "micro-batches smaller: DataSettings(micro_batch=...)."
)
_LAST = 3
"""Plans with the lowest predicted peaks that are measured before a budget is called impossible."""


@dataclasses.dataclass(frozen=True)
class Verified:
    """A plan that keeps the budget."""

    plan: Plan
    names: tuple[str, ...]
    peak: int
    """Bytes at the peak, measured."""
    changing: tuple[torch.Tensor, ...]
    """Buffers and parameters that a forward pass changes."""

    def apply(self) -> Recomputed:
        """Recompute the modules from now on."""
        return Recomputed(self.plan.modules, self.changing)

    def note(self, budget_mb: float) -> str:
        """A sentence on the modules that are recomputed to keep ``budget_mb``."""
        done = f"{listed(self.names)} {'is' if len(self.names) == 1 else 'are'}" if self.names else "nothing is"
        return f"Activations take {self.peak / 1e6:.2f} MB at their peak, of {budget_mb:g} MB allowed: {done} recomputed."


def choose(
    model: nn.Module,
    forward: Callable[[], torch.Tensor],
    budget: float,
    device: torch.device,
    *,
    loss: nn.Module | None = None,
    world: World | None = None,
) -> Verified:
    """The cheapest plan found whose measured peak is at most ``budget`` bytes.

    Afterwards, buffers and random generators are as before, and there are no gradients.

    Args:
        forward: computes the loss of the batch that the budget is meant for.
        loss: the loss, if it is a module.
        world: the processes that train together. All run the plans of rank 0.

    Raises:
        UsageError: no plan keeps the budget; the message names the smallest one that can be kept.
        WorkloadError: the forward pass has a backward pass in it; the plan gives other gradients; or memory ran out where
            other processes cannot be informed.
    """
    world = world or World()
    failed: BaseException | None = None
    with rolled_back(model, loss=loss) as kept:
        try:
            traced = trace(model, forward, device)
        except (RuntimeError, MemoryError) as error:
            raise_unless_retryable(error, repeats=world.repeats)
            failed = error
        if world.any(failed is not None):  # a call that all processes make
            raise UsageError(_impossible(budget)) from failed
        changing = tuple(kept.changed())
        kept.restore()  # a forward pass may have replaced these tensors
        plans = pareto_front(model, traced)
        if world.processes > 1:
            plans = _plans_of_rank_0(model, plans, world)
        search = _Search(model, forward, device, plans, changing, budget, world, loss)
        index = search.run()
        if index is None:
            raise UsageError(_impossible(budget, search.peaks.values(), _names(model, traced.mutable_inputs)))
        plan, names = plans[index], _names(model, plans[index].modules)
        if world.processes == 1 and (difference := search.gradient_error(plan)):
            raise WorkloadError(_DIFFERENT.format(listed(names), difference))
    return Verified(plan, names, int(search.peaks[index]), changing)


def _names(model: nn.Module, modules: Iterable[nn.Module]) -> tuple[str, ...]:
    """The names of ``modules``, in the order of the model."""
    wanted = set(modules)
    return tuple(name for name, module in model.named_modules() if module in wanted)


def _plans_of_rank_0(model: nn.Module, plans: Sequence[Plan], world: World) -> list[Plan]:
    modules = dict(model.named_modules())
    first = world.gathered([(_names(model, plan.modules), plan.predicted, plan.seconds) for plan in plans])[0]
    return [Plan(tuple(modules[name] for name in names), predicted, seconds) for names, predicted, seconds in first]


@dataclasses.dataclass
class _Search:
    """Measures plans by bisection, beginning with the first that is predicted to keep the budget."""

    model: nn.Module
    forward: Callable[[], torch.Tensor]
    device: torch.device
    plans: Sequence[Plan]
    changing: Sequence[torch.Tensor]
    budget: float
    world: World
    loss: nn.Module | None
    peaks: dict[int, float] = dataclasses.field(default_factory=dict)
    """Bytes measured, by the index of the plan; infinite where memory ran out."""

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
            try:
                with self._recomputing(self.plans[index].modules):
                    self.peaks[index] = peak_activations(self._step, self.model.parameters(), self.device)
            except (RuntimeError, MemoryError) as error:
                raise_unless_retryable(error, repeats=self.world.repeats)
                self.peaks[index] = math.inf
        return not self.world.any(self.peaks[index] > self.budget)

    def _step(self) -> None:
        self.forward().backward()  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def _recomputing(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """A block in which ``modules`` are recomputed, and after which the model is as before."""
        recomputed = Recomputed(modules, self.changing)
        try:
            with rolled_back(self.model, loss=self.loss):
                yield
        finally:
            recomputed.undo()

    def gradient_error(self, plan: Plan) -> str | None:
        """Why the gradients with ``plan`` are not those without, in a sentence; ``None`` if they are, or memory runs out."""
        if not plan.modules:
            return None
        try:
            plain, again, found = self._gradients(()), self._gradients(()), self._gradients(plan.modules)
        except (RuntimeError, MemoryError) as error:
            raise_unless_retryable(error, repeats=self.world.repeats)
            return None
        if not math.isfinite(gradient_distance(plain, again)):  # what the settings say of such updates is not decided here
            return None
        return gradients_differ(plain, again, found, ROUNDING)

    def _gradients(self, modules: Sequence[nn.Module]) -> list[torch.Tensor | None]:
        """The gradient of each parameter, with ``modules`` recomputed."""
        with self._recomputing(modules):
            self._step()
            return [parameter.grad for parameter in self.model.parameters()]


def _impossible(budget: float, peaks: Iterable[float] = (), given: Iterable[str] = ()) -> str:
    """Why no plan keeps ``budget``; ``peaks`` are measured, and the modules ``given`` objects are none that it recomputes."""
    least = min(peaks, default=math.inf)
    names = [name for name in given if name]  # the model itself has none, and is no choice
    if math.isinf(least):
        return (
            f"activation_mb={budget / 1e6:g} cannot be kept: even with all that recomputing saves, this batch does not fit "
            "into memory. Make it smaller, or take it apart with DataSettings(micro_batch=...)."
        )
    text = (
        f"activation_mb={budget / 1e6:g} cannot be kept: with all that recomputing saves, this batch still takes "
        f"{math.ceil(least / 1e4) / 100:.2f} MB. Give at least that, or smaller micro-batches: DataSettings(micro_batch=...)."
    )
    why = "Not recomputed as a whole, because of a list or an object among the arguments"
    return f"{text} {why}: {listed(names)}." if names else text
