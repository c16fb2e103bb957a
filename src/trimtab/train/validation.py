"""How good the model is on data that it does not learn from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trimtab.errors import UsageError, WorkloadError
from trimtab.train.feed import Seekable, has_workers, keeps_workers, set_workers
from trimtab.train.objective import Batch, Objective, Weight, call, examples, is_pair
from trimtab.train.peek import first_batches, kept_random
from trimtab.workload import user_code

if TYPE_CHECKING:
    from trimtab.train.prepare import Ready
    from trimtab.train.trainer import Trainer

Metric = Callable[[Any, Any], Any]
"""``metric(outputs, targets)`` -> one value per example. Loss and metrics get the same outputs, so none may change them."""
Move = Callable[[Batch], Batch]
_READING, _END = user_code("The validation loader raised"), object()
_MODEL = user_code("In validation the model or its loss raised")


def checked(trainer: Trainer, held_out: Iterable[Batch] | None) -> Iterable[Batch] | None:
    """Refuse before the run what its first validation would fail with; ``held_out`` is this process's part of the data.

    Returns the loader to use, which still has all of its batches.

    Raises:
        UsageError: there is no validation data, early stopping watches a figure that there is not, or metrics cannot be had.
        WorkloadError: the loader raised.
    """
    metrics, stopping, world = trainer.metrics, trainer.early_stopping, trainer.world
    if held_out is None:
        if stopping is not None or metrics:
            asking = "EarlyStopping goes" if stopping is not None else f"metrics={{{', '.join(map(repr, metrics))}}} go"
            raise UsageError(f"{asking} by the validation, and there is none. Give fit(train, validate, ...).")
        return None
    if stopping is not None and stopping.metric not in (names := ("loss", *metrics)):
        raise UsageError(
            f"EarlyStopping watches {stopping.metric!r}, but the validation has {', '.join(names)}. Name one of these, or give "
            "metrics={...}."
        )
    lengths = world.gathered(_length(held_out))
    if all(length == 0 for length in lengths):
        raise UsageError("validate has no batch: its len() is 0. Give it data, or leave it out.")
    if world.shared and 0 in lengths:
        raise UsageError(
            f"validate has no batch for the process of rank {lengths.index(0)}, and all processes must call a sharded model "
            f"together. Give it at least {len(lengths)} batches, smaller ones for instance."
        )
    if metrics and trainer.objective.calls_model:
        with _READING:
            first, held_out = first_batches(held_out, 1)
        if world.any(any(not is_pair(batch) for batch in first)):
            raise UsageError(_no_pair(next(iter(metrics))))
    return held_out


@torch.no_grad()
def validate(
    model: nn.Module,
    objective: Objective,
    batches: Iterable[Batch],
    metrics: Mapping[str, Metric],
    ready: Ready,
    cut: Callable[[], bool],
) -> dict[str, float] | None:
    """The mean loss, weighted as in training, and the means of ``metrics``, over all of ``batches`` on all processes.

    The model is in evaluation mode meanwhile, and each of its modules in the mode that it was in afterwards. ``None`` where
    ``cut`` has come true in a process: it is asked before each batch.

    Raises:
        WorkloadError: the loader, the model or a metric raised, there is no batch, or a metric gives something else than a
            value per example.
    """
    modes, clock, world = [(module, module.training) for module in model.modules()], ready.clock, ready.step.world
    losses: list[torch.Tensor] = []
    weights: list[Weight] = []
    values: dict[str, list[torch.Tensor]] = {name: [] for name in metrics}
    if isinstance(batches, Seekable):  # so that every validation, also one after a resumption, sees the same
        batches.seek(0, 0)
    model.eval()
    try:
        with world.together():
            # It is the plain model that is called: only one whose shares must be gathered needs all processes at once.
            read = _read(batches, cut)
            for batch in world.rounds(read, None) if world.shared else read:  # which may be cut off, so nobody knows how many
                if world.shared and world.any(cut()):
                    break
                moved = ready.move(batch)
                with ready.step.precision():
                    with _MODEL:
                        loss, weight, outputs = world.looked(functools.partial(objective.answered, model, moved))
                    if metrics and outputs is None:
                        outputs = _outputs(model, moved, metrics)
                    if not world.counts:  # it only helped others, who have more
                        continue
                    for name, metric in metrics.items():
                        values[name].append(_per_example(name, metric, outputs, moved))
                losses.append(loss.detach())
                weights.append(weight)
    finally:
        model.train(modes[0][1])  # some modules do more then than set a flag, such as take apart what eval() has merged
        for module, mode in modes:
            module.training = mode
        world.rest()
        clock.enter("other")
    if world.any(cut()):
        return None
    if not world.any(bool(losses)):
        raise WorkloadError("The validation loader gave no batch. Check that it has data and can be gone through again.")
    found = {"loss": float(world.mean(losses, weights, summed=objective.summed)[0])}
    for name, parts in values.items():
        means, counts = [part.double().mean() for part in parts], [float(part.numel()) for part in parts]
        found[name] = float(world.mean(means, counts, summed=False)[0])
    return found


def _read(batches: Iterable[Batch], cut: Callable[[], bool]) -> Iterator[Batch]:
    """All of ``batches``, or those before ``cut`` came true."""
    if keeps_workers(batches) and not has_workers(batches):
        with kept_random():  # what starting them draws would be drawn again in a run that is gone on with
            set_workers(batches, running=True)
    with _READING:
        running = iter(batches)
    while not cut():
        try:
            with _READING:
                batch = next(running, _END)
        except WorkloadError:
            if cut():  # a signal to the whole group of processes ends the loader's workers too
                return
            raise
        if batch is _END:
            return
        yield batch


def _length(batches: Iterable[Batch]) -> int | None:
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None


def _outputs(model: nn.Module, batch: Batch, metrics: Mapping[str, Metric]) -> Any:
    """What the model gives for ``metrics``, where it is the loss that calls it."""
    if not is_pair(batch):
        raise UsageError(_no_pair(next(iter(metrics))))
    with _MODEL:
        return call(model, batch[0])


def _no_pair(name: str) -> str:
    return f"The metric {name!r} needs batches of (inputs, targets); compute it in a callback instead."


def _per_example(name: str, metric: Metric, outputs: Any, batch: Batch) -> torch.Tensor:
    with user_code(f"The metric {name!r} raised"):
        found = torch.as_tensor(metric(outputs, batch[1]))
    if found.dim() == 0:
        found = found.expand(examples(batch))
    return found.reshape(-1)
