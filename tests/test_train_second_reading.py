"""Trainings of kinds that are met less often."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import trimtab
from trimtab.candidate import Settings
from trimtab.train.adjust import Micro, Workers
from trimtab.train.clock import HostClock
from trimtab.train.feed import Feed
from trimtab.train.loader import Loader
from trimtab.train.objective import examples
from trimtab.train.trainer import Position, Trainer
from trimtab.train.trying import prepared

SGD = functools.partial(torch.optim.SGD, lr=1e-4)


def test_an_overflow_of_float16_does_not_stop_a_healthy_run() -> None:
    data = [(torch.randn(8, 4), torch.full((8, 1), 1000.0))] * 5
    settings = Settings(autocast="float16", nonfinite="stop")
    found = Trainer(nn.Linear(4, 1), loss=nn.MSELoss(), optimizer=SGD, settings=settings).fit(data, steps=5)
    assert found.updates == 5, found.ended


class Last(nn.Module):
    """Classifies packed sequences by the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Any) -> torch.Tensor:
        found: torch.Tensor = self.head(self.lstm(x)[1][0][-1])
        return found


def test_packed_sequences_are_one_input_and_count_as_examples() -> None:
    batch = (pack_sequence([torch.randn(4, 3), torch.randn(2, 3)]), torch.tensor([0, 1]))
    assert examples(batch) == 2
    found = Trainer(Last(), loss=nn.CrossEntropyLoss(), optimizer=SGD).fit([batch] * 3, epochs=1)
    assert found.updates == 3


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
    trainer = Trainer(Growing(), loss=nn.MSELoss(), optimizer=SGD, ema=0.9)
    assert trainer.fit(data, data, epochs=2).updates == 8
    assert trainer.ema is not None
    assert trainer.ema.shadow["table"].shape == (5, 1)


def test_an_attempt_at_smaller_batches_ends_no_run() -> None:
    graphs = [(torch.randn(6, 3), torch.zeros(2, 9), torch.zeros(4))] * 2
    feed = Feed(graphs, 1, HostClock(), lambda batch: batch)
    remedy = Micro(feed, nn.Linear(3, 1), 3)
    remedy.apply()
    feed.begin(0)
    assert [len(group) for group in feed.groups()] == [1, 1]
    assert feed.micro is None
    remedy.undo()
    assert feed.fallback is None


def test_a_dataset_without_places_gets_no_other_workers() -> None:
    loader: Any = DataLoader({"a": torch.ones(2), "b": torch.ones(2)}, sampler=["a", "b"])  # type: ignore[arg-type]
    reason = Workers(Feed(loader, 1, HostClock(), lambda batch: batch), Position(), 2).why_not()
    assert str(reason).startswith("whether the dataset draws random numbers could not be found out.")


def test_another_seed_is_another_order_of_the_data() -> None:
    data = TensorDataset(torch.arange(64.0)[:, None], torch.arange(64.0)[:, None])
    training = trimtab.Training(data=lambda: Loader(data, batch=8), optimizer=SGD, loss=nn.MSELoss())
    workload = trimtab.Workload(model=lambda: nn.Linear(1, 1), inputs=torch.randn(1, 1), training=training)
    one, again, other = (prepared(workload, 6, seed=seed).batches for seed in (None, workload.seed, workload.seed + 1))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(one, again, strict=True))
    assert not all(torch.equal(a[0], b[0]) for a, b in zip(one, other, strict=True))
