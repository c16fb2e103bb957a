"""Several processes in trouble: a wrong len(), no memory for the first exchange, gradients that cannot cross, no device."""

from __future__ import annotations

import pathlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from _ranks import failure, variables
from _runs import full_at, settings_of
from trimtab.core.settings import DistributedSettings, PrecisionSettings, Settings
from trimtab.errors import PeerError, UsageError
from trimtab.train.autotune.batch_size import find_batch
from trimtab.train.distributed import data_parallel, fsdp
from trimtab.train.distributed.comm_hooks import Bucket
from trimtab.train.distributed.data_parallel import DataParallelGroup
from trimtab.train.distributed.launch import join
from trimtab.train.telemetry.events import Event, Remarked, Validated
from trimtab.train.trainer import Trainer

Batches = list[tuple[torch.Tensor, torch.Tensor]]


class Sized:
    """A loader of this process's own batches, whose len() may be wrong."""

    sharded = True

    def __init__(self, count: int, said: int, spoilt: int | None = None) -> None:
        self.count, self.said, self.spoilt = count, said, spoilt

    def __len__(self) -> int:
        return self.said

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first."""
        return next(iter(self))

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        random = torch.Generator().manual_seed(dist.get_rank())
        for index in range(self.count):
            inputs = torch.randn(6, 32, generator=random)
            yield (inputs * torch.nan if index == self.spoilt else inputs), torch.randint(0, 4, (6,), generator=random)


def trainer(model: nn.Module | None = None, checkpoint: pathlib.Path | None = None, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    return Trainer(
        model or nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        settings=settings_of(**settings),
        checkpoint=checkpoint,
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
    """Rank 1 has no memory for a copy of its gradients."""
    found = {}
    for name in ("nothing", "copy"):
        made = trainer()
        with pytest.MonkeyPatch.context() as patch:
            if name == "copy" and dist.get_rank() == 1:
                patch.setattr(data_parallel, "views", full_at(1, data_parallel.views))
            summary = made.fit(Sized(3, 3), epochs=1)
        found[name] = {"parameters": flat(made), "updates": summary.updates, "notes": list(summary.notes)}
    return found


def not_finite() -> dict[str, Any]:
    """Rank 1 has one batch that is no number: in the first update, which crosses whole, or in one that is compressed."""
    found = {}
    for index in (0, 2):
        made = trainer(communication="powersgd", nonfinite="skip")
        made.fit(Sized(6, 6, spoilt=index if dist.get_rank() == 1 else None), epochs=1)
        found[str(index)] = {"skipped": made.position.skipped, "parameters": flat(made)}
    return found


def crossed(world: DataParallelGroup, given: torch.Tensor) -> torch.Tensor:
    """What becomes of the gradient of one matrix."""
    bucket = Bucket(0, [nn.Parameter(torch.zeros_like(given))], given.flatten().clone(), last=True)
    world.exchange.begin(bucket).wait()
    return bucket.flat.view_as(given)


def tried_again() -> dict[str, Any]:
    """What crosses of no gradient after others, and after others whose update failed."""
    found = {}
    for name in ("went well", "failed"):
        world, given = (
            DataParallelGroup(Settings(distributed=DistributedSettings(communication="powersgd"))),
            torch.randn(32, 32, generator=torch.manual_seed(1)),
        )
        for _ in range(3):
            crossed(world, given)
        if name == "failed":
            world.drop_update()
        found[name] = float(crossed(world, torch.zeros(32, 32)).abs().max())
    return found


def narrow() -> dict[str, Any]:
    """A bfloat16 gradient, which torch's power iteration takes no good care of."""
    world, given = (
        DataParallelGroup(Settings(distributed=DistributedSettings(communication="powersgd"))),
        torch.randn(32, 32, generator=torch.manual_seed(1)).bfloat16(),
    )
    return {"whole": all(torch.equal(crossed(world, given), given) for _ in range(4))}


def refused() -> dict[str, Any]:
    embedding = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Flatten(), nn.Linear(8, 4))
    data: Batches = [(torch.randint(0, 8, (4, 2)), torch.zeros(4, dtype=torch.int64))] * 2
    found: dict[str, Any] = {"sparse": epoch(trainer(embedding), data)}
    try:
        join(
            Settings(precision=PrecisionSettings(autocast="float16"), distributed=DistributedSettings(communication="powersgd"))
        )
    except UsageError as error:
        found["float16"] = str(error)
    return found


def rehearsed() -> int:
    """What a search for a batch size has left behind."""
    made = trainer(communication="powersgd")
    find_batch(made, [Sized(1, 1).batch()] * 2, largest=2, seconds=0.01)
    return len(made.world.exchange.power.error_dict)  # type: ignore[attr-defined]


