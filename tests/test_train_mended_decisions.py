"""What decides and adjusts a run where it is interrupted, beside other processes, or over a loader of a class of its own."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab import Settings, Trainer
from trimtab.errors import UsageError
from trimtab.train import auto
from trimtab.train.adjust import Workers, _window
from trimtab.train.clock import HostClock
from trimtab.train.distributed.data import share
from trimtab.train.double import why_not_alone
from trimtab.train.events import Event, Progressed, Remarked
from trimtab.train.feed import Feed, mover
from trimtab.train.peak import flops_share
from trimtab.train.world import World

DATA = TensorDataset(torch.zeros(12, 4), torch.zeros(12, dtype=torch.int64))


class Own(DataLoader[Any]):
    """A loader that gives something else than a DataLoader would."""

    def __iter__(self) -> Iterator[Any]:
        return ((inputs + 1, labels) for inputs, labels in super().__iter__())


class Two(World):
    """The first of two processes, the other of which finds 2 more than it does."""

    size = 2

    def agreed(self, value: float) -> float:
        return value + 1


def trainer(settings: Settings, *layers: nn.Module, **more: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), *layers, nn.Linear(4, 4))
    return Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.AdamW, settings=settings, **more)


def test_a_loader_of_a_class_of_its_own_is_not_shared_out() -> None:
    with pytest.raises(UsageError, match=r"train is a Own, and with 2 processes each would train on all of it\."):
        share(Own(DATA, 4), "train", 0, 2, 0)


def test_a_loader_that_is_shared_out_keeps_its_generator_and_its_order() -> None:
    generator = torch.Generator().manual_seed(3)
    made = share(DataLoader(DATA, 4, generator=generator, in_order=False), "train", 0, 2, 0)
    assert isinstance(made, DataLoader)
    assert made.generator is generator
    assert not made.in_order


def test_a_loader_of_a_class_of_its_own_gets_no_workers() -> None:
    feed = Feed(Own(DATA, 4), 1, HostClock(), mover(torch.device("cpu")))
    reason = Workers(feed, trainer(Settings(threads=1)).position, 2).why_not()
    assert reason == "a Own, a loader class of its own, cannot be made anew. Use trimtab.train.Loader."


def test_the_examples_of_a_window_are_those_of_one_process_and_agreed() -> None:
    event = Progressed(
        update=1, epoch=0, updates=2, loss=1.0, norm=1.0, rate=0.1, examples_per_s=1000.0, step_ms=64.0, skipped=0,
        shares={"data": 0.5, "forward": 0.25, "backward": 0.25},
    )  # fmt: skip
    assert _window(trainer(Settings(threads=1), world=Two()), event).examples == 64 / 2 + 1


def test_a_model_that_would_wait_for_others_is_not_tried_out_alone() -> None:
    made = trainer(Settings(threads=1, autocast="auto", optimizer="auto"), nn.SyncBatchNorm(4), world=Two())
    batches = [(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))] * 2
    assert auto.decide(made, batches, 1000) is batches
    assert made.notes == [
        "autocast, optimizer stay off: a copy of a model with SyncBatchNorm would wait for the other processes."
    ]
    assert (made.settings.autocast, made.settings.optimizer) == (None, None)
    assert flops_share(made, batches, 10.0) is None
    assert why_not_alone(trainer(Settings(threads=1), nn.SyncBatchNorm(4))) is None
    assert why_not_alone(trainer(Settings(threads=1), world=Two())) is None


def test_float16_is_not_tried_where_communication_keeps_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(Settings(threads=1, autocast="auto", communication="topk"), world=Two())
    made.device = torch.device("cuda")  # where float16 would be tried
    decisions = auto._Decisions(made, [], 1000)
    decisions.candidate = auto.candidate(
        trainer(Settings(threads=1)), Settings(threads=1), (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    )
    reasons = [decisions._against_trying(technique) for technique in auto._techniques("autocast")]
    assert "what communication leaves out for later updates would be in units of a scale that changes." in reasons


def test_what_an_interruption_left_open_is_decided_by_the_run_that_goes_on(tmp_path: pathlib.Path) -> None:
    def stop(trainer: Trainer, event: Event) -> None:
        if isinstance(event, Remarked) and event.text.startswith("autocast"):
            trainer.stop("Ctrl-C.")

    def enough(trainer: Trainer, event: Event) -> None:
        trainer.stop("Enough.")

    settings = Settings(threads=1, autocast="auto", optimizer="auto")
    batches = [(torch.randn(8, 4), torch.randint(4, (8,))) for _ in range(4)]
    first = trainer(settings, checkpoint=tmp_path, callbacks=[stop])
    first.fit(batches, steps=200)
    assert any("optimizer" in note and "interrupted before it was measured" in note for note in first.notes)
    assert first.decided.keys() == {"autocast"}
    again = trainer(settings, checkpoint=tmp_path, callbacks=[enough]).resume()
    assert again.settings.optimizer == "auto"
    again.fit(batches, steps=200)
    assert again.decided.keys() == {"autocast", "optimizer"}
    assert again.settings.optimizer != "auto"
