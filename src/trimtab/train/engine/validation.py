"""Validation: the mean loss and metrics on data that is not trained on."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trimtab._internal.user_code import user_code
from trimtab._internal.validation import length_of
from trimtab.errors import UsageError, WorkloadError
from trimtab.tensors.structure import map_tensors
from trimtab.train.data.loader_position import is_seekable
from trimtab.train.data.micro_batches import has_workers, keeps_workers, set_workers
from trimtab.train.data.peek import preserved_random_state
from trimtab.train.loss.adapter import Batch, Weight
from trimtab.train.run_context import RunContext
from trimtab.train.telemetry.metrics import Figures

if TYPE_CHECKING:
    from trimtab.train.engine.step import Step
    from trimtab.train.runtime.world import World

Move = Callable[[Batch], Batch]
_READING, _END = user_code("The validation loader raised"), object()
_MODEL = user_code("In validation the model or its loss raised")
_NO_GRADIENT = "does not require grad"
"""Part of torch's message if something is differentiated that was computed without gradients."""


def checked(context: RunContext, held_out: Iterable[Batch] | None) -> Iterable[Batch] | None:
    """Check before the run what would fail in its first validation; ``held_out`` is this process's part of the data.

    Returns the loader to use, with all of its batches.

    Raises:
        UsageError: validation data is missing or empty, early stopping watches an unknown figure, or a metric cannot be
            computed or is called ``"loss"``.
        WorkloadError: the loader raised.
    """
    metrics, stopping, world = context.metrics, context.early_stopping, context.world
    if held_out is None:
        if stopping is not None or metrics or context.validate_every is not None:
            asking = f"metrics={{{', '.join(map(repr, metrics))}}} go" if metrics else "validate_every goes"
            asking = "EarlyStopping goes" if stopping is not None else asking
            raise UsageError(f"{asking} by the validation, and there is none. Give fit(train, validate, ...).")
        if context.checkpoints is not None and context.checkpoints.keep_best:
            raise UsageError("keep_best goes by the validation, and there is none. Give fit(train, validate, ...).")
        return None
    if stopping is not None and stopping.metric not in (names := ("loss", *metrics)):
        raise UsageError(
            f"EarlyStopping watches {stopping.metric!r}, but the validation has {', '.join(names)}. Name one of these, or give "
            "metrics={...}."
        )
    if "loss" in metrics:
        raise UsageError("metrics has a 'loss', as the validation's own mean is called. Give yours another name.")
    lengths = world.gathered(length_of(held_out))
    if all(length == 0 for length in lengths):
        raise UsageError("validate has no batch: its len() is 0. Give it data, or leave it out.")
    if world.shared and 0 in lengths:
        raise UsageError(
            f"validate has no batch for the process of rank {lengths.index(0)}, and all processes must call a sharded model "
            f"together. Give it at least {len(lengths)} batches, smaller ones for instance."
        )
    return held_out


@torch.no_grad()
def validate(
    context: RunContext, batches: Iterable[Batch], step: Step, move: Move, cut: Callable[[], bool]
) -> dict[str, float] | None:
    """The mean loss, weighted as in training, and the metrics, over all of ``batches`` on all processes.

    Model and loss are in evaluation mode during it; afterwards each module is in its earlier mode. Returns ``None`` if ``cut``,
    which is called before each batch, returned true in any process.

    Raises:
        WorkloadError: the loader, the model or a metric raised, there is no batch, or a metric does not return one value per
            example.
    """
    objective, world = context.objective, step.world
    batch_loss, objective.count_warning = _BatchLoss(context, world), None
    losses: list[torch.Tensor] = []
    weights: list[Weight] = []
    if is_seekable(batches):  # every validation sees the same batches, also after a resumption
        batches.seek(0, 0)
    try:
        with evaluating(context.model, objective.module), world.together():
            figures = Figures(context.metrics)
            # The plain model is called, so only a sharded model needs all processes at once.
            read = itertools.islice(_read(batches, cut), context.fit.limit_validate)
            for batch in world.rounds(read, None) if world.shared else read:  # may be cut off: no length
                if world.shared and world.any(cut()):
                    break
                moved = move(batch)
                with step.precision():
                    loss, weight, outputs = batch_loss(moved)
                    if not world.counts:  # it only keeps step with processes that have more batches
                        continue
                    figures.add(outputs, moved)
                losses.append(loss)
                weights.append(weight)
    finally:
        world.free_gathered()
        step.clock.enter("other")
    if world.any(cut()):
        return None
    if not world.any(bool(losses)):
        raise WorkloadError("The validation loader gave no batch. Check that it has data and can be gone through again.")
    if len(losses) > 1:
        context.note_once(objective.count_warning)
    context.note_once(figures.remark())
    return {"loss": float(world.mean(losses, weights, summed=objective.summed)[0]), **figures.values(world)}


