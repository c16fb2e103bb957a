"""Labelled examples, a workload that classifies them, and what judges its answers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trimtab.core.workload import Evaluation, Workload
from trimtab.data.batches import Batch
from trimtab.evaluation.prepared_workload import Subject

X, Y = torch.randn(120, 8, generator=torch.Generator().manual_seed(0)), torch.arange(120) % 2


def top1(output: torch.Tensor, target: Any) -> torch.Tensor:
    return output.argmax(1) == torch.as_tensor(target)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> float:
    return float((output.argmax(-1) == target).float().mean())


def classifier(data: Any, **more: Any) -> Workload:
    options = {"model": nn.Linear(8, 2).eval(), "inputs": torch.ones(1, 8)} | more
    return Workload(evaluation=Evaluation(data=data, score=top1), **options)


def all_batches(subject: Subject) -> list[Batch]:
    splits = subject.splits
    return [*splits.calibration, *splits.selection, *splits.test]
