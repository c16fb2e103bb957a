"""The argument ``run`` of a loss that makes its own backward passes and steps: ``def step(run, batch)``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from trimtab._internal.text import of_type
from trimtab.errors import WorkloadError

Closure = Callable[[], torch.Tensor]


class Engine(Protocol):
    """The object that makes the backward passes and steps of a :class:`ManualRun`."""

    update: int
    last: bool

    def backward(self, loss: torch.Tensor, names: list[str], weight: float | None, *, retain_graph: bool) -> None:
        """Add the gradients of ``loss`` to those of the optimizers ``names``."""

    def step(self, names: list[str], closure: Closure | None) -> bool:
        """Make the steps of the optimizers ``names``, if the update has no further batch."""

    def stop(self, reason: str) -> None:
        """End the run after this update."""


class ManualRun:
    """The first argument of ``loss=step``, if that is ``def step(run, batch)``: backward passes and steps are its own.

    The function is called with each batch. It returns the loss to report, as a scalar tensor or ``(mean, weight)``; or nothing,
    for the sum of the losses that it has given to :meth:`backward`; a closure counts with its first evaluation. In a validation
    the function is called too, without gradients: :meth:`backward` only notes the loss, and :meth:`step` does nothing.
    """

    def __init__(self, model: nn.Module, optimizers: dict[str, Optimizer], engine: Engine | None = None) -> None:
        self.model = model
        """The model, as the Trainer was given it."""
        self.optimizers = optimizers
        """The optimizers by name; a single one is called ``"optimizer"``."""
        self._engine = engine
        self._losses: list[torch.Tensor] = []

    @property
    def training(self) -> bool:
        """Whether the batch is trained on; false in a validation."""
        return self._engine is not None

    @property
    def update(self) -> int:
        """Updates that the run has made so far; 0 in a validation."""
        return 0 if self._engine is None else self._engine.update

    @property
    def last(self) -> bool:
        """Whether this is the last batch of the update, in which :meth:`step` steps."""
        return self._engine is None or self._engine.last

    def backward(
        self,
        loss: torch.Tensor,
        optimizer: str | Optimizer | None = None,
        *,
        weight: float | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Compute the gradients of ``loss``, and add them to those of this update.

        Args:
            loss: a scalar, the mean over the examples of the batch.
            optimizer: name or object of the optimizer whose parameters get gradients; by default those of all optimizers.
            weight: what the loss is a mean over, by default the number of examples of the batch.
            retain_graph: as in :meth:`torch.Tensor.backward`.

        Raises:
            WorkloadError: the loss is no scalar, or there is no such optimizer.
        """
        if not isinstance(loss, torch.Tensor) or loss.dim():
            shape = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"{of_type(loss)}"
            raise WorkloadError(f"run.backward got a loss {shape}, but one number is needed. Give its mean().")
        names = self._names(optimizer)
        self._losses.append(loss.detach())
        if self._engine is not None:
            self._engine.backward(loss, names, weight, retain_graph=retain_graph)

    def step(self, optimizer: str | Optimizer | None = None, closure: Closure | None = None) -> bool:
        """Make the step of an optimizer from the gradients of all batches of the update, clipped and checked.

        In the batches before the last of an accumulated update it does nothing.

        Args:
            optimizer: its name or the object; by default all make their step.
            closure: for optimizers such as LBFGS: calls :meth:`backward`, and returns the loss. Gradients are zeroed before.

        Returns:
            Whether the step was made.

        Raises:
            NonFiniteError: a gradient is not finite, and the settings make that an error.
            WorkloadError: the optimizer raised, there is no such optimizer, or a closure meets settings that rule it out.
        """
        names = self._names(optimizer)
        if closure is not None:
            closure = self._reported_once(closure)
        if self._engine is not None:
            return self._engine.step(names, closure)
        if closure is not None:
            closure()
        return False

    def stop(self, reason: str) -> None:
        """End the run after this update; ``reason`` is a sentence for the summary."""
        if self._engine is not None:
            self._engine.stop(reason)

    def reported(self, returned: Any) -> Any:
        """``returned``, the value of the function; else the sum of the losses given to :meth:`backward` since the last call."""
        losses, self._losses = self._losses, []
        if returned is not None:
            return returned
        if not losses:
            raise WorkloadError(
                "The function that drives the update returned nothing and called no run.backward(loss): there is no loss to "
                "report. Return one."
            )
        return functools.reduce(torch.add, losses)  # stacking them first takes twice as long for two

    def _reported_once(self, closure: Closure) -> Closure:
        """``closure``, of whose losses only those of the first evaluation are reported."""
        evaluated = False

        def computed() -> torch.Tensor:
            nonlocal evaluated
            before, loss = len(self._losses), closure()
            if evaluated:
                del self._losses[before:]
            evaluated = True
            return loss

        return computed

    def _names(self, optimizer: str | Optimizer | None) -> list[str]:
        if optimizer is None:
            return list(self.optimizers)
        if isinstance(optimizer, str):
            found = [optimizer] if optimizer in self.optimizers else []
        else:
            found = [name for name, each in self.optimizers.items() if each is optimizer]
        if not found:
            given = repr(optimizer) if isinstance(optimizer, str) else of_type(optimizer)
            raise WorkloadError(f"The run has no optimizer {given}. It has {', '.join(map(repr, self.optimizers))}.")
        return found
