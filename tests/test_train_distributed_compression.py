"""Compressed gradients: what really crosses, and what becomes of the loss, on the digits."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from _ranks import on_ranks
from trimtab.candidate import Settings
from trimtab.train.distributed.exchange import Errors
from trimtab.train.trainer import Trainer

KINDS = [None, "float16", "bfloat16", "powersgd", "topk"]
EPOCHS = 16
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def digits() -> tuple[Batches, Batches]:
    """Batches to learn from, and to validate on."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(found.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    batches = [(images[part], labels[part]) for part in order.split(32)]
    return batches[:-14], batches[-14:]


def train(kind: Any, epochs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    made = Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        settings=Settings(communication=kind, bucket_mb=0.06),  # several buckets: what torch's own PowerSGD cannot do over gloo
    )
    learn, held_out = digits()
    summary = made.fit(learn, held_out, epochs=epochs)
    meter = made.world.exchange.meter  # type: ignore[attr-defined]
    return {
        "sent": meter.bytes / meter.updates,
        "loss": summary.metrics["loss"],
        "parameters": [p.sum().item() for p in model.parameters()],
    }


def few_updates(folder: pathlib.Path) -> dict[str, Any]:
    return {str(kind): train(kind, 1) for kind in KINDS}


def many_updates(folder: pathlib.Path) -> dict[str, Any]:
    return {str(kind): train(kind, EPOCHS) for kind in (None, "powersgd", "topk")}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(few_updates, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(("kind", "most"), [("float16", 0.5), ("bfloat16", 0.5), ("powersgd", 0.1), ("topk", 0.03)])
def test_less_crosses(found: list[dict[str, Any]], kind: str, most: float) -> None:
    for each in found:
        assert 0 < each[kind]["sent"] <= most * each["None"]["sent"]


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "powersgd", "topk"])
def test_all_processes_have_the_same_model(found: list[dict[str, Any]], kind: str) -> None:
    assert found[0][kind]["parameters"] == found[1][kind]["parameters"] != found[0]["None"]["parameters"]


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_rounding_leaves_the_loss(found: list[dict[str, Any]], kind: str) -> None:
    assert found[0][kind]["loss"] == pytest.approx(found[0]["None"]["loss"], rel=0.02)


@pytest.mark.slow
def test_what_is_left_out_comes_later(tmp_path: pathlib.Path) -> None:
    found, _ = on_ranks(many_updates, tmp_path)
    for kind in ("powersgd", "topk"):
        assert found[kind]["loss"] == pytest.approx(found["None"]["loss"], rel=0.02)


def test_what_was_left_out_is_found_again_when_ddp_groups_parameters_anew() -> None:
    first, second, third = (nn.Parameter(torch.zeros(size)) for size in (2, 3, 1))
    errors = Errors()
    errors.of([first, second, third], torch.zeros(6)).copy_(torch.arange(6.0))
    assert errors.of([third, second], torch.zeros(4)).tolist() == [5.0, 2.0, 3.0, 4.0]
    assert errors.of([first], torch.zeros(2)).tolist() == [0.0, 1.0]
    errors.of([first], torch.zeros(2)).add_(1)
    assert errors.of([first], torch.zeros(2)).tolist() == [1.0, 2.0]
