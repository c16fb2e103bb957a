"""Schedules of the learning rate: those of torch and ours go on where they stood, over a run of any length, or are refused."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader

from _runs import EPOCH, Line, Stream, loader, told, trainer
from trimtab import DataSettings, Settings, Trainer
from trimtab.errors import UsageError, WorkloadError
from trimtab.train.early_stopping import EarlyStopping
from trimtab.train.optim.schedules import ENDLESS, cosine, linear, one_cycle, remark
from trimtab.train.telemetry.events import Event

pytestmark = pytest.mark.usefixtures("one_thread")


class Falling:
    """A factor that is an object, not a function."""

    def __call__(self, update: int) -> float:
        return 0.9**update


def sequential(optimizer: torch.optim.Optimizer, updates: int) -> LRScheduler:
    """One after another, with functions inside."""
    parts = [LambdaLR(optimizer, lambda update: (update + 1) / 4), LambdaLR(optimizer, Falling())]
    return SequentialLR(optimizer, parts, milestones=[3])


SCHEDULES: dict[str, Any] = {
    "one_cycle": one_cycle(0.05), "cosine": cosine(), "linear": linear(floor=0.1), "sequential": sequential,
    "object": lambda optimizer, updates: LambdaLR(optimizer, Falling()),
    "multiplicative": lambda optimizer, updates: MultiplicativeLR(optimizer, lambda update: 0.9),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_goes_on_where_it_stood(name: str, tmp_path: pathlib.Path) -> None:
    want = told(whole := trainer(schedule=SCHEDULES[name]), "rate")
    whole.fit(loader(), epochs=2)

    def stop(made: Trainer, event: Event) -> None:
        if event.update == 6:
            made.stop("enough")

    got = told(cut := trainer(schedule=SCHEDULES[name], checkpoint=tmp_path, callbacks=[stop]), "rate")
    cut.fit(batches := loader(), epochs=2)
    rest = told(resumed := trainer(schedule=SCHEDULES[name], checkpoint=tmp_path).resume(), "rate")
    resumed.fit(loader(), epochs=2)
    again = told(cut, "rate")  # and so does a second run of the same trainer
    cut.fit(batches, epochs=2)
    assert len(want) == 16
    assert got[:6] + rest == want
    assert got[:6] + again == want


def warmed_up(optimizer: Optimizer, updates: int) -> LRScheduler:
    """A quarter up, then along a cosine."""
    rise = updates // 4
    parts = [LinearLR(optimizer, 0.1, total_iters=rise), CosineAnnealingLR(optimizer, T_max=updates - rise)]
    return SequentialLR(optimizer, parts, milestones=[rise])


class Warming(LRScheduler):
    """Says what the rate is."""

    def __init__(self, optimizer: Optimizer, rise: int) -> None:
        self.rise = rise
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [base * min(1.0, (self.last_epoch + 1) / self.rise) for base in self.base_lrs]


SHAPES: dict[str, Callable[[Optimizer, int], LRScheduler]] = {
    "one_cycle": one_cycle(0.05),
    "cosine": cosine(),
    "annealing": lambda optimizer, updates: CosineAnnealingLR(optimizer, T_max=updates, eta_min=1e-4),
    "linear": lambda optimizer, updates: LinearLR(optimizer, 1.0, 0.1, total_iters=updates),
    "polynomial": lambda optimizer, updates: PolynomialLR(optimizer, total_iters=updates),
    "step": lambda optimizer, updates: StepLR(optimizer, step_size=updates // 4),
    "steps": lambda optimizer, updates: MultiStepLR(optimizer, [updates // 2, 3 * updates // 4]),
    "sequential": warmed_up,
    "chained": lambda optimizer, updates: ChainedScheduler(
        [ConstantLR(optimizer, 0.5, total_iters=updates // 4), CosineAnnealingLR(optimizer, updates)]
    ),
    "own": lambda optimizer, updates: Warming(optimizer, updates),
}


def rates(made: Trainer) -> list[float]:
    """The rate of every update to come, as the optimizer has it and not as it is told."""
    found: list[float] = []
    made.optimizer.register_step_pre_hook(lambda optimizer, *_: found.append(optimizer.param_groups[0]["lr"]))
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_a_run_that_is_made_longer_has_the_rates_of_the_longer_one(name: str, tmp_path: pathlib.Path) -> None:
    want = rates(whole := trainer(schedule=SHAPES[name]))
    whole.fit(loader(), epochs=2)
    first = rates(short := trainer(schedule=SHAPES[name], checkpoint=tmp_path))
    short.fit(loader(), epochs=1)
    assert len(first) == EPOCH
    rest = rates(resumed := trainer(schedule=SHAPES[name], checkpoint=tmp_path).resume())
    resumed.fit(loader(), epochs=2)
    short.fit(loader(), epochs=2)
    assert rest == first[EPOCH:] == want[EPOCH:]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (one_cycle(0.05), cosine(), "The run began with OneCycleLR, and this is LambdaLR"),
        (cosine(), one_cycle(0.05), "The run began with LambdaLR, and this is OneCycleLR"),
        (None, one_cycle(0.05), "The run began with no schedule, and this is OneCycleLR"),
        (cosine(), None, "The run began with LambdaLR, and this is no schedule"),
        (SHAPES["sequential"], lambda optimizer, updates: SequentialLR(
            optimizer, [ConstantLR(optimizer), CosineAnnealingLR(optimizer, 4)], [4]
        ), "The run began with SequentialLR(LinearLR, CosineAnnealingLR), and this is SequentialLR(ConstantLR, CosineAnnealing"
           "LR)"),
    ],
)  # fmt: skip
def test_another_kind_of_schedule_is_refused(before: Any, after: Any, said: str, tmp_path: pathlib.Path) -> None:
    trainer(schedule=before, checkpoint=tmp_path).fit(loader(), epochs=1)
    resumed = trainer(schedule=after, checkpoint=tmp_path).resume()
    with pytest.raises(UsageError, match=re.escape(f"{said}. Give the schedule that it began with.")):
        resumed.fit(loader(), epochs=2)
    assert resumed.position.update == EPOCH


OPTIONS: dict[str, tuple[Callable[[Optimizer, Any], LRScheduler], Any, Any, str]] = {
    "step": (lambda o, gamma: StepLR(o, 3, gamma), 0.5, 0.8, "schedule.gamma=0.5 (script: 0.8)"),
    "exponential": (ExponentialLR, 0.9, 0.95, "schedule.gamma=0.9 (script: 0.95)"),
    "floor": (lambda o, floor: CosineAnnealingLR(o, 16, floor), 0.0, 1e-3, "schedule.eta_min=0.0 (script: 0.001)"),
    "power": (lambda o, power: PolynomialLR(o, 16, power), 1.0, 2.0, "schedule.power=1.0 (script: 2.0)"),
    "restarts": (CosineAnnealingWarmRestarts, 4, 5, "schedule.T_0=4 (script: 5)"),
    "cyclic": (lambda o, top: CyclicLR(o, 1e-3, top, 4), 1e-2, 3e-2, "schedule.max_lrs=[0.01] (script: [0.03])"),
    "base": (lambda o, base: CyclicLR(o, base, 1e-2, 4), 1e-3, 2e-3, "lr=0.001 (script: 0.002)"),
    "cycle": (
        lambda o, div: OneCycleLR(o, 1e-2, total_steps=30, div_factor=div), 25.0, 10.0,
        "initial_lr=0.0004 (script: 0.001)",
    ),
    "strategy": (
        lambda o, how: OneCycleLR(o, 1e-2, total_steps=30, anneal_strategy=how), "cos", "linear",
        "schedule.anneal_func_type='cos' (script: 'linear')",
    ),
    "own": (Warming, 10, 20, "schedule.rise=10 (script: 20)"),
    "inner": (
        lambda o, gamma: SequentialLR(o, [ConstantLR(o, 0.5, 3), ExponentialLR(o, gamma)], [3]), 0.9, 0.8,
        "schedule.gamma=0.9 (script: 0.8)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_what_the_script_has_changed_of_a_schedule_is_told_of_and_stays_as_it_was(name: str, tmp_path: pathlib.Path) -> None:
    made, before, after, said = OPTIONS[name]
    sgd = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)

    def one(value: Any, **options: Any) -> Trainer:
        return trainer(schedule=lambda optimizer, _: made(optimizer, value), optimizer=sgd, **options)

    def stop(made: Trainer, event: Event) -> None:
        if event.update == 6:
            made.stop("enough")

    want = rates(whole := one(before))
    whole.fit(loader(), epochs=2)
    one(before, checkpoint=tmp_path, callbacks=[stop], log_every=1).fit(loader(), epochs=2)
    for value, first, last in ((after, 6, EPOCH), (after, EPOCH, 2 * EPOCH)):  # and again, as long as it differs
        got = rates(resumed := one(value, checkpoint=tmp_path).resume())
        if last == EPOCH:
            resumed.context.callbacks.append(lambda made, event: made.stop("enough") if event.update == EPOCH else None)
            resumed.context.log_every = 1
        resumed.fit(loader(), epochs=2)
        assert got == want[first:last]
        assert [note for note in resumed.notes if note.startswith("The checkpoint wins") and said in note], resumed.notes


def test_a_schedule_that_is_another_and_of_another_length_is_the_scripts_and_is_told_of(tmp_path: pathlib.Path) -> None:
    def steps(gamma: float) -> Callable[[Optimizer, int], LRScheduler]:
        return lambda optimizer, updates: StepLR(optimizer, updates // 4, gamma)

    want = rates(whole := trainer(schedule=steps(0.8)))
    whole.fit(loader(), epochs=2)
    trainer(schedule=steps(0.5), checkpoint=tmp_path).fit(loader(), epochs=1)
    got = rates(resumed := trainer(schedule=steps(0.8), checkpoint=tmp_path).resume())
    resumed.fit(loader(), epochs=2)
    assert got == want[EPOCH:]
    assert resumed.notes == ["The run has 16 updates now, and had 8: its schedule is the script's for 16 updates."]


def test_a_plateau_has_the_patience_of_the_run_and_a_new_best_for_another_figure(tmp_path: pathlib.Path) -> None:
    def plateau(patience: int, **options: Any) -> Trainer:
        sgd = functools.partial(torch.optim.SGD, lr=1e-12)  # nothing gets better
        schedule = lambda optimizer, _: ReduceLROnPlateau(optimizer, "min", 0.1, patience)  # noqa: E731
        return trainer(schedule=schedule, checkpoint=tmp_path, optimizer=sgd, **options)

    held_out = loader(shuffle=False)
    first = plateau(50)
    first.fit(loader(), held_out, epochs=4)
    assert first.optimizer.param_groups[0]["lr"] == 1e-12
    resumed = plateau(1).resume()
    resumed.fit(loader(), held_out, epochs=5)
    assert isinstance(resumed.scheduler, ReduceLROnPlateau)
    assert resumed.scheduler.patience == 50
    said = "The checkpoint wins over the script: schedule.patience=50 (script: 1). Only a new run can change that."
    assert any(note.startswith(said) for note in resumed.notes)
    best, bad = resumed.scheduler.best, resumed.scheduler.num_bad_epochs
    assert bad == 4
    other = plateau(
        50, metrics={"size": lambda output, target: output.abs().mean()},
        early_stopping=EarlyStopping(metric="size", mode="min", patience=9),
    ).resume()  # fmt: skip
    other.fit(loader(), held_out, epochs=6)
    assert isinstance(other.scheduler, ReduceLROnPlateau)
    assert other.scheduler.best == other.results["size"] != best


def test_a_cycle_is_as_long_as_the_run_that_goes_on(tmp_path: pathlib.Path) -> None:
    trainer(schedule=one_cycle(0.05), checkpoint=tmp_path).fit(loader(), epochs=1)
    resumed = trainer(schedule=one_cycle(0.05), checkpoint=tmp_path).resume()
    assert resumed.fit(loader(), epochs=2).updates == 8
    assert isinstance(resumed.scheduler, OneCycleLR)
    assert resumed.scheduler.total_steps == 17


def falling(updates: int, begin: int) -> Any:
    """What a rate of 0.01 is that falls straight over so many updates, from the one at ``begin`` on."""
    return pytest.approx([0.01 * (1 - update / updates) for update in range(begin, updates)])


def test_a_schedule_lasts_for_what_is_left_with_other_data_or_other_batches(tmp_path: pathlib.Path) -> None:
    made = trainer(schedule=linear(warmup=0.0))
    made.fit(loader(), epochs=1)
    found = rates(made)
    assert made.fit([(torch.ones(1, 1), torch.ones(1, 1))] * 3, epochs=3).updates == 6
    assert found == falling(EPOCH + 6, EPOCH)

    def stop(made: Trainer, event: Event) -> None:
        if event.update == 4:
            made.stop("enough")

    trainer(schedule=linear(warmup=0.0), checkpoint=tmp_path, callbacks=[stop], log_every=1).fit(loader(), epochs=2)
    resumed = trainer(
        schedule=linear(warmup=0.0), checkpoint=tmp_path, settings=Settings(data=DataSettings(accumulate=4))
    ).resume()
    found = rates(resumed)
    assert resumed.fit(loader(), epochs=2).updates == 3  # of the four batches left, and of two times four
    assert found == falling(7, 4)


def thawing(schedule: Any, at: int) -> Trainer:
    """A second group of parameters comes to the optimizer after update ``at``."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))

    def thaw(made: Trainer, event: Event) -> None:
        if event.update == at and len(made.optimizer.param_groups) == 1:
            made.optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.001})

    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.01)
    return trainer(model, optimizer=optimizer, schedule=schedule, callbacks=[thaw], log_every=1)


