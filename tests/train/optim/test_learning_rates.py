"""The rule by which the learning rate follows the batches of an update."""

from __future__ import annotations

import functools
import pathlib
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CyclicLR,
    ExponentialLR,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR

from _ranks import on_ranks
from _runs import Line, loader, told, trainer
from trimtab import DataSettings, OptimizerSettings, Settings, Trainer
from trimtab.errors import UsageError
from trimtab.train.optim.schedules import cosine, linear, one_cycle
from trimtab.train.telemetry.events import Event

pytestmark = pytest.mark.usefixtures("one_thread")
RATE = 2**-6
PLAIN = Settings(data=DataSettings(accumulate=2))
TWICE = Settings(data=DataSettings(accumulate=2), optimizer=OptimizerSettings(scale_lr="linear"))
"""Of the rate that is given: there are two batches per update."""


def chained(optimizer: Optimizer, updates: int) -> LRScheduler:
    return ChainedScheduler([StepLR(optimizer, 2, 0.5), ConstantLR(optimizer, 0.5, 3)])


def sequential(optimizer: Optimizer, updates: int) -> LRScheduler:
    return SequentialLR(optimizer, [ConstantLR(optimizer, 0.5, 2), ExponentialLR(optimizer, 0.9)], milestones=[3])


SCHEDULES: dict[str, Any] = {
    "none": None,
    "one_cycle": one_cycle(0.0625),
    "cosine": cosine(),
    "linear": linear(floor=0.125),
    "cyclic": lambda optimizer, updates: CyclicLR(optimizer, 0.125, 0.25, step_size_up=3),
    "swa": lambda optimizer, updates: SWALR(optimizer, swa_lr=0.25, anneal_epochs=3),
    "chained": chained,
    "sequential": sequential,
}


def made(settings: Settings = PLAIN, **options: Any) -> Trainer:
    return trainer(optimizer=functools.partial(SGD, lr=RATE, momentum=0.5), settings=settings, **options)


def stop_at(update: int) -> Any:
    def stop(run: Trainer, event: Event) -> None:
        if event.update == update:
            run.stop("enough")

    return stop


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rate_of_any_schedule_follows_and_goes_on_after_an_interruption(name: str, tmp_path: pathlib.Path) -> None:
    given = told(plain := made(schedule=SCHEDULES[name]), "rate")
    plain.fit(loader(), epochs=2)
    want = [2 * rate for rate in given]
    got = told(cut := made(TWICE, schedule=SCHEDULES[name], checkpoint=tmp_path, callbacks=[stop_at(3)]), "rate")
    summary = cut.fit(batches := loader(), epochs=2)
    assert "scale_lr='linear': updates are from 2 batches, with 2 times the learning rate given." in summary.notes
    rest = told(resumed := made(TWICE, schedule=SCHEDULES[name], checkpoint=tmp_path).resume(), "rate")
    assert not any("scale_lr" in note for note in resumed.fit(loader(), epochs=2).notes)
    again = told(cut, "rate")  # and so does a second run of the same trainer
    cut.fit(batches, epochs=2)
    assert len(given) == 8
    assert got[:3] + rest == want
    assert got[:3] + again == want


def test_a_run_that_goes_on_with_other_batches_per_update_gets_their_rate(tmp_path: pathlib.Path) -> None:
    made(TWICE, checkpoint=tmp_path, callbacks=[stop_at(2)], schedule=cosine()).fit(loader(), steps=8)
    for settings, factor in (
        (Settings(data=DataSettings(accumulate=4), optimizer=OptimizerSettings(scale_lr="linear")), 4.0),
        (Settings(data=DataSettings(accumulate=4), optimizer=OptimizerSettings(scale_lr="sqrt")), 2.0),
    ):
        rates = told(resumed := made(settings, checkpoint=tmp_path, schedule=cosine()).resume(), "rate")
        resumed.context.callbacks.append(stop_at(3))
        resumed.fit(loader(), steps=8)
        want = told(whole := made(schedule=cosine()), "rate")
        whole.fit(loader(), steps=8)
        assert rates == [factor * rate for rate in want[resumed.position.update - len(rates) : resumed.position.update]]


def test_an_optimizer_or_a_scheduler_that_is_used_again_is_not_scaled_twice() -> None:
    model = Line()
    optimizer = SGD(model.parameters(), lr=RATE)
    schedule = StepLR(optimizer, 100)
    trainer(model, optimizer=optimizer, settings=TWICE, schedule=schedule).fit(loader(), steps=2)
    assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0] == 2 * RATE
    trainer(model, optimizer=optimizer, settings=TWICE, schedule=schedule).fit(loader(), steps=2)
    assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0] == 2 * RATE
    rates = told(cycle := trainer(model, optimizer=optimizer, settings=TWICE, schedule=one_cycle(0.5)), "rate")
    cycle.fit(loader(), steps=4)
    assert max(rates) > 0.5  # of 1.0, because it states its rates itself
    trainer(model, optimizer=optimizer, settings=Settings(data=DataSettings(accumulate=2))).fit(loader(), steps=1)
    assert optimizer.param_groups[0]["max_lr"] == 0.5


