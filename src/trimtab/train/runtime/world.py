"""The processes that train together: how many they are, and what crosses between them. Here: one alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from trimtab.core.settings import Settings
from trimtab.errors import UsageError
from trimtab.train.loss.adapter import Weight
from trimtab.train.runtime.memory_errors import stopped
from trimtab.train.runtime.step_clock import Clock

T = TypeVar("T")

NOTHING = contextlib.nullcontext()
"""A block as any other; one for all of them, because an update has several."""


class World:
    """A process that trains alone; ``distributed/`` has those that do not."""

    rank: int = 0
    """Among the processes that have different data."""
    size: int = 1
    """How many of those there are."""
    index: int = 0
    """Among all processes: where layers are split, some have the same data."""
    processes: int = 1
    """How many there are in all."""
    seed: int | None = None
    """Of the order in which the processes share out data; it goes into checkpoints."""
    averages: bool = False
    """Whether gradients are divided by the number of processes on their way, as FSDP does."""
    counts: bool = True
    """Whether what this process computes counts; not while it only keeps step with others that have more data."""
    used: bool = True
    """Whether what any process has computed for the last update counts: not where a signal has ended the loaders of all."""
    shared: bool = False
    """Whether each process holds only a part of the model, so that all of them must call it at the same time."""
    repeats: bool = True
    """Whether an update in which memory ran out can be made again: not if others then wait for this process in a layer."""

    @property
    def leads(self) -> bool:
        """Whether this is the process that logs, saves and prints."""
        return True

    def device(self, name: str) -> torch.device:
        """The device of this process where the settings say ``name``."""
        return torch.device(name)

    def timed(self, clock: Clock) -> None:
        """Tell ``clock`` when the backward pass does nothing any more but wait for others."""

    def place(self, model: nn.Module, settings: Settings) -> None:
        """Put on its device of the model what this process is to hold; before there is an optimizer.

        Raises:
            UsageError: the model has no values yet.
        """
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_meta:
                raise UsageError(
                    f"{type(model).__name__} has a tensor of shape {tuple(tensor.shape)} on the meta device, which holds no "
                    "values. Make the model on the CPU; or call model.to_empty(device='cpu') and give all of it values."
                )
        model.to(self.device(settings.device))

    def wrap(self, model: nn.Module, settings: Settings, *, fresh: bool) -> nn.Module:
        """What the step calls for ``model``; ``fresh`` where the run begins and is not gone on with."""
        return model

    def share(self, batches: Iterable[Any], what: str) -> Iterable[Any]:
        """This process's part of the batches."""
        return batches

    def rounds(self, groups: Iterator[T], length: int | None, again: Callable[[], T | None] | None = None) -> Iterator[T]:
        """``groups``, of which there are ``length`` if that is known, as many as the process that has most.

        ``again`` gives one that was used before, to a process that has none left to keep step with.
        """
        return groups

    def together(self, *, update: bool = False) -> contextlib.AbstractContextManager[object]:
        """A block that succeeds in all processes or in none, so that nobody waits for one that failed in it.

        With ``update`` it is the forward and backward passes of an update.
        """
        return NOTHING

    def heard(self, error: BaseException) -> bool:
        """Whether all processes have failed with ``error``, or have been told of it, so that they can still act together."""
        return not stopped(error)

    def rehearsed(self) -> contextlib.AbstractContextManager[object]:
        """A block of updates that are only tried, after which the exchange of gradients is as it was."""
        return contextlib.nullcontext()

    def exchanging(self, *, now: bool) -> contextlib.AbstractContextManager[object]:
        """A block whose backward pass exchanges gradients with the other processes only if ``now``."""
        return NOTHING

    def asked(self, ask: Callable[[], T]) -> T:
        """What ``ask`` gives, the forward pass of a batch, so that its backward pass can exchange gradients."""
        return ask()

    def looked(self, ask: Callable[[], T]) -> T:
        """What ``ask`` gives, a forward pass of the plain model, of which no backward pass exchanges gradients of replicas."""
        return ask()

    def mean(
        self, losses: Sequence[torch.Tensor], weights: Sequence[Weight], *, summed: bool
    ) -> tuple[torch.Tensor, Weight | None]:
        """The mean of all losses of an update (the sum, if they are ``summed``), and the weight of all of them.

        The weight is ``None`` where there is only one loss, whose weight makes no difference.
        """
        if len(losses) == 1:
            return losses[0], None
        if summed:
            return torch.stack(list(losses)).sum(), None
        count, value = weighted(losses, weights)
        count = torch.where(count > 0, count, 1.0)  # what stands for nothing has no gradient, and is no 0/0
        if count.device != losses[0].device:  # it knows no wider numbers than its own
            return (value / count).to(losses[0]), count.to(losses[0])
        return value / count, count

    def norm(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm of the gradient of all parameters, wherever they lie."""
        if len({(grad.device, grad.dtype) for grad in grads}) != 1:
            return torch.nn.utils.get_total_norm(grads)
        norms = torch._foreach_norm(list(grads))  # what torch's own function does, without its bookkeeping
        found: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return found

    def total(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """A real number that is finite if all gradients are: their sum, or their norm where float16 could not hold that."""
        kinds = {(grad.device, grad.dtype) for grad in grads}
        if len(kinds) != 1 or grads[0].dtype == torch.float16 or grads[0].is_complex():
            return self.norm(grads)
        return torch.stack([grad.sum() for grad in grads]).sum()

    def scale(self, grads: Sequence[torch.Tensor], factor: Weight) -> None:
        """Multiply the gradients by ``factor``, in place."""
        if isinstance(factor, torch.Tensor) and grads and all(grad.is_cuda and grad.dtype == torch.float32 for grad in grads):
            factor = factor.float()  # of another dtype, each gradient takes a kernel of its own
        torch._foreach_mul_(list(grads), factor)

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """Learn what updates the parameters, and see that it can where they are spread out."""

    def overflow(self, found: torch.Tensor) -> None:
        """Make ``found``, which is not 0 where float16's gradients overflowed, that of all who hold parts of the model."""

    def agreed(self, value: float) -> float:
        """The same number in all processes: the mean of what they give."""
        return value

    def any(self, truth: bool) -> bool:
        """Whether it is true in any process."""
        return truth

    def most(self, count: int) -> int:
        """The largest that any process gives."""
        return count

    def stopping(self, wish: bool) -> bool:
        """Whether the run ends after this update, in all processes; one's wish is heard by the others with the next update."""
        return wish

    def gathered(self, value: T) -> list[T]:
        """What every process gives, in the order of their ranks."""
        return [value]

    def led(self, action: Callable[[], T]) -> T | None:
        """What ``action`` gives to the process that leads, once it is done; the others only wait for it."""
        return action()

    def settle(self, buffers: Sequence[torch.Tensor]) -> None:
        """Make those that differ between processes, such as BatchNorm's statistics, the same: their mean."""

    def rest(self) -> None:
        """Let go of what a forward pass has gathered that no backward pass follows."""

    def whole(self, state: Any) -> Any:
        """``state`` with its tensors whole where each process has only a part; only the one that leads gets them."""
        return state

    def part(self, value: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        """This process's part of a whole tensor, as ``of`` is one."""
        return value

    def notes(self) -> list[str]:
        """What there is to tell about the exchange of gradients, a sentence each."""
        return []

    def barrier(self) -> None:
        """Wait until every process is here."""
        return None


def weighted(losses: Sequence[torch.Tensor], weights: Sequence[Weight]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the weights, and of the losses times their weights; a loss that weighs nothing counts for nothing."""
    values = wide(torch.stack(list(losses)))
    counts = torch.stack([_beside(values, weight) for weight in weights])
    return counts.sum(), torch.where(counts > 0, values * counts, 0.0).sum()


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in 64 bits; on the CPU where its device may have no such numbers, as Apple's and some of Intel's GPUs."""
    return (tensor if tensor.device.type in ("cpu", "cuda") else tensor.cpu()).double()


def _beside(values: torch.Tensor, weight: Weight) -> torch.Tensor:
    """``weight`` as one of ``values``. A number is written by a GPU itself, which need not be waited for as a copy is."""
    if isinstance(weight, torch.Tensor):
        return weight.to(values.device, values.dtype, non_blocking=values.is_cuda)
    return values.new_full((), weight)
