"""Mistakes about the validation: those that can be known are told before the run, and none costs the epoch before it."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trimtab import Trainer
from trimtab.errors import UsageError, WorkloadError
from trimtab.train.checkpoint import Checkpoints
from trimtab.train.stopping import EarlyStopping

Batches = list[tuple[torch.Tensor, torch.Tensor]]


def batches(count: int = 3) -> Batches:
    return [(torch.full((2, 1), float(index)), torch.ones(2, 1)) for index in range(count)]


def trainer(**options: Any) -> Trainer:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"loss": nn.MSELoss(), "optimizer": functools.partial(torch.optim.SGD, lr=0.01)}
    return Trainer(nn.Linear(1, 1), **{**defaults, **options})


def right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.round() == targets


def failing(*_: Any) -> Any:
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("options", "validate", "said"),
    [
        ({"early_stopping": EarlyStopping(metric="acc"), "metrics": {"right": right}}, batches(),
         r"EarlyStopping watches 'acc', but the validation has loss, right\. Name one of these, or give metrics"),
        ({"early_stopping": EarlyStopping()}, None, r"EarlyStopping goes by the validation, and there is none\. Give fit\("),
        ({"metrics": {"right": right}}, None, r"metrics={'right'} go by the validation, and there is none\. Give fit\("),
        ({}, [], r"validate has no batch: its len\(\) is 0\. Give it data, or leave it out\."),
    ],
)  # fmt: skip
def test_what_can_be_known_is_refused_before_the_run(options: dict[str, Any], validate: Batches | None, said: str) -> None:
    made = trainer(**options)
    with pytest.raises(UsageError, match=said):
        made.fit(batches(), validate, epochs=1)
    assert made.position.update == 0


def of_the_first(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    found: torch.Tensor = model(batch[0]).square().mean()
    return found


@pytest.mark.parametrize(
    ("make", "data", "kind"),
    [
        (lambda folder: trainer(metrics={"mine": failing}, checkpoint=folder), batches(), WorkloadError),
        (lambda folder: trainer(metrics={"mine": failing}, checkpoint=folder, ema=0.5), batches(), WorkloadError),
        (
            lambda folder: trainer(loss=of_the_first, metrics={"right": right}, checkpoint=folder, checkpoint_every=9),
            [(torch.ones(2, 1), torch.ones(2, 1)), *[(torch.ones(2, 1),)] * 2],  # the first alone is looked at before the run
            UsageError,
        ),
    ],
)
def test_a_validation_that_fails_does_not_cost_the_epoch(
    make: Callable[[pathlib.Path], Trainer], data: list[Any], kind: type[Exception], tmp_path: pathlib.Path
) -> None:
    made = make(tmp_path)
    with pytest.raises(kind, match="metric"):
        made.fit(data, data, epochs=2)
    assert Checkpoints(tmp_path).update() == 3
    again = make(tmp_path).resume()
    assert (again.position.epoch, again.position.batch) == (1, 0)
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), made.model.parameters(), strict=True))
    again.metrics.clear()
    assert again.fit(data, data, epochs=2).updates == 3