def test_a_rate_in_a_tensor_stays_in_it_and_groups_keep_their_proportion() -> None:
    model, rate = Line(), torch.tensor(RATE)
    groups = [{"params": [model.layer.weight], "lr": rate}, {"params": [model.layer.bias], "lr": 4 * RATE}]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    settings = Settings(data=DataSettings(accumulate=4), optimizer=OptimizerSettings(scale_lr="sqrt"))
    trainer(model, optimizer=optimizer, settings=settings, schedule=lambda o, n: StepLR(o, 100)).fit(loader(), steps=2)
    assert optimizer.param_groups[0]["lr"] is rate
    assert [float(group["lr"]) for group in optimizer.param_groups] == [2 * RATE, 8 * RATE]


def test_the_rule_needs_a_rate_and_one_batch_changes_none() -> None:
    run = made(Settings(optimizer=OptimizerSettings(scale_lr="linear")), schedule=lambda o, n: ReduceLROnPlateau(o))
    assert run.fit(loader(), loader(), epochs=1).notes == ()
    assert run.optimizer.param_groups[0]["lr"] == RATE
    with pytest.raises(UsageError, match="Settings optimizer.scale_lr is 'lin'; it can be 'linear', 'sqrt' or None"):
        Settings(optimizer=OptimizerSettings(scale_lr="lin"))  # type: ignore[arg-type]

    def own(parameters: Any) -> Optimizer:
        found = SGD(parameters, lr=RATE)
        found.param_groups[0]["lr"] = None
        return found

    with pytest.raises(UsageError, match="scale_lr is 'linear', but SGD finds its own learning rate. Leave it out"):
        trainer(optimizer=own, settings=TWICE).fit(loader(), epochs=1)


def rate_of_two(folder: pathlib.Path) -> dict[str, Any]:
    optimizer = functools.partial(SGD, lr=RATE)
    run = Trainer(Line(), loss=nn.MSELoss(), optimizer=optimizer, settings=TWICE, checkpoint=folder / "run", progress=False)
    run.fit(loader(), steps=1)
    return {"rate": run.optimizer.param_groups[0]["lr"]}


def test_the_batches_of_all_processes_count(tmp_path: pathlib.Path) -> None:
    assert [found["rate"] for found in on_ranks(rate_of_two, tmp_path)] == [4 * RATE] * 2
    alone = trainer(optimizer=functools.partial(SGD, lr=RATE), settings=TWICE, checkpoint=tmp_path / "run").resume()
    alone.fit(loader(), steps=2)
    assert alone.optimizer.param_groups[0]["lr"] == 2 * RATE
    assert "scale_lr='linear': updates are from 2 batches, with 2 times the learning rate given." in alone.notes


@pytest.mark.parametrize(("rule", "factor"), [("linear", 3.0), ("sqrt", 3**0.5), (None, 1.0)])
def test_rates_follow_the_batches_that_an_update_really_has(rule: Literal["linear", "sqrt"] | None, factor: float) -> None:
    """An epoch of 3 batches with ``accumulate=8``: an update ends with its epoch, and so never has 8."""
    rows = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(3)]
    settings = Settings(data=DataSettings(accumulate=8), optimizer=OptimizerSettings(scale_lr=rule))
    run = Trainer(nn.Linear(2, 1), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.01), settings=settings)
    summary = run.fit(rows, epochs=4)
    assert summary.updates == 4
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * factor)
    assert any("data.accumulate is 8, and an epoch has 3 batches: no update has more" in note for note in summary.notes)


@pytest.mark.parametrize(("rule", "told"), [("linear", True), (None, False)])
def test_a_last_update_of_fewer_batches_keeps_the_rate_and_is_told(rule: Literal["linear"] | None, told: bool) -> None:
    rows = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(11)]
    settings = Settings(data=DataSettings(accumulate=8), optimizer=OptimizerSettings(scale_lr=rule))
    run = Trainer(nn.Linear(2, 1), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.01), settings=settings)
    summary = run.fit(rows, epochs=2)
    assert summary.updates == 4
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.08 if told else 0.01)
    short = "The last update of an epoch has 3 batches and not 8: scale_lr gives it the learning rate of the others."
    assert (short in summary.notes) is told
