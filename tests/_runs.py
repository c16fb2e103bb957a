"""Trainings that are soon over, of a line over numbered examples: what they saw and told, and what may befall them."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from trimtab import Settings, Trainer
from trimtab.train.data.loader import Loader
from trimtab.train.telemetry.events import Progressed

EPOCH = 8
"""Updates."""
COUNTED = torch.arange(32.0)[:, None]
DATA = TensorDataset(COUNTED, COUNTED)
STAYING: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
"""Options of a loader whose worker stays from one epoch to the next."""


def settings_of(**fields: Any) -> Settings:
    """Settings from the names of fields without their groups: ``settings_of(accumulate=2)`` sets ``data.accumulate``."""
    known = {name.rpartition(".")[2]: name for name in Settings.names()}
    return Settings().replaced({known[name]: value for name, value in fields.items()})


class Line(nn.Module):
    """Remembers the examples that it was trained on, each of which is its number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += x[:, 0].tolist()
        found: torch.Tensor = self.layer(x / 32)
        return found


class Drawing(Line):
    """Draws random numbers, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


def loader(dataset: Any = DATA, **options: Any) -> DataLoader[Any]:
    """Eight batches of four, in a random order: each time that it is gone through draws random numbers."""
    return DataLoader(dataset, **{"batch_size": 4, "shuffle": True, **options})


def trainer(model: nn.Module | Callable[[], nn.Module] = Line, **options: Any) -> Trainer:
    """A trainer of a model, or of what a function makes, which is then always the same."""
    torch.manual_seed(0)
    made = model if isinstance(model, nn.Module) else model()
    return Trainer(made, **{"loss": nn.MSELoss(), "optimizer": functools.partial(torch.optim.SGD, lr=0.01), **options})


def told(made: Trainer, what: str) -> list[float]:
    """What every update to come tells: its ``loss``, its ``rate``."""
    found: list[float] = []
    made.context.log_every = 1
    made.context.callbacks.append(
        lambda _, event: found.append(getattr(event, what)) if isinstance(event, Progressed) else None
    )
    return found


class Stream(IterableDataset[Any]):
    """What a function gives for the epoch that it has to be told."""

    epoch = -1

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter(self.make(self.epoch))


class Ended(Dataset[Any]):
    """A worker gets the signal that its parent got too, which is sent while the parent waits for data."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        if place == 12 and torch.utils.data.get_worker_info() is not None:
            time.sleep(0.3)
            os.kill(os.getppid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(1), torch.ones(1)


LOADERS_THAT_END = [
    pytest.param(lambda: DataLoader(Ended(), batch_size=4, num_workers=1, timeout=1), id="torch"),
    pytest.param(lambda: Loader(Ended(), batch=4, workers=1, shuffle=False), id="trimtab"),
]


def full_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, but for one call, in which memory runs out."""
    calls: list[None] = []

    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == call:
            raise torch.OutOfMemoryError("injected")
        return function(*args, **kwargs)

    return called
