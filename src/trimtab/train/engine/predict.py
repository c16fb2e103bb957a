"""``Trainer.predict``: the model's outputs for batches."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from typing import Any

import torch

from trimtab._internal.user_code import user_code
from trimtab.errors import WorkloadError
from trimtab.tensors.batch_axis import BatchAxis, concatenate
from trimtab.tensors.structure import map_tensors
from trimtab.train.autotune import auto_settings
from trimtab.train.data.loader_position import is_seekable
from trimtab.train.data.micro_batches import check_loader
from trimtab.train.engine import setup, validation
from trimtab.train.engine.step import Step
from trimtab.train.loss.adapter import Batch, call, is_pair
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.step_clock import HostClock
from trimtab.train.runtime.torch_settings import running

_READING, _MODEL = user_code("The loader raised"), user_code("In predict() the model raised")


@torch.no_grad()
def outputs(context: RunContext, batches: Iterable[Batch], *, limit: int | None, joined: bool) -> Any:
    """The outputs of the current model for ``batches``, on the CPU; every process goes through all of them.

    Raises:
        UsageError: ``batches`` is no loader.
        WorkloadError: the model or the loader failed, there is no batch, or the outputs cannot be joined.
    """
    check_loader(batches, "predict")
    settings, model = context.settings, context.model
    settings = settings.replaced({name: auto_settings.OFF[name] for name in auto_settings.undecided(settings)})
    step = Step(model, context.objective, context.optimizer, settings, context.world, HostClock())
    move = setup.apply_memory_format(model, settings, context.device)
    if is_seekable(batches):
        batches.seek(0, 0)
    shown = context.eval_weights.applied() if context.resuming is not None else contextlib.nullcontext()
    found: list[Any] = []
    with running(settings), shown, validation.evaluating(model):
        with _READING:
            reading = iter(batches)
        for batch in itertools.islice(_read(reading), limit):
            moved = move(batch)
            inputs = moved[0] if is_pair(moved) else moved
            with step.precision(), _MODEL:
                answer = call(model, inputs)
            found.append(map_tensors(answer, _to_cpu if settings.precision.autocast is None else _to_cpu_float32))
    context.world.free_gathered()
    if not found:
        raise WorkloadError("predict() got no batch. Check that the loader has data and can be gone through again.")
    return _joined(found) if joined else found


def _read(reading: Any) -> Iterable[Batch]:
    end = object()
    while True:
        with _READING:
            batch = next(reading, end)
        if batch is end:
            return
        yield batch


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def _to_cpu_float32(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, as float32 if autocast made it 16 bits wide: numpy has no bfloat16."""
    narrow = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.detach().cpu().float() if narrow else tensor.detach().cpu()


def _joined(found: list[Any]) -> Any:
    """The outputs of all batches as those of one."""
    if len(found) == 1:
        return found[0]
    try:
        return concatenate(found, [BatchAxis.of(each).is_column for each in found])
    except (WorkloadError, RuntimeError) as error:
        raise WorkloadError(
            f"The outputs of {len(found)} batches cannot be joined: {error} Give predict(..., joined=False) for a list with an "
            "item per batch."
        ) from error
