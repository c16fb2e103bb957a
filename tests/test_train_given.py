"""A run that goes on where the script is another by now, or where the run itself had changed what the script gives."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, SequentialLR

from _runs import EPOCH, loader, told, trainer
from trimtab import Trainer
from trimtab.errors import UsageError
from trimtab.train.events import Event, Validated
from trimtab.train.schedule import cosine, one_cycle
from trimtab.train.stopping import EarlyStopping

pytestmark = pytest.mark.usefixtures("one_thread")


def halves() -> nn.Sequential:
    """Two layers, the first of which is frozen."""
    model = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    return model


def by_flags(made: Trainer, event: Event) -> None:
    if isinstance(event, Validated) and event.epoch == 1:
        made.model[0].requires_grad_(True)


def by_group(made: Trainer, event: Event) -> None:
    by_flags(made, event)
    if isinstance(event, Validated) and event.epoch == 1:
        made.optimizer.add_param_group({"params": list(made.model[0].parameters()), "lr": 0.002})


def back(made: Trainer, event: Event) -> None:
    if isinstance(event, Validated) and event.epoch == 1:
        made.model[1].bias.requires_grad_(False)


def over_all(model: nn.Module) -> Any:
    return Adam(model.parameters(), lr=0.01)


def thawing(callback: Any, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = halves()
    optimizer = functools.partial(Adam, lr=0.01) if callback is by_group else over_all(model)
    return trainer(model, optimizer=optimizer, callbacks=[callback], **options)


@pytest.mark.parametrize("schedule", [None, cosine()], ids=["constant", "cosine"])
@pytest.mark.parametrize(
    ("callback", "notes"),
    [
        (by_flags, ["requires_grad is True for 0.weight, 0.bias, as the run before left it."]),
        (by_group, ["requires_grad is True for 0.weight, 0.bias, as the run before left it."]),
        (back, ["requires_grad is False for 1.bias, as the run before left it."]),
    ],
)
def test_what_a_callback_has_thawed_or_frozen_is_so_in_the_run_that_goes_on(
    callback: Any, notes: list[str], schedule: Any, tmp_path: pathlib.Path
) -> None:
    want = told(whole := thawing(callback, schedule=schedule), "loss")
    whole.fit(loader(), loader(), epochs=4)

    def stop(made: Trainer, event: Event) -> None:
        if event.update == 2 * EPOCH:
            made.stop("killed")

    cut = thawing(callback, schedule=schedule, checkpoint=tmp_path)
    got = told(cut, "loss")
    cut.callbacks.append(stop)
    cut.fit(loader(), loader(), epochs=4)
    resumed = thawing(callback, schedule=schedule, checkpoint=tmp_path).resume()
    assert resumed.notes == notes
    rest = told(resumed, "loss")
    resumed.fit(loader(), loader(), epochs=4)
    assert got + rest == want
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))


def test_what_is_thawed_in_the_script_stays_thawed(tmp_path: pathlib.Path) -> None:
    thawing(lambda *_: None, checkpoint=tmp_path).fit(loader(), epochs=1)
    torch.manual_seed(0)
    model = halves().requires_grad_(True)
    again = trainer(model, optimizer=over_all(model), checkpoint=tmp_path).resume()
    assert again.notes == []
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_groups_that_are_missing_are_added_only_where_those_before_are_the_same(tmp_path: pathlib.Path) -> None:
    thawing(by_group, checkpoint=tmp_path).fit(loader(), loader(), epochs=2)
    torch.manual_seed(0)
    model = halves()
    optimizer = Adam([model[1].bias, model[1].weight], lr=0.01)
    with pytest.raises(UsageError, match="was made with optimizer groups of 2 and 2 parameters, not of 2"):
        trainer(model, optimizer=optimizer, checkpoint=tmp_path).resume()
    assert len(optimizer.param_groups) == 1


def right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).abs() < 4


STOPPING = EarlyStopping(patience=2)
ANEW = ": the best validation is looked for anew."


@pytest.mark.parametrize(
    ("before", "after", "note"),
    [
        (STOPPING, EarlyStopping(metric="right", mode="max"),
         "The run before had early stopping by 'loss' (mode='min'), and this one has early stopping by 'right' (mode='max')"
         + ANEW),
        (EarlyStopping(mode="max", patience=9), EarlyStopping(patience=9),
         "The run before had early stopping by 'loss' (mode='max'), and this one has early stopping by 'loss' (mode='min')"
         + ANEW),
        (None, EarlyStopping(min_delta=1e9, patience=1),
         f"The run before had no early stopping, and this one has early stopping by 'loss' (mode='min'){ANEW}"),
        (STOPPING, None, f"The run before had early stopping by 'loss' (mode='min'), and this one has no early stopping{ANEW}"),
        (EarlyStopping(restore_best=False), STOPPING,
         "The run before kept no parameters of its best validation: the best is looked for anew."),
    ],
)  # fmt: skip
def test_early_stopping_goes_by_the_best_of_its_own_figure(before: Any, after: Any, note: str, tmp_path: pathlib.Path) -> None:
    options: dict[str, Any] = {"metrics": {"right": right}, "checkpoint": tmp_path}
    trainer(early_stopping=before, **options).fit(loader(), loader(), epochs=2)
    resumed = trainer(early_stopping=after, **options).resume()
    assert resumed.notes == [note]
    assert (resumed.position.best, resumed.position.stale, resumed.best_parameters) == (None, 0, None)
    summary = resumed.fit(loader(), loader(), epochs=3)
    assert summary.epochs == 3
    assert summary.best == summary.metrics["right" if after is not None and after.metric == "right" else "loss"]
    assert (resumed.best_parameters is None) == (after is None)
    assert trainer(early_stopping=after, **options).resume().notes == []  # which goes by its own


def test_the_best_parameters_are_not_shown_where_nobody_asks_for_them(tmp_path: pathlib.Path) -> None:
    trainer(early_stopping=STOPPING, checkpoint=tmp_path).fit(loader(), loader(), epochs=2)
    resumed = trainer(early_stopping=EarlyStopping(restore_best=False), checkpoint=tmp_path).resume()
    assert resumed.notes == []
    assert resumed.position.best is not None
    assert resumed.best_parameters is None


RATE = 2**-7
CHAINS: dict[str, Any] = {
    "none": None,
    "cosine": cosine(),
    "sequential": lambda o, n: SequentialLR(o, [ConstantLR(o, 0.5, 2), ExponentialLR(o, 0.5)], milestones=[3]),
}


def cut(schedule: Any, folder: pathlib.Path, **options: Any) -> Trainer:
    """A run of two epochs that ends after six updates."""

    def stop(made: Trainer, event: Event) -> None:
        if event.update == 6:
            made.stop("enough")

    made = trainer(schedule=schedule, checkpoint=folder, callbacks=[stop], log_every=1, **options)
    made.fit(loader(), epochs=2)
    return made


@pytest.mark.parametrize("name", CHAINS)
def test_a_rate_that_is_another_in_the_script_takes_effect(name: str, tmp_path: pathlib.Path) -> None:
    slow, fast = functools.partial(SGD, lr=RATE / 4), functools.partial(SGD, lr=RATE)
    want = told(whole := trainer(optimizer=fast, schedule=CHAINS[name]), "rate")
    whole.fit(loader(), epochs=2)
    cut(CHAINS[name], tmp_path, optimizer=fast)
    same = told(unchanged := trainer(optimizer=fast, schedule=CHAINS[name], checkpoint=tmp_path).resume(), "rate")
    assert unchanged.fit(loader(), epochs=2).notes == ()
    assert same == want[6:]
    cut(CHAINS[name], tmp_path / "slow", optimizer=fast)
    rest = told(resumed := trainer(optimizer=slow, schedule=CHAINS[name], checkpoint=tmp_path / "slow").resume(), "rate")
    resumed.callbacks.append(lambda made, event: made.stop("enough") if event.update == 9 else None)
    note = "The optimizer's learning rate in the script was 0.0078125 when the run began. It goes on with what is there now: "
    assert resumed.fit(loader(), epochs=2).notes == (f"{note}0.00195312.",)
    again = told(last := trainer(optimizer=slow, schedule=CHAINS[name], checkpoint=tmp_path / "slow").resume(), "rate")
    assert last.fit(loader(), epochs=2).notes == ()  # it has taken effect
    assert rest + again == [rate / 4 for rate in want[6:]]


def test_the_largest_rate_of_a_cycle_takes_effect_and_the_rate_that_it_goes_without_does_not(tmp_path: pathlib.Path) -> None:
    want = told(whole := trainer(schedule=one_cycle(RATE)), "rate")
    whole.fit(loader(), epochs=2)
    cut(one_cycle(RATE), tmp_path)
    other = functools.partial(SGD, lr=7.0)
    rest = told(resumed := trainer(optimizer=other, schedule=one_cycle(RATE / 4), checkpoint=tmp_path).resume(), "rate")
    assert len(resumed.fit(loader(), epochs=2).notes) == 1
    assert rest == [rate / 4 for rate in want[6:]]


def test_other_options_take_effect_and_what_the_run_had_changed_stays(tmp_path: pathlib.Path) -> None:
    def lower(made: Trainer, event: Event) -> None:
        made.optimizer.param_groups[0]["lr"] = 0.003

    def options(decay: float, betas: tuple[float, float]) -> dict[str, Any]:
        optimizer = functools.partial(AdamW, lr=0.01, weight_decay=decay, betas=betas)
        return {"optimizer": optimizer, "checkpoint": tmp_path, "callbacks": [lower], "log_every": 1}

    trainer(**options(0.0, (0.9, 0.99))).fit(loader(), epochs=1)
    resumed = trainer(**options(0.25, (0.8, 0.99))).resume()
    assert resumed.fit(loader(), steps=EPOCH + 1).notes == (
        "The optimizer's betas in the script was 0.9, 0.99 when the run began. It goes on with what is there now: 0.8, 0.99.",
        "The optimizer's weight_decay in the script was 0 when the run began. It goes on with what is there now: 0.25.",
    )
    group = resumed.optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.003, (0.8, 0.99), 0.25)


def test_an_optimizer_that_was_used_before_has_what_it_was_given(tmp_path: pathlib.Path) -> None:
    def lower(made: Trainer, event: Event) -> None:
        made.optimizer.param_groups[0]["lr"] = 0.003

    def made(optimizer: Callable[..., Optimizer] | Optimizer, model: nn.Module) -> Trainer:
        return trainer(model, optimizer=optimizer, checkpoint=tmp_path, callbacks=[lower], log_every=1)

    first = made(functools.partial(SGD, lr=0.01), nn.Linear(1, 1))
    first.fit(loader(), epochs=1)
    again = made(first.optimizer, first.model).resume()
    assert again.fit(loader(), epochs=2).notes == ()
    assert again.optimizer.param_groups[0]["lr"] == 0.003
