"""Model FLOPs utilization: the share of the floating-point peak that a run used."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trimtab._internal.user_code import user_code
from trimtab.errors import TrimtabError, UsageError, WorkloadError
from trimtab.hardware.environment import Environment, known_peaks
from trimtab.hardware.peaks import Peaks
from trimtab.measure.flops import count_flops
from trimtab.tensors.precision import tf32_allowed
from trimtab.train.autotune.shadow_run import copies, why_no_copy
from trimtab.train.data.batch_structure import split
from trimtab.train.data.peek import preserved_random_state
from trimtab.train.loss.adapter import Batch, examples
from trimtab.train.memory import activation_checkpointing
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.memory_errors import first_line

FEW, SMALL = 2, 16
"""Operations are counted on this many examples, because BatchNorm takes no single one. Where activations are recomputed, a
batch must have :data:`SMALL` times as many, so that counting without recomputation does not exceed the memory."""


def flops_share(context: RunContext, group: Sequence[Batch], examples_per_s: float) -> tuple[float | None, str | None]:
    """The share of this machine's floating-point peak that ``examples_per_s`` amount to, and a sentence on what is unknown.

    The operations of a forward and backward pass are counted on a copy of the model, with :data:`FEW` examples of each batch
    in ``group``, and scaled to all examples. Operations that activation checkpointing repeats count once (Chowdhery et al.
    2022, https://arxiv.org/abs/2204.02311, appendix B). The peak is the one that
    :func:`~trimtab.hardware.environment.measured_peaks` has stored; nothing is measured now.

    Returns:
        The share, or ``None`` if it is unknown; and a sentence, if operators could not be counted or counting failed.
    """
    if why_no_copy(context):
        return None, None
    peaks = known_peaks(Environment.capture())
    peak = None if peaks is None else _peak(context, peaks)
    count = sum(map(examples, group))
    if peak is None or not count:
        return None, None
    try:
        with user_code("Counting the operations failed"):  # any error: the run itself has succeeded
            total, uncounted = _counted(context, group)
    except TrimtabError as error:
        return None, f"The share of the peak is not known. {first_line(error)}."
    names = ", ".join(sorted(uncounted))
    remark = f"The share of the peak is a lower bound: {names} could not be counted." if uncounted else None
    return (total / count * examples_per_s / (peak * 1e9) if total else None), remark


def _peak(context: RunContext, peaks: Peaks) -> float | None:
    """Peak in GFLOP/s at the precision, on the device and with the threads of the run; ``None`` if it was not measured."""
    kind = context.settings.precision.autocast or "float32"
    device, tf32 = context.device, context.settings.precision.tf32
    if kind == "auto" or tf32 is True or (device.type == "cuda" and kind == "float32" and tf32 is None and tf32_allowed()):
        return None
    if device.type == "cpu":
        return peaks.find(kind, "cpu", context.settings.threads or torch.get_num_threads())
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index or 0
    return peaks.find(kind, f"{device.type}:{index}")


def _counted(context: RunContext, group: Sequence[Batch]) -> tuple[float, set[str]]:
    """Floating-point operations of an update from ``group``, and the operators that could not be counted.

    Raises:
        UsageError: counting could exceed the memory that the settings allow.
    """
    settings, most = context.settings, min(FEW, context.fit.memory_plan.sizer.limit or FEW)
    batches = [(batch, _some(batch, most)) for batch in group]
    if settings.memory.activation_mb is not None and any(SMALL * examples(few) > examples(batch) for batch, few in batches):
        raise UsageError("To count operations nothing is recomputed, for which the settings leave no memory.")
    model, objective = copies(context.model, context.objective)
    context.modes.train(model)
    for module in model.modules():  # the wrapper that recomputes activations calls the original
        if getattr(vars(module).get("forward"), "__module__", None) == activation_checkpointing.__name__:
            del vars(module)["forward"]

    device, dtype = torch.device(settings.device).type, getattr(torch, settings.precision.autocast or "float32")
    total, uncounted = 0.0, set[str]()
    with preserved_random_state(), torch.autocast(device, dtype=dtype, enabled=settings.precision.autocast is not None):
        for batch, few in batches:
            found = count_flops(lambda few=few: objective(model, few)[0].backward(), gradients=True)
            total += found.total * examples(batch) / examples(few)
            uncounted.update(found.uncounted)
    return total, uncounted


def _some(batch: Batch, most: int) -> Batch:
    """At most ``most`` examples of ``batch``; all of them if it cannot be split."""
    try:
        return split(batch, most)[0]
    except WorkloadError:
        return batch
