"""Tuning of loaders by measurement, and copies to a GPU on a stream of their own."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import trimtab
from trimtab.candidate import Settings
from trimtab.errors import UsageError
from trimtab.train.feed import mover
from trimtab.train.loader import Loader
from trimtab.train.prefetch import StreamTransfer, Transfer, transfer_for
from trimtab.train.tuned_loader import Way, tune_loader

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
X = torch.arange(512.0).reshape(64, 8)


class Slow(Dataset[Any]):
    """Waits, as for a disk."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> torch.Tensor:
        time.sleep(0.004)
        return X[place]


def test_workers_are_found_where_reading_waits() -> None:
    loader = Loader(Slow(), 8, shuffle=False)
    before = torch.get_rng_state()
    found = tune_loader(loader, seconds=3, most_workers=2)
    assert found.best.workers == 2
    assert loader.workers == 2
    assert len(found.reasons) == 5 + 5 * torch.cuda.is_available()
    assert sum("chosen" in reason for reason in found.reasons) == 1
    assert "times the time of 2 workers" in next(r for r in found.reasons if r.startswith("0 workers"))
    assert torch.equal(torch.cat(list(loader)), X)  # from the start, as if nothing had been read
    assert torch.equal(before, torch.get_rng_state())
    loader.close()


def test_what_lies_in_memory_is_read_here() -> None:
    found = tune_loader(X, step=0.02, seconds=2, most_workers=1, batch=8)
    assert found.best.workers == 0
    assert "not tried, because only" in str(found)
    with pytest.raises(UsageError, match="seconds is 0"):
        tune_loader(X, seconds=0)
    with pytest.raises(UsageError, match="batch cannot be given with a Loader"):
        tune_loader(Loader(X), batch=8)
    assert str(Way(1, 4, True)) == "1 worker, prefetch 4, pinned"


def test_a_cpu_has_nothing_copied() -> None:
    transfer = transfer_for(torch.device("cpu"), lambda batch: batch)
    assert type(transfer) is Transfer
    batches = iter([X])
    assert transfer.start(batches, ahead=True) is batches
    assert transfer.arrive(X) is X


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [False, True])
def test_batches_arrive_whole_while_the_device_is_busy(ahead: bool) -> None:
    device = torch.device("cuda")
    busy = torch.randn(2048, 2048, device=device)
    source = [{"x": torch.full((1 << 20,), float(i)).pin_memory(), "y": torch.full((4,), i, device=device)} for i in range(20)]
    transfer = transfer_for(device, mover(device))
    assert isinstance(transfer, StreamTransfer)
    sums = []
    for number, coming in enumerate(transfer.start(iter(source), ahead=ahead)):
        batch = transfer.arrive(coming)
        for _ in range(5):
            busy = (busy @ busy).clamp(-1, 1)
        scratch = torch.full((1 << 20,), -1.0, device=device)  # would take the place of a batch that was given back too early
        sums.append((number, batch["x"].double().sum() + scratch.sum() * 0, batch["y"].sum()))
        del batch
    for number, x, y in sums:
        assert float(x) == number * (1 << 20)
        assert int(y) == 4 * number


@gpu
@pytest.mark.gpu
def test_copying_ahead_changes_no_loss() -> None:
    losses = []
    for workers in (0, 2):
        torch.manual_seed(0)
        trainer = trimtab.Trainer(
            nn.Linear(8, 1),
            loss=nn.MSELoss(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-6),
            settings=Settings(device="cuda"),
        )
        losses.append(trainer.fit(Loader((X, X.sum(1, keepdim=True)), 4, workers=workers), epochs=3).loss)
    assert losses[0] == losses[1]
