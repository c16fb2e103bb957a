"""Compressed gradients: what really crosses, and what becomes of the loss, on the digits."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from _ranks import on_ranks
from trimtab.core.settings import DistributedSettings, Settings
from trimtab.train.distributed.comm_hooks import Bucket, Exchange, views
from trimtab.train.distributed.launch import start
from trimtab.train.distributed.process_group import Group
from trimtab.train.trainer import Trainer

KINDS = [None, "float16", "bfloat16", "powersgd"]
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
        settings=Settings(
            distributed=DistributedSettings(communication=kind, bucket_mb=0.06)
        ),  # several, over which torch's PowerSGD hangs by itself
    )
    learn, held_out = digits()
    summary = made.fit(learn, held_out, epochs=epochs)
    _, numbers, sent = made.world.exchange.power.compression_stats()  # type: ignore[attr-defined]
    return {
        "sent": sent / numbers if numbers else 1.0,
        "notes": list(summary.notes),
        "loss": summary.metrics["loss"],
        "parameters": [p.sum().item() for p in model.parameters()],
    }


CAUTION: dict[str, Any] = {
    "powersgd RMSprop": ("powersgd", torch.optim.RMSprop),
    "powersgd SGD": ("powersgd", torch.optim.SGD),
    "float16 AdamW": ("float16", torch.optim.AdamW),
}


def noted(kind: Any, make: Any) -> list[str]:
    """What is said of two updates."""
    model = nn.Linear(64, 10)
    made = Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: make(p, lr=1e-3),
        settings=Settings(distributed=DistributedSettings(communication=kind)),
    )
    return list(made.fit(digits()[0][:4], epochs=1).notes)


def few_and_many_updates(folder: pathlib.Path) -> dict[str, Any]:
    few = {str(kind): train(kind, 1) for kind in KINDS}
    few["notes"] = {name: noted(kind, make) for name, (kind, make) in CAUTION.items()}
    return few | {f"{kind}, many": train(kind, EPOCHS) for kind in (None, "powersgd")}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(few_and_many_updates, tmp_path_factory.mktemp("ranks"))


def test_powersgd_sends_less_and_says_how_much(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert 0 < each["powersgd"]["sent"] <= 0.2
        assert f"PowerSGD sent {each['powersgd']['sent']:.2f} of the numbers in the gradients." in each["powersgd"]["notes"]
        assert each["float16"]["sent"] == 1.0


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "powersgd"])
def test_all_processes_have_the_same_model(found: list[dict[str, Any]], kind: str) -> None:
    assert found[0][kind]["parameters"] == found[1][kind]["parameters"] != found[0]["None"]["parameters"]


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_rounding_leaves_the_loss(found: list[dict[str, Any]], kind: str) -> None:
    assert found[0][kind]["loss"] == pytest.approx(found[0]["None"]["loss"], rel=0.02)


def test_what_is_left_out_comes_later(found: list[dict[str, Any]]) -> None:
    assert found[0]["powersgd, many"]["loss"] == pytest.approx(found[0]["None, many"]["loss"], rel=0.02)


def test_optimizers_that_adapt_their_steps_are_warned_of(found: list[dict[str, Any]]) -> None:
    cautions = {name: [note for note in notes if "Caution" in note] for name, notes in found[0]["notes"].items()}
    assert {name: len(notes) for name, notes in cautions.items()} == dict.fromkeys(CAUTION, 0) | {"powersgd RMSprop": 1}
    assert "communication='powersgd' with RMSprop" in cautions["powersgd RMSprop"][0]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_lie_in_a_row_as_their_parameter_does(layout: torch.memory_format) -> None:
    parameter = torch.randn(4, 3, 2, 5).contiguous(memory_format=layout)
    gaps, scalar, flat = torch.randn(4, 6)[:, ::2], torch.tensor(3.0), torch.zeros(140)
    found = views(flat, [parameter, gaps, scalar])
    assert [view.stride() for view in found] == [parameter.stride(), (3, 1), ()]
    torch._foreach_copy_(found, [parameter, gaps, scalar])
    assert torch.equal(flat[:120], torch.as_strided(parameter, (120,), (1,)))
    assert torch.equal(flat[120:133], torch.cat([gaps.reshape(-1), scalar.reshape(1)]))
    assert not flat[133:].any()


def over_nccl(folder: pathlib.Path) -> dict[str, Any]:
    start("cuda")
    metric, _ = Group(Settings(device="cuda")).mean([torch.ones(())], [1.0], summed=False)
    exchange, parameter = Exchange("powersgd"), nn.Parameter(torch.zeros(512, 512, device="cuda"))
    given = torch.outer(torch.arange(512.0), torch.ones(512)).cuda()
    buckets = [Bucket(0, [parameter], given.flatten().clone(), last=True) for _ in range(20)]
    drawn = torch.cuda.get_rng_state()
    for bucket in buckets:
        exchange.begin(bucket)
    apart = max(float((bucket.flat.view(512, 512) - given).abs().max()) for bucket in buckets)
    return {"metric": metric.device.type, "apart": apart, "drawn": not torch.equal(drawn, torch.cuda.get_rng_state())}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.gpu
def test_over_nccl_metrics_of_the_host_count_and_thin_matrices_are_whole(tmp_path: pathlib.Path) -> None:
    (found,) = on_ranks(over_nccl, tmp_path, size=1)
    assert found["metric"] == "cuda"
    assert found["apart"] < 1.0  # of 511
    assert not found["drawn"], "random numbers of the run are its own"
