"""A run that goes on where the script is another by now, or where the run itself had changed what the script gives."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, SequentialLR

from _runs import EPOCH, Line, loader, told, trainer
from trimtab import Trainer
from trimtab.errors import UsageError
from trimtab.train.early_stopping import EarlyStopping
from trimtab.train.optim.schedules import cosine, one_cycle
from trimtab.train.telemetry.events import Event, Validated

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
        (
            by_flags,
            ["requires_grad is True for 0.weight, 0.bias, as the run before left it. To change it, set it after resume()."],
        ),
        (
            by_group,
            ["requires_grad is True for 0.weight, 0.bias, as the run before left it. To change it, set it after resume()."],
        ),
        (back, ["requires_grad is False for 1.bias, as the run before left it. To change it, set it after resume()."]),
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
    cut.context.callbacks.append(stop)
    cut.fit(loader(), loader(), epochs=4)
    resumed = thawing(callback, schedule=schedule, checkpoint=tmp_path).resume()
    assert resumed.notes == notes
    rest = told(resumed, "loss")
    resumed.fit(loader(), loader(), epochs=4)
    assert got + rest == want
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))


def test_what_is_thawed_in_the_script_is_told_of_and_can_be_thawed_after_resume(tmp_path: pathlib.Path) -> None:
    thawing(lambda *_: None, checkpoint=tmp_path).fit(loader(), epochs=1)
    torch.manual_seed(0)
    model = halves().requires_grad_(True)
    again = trainer(model, optimizer=over_all(model), checkpoint=tmp_path).resume()
    assert again.notes == [
        "requires_grad is False for 0.weight, 0.bias, as the run before left it. To change it, set it after resume()."
    ]
    before = model[0].weight.detach().clone()
    model.requires_grad_(True)
    again.fit(loader(), epochs=2)
    assert not torch.equal(model[0].weight, before)


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
ANEW = ": the best is looked for anew."


@pytest.mark.parametrize(
    ("before", "after", "note"),
    [
        (STOPPING, EarlyStopping(metric="right", mode="max"),
         f"The run before watched 'loss' (mode='min'), and this one watches 'right' (mode='max'){ANEW}"),
        (EarlyStopping(mode="max", patience=9), EarlyStopping(patience=9),
         f"The run before watched 'loss' (mode='max'), and this one watches 'loss' (mode='min'){ANEW}"),
        (None, EarlyStopping(min_delta=1e9, patience=1), f"The run before kept no parameters of its best validation{ANEW}"),
        (EarlyStopping(restore_best=False), STOPPING, f"The run before kept no parameters of its best validation{ANEW}"),
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
    assert summary.best == summary.metrics[after.metric]
    assert resumed.best_parameters is not None
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


def note(*differences: str) -> str:
    fix = "resume(override={'lr': ...}) overrides numbers of the optimizer."
    return f"The checkpoint wins over the script: {', '.join(differences)}. {fix}"


@pytest.mark.parametrize("name", CHAINS)
def test_the_rate_of_the_checkpoint_goes_before_that_of_the_script_unless_it_is_overridden(
    name: str, tmp_path: pathlib.Path
) -> None:
    slow, fast = functools.partial(SGD, lr=RATE / 4), functools.partial(SGD, lr=RATE)
    want = told(whole := trainer(optimizer=fast, schedule=CHAINS[name]), "rate")
    whole.fit(loader(), epochs=2)
    for script, notes in ((fast, ()), (slow, (note(f"lr={RATE} (script: {RATE / 4})"),))):
        folder = tmp_path / str(len(notes))
        cut(CHAINS[name], folder, optimizer=fast)
        rest = told(resumed := trainer(optimizer=script, schedule=CHAINS[name], checkpoint=folder).resume(), "rate")
        assert resumed.fit(loader(), epochs=2).notes == notes
        assert rest == want[6:]
        assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))
    cut(CHAINS[name], tmp_path / "other", optimizer=fast)
    over = trainer(optimizer=fast, schedule=CHAINS[name], checkpoint=tmp_path / "other").resume(override={"lr": RATE / 4})
    rest = told(over, "rate")
    over.context.callbacks.append(lambda made, event: made.stop("enough") if event.update == 9 else None)
    assert over.fit(loader(), epochs=2).notes == (f"lr is {RATE / 4} from here on, by resume(override=...), and was {RATE}.",)
    for base in getattr(over.scheduler, "base_lrs", ()):
        assert base == RATE / 4
    again = told(last := trainer(optimizer=slow, schedule=CHAINS[name], checkpoint=tmp_path / "other").resume(), "rate")
    assert last.fit(loader(), epochs=2).notes == ()  # it is the run's by now
    assert rest + again == [rate / 4 for rate in want[6:]]


def test_the_largest_rate_of_a_cycle_is_what_is_overridden_and_stays_so_in_a_longer_run(tmp_path: pathlib.Path) -> None:
    want = told(whole := trainer(schedule=one_cycle(RATE)), "rate")
    whole.fit(loader(), epochs=2)
    cut(one_cycle(RATE), tmp_path)
    other = functools.partial(SGD, lr=7.0)  # without which the cycle goes
    resumed = trainer(optimizer=other, schedule=one_cycle(RATE), checkpoint=tmp_path).resume(override={"lr": RATE / 4})
    rest = told(resumed, "rate")
    assert resumed.fit(loader(), epochs=2).notes == (
        f"lr is {RATE / 4} from here on, by resume(override=...), and was {RATE}.",
    )
    assert rest == [rate / 4 for rate in want[6:]]
    want = told(whole := trainer(schedule=one_cycle(RATE / 4)), "rate")
    whole.fit(loader(), epochs=3)
    longer = trainer(schedule=one_cycle(RATE), checkpoint=tmp_path).resume()
    rest = told(longer, "rate")
    anew = "The run has 24 updates now, and had 16: its schedule is the script's for 24 updates."
    assert longer.fit(loader(), epochs=3).notes == (anew, note(f"lr={RATE / 4} (script: {RATE})"))
    assert rest == pytest.approx(want[2 * EPOCH :])


def test_other_options_are_told_of_and_can_be_overridden(tmp_path: pathlib.Path) -> None:
    def lower(made: Trainer, event: Event) -> None:
        made.optimizer.param_groups[0]["lr"] = 0.003

    def options(decay: float, betas: tuple[float, float], *, maximize: bool = False) -> dict[str, Any]:
        optimizer = functools.partial(AdamW, lr=0.01, weight_decay=decay, betas=betas, maximize=maximize)
        return {"optimizer": optimizer, "checkpoint": tmp_path, "callbacks": [lower], "log_every": 1}

    trainer(**options(0.0, (0.9, 0.99))).fit(loader(), epochs=1)
    resumed = trainer(**options(0.25, (0.8, 0.99), maximize=True)).resume()
    assert resumed.fit(loader(), steps=EPOCH + 1).notes == (
        note(
            "betas=(0.9, 0.99) (script: (0.8, 0.99))",
            "maximize=False (script: True)",
            "weight_decay=0.0 (script: 0.25)",
        ),
    )
    group = resumed.optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"], group["maximize"]) == (0.003, (0.9, 0.99), 0.0, False)
    over = trainer(**options(0.25, (0.8, 0.99))).resume(override={"weight_decay": 0.5, "betas": (0.7, 0.9)})
    assert over.fit(loader(), steps=EPOCH + 2).notes == (
        "weight_decay is 0.5 from here on, by resume(override=...), and was 0.0.",
        "betas is (0.7, 0.9) from here on, by resume(override=...), and was (0.9, 0.99).",
    )
    group = over.optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.003, (0.7, 0.9), 0.5)
    again = trainer(**options(0.5, (0.7, 0.9))).resume()
    assert again.fit(loader(), steps=EPOCH + 3).notes == ()


def test_of_several_groups_the_one_that_differs_is_named_and_all_are_overridden(tmp_path: pathlib.Path) -> None:
    def made(rate: float) -> Trainer:
        model = Line()
        optimizer = SGD([{"params": [model.layer.weight]}, {"params": [model.layer.bias], "lr": rate}], lr=0.5)
        return trainer(model, optimizer=optimizer, checkpoint=tmp_path)

    made(0.25).fit(loader(), steps=1)
    assert made(0.125).resume().fit(loader(), steps=2).notes == (note("param_groups[1].lr=0.25 (script: 0.125)"),)
    over = made(0.25).resume(override={"lr": 0.0625})
    over.fit(loader(), steps=3)
    assert [group["lr"] for group in over.optimizer.param_groups] == [0.0625, 0.0625]


def test_a_run_that_has_no_checkpoint_yet_has_what_is_overridden_from_its_beginning(tmp_path: pathlib.Path) -> None:
    for epochs, notes in ((1, ("lr is 0.5 from here on, by resume(override=...), and was 0.01.",)), (2, ())):
        made = trainer(checkpoint=tmp_path).resume(missing_ok=True, override={"lr": 0.5})
        assert made.fit(loader(), epochs=epochs).notes == notes
        assert made.optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"rate": 0.1}, "override has rate=0.1. SGD takes numbers of at least 0 for: dampening=0, lr=0.01, momentum=0"),
        ({"nesterov": True}, "override has nesterov=True. SGD takes numbers of at least 0 for: dampening=0, lr=0.01, mom"),
        ({"lr": "small"}, "override has lr='small'. SGD takes numbers of at least 0 for: "),
        ({"lr": (0.1, 0.2)}, "override has lr=(0.1, 0.2). SGD takes numbers of at least 0 for: "),
        ({"lr": -0.1}, "override has lr=-0.1. SGD takes numbers of at least 0 for: "),
        ([0.1], "override is a list; give values by name, such as {'lr': 3e-4}."),
    ],
)
def test_what_cannot_be_overridden_is_refused(override: Any, said: str, tmp_path: pathlib.Path) -> None:
    cut(None, tmp_path)
    made = trainer(checkpoint=tmp_path)
    with pytest.raises(UsageError) as caught:
        made.resume(override=override)
    assert said in str(caught.value)
    assert made.position.update == 0


def test_a_momentum_that_the_cycle_sets_cannot_be_overridden(tmp_path: pathlib.Path) -> None:
    cut(one_cycle(RATE), tmp_path)
    resumed = trainer(schedule=one_cycle(RATE), checkpoint=tmp_path).resume(override={"momentum": 0.5})
    with pytest.raises(UsageError, match=r"override has momentum, which OneCycleLR sets in each update\. Leave it out\."):
        resumed.fit(loader(), epochs=2)