def test_what_is_thawed_in_mid_run_follows_the_schedule() -> None:
    for schedule in (linear(warmup=0.0), lambda o, n: SequentialLR(o, [ConstantLR(o, 1.0), linear(warmup=0.0)(o, n)], [1])):
        made, found = thawing(schedule, 4), list[tuple[float, ...]]()
        made.optimizer.register_step_pre_hook(lambda o, *_, to=found: to.append(tuple(g["lr"] for g in o.param_groups)))
        made.fit(loader(), epochs=1)
        assert all(second == pytest.approx(first / 10) for first, second in found[5:])
    made = thawing(linear(warmup=0.0), EPOCH)
    made.fit(batches := loader(), epochs=1)
    assert made.fit(batches, epochs=2).updates == EPOCH
    assert made.optimizer.param_groups[1]["lr"] == 0
    said = (
        r"has 2 groups of parameters by now, and the OneCycleLR was made for 1, .* Give schedule=cosine\(\), which takes them"
    )
    with pytest.raises(UsageError, match=said):
        thawing(one_cycle(0.05), 4).fit(loader(), epochs=1)
    two = thawing(lambda o, n: LambdaLR(o, [lambda update: 1.0] * len(o.param_groups)), 4)
    assert two.fit(loader(), epochs=1).updates == EPOCH