def callbacks(folder: pathlib.Path) -> dict[str, Any]:
    """One that lowers the learning rate, one that validates on its own, and one that fails after a validation."""

    def lower(made: Trainer, event: Event) -> None:
        made.optimizer.param_groups[0]["lr"] *= 0.5

    def ask(made: Trainer, event: Event) -> None:
        if not isinstance(event, Remarked):
            made.note("In between:")  # of which the callbacks are told, within themselves
            made.validate(data)

    def fail(made: Trainer, event: Event) -> None:
        if isinstance(event, Validated):
            raise RuntimeError("no server")

    made, data = trainer(), Sized(2, 2)
    made.context.callbacks.append(lower)
    found: dict[str, Any] = {"lower": epoch(made, data)}
    made = trainer()
    made.context.callbacks.append(ask)
    found["validate"] = epoch(made, data)
    made = trainer(checkpoint=folder / "callbacks")
    made.context.callbacks.append(fail)
    found["fail"] = failure(lambda: made.fit(data, data, epochs=2))
    return found | {"saved": sorted(path.name for path in (folder / "callbacks").glob("update-*"))}


def different(folder: pathlib.Path) -> dict[str, Any]:
    """What scripts that were written for other trainers do in their first process only."""
    leads, data = dist.get_rank() == 0, Sized(2, 2)
    saving = trainer(checkpoint=folder / "different" if leads else None)
    return {
        "checkpoint": epoch(saving, data),
        "validate": failure(lambda: trainer().fit(data, data if leads else None, epochs=1)),
        "accumulate": epoch(trainer(accumulate=1 if leads else 2), data),
        "threads": epoch(trainer(threads=1 if leads else 2), data),
    }


class Skips(nn.Module):
    """Layers of which each process runs others: as many, or more."""

    def __init__(self, *, more: bool) -> None:
        super().__init__()
        self.layers, self.head, self.more = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)), nn.Linear(32, 4), more

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rank = dist.get_rank()
        for layer in self.layers[: 1 + rank] if self.more else self.layers[rank : rank + 1]:
            inputs = torch.tanh(layer(inputs))
        found: torch.Tensor = self.head(inputs)
        return found


def skipped() -> dict[str, list[str]]:
    """Shards of which the processes gather others; where nobody looks as they run, it shows when they have."""
    found = {name: epoch(trainer(Skips(more=more), sharding="shard"), Sized(2, 2)) for name, more in SKIPPED.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "COMPARED", 0)
        found["late"] = epoch(trainer(Skips(more=False), sharding="shard"), Sized(2, 2))
    return found


SKIPPED = {"other": False, "more": True}


def validation() -> list[str]:
    """Rank 1 cannot validate a sharded model; the last check, because it ends where nobody can be told."""
    made = trainer(sharding="shard")
    inputs = [torch.randn(6, 32) if dist.get_rank() == 0 else torch.randn(6, 31)]
    held_out: Batches = [(each, torch.zeros(6, dtype=torch.int64)) for each in inputs * 4]
    return failure(lambda: made.fit(Sized(2, 2), held_out, epochs=1))


def all_checks(folder: pathlib.Path) -> dict[str, Any]:
    trainer()  # which meets the other process
    found: dict[str, Any] = {check.__name__: check(folder) for check in (callbacks, different)}
    checks = (lengths, first_exchange, not_finite, tried_again, narrow, refused, rehearsed, skipped, validation)
    return found | {check.__name__: check() for check in checks}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none", "The loader gave no batch."),
        ("some", "The loader gave the batches of 1 update in this epoch, but its len() said 5. Mend its len(), or leave it"),
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


def test_no_memory_for_the_first_exchange_costs_no_update(ranks: list[dict[str, Any]]) -> None:
    for each in (rank["first_exchange"] for rank in ranks):
        assert each["copy"]["updates"] == 3
        torch.testing.assert_close(torch.tensor(each["copy"]["parameters"]), torch.tensor(each["nothing"]["parameters"]))
        assert "did not fit into memory" in "".join(each["copy"]["notes"])
        assert "did not fit into memory" not in "".join(each["nothing"]["notes"])


@pytest.mark.parametrize("index", ["0", "2"])
def test_a_gradient_that_is_no_number_spoils_one_update_only(ranks: list[dict[str, Any]], index: str) -> None:
    first, second = (each["not_finite"][index] for each in ranks)
    assert first == second
    assert first["skipped"] == 1
    assert torch.tensor(first["parameters"]).isfinite().all()


def test_of_an_update_that_failed_nothing_is_sent_later(ranks: list[dict[str, Any]]) -> None:
    for each in (rank["tried_again"] for rank in ranks):
        assert each["went well"] > 0.01
        assert each["failed"] == 0.0