class _BatchLoss:
    """Calls model and loss for the batches of a validation, without gradients if possible.

    Some need gradients: a loss with a gradient penalty, or a model whose forces are derivatives of an energy. The first batch
    shows it.
    """

    def __init__(self, context: RunContext, world: World) -> None:
        self.context, self.world = context, world
        self._gradients: bool | None = None

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, Weight, Any]:
        """The loss of ``batch``, its weight, and the outputs if metrics need them."""
        with _MODEL:
            try:
                found = self._forward(batch, bool(self._gradients))
            except RuntimeError as error:
                if self._gradients is not None or _NO_GRADIENT not in str(error):
                    raise
                self._gradients = True
            else:
                self._gradients = bool(self._gradients)
                return found
            self.world.free_gathered()
            return self._forward(batch, True)

    def _forward(self, batch: Batch, gradients: bool) -> tuple[torch.Tensor, Weight, Any]:
        context = self.context
        with torch.set_grad_enabled(gradients):
            compute = functools.partial(context.objective.evaluate, context.model, batch)
            if not context.metrics or context.objective.loss is None or not context.objective.calls_model:
                loss, weight, outputs = self.world.forward_alone(compute)
            else:
                with _recorded_outputs(context.model) as recorded:
                    loss, weight, _ = self.world.forward_alone(compute)
                outputs = _model_outputs(recorded, next(iter(context.metrics)))
        return loss.detach(), weight, map_tensors(outputs, torch.Tensor.detach) if gradients else outputs


@contextlib.contextmanager
def evaluating(*modules: nn.Module | None) -> Iterator[None]:
    """A block with ``modules`` in evaluation mode; every module inside them gets its mode back."""
    roots = [(module, module.training) for module in modules if module is not None]
    modes = [(inner, inner.training) for module, _ in roots for inner in module.modules()]
    for module, _ in roots:
        module.eval()
    try:
        yield
    finally:
        for module, mode in roots:
            module.train(mode)  # some do more than set a flag, such as undo what eval() merged
        for module, mode in modes:
            module.training = mode


def _read(batches: Iterable[Batch], cut: Callable[[], bool]) -> Iterator[Batch]:
    """The ``batches`` until ``cut`` returns true."""
    if keeps_workers(batches) and not has_workers(batches):
        with preserved_random_state():  # starting workers draws a random number, also in a resumed run
            set_workers(batches, running=True)
    with _READING:
        running = iter(batches)
    while not cut():
        try:
            with _READING:
                batch = next(running, _END)
        except WorkloadError:
            if cut():  # a signal to the process group ends the loader's workers too
                return
            raise
        if batch is _END:
            return
        yield batch


@contextlib.contextmanager
def _recorded_outputs(model: nn.Module) -> Iterator[list[Any]]:
    """A block that gets a list of what ``model`` returns, for metrics where the loss calls it."""
    found: list[Any] = []
    handle = model.register_forward_hook(lambda _module, _inputs, outputs: found.append(outputs))
    try:
        yield found
    finally:
        handle.remove()


def _model_outputs(recorded: list[Any], name: str) -> Any:
    """The output of the model; for several calls, as for the parts of a pair, a list in their order."""
    if not recorded:
        raise UsageError(
            f"The metric {name!r} needs the outputs of the model, and the loss calls its methods, which cannot be seen. Let "
            "loss(model, batch) call model(...) itself."
        )
    return recorded[0] if len(recorded) == 1 else recorded