def test_a_cycle_that_is_too_short_is_refused_at_once() -> None:
    made = trainer(optimizer=torch.optim.SGD((model := Line()).parameters(), lr=0.1), model=model)
    made.context.schedule = OneCycleLR(made.optimizer, 0.1, total_steps=10)
    with pytest.raises(
        UsageError, match=r"The OneCycleLR has 10 steps, of which 0 are made, and the run has 16 updates to come"
    ):
        made.fit(loader(), epochs=2)
    assert made.position.update == 0


def test_a_cycle_that_is_over_is_not_asked_for_more(tmp_path: pathlib.Path) -> None:
    trainer(schedule=one_cycle(0.05), checkpoint=tmp_path).fit(loader(), epochs=2)
    assert trainer(schedule=one_cycle(0.05), checkpoint=tmp_path).resume().fit(loader(), epochs=1).updates == 0


class Sharded(Stream):
    """Gives more batches than its length says."""

    def __len__(self) -> int:
        return 4


def after_a_step(optimizer: torch.optim.Optimizer, updates: int) -> LRScheduler:
    return SequentialLR(optimizer, [StepLR(optimizer, 1), OneCycleLR(optimizer, 0.1, total_steps=updates)], [2])


def before_a_constant(optimizer: torch.optim.Optimizer, updates: int) -> LRScheduler:
    return SequentialLR(optimizer, [OneCycleLR(optimizer, 0.1, total_steps=4), ConstantLR(optimizer)], [9])


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
@pytest.mark.parametrize(("schedule", "ended"), [(one_cycle(0.1), 9), (after_a_step, 10), (before_a_constant, 4)])
def test_a_cycle_stays_at_its_last_rate(schedule: Any, ended: int) -> None:
    data = DataLoader(Sharded(lambda _: [(torch.ones(1), torch.ones(1))] * 6), 1)
    (note,) = trainer(schedule=schedule).fit(data, epochs=2).notes
    assert note.startswith(f"The schedule ended after {ended} updates, and the run makes more")


