"""Tuning of loaders by measurement, and copies to a GPU on a stream of their own."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset
from transformers import BatchEncoding

import trimtab
from trimtab.core.settings import Settings
from trimtab.errors import UsageError, WorkloadError
from trimtab.train.data.device_prefetch import StreamTransfer, Transfer, _PendingCopy, mover, storage_tensors, transfer_for
from trimtab.train.data.loader import Loader
from trimtab.train.data.micro_batches import MicroBatcher
from trimtab.train.data.worker_tuning import Way, _Trial, tune_loader
from trimtab.train.runtime.step_clock import HostClock

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
    assert len(found.reasons) == 5
    assert sum("chosen" in reason for reason in found.reasons) == 1
    assert "times the time of 2 workers" in next(r for r in found.reasons if r.startswith("0 workers"))
    assert torch.equal(torch.cat(list(loader)), X)  # from the start, as if nothing had been read
    assert torch.equal(before, torch.get_rng_state())
    loader.close()


def test_what_lies_in_memory_is_read_here() -> None:
    found = tune_loader(X, step=0.4, seconds=2, most_workers=1, batch=8)  # beside which a busy neighbour is little
    assert found.best.workers == 0
    assert "not tried, because only" in str(found)
    with pytest.raises(UsageError, match="seconds is 0"):
        tune_loader(X, seconds=0)
    with pytest.raises(UsageError, match="batch cannot be given with a Loader"):
        tune_loader(Loader(X), batch=8)
    assert str(Way(1, 4)) == "1 worker, prefetch 4"


@pytest.mark.parametrize("pin", [None, False, True])
def test_pinning_stays_as_it_is(pin: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.train.data.loader._pinned", lambda batch: batch)  # there may be no GPU to lock memory for
    loader = Loader(X, 8, pin=pin)
    tune_loader(loader, seconds=0.5, most_workers=0)
    assert loader.pin is pin


def test_a_cpu_has_nothing_copied() -> None:
    transfer = transfer_for(torch.device("cpu"), lambda batch: batch)
    assert type(transfer) is Transfer
    batches = iter([X])
    assert transfer.start(batches, ahead=True) is batches
    assert transfer.receive(X) is X


class Early(Transfer):
    """Moves a batch before its turn, as one with a stream does."""

    def start(self, batches: Iterator[Any], *, ahead: bool) -> Iterator[Any]:
        return map(self.move, batches)

    def receive(self, coming: Any) -> Any:
        return coming


@pytest.mark.parametrize("transfer", [Transfer, Early])
def test_what_fails_on_the_way_to_the_device_is_not_told_as_the_loaders(transfer: type[Transfer]) -> None:
    def fed(error: Exception) -> MicroBatcher:
        def move(batch: Any) -> Any:
            raise error

        feed = MicroBatcher([X], 1, HostClock(), move, transfer=transfer(move))
        feed.begin(0)
        return feed

    with pytest.raises(RuntimeError, match="^CUDA error: an illegal memory access was encountered$"):
        next(fed(RuntimeError("CUDA error: an illegal memory access was encountered")).groups())
    with pytest.raises(WorkloadError, match=r"no room on its device \(CUDA out of memory\. Tried"):
        next(fed(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")).groups())


class Tight(StreamTransfer):
    """There is room for one batch."""

    def __init__(self) -> None:
        Transfer.__init__(self, lambda batch: batch)
        self.depth = 1
        self.there: weakref.ref[Any] | None = None

    def _send(self, batch: Any) -> Any:
        if self.there is not None and self.there() is not None:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        coming = _PendingCopy(batch.clone(), Any)  # type: ignore[arg-type]
        self.there = weakref.ref(coming.batch)
        return coming


def test_where_two_batches_have_no_room_one_is_copied_after_the_other() -> None:
    found = []
    for coming in Tight().start(iter(X.split(16)), ahead=True):
        found.append(coming.batch.sum())
        del coming
    assert torch.stack(found).tolist() == [float(part.sum()) for part in X.split(16)]


def test_nobody_waits_for_the_copies_of_objects_that_move_themselves() -> None:
    told = []

    class Points:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

        def to(self, device: torch.device, non_blocking: bool = False) -> Points:
            told.append(non_blocking)
            return Points(self.x.to(device))

    class Plain(Points):
        def to(self, device: torch.device) -> Plain:  # type: ignore[override]
            return Plain(self.x.to(device))

    move = mover(torch.device("meta"))
    assert move(Points(X)).x.is_meta
    assert move(Plain(X)).x.is_meta
    assert told == [True]
    assert move(BatchEncoding({"input_ids": X}))["input_ids"].is_meta
    assert move(pack_sequence([X[0], X[1]])).data.is_meta


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
        batch = transfer.receive(coming)
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


def test_a_step_that_was_only_asked_for_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On whichever GPU it runs, which need not be the current one; the others are not woken."""
    waits: list[int | None] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 4096 if index == 1 else 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index=None: waits.append(index))
    _Trial(Loader(torch.ones(64, 2), 4, pin=False), Way(0), lambda batch: None).sample()
    assert waits == [1, 1]


SPARSE: list[Callable[[torch.Tensor], torch.Tensor]] = [
    torch.Tensor.to_sparse_coo,
    torch.Tensor.to_sparse_csr,
    torch.Tensor.to_sparse_csc,
    lambda tensor: tensor.to_sparse_bsr((2, 2)),
    lambda tensor: tensor.to_sparse_bsc((2, 2)),
]
beta = pytest.mark.filterwarnings("ignore:Sparse .* support is in beta state")


@beta
@pytest.mark.parametrize("sparse", SPARSE)
def test_the_memory_of_a_sparse_tensor_is_that_of_its_parts(sparse: Callable[[torch.Tensor], torch.Tensor]) -> None:
    whole = torch.eye(4)
    parts = storage_tensors(sparse(whole))
    assert len(parts) in (2, 3)
    assert all(part.layout == torch.strided and part.untyped_storage().nbytes() for part in parts)
    assert storage_tensors(whole) == [whole]


@gpu
@pytest.mark.gpu
@beta
@pytest.mark.parametrize("sparse", SPARSE)
def test_sparse_tensors_arrive(sparse: Callable[[torch.Tensor], torch.Tensor]) -> None:
    device, tensor = torch.device("cuda"), sparse(torch.eye(4))
    transfer = transfer_for(device, mover(device))
    source = [{"x": tensor}, {"x": tensor.to(device)}] * 3
    found = [transfer.receive(coming)["x"].to_dense().cpu() for coming in transfer.start(iter(source), ahead=True)]
    assert all(torch.equal(each, torch.eye(4)) for each in found)
    assert len(found) == 6


@gpu
@pytest.mark.gpu
def test_batches_from_data_on_a_gpu_are_not_waited_for() -> None:
    data = torch.arange(64.0, device="cuda")[:, None]
    loader = Loader(data, 8)
    first = next(iter(loader))
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = list(loader)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert first.is_cuda
    assert torch.equal(torch.cat(batches).sort(0).values, data)
