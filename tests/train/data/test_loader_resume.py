"""A run that is killed for real in the middle of an epoch goes on with the very losses that it would have had."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import trimtab
from _places import TESTS
from trimtab.train.data.collate import Collate
from trimtab.train.data.loader import Loader
from trimtab.train.telemetry.events import Event, Progressed

SAVED, KILLED, STEPS = 24, 31, 84
"""With about 30 batches an epoch: the checkpoint that is left is of mid-epoch, and the losses after it cross two epochs."""
LENGTHS = np.random.default_rng(0).integers(3, 40, 240)


class Texts(Dataset[Any]):
    """Sequences of unequal lengths, augmented with all three generators."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, float]:
        steps = torch.linspace(0, 1 + place / 100, int(LENGTHS[place]))
        noise = torch.randn(len(steps)) * 0.01 + np.random.rand() * 0.01 + random.random() * 0.01
        return steps + noise, place / len(LENGTHS)


class Pooled(nn.Module):
    """Dropout draws from the generator that a stock loader's augmentation draws from too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x[..., None]).mean((1, 2))
        return found


def loader_of(kind: str) -> Any:
    if kind.startswith("stock"):
        return DataLoader(Texts(), batch_size=8, shuffle=True, num_workers=int(kind[-1]), collate_fn=Collate())
    return Loader(Texts(), lengths=LENGTHS, tokens=200, workers=int(kind[-1]))


def train(kind: str, folder: pathlib.Path, log: pathlib.Path, *, resume: bool, kill: bool) -> None:
    """The run of the child: losses go to ``log``, a line each, exact to the bit."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)

    def note(trainer: trimtab.Trainer, event: Event) -> None:
        if isinstance(event, Progressed):
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps([event.update, event.loss.hex()]) + "\n")
            if kill and event.update == KILLED:
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = trimtab.Trainer(
        Pooled(),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
        checkpoint=folder,
        checkpoint_every=SAVED,
        callbacks=[note],
        log_every=1,
    )
    if resume:
        trainer.resume()
    trainer.fit(loader_of(kind), steps=STEPS)


def losses(log: pathlib.Path) -> dict[int, str]:
    return dict(json.loads(line) for line in log.read_text(encoding="utf-8").splitlines())


KINDS = ["bucketed 0", "bucketed 2", "stock 0", "stock 2"]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where the losses are of all runs, which one fresh process starts one after the other."""
    folder = tmp_path_factory.mktemp("runs")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    command = [sys.executable, __file__, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_fifty_losses_are_the_same(kind: str, logs: pathlib.Path) -> None:
    whole, cut, resumed = (losses(logs / f"{kind} {run}.log") for run in ("whole", "cut", "resumed"))
    assert cut == {update: whole[update] for update in range(1, KILLED + 1)}
    assert min(resumed) == SAVED + 1
    assert len(resumed) == STEPS - SAVED >= 50
    assert resumed == {update: whole[update] for update in resumed}


def forked(expected: int, kind: str, folder: pathlib.Path, log: str, *, resume: bool = False, kill: bool = False) -> None:
    """One run in a process of its own, which has to end as ``expected``."""
    if not (child := os.fork()):
        train(kind, folder, folder.parent / f"{kind} {log}.log", resume=resume, kill=kill)
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended == expected, f"{kind} {log} ended as {ended}"


if __name__ == "__main__":
    importlib.import_module("torch._dynamo")  # every optimizer imports it, which takes seconds; the runs are forked after it
    for kind in KINDS:
        place = pathlib.Path(sys.argv[1]) / kind
        forked(0, kind, place.with_suffix(".whole"), "whole")
        forked(-signal.SIGKILL, kind, place, "cut", kill=True)
        forked(0, kind, place, "resumed", resume=True)