EPOCHS: dict[str, tuple[Callable[[Optimizer], LRScheduler], str]] = {
    "step": (lambda o: StepLR(o, 30), "StepLR is at its end after 90 updates"),
    "steps": (lambda o: MultiStepLR(o, [30, 60, 90]), "MultiStepLR is at its end after 90 updates"),
    "annealing": (lambda o: CosineAnnealingLR(o, T_max=90), "CosineAnnealingLR is at its end after 90 updates"),
    "falling": (lambda o: LinearLR(o, 1.0, 0.0, total_iters=90), "LinearLR is at its end after 90 updates"),
    "exponential": (lambda o: ExponentialLR(o, 0.95), "ExponentialLR is at its end after 135 updates"),
    "function": (lambda o: LambdaLR(o, lambda epoch: 0.95**epoch), "LambdaLR is at its end after 135 updates"),
    "function that ends": (
        lambda o: LambdaLR(o, lambda epoch: 1e-4 * max(0.0, min(epoch / 5, 1 - epoch / 30))),
        "LambdaLR is at its end after 135 updates",
    ),
    "sequential": (
        lambda o: SequentialLR(o, [LinearLR(o, 0.1, 1.0, 5), CosineAnnealingLR(o, 85)], [5]),
        "CosineAnnealingLR is at its end after 85 updates",
    ),
    "chained": (lambda o: ChainedScheduler([ConstantLR(o), StepLR(o, 30)]), "StepLR is at its end after 90 updates"),
}
UPDATES: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "cosine": lambda o: cosine()(o, 1500),
    "one_cycle": lambda o: one_cycle(0.1)(o, 1500),
    "restarts": lambda o: CosineAnnealingWarmRestarts(o, 100, T_mult=2),
    "restarts in proportion": lambda o: CosineAnnealingWarmRestarts(o, 375),
    "step": lambda o: StepLR(o, 500),
    "stairs": lambda o: StepLR(o, 30, gamma=0.95),
    "exponential": lambda o: ExponentialLR(o, 0.05 ** (1 / 1500)),
    "warm-up": lambda o: LinearLR(o, 0.1, 1.0, total_iters=50),
    "sequential": lambda o: SequentialLR(o, [LinearLR(o, 0.1, 1.0, 50), CosineAnnealingLR(o, 1450)], [50]),
    "chained": lambda o: ChainedScheduler([ConstantLR(o, 0.5, 20), PolynomialLR(o, 1500)]),
    "plateau": ReduceLROnPlateau,
    "function": lambda o: LambdaLR(o, lambda update: 1e-3 * min((update + 1) / 400, 20 / (update + 1) ** 0.5)),
    "part that stays frozen": lambda o: LambdaLR(o, lambda update: 0.0),
    "function that fails": lambda o: LambdaLR(o, lambda update: [1.0][update]),
}


