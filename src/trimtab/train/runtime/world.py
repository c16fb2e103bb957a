"""The processes that train together and their collective operations: the interface, implemented for a single process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from trimtab.core.settings import Settings
from trimtab.errors import UsageError
from trimtab.train.loss.adapter import Weight
from trimtab.train.runtime.memory_errors import gpu_assert_failed
from trimtab.train.runtime.step_clock import Clock

T = TypeVar("T")

NO_OP = contextlib.nullcontext()
"""A null context, created once because each update enters several."""


class World:
    """One process that trains alone. ``distributed/`` has the subclasses for several processes."""

    rank: int = 0
    """Rank among the processes that have different data."""
    size: int = 1
    """Number of processes that have different data."""
    index: int = 0
    """Rank among all processes; with tensor parallelism several have the same data."""
    processes: int = 1
    """Number of all processes."""
    seed: int | None = None
    """Seed of the order in which data is divided among the processes; it is stored in checkpoints."""
    averages: bool = False
    """Whether the exchange averages gradients over the processes, as FSDP does, so that their sum must be restored."""
    counts: bool = True
    """Whether the gradients of this process count. They do not while it repeats a batch because others have more data."""
    used: bool = True
    """Whether the last update counts in any process. It does not if a signal has ended the loaders of all processes."""
    shared: bool = False
    """Whether each process has a shard of the model, so that a forward pass is a collective operation."""
    repeats: bool = True
    """Whether an update can be repeated after it ran out of memory. It cannot if other processes wait within it."""

    @property
    def leads(self) -> bool:
        """Whether this is the first process, which logs, saves and prints."""
        return True

    def device(self, name: str) -> torch.device:
        """The device of this process for the device ``name`` of the settings."""
        return torch.device(name)

    def timed(self, clock: Clock) -> None:
        """Let ``clock`` count the time in which the backward pass only waits for other processes."""

    def place(self, model: nn.Module, settings: Settings) -> None:
        """Move the model, or this process's shard of it, to the device; call it before the optimizer is made.

        Raises:
            UsageError: a tensor is on the meta device, and has no values.
        """
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_meta:
                raise UsageError(
                    f"{type(model).__name__} has a tensor of shape {tuple(tensor.shape)} on the meta device, which holds no "
                    "values. Make the model on the CPU; or call model.to_empty(device='cpu') and give all of it values."
                )
        model.to(self.device(settings.device))

    def wrap(self, model: nn.Module, settings: Settings, *, fresh: bool) -> nn.Module:
        """The module that the step calls for ``model``; ``fresh`` if the run begins, and is not resumed."""
        return model

    def share(self, batches: Iterable[Any], what: str) -> Iterable[Any]:
        """This process's part of ``batches``; ``what`` names them in errors."""
        return batches

    def rounds(self, groups: Iterator[T], length: int | None, repeat: Callable[[], T | None] | None = None) -> Iterator[T]:
        """``groups``, as many as the process that has most.

        Args:
            groups: batches of each update.
            length: number of groups, if known.
            repeat: gives a group that was used before, for a process that has none left while others have.
        """
        return groups

    def together(self, *, update: bool = False) -> contextlib.AbstractContextManager[object]:
        """A block that fails in all processes if it fails in one, so that no process waits for one that failed.

        ``update`` says that it has the forward and backward passes of an update.
        """
        return NO_OP

    def manual_update(self) -> contextlib.AbstractContextManager[object]:
        """A block of an update that exchanges gradients by :meth:`average_gradients`; it fails in all processes or in none."""
        return NO_OP

    def average_gradients(self, parameters: Sequence[nn.Parameter], weight: Weight, place: int) -> Weight:
        """Average the gradients of ``parameters`` over all processes, in place; returns the sum of ``weight`` over them.

        Args:
            parameters: of one optimizer. A gradient that no process has stays ``None``.
            weight: sum of the weights of the losses whose gradients this process has.
            place: number of the optimizer, which identifies its exchange.
        """
        return weight

    def known_to_all(self, error: BaseException) -> bool:
        """Whether all processes know of ``error``, so that collective operations are still possible."""
        return not gpu_assert_failed(error)

    def drop_update(self) -> None:
        """Drop the state that the exchange of gradients keeps of a failed update or of trial updates."""

    def exchanging(self, *, now: bool) -> contextlib.AbstractContextManager[object]:
        """A block whose backward passes exchange gradients only if ``now``."""
        return NO_OP

    def forward(self, compute: Callable[[], T]) -> T:
        """Run the forward pass ``compute``, whose backward pass may exchange gradients."""
        return compute()

    def forward_alone(self, compute: Callable[[], T]) -> T:
        """Run the forward pass ``compute`` of the plain model, whose backward pass exchanges no gradients of replicas."""
        return compute()

    def mean(
        self, losses: Sequence[torch.Tensor], weights: Sequence[Weight], *, summed: bool
    ) -> tuple[torch.Tensor, Weight | None]:
        """The weighted mean of the scalar ``losses`` of an update, or their sum if ``summed``; and the sum of the weights.

        The sum of the weights is ``None`` if it has no effect.
        """
        if len(losses) == 1:
            return losses[0], None
        if summed:
            return torch.stack(list(losses)).sum(), None
        count, value = weighted(losses, weights)
        count = torch.where(count > 0, count, 1.0)  # losses without weight give 0 and not NaN
        if count.device != losses[0].device:  # it has no float64
            return (value / count).to(losses[0]), count.to(losses[0])
        return value / count, count

    def norm(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm of all gradients, including shards of other processes."""
        if len({(grad.device, grad.dtype) for grad in grads}) != 1:
            return torch.nn.utils.get_total_norm(grads)
        norms = torch._foreach_norm(list(grads))  # as torch.nn.utils.get_total_norm does, with less overhead
        found: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return found

    def total(self, grads: Sequence[torch.Tensor]) -> torch.Tensor | float:
        """A real number that is finite if all gradients are: their sum, or their norm if the sum might overflow."""
        kinds = {(grad.device, grad.dtype) for grad in grads}
        if len(kinds) != 1 or grads[0].dtype == torch.float16 or grads[0].is_complex():
            return self.norm(grads)
        if grads[0].device.type == "cpu":  # no device waits, and adding numbers takes two thirds of the time of adding tensors
            return float(sum(grad.sum().item() for grad in grads))
        return torch.stack([grad.sum() for grad in grads]).sum()

    def scale(self, grads: Sequence[torch.Tensor], factor: Weight) -> None:
        """Multiply the gradients by ``factor``, in place."""
        if isinstance(factor, torch.Tensor) and grads and all(grad.is_cuda and grad.dtype == torch.float32 for grad in grads):
            factor = factor.float()  # a factor of another dtype takes a kernel per gradient
        torch._foreach_mul_(list(grads), factor)

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Get the optimizer, and check that it supports sharded parameters if there are any."""

    def overflow(self, found: torch.Tensor) -> None:
        """Combine ``found``, nonzero if float16 gradients overflowed, in place over the processes with shards of the model."""

    def average(self, value: float) -> float:
        """The mean of ``value`` over all processes."""
        return value

    def any(self, truth: bool) -> bool:
        """Whether ``truth`` is true in any process."""
        return truth

    def maximum(self, count: int) -> int:
        """The maximum of ``count`` over all processes."""
        return count

    def stopping(self, wanted: bool) -> bool:
        """Whether the run ends after this update, in all processes; they exchange ``wanted`` with the next update."""
        return wanted

    def gathered(self, value: T) -> list[T]:
        """``value`` of every process, in the order of ranks."""
        return [value]

    def on_rank_0(self, action: Callable[[], T]) -> T | None:
        """Run ``action`` in the first process, while the others wait; they get ``None``."""
        return action()

    def average_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Set buffers that differ between processes, such as BatchNorm's statistics, to their mean."""

    def free_gathered(self) -> None:
        """Free the parameters that a sharded forward pass has gathered, if no backward pass follows."""

    def unsharded(self, state: Any) -> Any:
        """``state`` with shards gathered into whole tensors, in the first process only."""
        return state

    def shard(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """This process's shard of the whole tensor ``value``, divided as ``like`` is."""
        return value

    def notes(self) -> list[str]:
        """Remarks on the exchange of gradients, a sentence each."""
        return []

    def barrier(self) -> None:
        """Wait for all processes."""
        return None


def weighted(losses: Sequence[torch.Tensor], weights: Sequence[Weight]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the weights, and that of the weighted losses, in float64; a loss of weight 0 may be NaN."""
    values = wide(torch.stack(list(losses)))
    counts = torch.stack([_scalar_like(values, weight) for weight in weights])
    return counts.sum(), torch.where(counts > 0, values * counts, 0.0).sum()


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as float64; moved to the CPU unless its device surely has float64, as Apple's GPUs do not."""
    return (tensor if tensor.device.type in ("cpu", "cuda") else tensor.cpu()).double()


def _scalar_like(values: torch.Tensor, weight: Weight) -> torch.Tensor:
    """``weight`` as a scalar tensor like ``values``. A Python number is filled in on the device, without a copy to wait for."""
    if isinstance(weight, torch.Tensor):
        return weight.to(values.device, values.dtype, non_blocking=values.is_cuda)
    return values.new_full((), weight)