def test_power_iteration_leaves_bfloat16_whole(ranks: list[dict[str, Any]]) -> None:
    assert [each["narrow"]["whole"] for each in ranks] == [True, True]


def test_what_several_processes_cannot_exchange_is_refused(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        assert each["refused"]["sparse"] == [
            "UsageError",
            "The gradient of 0.weight is sparse, and several processes exchange dense ones only. Make the embedding with "
            "sparse=False, or train in one process.",
        ]
        assert each["refused"]["float16"].startswith(
            "Settings distributed.communication='powersgd' keeps what it leaves out for later"
        )


def test_a_search_for_a_batch_size_leaves_nothing_to_be_sent(ranks: list[dict[str, Any]]) -> None:
    assert [each["rehearsed"] for each in ranks] == [0, 0]


def test_what_a_callback_changes_in_one_process_only_is_refused(ranks: list[dict[str, Any]]) -> None:
    own, peer = (each["callbacks"]["lower"] for each in ranks)
    assert own[0] == "UsageError"
    assert own[1].startswith("A callback has changed lr of the optimizer's group 0. Of several processes only the first calls")
    assert peer == [PeerError.__name__, "The process of rank 0 failed; its own message says why."]


def test_a_callback_that_asks_for_what_takes_all_processes_is_refused(ranks: list[dict[str, Any]]) -> None:
    own, peer = (each["callbacks"]["validate"] for each in ranks)
    assert own[0] == "UsageError"
    assert own[1].startswith("A callback asks for validate(), and of several processes only the first calls callbacks")
    assert peer == [PeerError.__name__, "The process of rank 0 failed; its own message says why."]


def test_a_callback_that_fails_is_heard_by_all_and_costs_no_epoch(ranks: list[dict[str, Any]]) -> None:
    own, peer = (each["callbacks"] for each in ranks)
    assert own["fail"] == ["RuntimeError", "no server"]
    assert peer["fail"][0] == PeerError.__name__
    assert own["saved"] == peer["saved"] == ["update-00000002"]


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("checkpoint", "given", "None"), ("validate", "given", "None"), ("accumulate", "1", "2")],
)
def test_processes_with_different_arguments_do_not_wait_for_each_other(
    ranks: list[dict[str, Any]], name: str, first: str, second: str
) -> None:
    named = f"{'Settings data.' if name == 'accumulate' else ''}{name}"
    for each in (rank["different"] for rank in ranks):
        assert each[name][0] == "UsageError"
        assert f"{named} is {first} for that of rank 0, and {second} for that of rank 1." in each[name][1]
        assert not each["threads"]


@pytest.mark.parametrize("name", [*SKIPPED, "late"])
def test_shards_of_which_processes_run_different_layers_end_the_run_in_all(ranks: list[dict[str, Any]], name: str) -> None:
    for each in ranks:
        assert each["skipped"][name][0] == "WorkloadError"
        assert each["skipped"][name][1].startswith("The processes called different layers of the model in this update")


def test_a_validation_of_shards_that_fails_in_one_process_ends_all(ranks: list[dict[str, Any]]) -> None:
    peer, own = (each["validation"] for each in ranks)
    assert peer[0] == "lost"
    assert own[1].startswith(
        "In validation the model or its loss raised: RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    )


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR"])
def test_a_process_that_is_not_told_its_number_does_not_train_alone(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables(0, 2, 1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(
        UsageError, match=rf"WORLD_SIZE is 2, and {missing} is not set\. Start the script with torchrun, or set RANK"
    ):
        trainer()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("WORLD_SIZE", "", "WORLD_SIZE is '' in the environment, where a launcher gives a whole number of at least 1\\."),
        ("WORLD_SIZE", "two", "WORLD_SIZE is 'two' in the environment"),
        ("RANK", "-1", "RANK is '-1' in the environment"),
        ("RANK", "2", "RANK is 2, but with WORLD_SIZE=2 ranks go from 0 to 1"),
        ("MASTER_PORT", "http", "MASTER_PORT is 'http' in the environment"),
    ],
)
def test_numbers_of_a_launcher_that_make_no_sense_are_refused(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known, number in {**variables(0, 2, 1), name: value}.items():
        monkeypatch.setenv(known, number)
    with pytest.raises(UsageError, match=said):
        trainer()


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in variables(0, 2, port).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UsageError, match=f"cannot meet at MASTER_ADDR=127.0.0.1, MASTER_PORT={port}: .*in use"):
            trainer()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs to have none")
def test_a_device_that_is_not_there_is_refused_before_the_processes_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables(0, 2, 1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="Settings device is 'cuda', which cannot be used here"):
        trainer(device="cuda")