def optimizer() -> Optimizer:
    return torch.optim.SGD(Line().parameters(), lr=0.1)


@pytest.mark.parametrize("name", EPOCHS)
def test_a_schedule_that_was_made_for_epochs_is_told_of(name: str) -> None:
    make, note = EPOCHS[name]
    said = remark(make(optimizer()), 1500, 500)
    assert said is not None
    assert said.startswith(f"The {note}, and the run has 1,500: it is stepped once per update. If it was made for epochs, mul")
    assert "multiply lengths by the 500 updates of one, and take the root of that degree" in said
    assert remark(make(optimizer()), 95, 5) is None  # too short to tell
    assert remark(make(optimizer()), ENDLESS, 500) is remark(make(optimizer()), None, None) is None


@pytest.mark.parametrize("name", UPDATES)
def test_a_schedule_that_fits_the_run_is_not_told_of(name: str) -> None:
    assert remark(UPDATES[name](optimizer()), 1500, 500) is None


def test_a_run_tells_of_a_schedule_that_was_made_for_epochs() -> None:
    (note,) = trainer(schedule=lambda o, n: MultiStepLR(o, [3, 6])).fit(loader(), epochs=13).notes
    assert note.startswith("The MultiStepLR is at its end after 6 updates, and the run has 104: it is stepped")
    assert "by the 8 updates of one" in note


