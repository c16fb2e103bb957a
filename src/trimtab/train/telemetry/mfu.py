"""How much of what the machine can compute a run really used."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trimtab.core.workload import user_code
from trimtab.errors import TrimtabError, UsageError, WorkloadError
from trimtab.hardware.environment import Environment, Peaks, known_peaks
from trimtab.measure.flops import count_flops
from trimtab.tensors.precision import rounded_to_tf32
from trimtab.train.autotune.shadow_run import copies, why_not_alone
from trimtab.train.data.batch_structure import split
from trimtab.train.data.peek import kept_random
from trimtab.train.loss.adapter import Batch, examples
from trimtab.train.memory import activation_checkpointing
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.memory_errors import said

FEW, SMALL = 2, 16
"""Examples that operations are counted by, as BatchNorm has no use for one alone; and the least that a batch has to have times
as many, where memory is kept free by recomputing."""


def flops_share(context: RunContext, group: Sequence[Batch], examples_per_s: float) -> float | None:
    """The share of this machine's floating-point peak that ``examples_per_s`` amount to; ``None`` where it is unknown.

    The operations of a forward and backward pass are counted on a copy of the model, by :data:`FEW` examples of each batch in
    ``group``, the last update's, and taken to be as many per example in the others: memory may be short. What checkpointing
    computes twice counts once, as is usual (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B). A note says
    where operators could not be counted.
    The peak is the one that :func:`~trimtab.hardware.environment.measured_peaks` found earlier; nothing is measured now.
    """
    if why_not_alone(context):
        return None
    peaks = known_peaks(Environment.capture())
    peak = None if peaks is None else _peak(context, peaks)
    count = sum(map(examples, group))
    if peak is None or not count:
        return None
    try:
        with user_code("Counting the operations failed"):  # whatever it is: the run itself is over, and was well
            total, uncounted = _counted(context, group)
    except TrimtabError as error:
        context.note(f"The share of the peak is not known. {said(error)}.")  # after its first line torch lists all its backends
        return None
    if uncounted:
        context.note(f"The share of the peak is a lower bound: {', '.join(sorted(uncounted))} could not be counted.")
    return total / count * examples_per_s / (peak * 1e9) if total else None


def _peak(context: RunContext, peaks: Peaks) -> float | None:
    """GFLOP/s that were measured at the precision, on the device and with the threads of the run."""
    kind = context.settings.precision.autocast or "float32"
    device, tf32 = context.device, context.settings.precision.tf32
    if kind == "auto" or tf32 is True or (device.type == "cuda" and kind == "float32" and tf32 is None and rounded_to_tf32()):
        return None
    if device.type == "cpu":
        return peaks.find(kind, "cpu", context.settings.threads or torch.get_num_threads())
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index or 0
    return peaks.find(kind, f"{device.type}:{index}")


def _counted(context: RunContext, group: Sequence[Batch]) -> tuple[float, set[str]]:
    """Operations of an update from ``group``, and the operators that are not among them.

    Raises:
        UsageError: that would take memory which the settings keep free.
    """
    settings, most = context.settings, min(FEW, context.fit.memory_plan.fitting.limit or FEW)
    batches = [(batch, _some(batch, most)) for batch in group]
    kept = settings.memory.activation_mb is not None or settings.memory.segments is not None
    if kept and any(SMALL * examples(few) > examples(batch) for batch, few in batches):
        raise UsageError("To count operations nothing is recomputed, for which the settings leave no memory.")
    model, objective = copies(context.model, context.objective)
    context.modes.train(model)
    for module in model.modules():  # what is recomputed now is a function of the original's
        if getattr(vars(module).get("forward"), "__module__", None) == activation_checkpointing.__name__:
            del vars(module)["forward"]

    device, dtype = torch.device(settings.device).type, getattr(torch, settings.precision.autocast or "float32")
    total, uncounted = 0.0, set[str]()
    with kept_random(), torch.autocast(device, dtype=dtype, enabled=settings.precision.autocast is not None):
        for batch, few in batches:
            found = count_flops(lambda few=few: objective(model, few)[0].backward(), gradients=True)
            total += found.total * examples(batch) / examples(few)
            uncounted.update(found.uncounted)
    return total, uncounted


def _some(batch: Batch, most: int) -> Batch:
    """At most so many examples of ``batch``; all of them where it cannot be taken apart."""
    try:
        return split(batch, most)[0]
    except WorkloadError:
        return batch
