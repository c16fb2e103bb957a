"""How much of what the machine can compute a run really used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from trimtab.environment import Environment, Peaks, known_peaks
from trimtab.errors import TrimtabError
from trimtab.measure.flops import FlopCount, count_flops
from trimtab.train import recompute
from trimtab.train.batch_size import parts
from trimtab.train.double import copied, why_not_alone
from trimtab.train.objective import Batch, examples
from trimtab.train.peek import kept_random
from trimtab.workload import user_code

if TYPE_CHECKING:
    from trimtab.train.trainer import Trainer


def flops_share(trainer: Trainer, group: Sequence[Batch], examples_per_s: float) -> float | None:
    """The share of this machine's floating-point peak that ``examples_per_s`` amount to; ``None`` where it is unknown.

    The operations of a forward and backward pass are counted on a copy of the model, by the batches of ``group``, the last
    update's, and taken to be as many per example in the others. What checkpointing computes twice counts once, as is usual
    (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B). A note says where operators could not be counted.
    The peak is the one that :func:`~trimtab.environment.measured_peaks` found earlier; nothing is measured now.
    """
    if why_not_alone(trainer):
        return None
    peaks = known_peaks(Environment.capture())
    peak = None if peaks is None else _peak(trainer, peaks)
    count = sum(map(examples, group))
    if peak is None or not count:
        return None
    try:
        counted = _counted(trainer, group)
    except (TrimtabError, RuntimeError, TypeError) as error:  # the run itself is over, and was well
        trainer.note(f"The share of the peak is not known, because the operations could not be counted: {error}")
        return None
    if counted.uncounted:
        trainer.note(f"The share of the peak is a lower bound: {', '.join(counted.uncounted)} could not be counted.")
    return counted.total / count * examples_per_s / (peak * 1e9) if counted.total else None


def _peak(trainer: Trainer, peaks: Peaks) -> float | None:
    """GFLOP/s that were measured at the precision, on the device and with the threads of the run."""
    kind = trainer.settings.autocast or "float32"
    if kind == "auto" or trainer.settings.tf32 is True:
        return None
    device = trainer.device
    if device.type == "cpu":
        return peaks.find(kind, "cpu", trainer.settings.threads or torch.get_num_threads())
    return peaks.find(kind, f"{device.type}:{device.index or 0}")


def _counted(trainer: Trainer, group: Sequence[Batch]) -> FlopCount:
    model, objective = copied(trainer.model, trainer.objective)
    trainer.modes.train(model)
    for module in model.modules():  # what is recomputed now is a function of the original's
        if getattr(vars(module).get("forward"), "__module__", None) == recompute.__name__:
            del vars(module)["forward"]

    limit = trainer.room.fitting.limit
    batches = group if limit is None else parts(group, limit)  # in as much memory as there was

    def update() -> None:
        for batch in batches:
            objective(model, batch)[0].backward()

    with kept_random(), user_code("The model or its loss raised"):
        return count_flops(update, gradients=True)
