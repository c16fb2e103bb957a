"""Several processes in trouble: a wrong len(), no memory for the first exchange, gradients that cannot cross, no device."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from _ranks import failure, variables
from _runs import full_at
from trimtab.candidate import Settings
from trimtab.errors import UsageError
from trimtab.train.distributed import replicas
from trimtab.train.distributed.group import PeerError
from trimtab.train.distributed.processes import join
from trimtab.train.distributed.replicas import Replicas
from trimtab.train.trainer import Trainer

COMPRESSED = ("topk", "powersgd")
Batches = list[tuple[torch.Tensor, torch.Tensor]]


class Sized:
    """A loader of this process's own batches, whose len() may be wrong."""

    sharded = True

    def __init__(self, count: int, said: int, spoilt: int | None = None) -> None:
        self.count, self.said, self.spoilt = count, said, spoilt

    def __len__(self) -> int:
        return self.said

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        random = torch.Generator().manual_seed(dist.get_rank())
        for index in range(self.count):
            inputs = torch.randn(6, 32, generator=random)
            yield (inputs * torch.nan if index == self.spoilt else inputs), torch.randint(0, 4, (6,), generator=random)


def trainer(model: nn.Module | None = None, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        model or nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        settings=Settings(**settings),
    )


def flat(made: Trainer) -> list[float]:
    found: list[float] = torch.cat([p.detach().flatten() for p in made.model.parameters()]).tolist()
    return found


def epoch(made: Trainer, data: Any) -> list[str]:
    """What an epoch over ``data`` fails with."""
    return failure(lambda: made.fit(data, epochs=1))


# What the two processes do, in a row; the tests below look at what they found.


def lengths() -> dict[str, Any]:
    """The loader of rank 1 gives less than it says: at once, or later; or more."""
    second = dist.get_rank() == 1
    found: dict[str, Any] = {
        name: epoch(trainer(), Sized(count if second else 5, 5)) for name, count in (("none", 0), ("some", 1), ("less", 3))
    }
    found["more"] = trainer().fit(Sized(7 if second else 5, 5), epochs=2).updates
    return found


def first_exchange() -> dict[str, Any]:
    """Rank 1 has no memory for a copy of its gradients, or for DDP."""
    found = {}
    for name, module, attribute, function in (
        ("nothing", None, "", None),
        ("copy", torch, "cat", torch.cat),
        ("engine", replicas, "DistributedDataParallel", DistributedDataParallel),
    ):
        made = trainer()
        with pytest.MonkeyPatch.context() as patch:
            if module is not None and function is not None and dist.get_rank() == 1:
                patch.setattr(module, attribute, full_at(1, function))
            summary = made.fit(Sized(3, 3), epochs=1)
        found[name] = {"parameters": flat(made), "updates": summary.updates, "notes": list(summary.notes)}
    return found


def not_finite() -> dict[str, Any]:
    """Rank 1 has one batch that is no number: in the first update, or in one under DDP."""
    found = {}
    for kind in COMPRESSED:
        for index in (0, 2):
            made = trainer(communication=kind, nonfinite="skip")
            made.fit(Sized(6, 6, spoilt=index if dist.get_rank() == 1 else None), epochs=1)
            found[f"{kind}{index}"] = {"skipped": made.position.skipped, "parameters": flat(made)}
    return found


def tried_again() -> dict[str, Any]:
    """What crosses of no gradient after one whose update failed."""
    found = {}
    for kind in COMPRESSED:
        world, parameter = Replicas(Settings(communication=kind)), nn.Parameter(torch.zeros(32, 32))
        world.exchange.add_up([parameter], torch.arange(1024.0)).wait()
        world.renew()
        found[kind] = float(world.exchange.add_up([parameter], torch.zeros(1024)).wait().abs().max())
    return found


