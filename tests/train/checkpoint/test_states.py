"""Modules whose state has a layout with a version: all that a run keeps is read as the version that it is."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

from _runs import loader, trainer
from trimtab import Trainer
from trimtab.train.early_stopping import EarlyStopping
from trimtab.train.telemetry.events import Event, Validated

pytestmark = pytest.mark.usefixtures("one_thread")


class Scaled(nn.Module):
    """Version 2 keeps its scale as it is; what comes without a version is of version 1, which kept its logarithm."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}scale"] = state[f"{prefix}scale"].exp()
        super()._load_from_state_dict(state, prefix, metadata, *rest)  # type: ignore[no-untyped-call]


class Weighted(nn.Module):
    """A loss that learns, as the model does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Scaled()

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.weight((output - target).square()).mean()
        return found


SLOW = functools.partial(torch.optim.SGD, lr=1e-5)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 1), Scaled())


def test_a_run_goes_on_with_modules_that_know_older_layouts(tmp_path: pathlib.Path) -> None:
    trainer(model, optimizer=SLOW, loss=(first := Weighted()), ema=0.9, checkpoint=tmp_path).fit(loader(), steps=4)
    fresh = trainer(model, optimizer=SLOW, loss=(second := Weighted()), ema=0.9, checkpoint=tmp_path).resume()
    assert torch.equal(second.weight.scale, first.weight.scale)
    fresh.fit(loader(), steps=8)
    whole = trainer(model, optimizer=SLOW, loss=(third := Weighted()), ema=0.9)
    whole.fit(loader(), steps=8)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(fresh.model.state_dict()[name], value), name
    assert torch.equal(second.weight.scale, third.weight.scale)


def test_the_best_parameters_come_back_in_the_layout_that_they_have(tmp_path: pathlib.Path) -> None:
    seen: list[float] = []

    def scale(run: Trainer, event: Event) -> None:
        if isinstance(event, Validated):
            seen.append(run.model[1].scale.item())

    def made() -> Trainer:
        return trainer(model, optimizer=SLOW, early_stopping=EarlyStopping(patience=9), checkpoint=tmp_path, callbacks=[scale])

    one = made()
    one.fit(loader(), loader(shuffle=False), epochs=2)
    assert one.model[1].scale.item() == seen[-1]
    again = made().resume()
    again.optimizer.param_groups[0]["lr"] = 0.0
    again.fit(loader(), loader(shuffle=False), epochs=3)
    assert again.model[1].scale.item() in seen
