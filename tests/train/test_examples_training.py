"""The examples of training, and the naive scripts that the benchmark holds them against, learn from what they read."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from _places import ROOT

EXAMPLES = ROOT / "examples" / "training"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "real")


@pytest.fixture(params=NAMES)
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example, imported as its benchmark does."""
    for folder in (ROOT / "benchmarks", EXAMPLES):
        monkeypatch.syspath_prepend(folder)
    before = dict(sys.modules)
    for name in (*NAMES, "real", "training"):
        sys.modules.pop(name, None)
    yield importlib.import_module(request.param)
    for name in (*NAMES, "real", "training"):
        sys.modules.pop(name, None)
    sys.modules.update({name: before[name] for name in (*NAMES, "real", "training") if name in before})


@pytest.mark.usefixtures("one_thread")
def test_it_learns_from_its_first_batches(example: ModuleType) -> None:
    torch.manual_seed(0)
    trainer = example.trainer()
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    summary = trainer.fit(example.loader(), steps=2)
    assert summary.updates == 2
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.usefixtures("one_thread")
def test_the_naive_loader_gives_what_its_loss_takes(example: ModuleType) -> None:
    benchmark = importlib.import_module("training")
    torch.manual_seed(0)
    batch = next(iter(benchmark.naive_loader(example)))
    with torch.no_grad():
        loss, weight = benchmark.loss_of(example, example.build(), batch)
    assert math.isfinite(float(loss))
    assert float(weight) > 0