def narrow() -> dict[str, Any]:
    """A bfloat16 gradient of rank 1 by power iteration, which finds it whole."""
    world, parameter = Replicas(Settings(communication="powersgd")), nn.Parameter(torch.zeros(32, 32, dtype=torch.bfloat16))
    given = torch.outer(torch.arange(32.0), torch.ones(32)).bfloat16()
    got = world.exchange.add_up([parameter], given.flatten().clone()).wait().view(32, 32)
    return {"apart": float((got.float() - 2 * given.float()).abs().max()), "dtype": str(got.dtype)}


def refused() -> dict[str, Any]:
    embedding = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Flatten(), nn.Linear(8, 4))
    data: Batches = [(torch.randint(0, 8, (4, 2)), torch.zeros(4, dtype=torch.int64))] * 2
    found: dict[str, Any] = {"sparse": epoch(trainer(embedding), data)}
    for kind in COMPRESSED:
        try:
            join(Settings(communication=kind, autocast="float16"))
        except UsageError as error:
            found[kind] = str(error)
    return found


def all_checks(folder: pathlib.Path) -> dict[str, Any]:
    trainer()  # which meets the other process
    return {check.__name__: check() for check in (lengths, first_exchange, not_finite, tried_again, narrow, refused)}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none", "The loader gave no batch."),
        ("some", "The loader gave the batches of 1 updates in this epoch, but its len() said 5. Mend its len(), or leave it"),
        ("less", "The loader gave the batches of 3 updates in this epoch, but its len() said 5. Mend its len(), or leave it"),
    ],
)
def test_a_loader_that_is_shorter_than_it_says_leaves_nobody_waiting(ranks: list[dict[str, Any]], name: str, said: str) -> None:
    peer, own = (each["lengths"][name] for each in ranks)
    assert peer == [PeerError.__name__, "The process of rank 1 failed; its own message says why."]
    assert own[0] == "WorkloadError"
    assert own[1].startswith(said)


def test_of_a_loader_that_is_longer_than_it_says_the_rest_is_left_out(ranks: list[dict[str, Any]]) -> None:
    assert [each["lengths"]["more"] for each in ranks] == [10, 10]


@pytest.mark.parametrize("what", ["copy", "engine"])
def test_no_memory_for_the_first_exchange_costs_no_update(ranks: list[dict[str, Any]], what: str) -> None:
    for each in (rank["first_exchange"] for rank in ranks):
        assert each[what]["updates"] == 3
        torch.testing.assert_close(torch.tensor(each[what]["parameters"]), torch.tensor(each["nothing"]["parameters"]))
        assert "did not fit into memory" in "".join(each[what]["notes"])
        assert "did not fit into memory" not in "".join(each["nothing"]["notes"])


@pytest.mark.parametrize("kind", COMPRESSED)
@pytest.mark.parametrize("index", [0, 2])
def test_a_gradient_that_is_no_number_spoils_one_update_only(ranks: list[dict[str, Any]], kind: str, index: int) -> None:
    first, second = (each["not_finite"][f"{kind}{index}"] for each in ranks)
    assert first == second
    assert first["skipped"] == 1
    assert torch.tensor(first["parameters"]).isfinite().all()


@pytest.mark.parametrize("kind", COMPRESSED)
def test_of_an_update_that_failed_nothing_is_sent_later(ranks: list[dict[str, Any]], kind: str) -> None:
    assert [each["tried_again"][kind] for each in ranks] == [0.0, 0.0]


def test_power_iteration_takes_bfloat16(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        assert each["narrow"]["dtype"] == "torch.bfloat16"
        assert each["narrow"]["apart"] < 1.0  # of 62


def test_what_several_processes_cannot_exchange_is_refused(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        assert each["refused"]["sparse"] == [
            "UsageError",
            "The gradient of 0.weight is sparse, and several processes exchange dense ones only. Make the embedding with "
            "sparse=False, or train in one process.",
        ]
        for kind in COMPRESSED:
            assert each["refused"][kind].startswith(
                f"Settings communication={kind!r} keeps what it leaves out for later updates"
            )


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs to have none")
def test_a_device_that_is_not_there_is_refused_before_the_processes_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables(0, 2, 1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="Settings device is 'cuda', which cannot be used here"):
        trainer(device="cuda")
