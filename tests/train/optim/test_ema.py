"""Averages of parameters: how fast they follow, what is kept of them, and what a run goes on with."""

from __future__ import annotations

import functools
import pathlib

import pytest
import torch
from torch import nn

from _runs import Line, loader, trainer
from trimtab import Trainer
from trimtab.train.optim.ema import Ema

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_average_follows_a_short_run_and_begins_with_what_was_loaded(tmp_path: pathlib.Path) -> None:
    made = trainer(model := nn.Linear(1, 1), ema=0.999, optimizer=functools.partial(torch.optim.SGD, lr=0.0))
    model.load_state_dict({"weight": torch.full((1, 1), 5.0), "bias": torch.zeros(1)})
    made.fit(loader(), epochs=1)
    assert model.weight.item() == 5
    average = Ema(model, 0.999)
    with torch.no_grad():
        model.weight.fill_(1)
    for _ in range(50):
        average.update(model)
    assert average.shadow["weight"].item() == pytest.approx(1, abs=1e-3)
    trainer(ema=0.9, checkpoint=tmp_path).fit(loader(), steps=3)
    resumed = trainer(ema=0.9, checkpoint=tmp_path).resume()
    assert resumed.ema is not None
    assert resumed.ema.updates == 3


def test_an_average_of_half_precision_is_kept_in_single() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1)
        average = Ema(model, 0.999)
        average.updates = 10**6
        model.weight.fill_(1.0078125)  # the next number
        for _ in range(100):
            average.update(model)
    kept = average.shadow["weight"].clone()
    assert kept.item() == pytest.approx(1 + 0.0078125 * (1 - 0.999**100), abs=1e-6)
    with average.shown(model):
        assert model.weight.item() == 1
    assert (model.weight.item(), average.shadow["weight"].item()) == (1.0078125, kept.item())


class Growing(nn.Module):
    """Makes a buffer at its first batch, and a longer one when it needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 1)
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None or len(self.table) < len(x):
            self.table = torch.ones(len(x), 1)
        found: torch.Tensor = self.head(x * self.table[: len(x)])
        return found


def test_an_average_follows_buffers_that_are_made_on_the_way() -> None:
    data = [(torch.randn(n, 3), torch.randn(n, 1)) for n in (2, 2, 5, 3)]
    made = trainer(Growing, ema=0.9, optimizer=functools.partial(torch.optim.SGD, lr=1e-4))
    assert made.fit(data, data, epochs=2).updates == 8
    assert made.ema is not None
    assert made.ema.shadow["table"].shape == (5, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trainer_that_has_shown_its_average_resumes_without_it(tmp_path: pathlib.Path, dtype: torch.dtype) -> None:
    data = [tuple(value.to(dtype) for value in batch) for batch in loader()]

    def made_in(folder: pathlib.Path) -> Trainer:
        torch.manual_seed(0)
        return trainer(Line().to(dtype), ema=0.9, checkpoint=folder)

    made, other = made_in(tmp_path), made_in(tmp_path / "other")
    made.fit(data, steps=8)
    made.resume().fit(data, steps=16)
    other.fit(data, steps=8)
    fresh = made_in(tmp_path / "other").resume()
    fresh.fit(data, steps=16)
    assert torch.equal(made.model.layer.weight, fresh.model.layer.weight)
    assert made.ema is not None
    assert fresh.ema is not None
    for name, value in fresh.ema.shadow.items():
        assert torch.equal(made.ema.shadow[name], value), name


def test_parameters_that_somebody_has_loaded_are_left_to_him() -> None:
    made = trainer(ema=0.5)
    made.fit(loader(), epochs=1)
    made.optimizer.param_groups[0]["lr"] = 0.0
    made.model.layer.load_state_dict({"weight": torch.full((1, 1), 5.0), "bias": torch.zeros(1)})
    made.fit(loader(), epochs=2)
    assert made.model.layer.weight.item() == 5
    assert made.ema is not None
    assert made.ema.updates == 8


class Masked(nn.Module):
    """Has a buffer that holds -inf, statistics of a normalisation, and a table that is made anew."""

    mask: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1), persistent=False)
        self.register_buffer("table", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table += 1
        hidden = self.norm(self.layer(x))
        found: torch.Tensor = (torch.einsum("ni,nj->nij", hidden, hidden) + self.mask).softmax(-1).square().mean((1, 2))
        return found


def test_an_average_leaves_buffers_that_are_no_statistics_as_they_are() -> None:
    model = Masked()
    average = Ema(model, 0.9)
    for _ in range(3):
        model(torch.randn(8, 4))
        with torch.no_grad():
            model.layer.weight += 1
        average.update(model)
    for name in ("mask", "table", "norm.num_batches_tracked"):
        assert torch.equal(average.shadow[name], dict(model.named_buffers())[name]), name
    for name in ("layer.weight", "norm.running_mean"):
        assert not torch.equal(average.shadow[name], {**dict(model.named_parameters()), **dict(model.named_buffers())}[name])
    data = [(torch.randn(8, 4), torch.randn(8)) for _ in range(3)]
    made = trainer(model, ema=0.9, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    assert torch.tensor(made.fit(data, data, epochs=2).metrics["loss"]).isfinite()
    assert torch.equal(model.mask, Masked().mask)