def test_a_plateau_is_found_in_the_validation(tmp_path: pathlib.Path) -> None:
    def schedule(optimizer: torch.optim.Optimizer, updates: int) -> LRScheduler:
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs")

    made = trainer(schedule=schedule, checkpoint=tmp_path)
    with pytest.raises(UsageError, match="ReduceLROnPlateau goes by the validation, and there is none"):
        made.fit(loader(), epochs=3)
    found = told(made, "rate")
    made.fit(loader(), loader(), epochs=3)
    assert sorted(set(found), reverse=True) == [0.01, 0.005]  # the first validation is the best so far
    rest = told(resumed := trainer(schedule=schedule, checkpoint=tmp_path).resume(), "rate")
    resumed.fit(loader(), loader(), epochs=4)
    assert set(rest) == {0.0025}


def plateau(mode: Any) -> Callable[..., Any]:
    return lambda optimizer, updates: ReduceLROnPlateau(optimizer, mode=mode)


def test_a_plateau_of_the_opposite_direction_is_refused() -> None:
    made = trainer(schedule=plateau("max"), metrics={"right": lambda outputs, targets: outputs > targets})
    with pytest.raises(
        UsageError,
        match=r"has mode='max', but goes by the validation's loss, which is watched with mode='min'\. Give both one mode: "
        r"EarlyStopping\(metric=\.\.\., mode='max'\)",
    ):
        made.fit(loader(), loader(), epochs=1)
    assert made.position.update == 0
    made.context.early_stopping = EarlyStopping(metric="right", mode="max", patience=10**6)
    assert made.fit(loader(), loader(), epochs=1).updates == EPOCH
    made = trainer(schedule=plateau("min"), metrics=made.context.metrics, early_stopping=made.context.early_stopping)
    with pytest.raises(UsageError, match="has mode='min', but goes by the validation's right, which is watched with"):
        made.fit(loader(), loader(), epochs=2)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("cosine", "schedule is 'cosine', a str, and no schedule. Give one such as trimtab.train.optim.schedules.cosine()"),
        ("cosine", "or a function: lambda optimizer, updates: StepLR(optimizer, updates // 3)."),
        (lambda o: StepLR(o, 1), "which cannot be called with (optimizer, updates): too many positional arguments. Give"),
        (one_cycle, "schedule is one_cycle, which cannot be called with (optimizer, updates)"),
        (StepLR, "schedule is StepLR, a class, to which the updates of a run may mean anything. Give one such as"),
        (lambda o, n: None, "The schedule returned None, not one of torch.optim.lr_scheduler. Let it return one."),
        (
            lambda o, n: StepLR(o, n / 0),
            "The schedule raised: ZeroDivisionError: division by zero (tests/train/optim/test_schedules",
        ),
    ],
)
def test_what_is_no_schedule_is_said(schedule: Any, said: str) -> None:
    with pytest.raises((UsageError, WorkloadError)) as caught:
        trainer(schedule=schedule).fit(loader(), epochs=1)
    assert said in str(caught.value)
