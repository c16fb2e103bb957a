"""Several processes, one of which has no memory: for its batches, its buffers, its optimizer, or what it sends to others."""

from __future__ import annotations

import datetime as dt
import functools
import pathlib
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from _nets import Nested
from _ranks import failure, on_ranks
from _runs import full_at
from trimtab.core.settings import DataSettings, DistributedSettings, MemorySettings, OptimizerSettings, Settings
from trimtab.errors import PeerError
from trimtab.measure.timer import gc_disabled
from trimtab.train.autotune import batch_size
from trimtab.train.autotune.batch_size import find_batch
from trimtab.train.distributed import launch
from trimtab.train.distributed.launch import join
from trimtab.train.engine import step
from trimtab.train.memory import activation_budget
from trimtab.train.trainer import Trainer


def batches(count: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 8, generator=random), torch.randint(0, 4, (8,), generator=random)) for _ in range(count)]


def on_second(value: int, other: int = 10**6) -> int:
    return value if dist.get_rank() == 1 else other


def trainer(model: nn.Module | None = None, settings: Settings = Settings()) -> Trainer:
    return Trainer(
        model or Nested(),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        settings=settings,
    )


# What the two processes do, in a row; the tests below look at what they found.


def searches() -> dict[str, Any]:
    """Sizes that do not fit in rank 1 alone: by a look at one update, by what is expected, by a limit; and no room to look."""
    made = trainer(Nested(on_second(5)), settings=Settings(data=DataSettings(micro_batch="auto")))
    made.fit(batches(), epochs=1)
    found: dict[str, Any] = {"auto": made.decided["data.micro_batch"]}
    found["find"] = find_batch(trainer(Nested(on_second(5))), batches(2 + dist.get_rank()), seconds=0.5).size
    limit = on_second(1, 1000) / 1000  # in rank 1 less than some examples take
    found["limit"] = [bool(t.reason) for t in find_batch(trainer(), batches(1), seconds=0.5, limit_mb=limit).tried]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_size, "free_mb", lambda: on_second(0))
        found["beyond"] = [one.reason[:24] for one in find_batch(trainer(), batches(1), seconds=0.5).tried]
        if dist.get_rank() == 1:
            patch.setattr(activation_budget, "trace", full_at(1, activation_budget.trace))
        found["trace"] = failure(
            lambda: trainer(settings=Settings(memory=MemorySettings(activation_mb=100.0))).fit(batches(), epochs=1)
        )
    return found


class Sized(list[Any]):
    """A loader of this process's own batches, one of them smaller, which may give fewer than it says."""

    sharded = True

    def __init__(self, count: int, small: int | None = None) -> None:
        super().__init__((x[:1], y[:1]) if index == small else (x, y) for index, (x, y) in enumerate(batches(count)))

    def __len__(self) -> int:
        return 5


class Held(Nested):
    """Has no room in rank 1 the first time, and sees later whether what it held by then is still there."""

    def __init__(self) -> None:
        super().__init__()
        self.first: weakref.ref[torch.Tensor] | None = None
        self.kept = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first is None:
            held = x + 1
            self.first = weakref.ref(held)
            if dist.get_rank() == 1:
                raise torch.OutOfMemoryError("there is no room")
        else:
            self.kept |= self.first() is not None
        return super().forward(x)


def updates() -> dict[str, Any]:
    """One example in rank 0 while rank 1 has no room; no room for buffers; a loader that ends where buckets are ordered."""
    made = trainer(Nested(on_second(5), call=3))
    found: dict[str, Any] = {"small": made.fit(Sized(5, small=None if dist.get_rank() else 2), epochs=1).updates}
    held = trainer(model := Held())
    with gc_disabled():
        found["freed"] = [held.fit(batches(2), epochs=1).updates, model.kept]
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(step, "Snapshot", full_at(3, step.Snapshot))
        found["kept"] = (
            trainer(settings=Settings(optimizer=OptimizerSettings(nonfinite="skip"))).fit(Sized(5), epochs=1).updates
        )
    found["short"] = failure(lambda: trainer().fit(Sized(on_second(2, 5)), epochs=1))
    return found


def all_checks(folder: pathlib.Path) -> dict[str, Any]:
    launch.TIMEOUT = dt.timedelta(seconds=90)
    trainer()  # which meets the other process
    return {"searches": searches(), "updates": updates()}


def test_a_size_that_does_not_fit_in_one_process_is_left_out_by_all(ranks: list[dict[str, Any]]) -> None:
    first, second = (each["searches"] for each in ranks)
    assert first["auto"] == second["auto"] <= 5
    assert first["find"] == second["find"] <= 5
    assert first["beyond"] == ["", "it does not fit into the"]
    assert second["beyond"] == ["", "it would take about 0 MB"]
    assert first["limit"] == second["limit"]
    assert first["limit"][-1]
    for each in (first, second):
        assert each["trace"][0] == "UsageError"
        assert "even with all that recomputing saves" in each["trace"][1]


def test_what_fails_in_one_process_leaves_nobody_waiting(ranks: list[dict[str, Any]]) -> None:
    for each in (rank["updates"] for rank in ranks):
        assert each["small"] == each["kept"] == 5
        assert each["freed"] == [1, False]
    assert ranks[0]["updates"]["short"][0] == PeerError.__name__
    assert ranks[1]["updates"]["short"][1].startswith("The loader gave the batches of 2 updates in this epoch, but its len()")


def full(name: str, folder: pathlib.Path) -> list[str]:
    """Rank 1 has no room in its optimizer, in shares, for the zeros that rank 0 waits for, or to send a bucket."""
    launch.TIMEOUT = dt.timedelta(seconds=60)
    join(Settings())
    second, call = dist.get_rank() == 1, {"shares": 2, "zeros": 3}.get(name, 100)
    made = trainer(
        Nested(on_second(5), call),
        settings=Settings(distributed=DistributedSettings(sharding="shard" if name == "shares" else "replicate")),
    )
    if name == "optimizer" and second:
        made.optimizer.step = full_at(3, made.optimizer.step)
    if name == "zeros" and second:
        made.world.finish_exchange = full_at(1, made.world.finish_exchange)
    if name == "bucket" and second:
        made.world.exchange.begin = full_at(3, made.world.exchange.begin)
    return failure(lambda: made.fit(batches(), epochs=1))


@pytest.mark.parametrize("name", ["optimizer", "shares", "zeros", "bucket"])
def test_memory_that_runs_out_where_nobody_can_be_told_ends_the_run(name: str, tmp_path: pathlib.Path) -> None:
    first, second = on_ranks(functools.partial(full, name), tmp_path)
    assert first[0] == "lost"
    said = (
        "what the optimizer needs beside them does not" if name == "optimizer" else "several processes cannot make this update"
    )
    assert second[0] == "WorkloadError"
    assert said in second[1]
