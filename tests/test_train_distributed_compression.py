"""Compressed gradients: what really crosses, and what becomes of the loss, on the digits."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

from _ranks import on_ranks
from trimtab.candidate import Settings
from trimtab.train.distributed.exchange import Errors, Meter, in_a_row, shaped
from trimtab.train.distributed.group import Group
from trimtab.train.distributed.powersgd import PowerSgd
from trimtab.train.distributed.processes import start
from trimtab.train.distributed.topk import TopK
from trimtab.train.events import Progressed
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


CAUTION: dict[str, Any] = {
    "topk AdamW": ("topk", torch.optim.AdamW),
    "powersgd RMSprop": ("powersgd", torch.optim.RMSprop),
    "topk SGD": ("topk", torch.optim.SGD),
    "float16 AdamW": ("float16", torch.optim.AdamW),
}


def noted(kind: Any, make: Any) -> list[str]:
    """What is said of two updates."""
    model = nn.Linear(64, 10)
    made = Trainer(
        model, loss=nn.CrossEntropyLoss(), optimizer=lambda p: make(p, lr=1e-3), settings=Settings(communication=kind)
    )
    return list(made.fit(digits()[0][:4], epochs=1).notes)


def few_and_many_updates(folder: pathlib.Path) -> dict[str, Any]:
    few = {str(kind): train(kind, 1) for kind in KINDS}
    few["notes"] = {name: noted(kind, make) for name, (kind, make) in CAUTION.items()}
    return few | {f"{kind}, many": train(kind, EPOCHS) for kind in (None, "powersgd", "topk")}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(few_and_many_updates, tmp_path_factory.mktemp("ranks"))


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


@pytest.mark.parametrize("kind", ["powersgd", "topk"])
def test_what_is_left_out_comes_later(found: list[dict[str, Any]], kind: str) -> None:
    assert found[0][f"{kind}, many"]["loss"] == pytest.approx(found[0]["None, many"]["loss"], rel=0.02)


def test_optimizers_that_adapt_their_steps_are_warned_of(found: list[dict[str, Any]]) -> None:
    cautions = {name: [note for note in notes if "Caution" in note] for name, notes in found[0]["notes"].items()}
    assert {name: len(notes) for name, notes in cautions.items()} == dict.fromkeys(CAUTION, 0) | {
        "topk AdamW": 1,
        "powersgd RMSprop": 1,
    }
    assert "communication='topk' with AdamW" in cautions["topk AdamW"][0]
    assert "1.19 times the loss" in cautions["powersgd RMSprop"][0]


def test_what_is_computed_to_send_a_bucket_is_not_hidden() -> None:
    meter, sent = Meter(), torch.futures.Future[torch.Tensor]()
    meter.flying(sent, time.perf_counter() - 1.0, last=True)
    sent.set_result(torch.zeros(1))
    meter.landed()
    assert meter.hidden == 0.0


def images() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(rows.view(-1, 1, 8, 8), labels) for rows, labels in digits()[0][:24]]


def run(kind: Any, folder: pathlib.Path | None, steps: int) -> tuple[list[float], Trainer]:
    """The losses of each update until ``steps``, from where the checkpoint in ``folder`` stands."""
    found: list[float] = []
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(16, 32, 3), nn.ReLU()),
        *(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(32, 10)),
    )
    made = Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        settings=Settings(communication=kind, bucket_mb=0.01, memory_format="channels_last"),
        checkpoint=folder,
        log_every=1,
        callbacks=[lambda _, event: found.append(event.loss) if isinstance(event, Progressed) else None],
    )
    if folder is not None:
        made.resume(missing_ok=True)
    made.fit(images(), steps=steps)
    return [*found, *(p.detach().sum().item() for p in model.parameters())], made


def cut_in_two(folder: pathlib.Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("powersgd", "topk"):
        whole, _ = run(kind, None, 10)
        left = run(kind, folder / kind, 4)[1].world.unsent()
        again = run(kind, folder / kind, 4)[1].world.unsent()  # takes up what was left, and makes no update
        resumed, _ = run(kind, folder / kind, 10)
        found[kind] = [whole, resumed]
        if left is not None and again is not None:  # in the first process
            assert len(left) == len(again) == 2
            kept = [[tensor for state in each for tensor in state["errors"].values()] for each in (left, again)]
            assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))
            assert sum(value.abs().sum() for value in kept[0]) > 0
            half = len(kept[0]) // 2
            assert any(not torch.equal(a, b) for a, b in zip(kept[0][:half], kept[0][half:], strict=True))  # each has its own
    return found


def test_a_resumed_run_sends_what_was_left_out_before(tmp_path: pathlib.Path) -> None:
    found = on_ranks(cut_in_two, tmp_path)[0]
    _, alone = run(None, tmp_path / "topk", 11)
    assert "What the run before had left out of its compressed gradients is dropped: this one compresses none." in alone.notes
    for whole, resumed in found.values():
        assert len(resumed) == len(whole) - 4
    whole, resumed = found["powersgd"]
    assert resumed == whole[4:]  # to the bit
    whole, resumed = found["topk"]
    assert resumed[0] == whole[4]
    assert resumed[1:6] == pytest.approx(whole[5:10], rel=0.05)  # its buckets are others at first


def test_another_number_of_processes_shares_out_what_was_left_out(tmp_path: pathlib.Path) -> None:
    for each in on_ranks(shared_out, tmp_path):
        assert each == {"by one": [2.0, 3.0], "by three": [3.0, 2.0]}


def shared_out(folder: pathlib.Path) -> dict[str, Any]:
    start()
    weight = nn.Parameter(torch.zeros(2))
    found = {}
    for name, states in (("by one", [[4.0, 6.0]]), ("by three", [[1.0, 2.0], [2.0, 2.0], [3.0, 0.0]])):
        exchange = TopK()
        exchange.load_state_dict([{"errors": {"w": torch.tensor(state)}} for state in states], {"w": weight})
        found[name] = exchange.errors.of([weight], torch.zeros(2)).tolist()
    dist.barrier()  # one that ends at once takes the connection from another that still begins
    return found


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_lie_in_a_row_as_their_parameter_does(layout: torch.memory_format) -> None:
    parameter = torch.empty(4, 3, 2, 5).contiguous(memory_format=layout)
    value = torch.randn(4, 3, 2, 5)
    flat = in_a_row(value, parameter)
    assert torch.equal(flat, torch.as_strided(parameter.copy_(value), (120,), (1,)))
    assert torch.equal(shaped(flat, parameter), value)
    assert shaped(torch.ones(1), torch.tensor(3.0)).shape == ()
    gaps = torch.empty(4, 6)[:, ::2]
    assert torch.equal(shaped(in_a_row(value[0, :, :, :2].reshape(4, 3), gaps), gaps), value[0, :, :, :2].reshape(4, 3))


def test_what_was_left_out_is_found_again_when_ddp_groups_parameters_anew() -> None:
    first, second, third = (nn.Parameter(torch.zeros(size)) for size in (2, 3, 1))
    errors = Errors()
    errors.of([first, second, third], torch.zeros(6)).copy_(torch.arange(6.0))
    assert errors.of([third, second], torch.zeros(4)).tolist() == [5.0, 2.0, 3.0, 4.0]
    assert errors.of([first], torch.zeros(2)).tolist() == [0.0, 1.0]
    errors.of([first], torch.zeros(2)).add_(1)
    assert errors.of([first], torch.zeros(2)).tolist() == [1.0, 2.0]


def over_nccl(folder: pathlib.Path) -> dict[str, Any]:
    start("cuda")
    metric, _ = Group(Settings(device="cuda")).mean([torch.ones(())], [1.0], summed=False)
    exchange, parameter = PowerSgd(), nn.Parameter(torch.zeros(512, 512, device="cuda"))
    given = torch.outer(torch.arange(512.0), torch.ones(512)).cuda()
    got = [exchange.add_up([parameter], given.flatten().clone()) for _ in range(20)]
    apart = max(float((future.wait().view(512, 512) - given).abs().max()) for future in got)
    return {"metric": metric.device.type, "apart": apart}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.gpu
def test_over_nccl_metrics_of_the_host_count_and_thin_matrices_are_whole(tmp_path: pathlib.Path) -> None:
    (found,) = on_ranks(over_nccl, tmp_path, size=1)
    assert found["metric"] == "cuda"
    assert found["apart"] < 1.0  # of 511
