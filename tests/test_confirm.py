"""The winner is measured again; what neighbours disturbed is neither believed nor held against it."""

from __future__ import annotations

import pathlib

import pytest
import torch

import trimtab
from trimtab import confirm as module
from trimtab.confirm import Confirmation, confirm
from trimtab.contracts import BACKENDS
from trimtab.evaluate import Plan
from trimtab.measure.timer import LocalRunner
from trimtab.measurement import Comparison, Interval, Measurement
from trimtab.recipe import Recipe
from trimtab.subject import prepare


def confirmed(monkeypatch: pytest.MonkeyPatch, ratio: Interval, folder: pathlib.Path) -> Confirmation:
    """A real confirmation, but for the machine: every comparison gives ``ratio``."""
    figure = Measurement(unit="ms", n=10, median=1.0, interval=Interval(1.0, 0.9, 1.1))
    monkeypatch.setattr(
        module, "compare", lambda *args, **kwargs: Comparison(ratio=ratio, pairs=9, candidate=figure, rival=figure)
    )
    subject = prepare(trimtab.Workload(name="small", model=torch.nn.Linear(4, 2), inputs=torch.randn(3, 4)))
    rivals = {"as_written": LocalRunner(lambda: None), "tuned": LocalRunner(lambda: None)}
    return confirm(Recipe(backend=BACKENDS["eager"]()), folder, subject, rivals, plan=Plan(), must_win=True)[0]


def test_a_ratio_that_is_sure_is_believed(monkeypatch, tmp_path) -> None:
    found = confirmed(monkeypatch, Interval(1.3, 1.25, 1.36), tmp_path)
    assert found.ok
    assert not found.undecided
    assert found.reason is None


def test_a_ratio_of_a_starved_machine_proves_nothing_and_deserves_another_try(monkeypatch, tmp_path) -> None:
    found = confirmed(monkeypatch, Interval(325.7, 1.27, 83238.7), tmp_path)
    assert not found.ok
    assert found.undecided
    assert found.reason == (
        "Measured again, it is between 1.27 and 8.32e+04 times as fast as the tuned original: the machine was too busy "
        "to tell. The same command measures it once more; run it when the machine is quiet."
    )


def test_a_ratio_that_is_sure_and_too_small_is_held_against_it(monkeypatch, tmp_path) -> None:
    found = confirmed(monkeypatch, Interval(1.01, 0.99, 1.03), tmp_path)
    assert not found.ok
    assert not found.undecided
    assert found.reason == (
        "Measured again, it is 1.01x the tuned original (0.99 to 1.03), which does not prove that it is faster."
    )
