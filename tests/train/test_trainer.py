"""The training loop: what it does per update, when it ends, what it tells, and what it refuses."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import pathlib
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab import DataSettings, OptimizerSettings, PrecisionSettings, Settings, Trainer
from trimtab.errors import NonFiniteError, TrimtabError, UsageError, WorkloadError
from trimtab.train.early_stopping import EarlyStopping
from trimtab.train.optim.schedules import cosine, linear, one_cycle
from trimtab.train.runtime.step_clock import PHASES
from trimtab.train.telemetry.distribution import Distribution
from trimtab.train.telemetry.events import (
    Ended,
    EpochEnded,
    EpochStarted,
    Event,
    JsonLines,
    Progressed,
    Saved,
    TensorBoard,
    Validated,
)

Batch = list[torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread and a seed, and torch's threads as they were afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def model() -> nn.Sequential:
    """A small classifier with everything that has a state: dropout, BatchNorm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))


def dataset(count: int = 96) -> TensorDataset:
    """Three classes that can be told apart."""
    made = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 8, generator=made)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def loader(count: int = 96, **options: Any) -> DataLoader[Any]:
    """Shuffled batches of 16."""
    return DataLoader(dataset(count), **{"batch_size": 16, "shuffle": True, **options})


class Returning(nn.Module):
    """Returns something else than its logits."""

    def __init__(self, what: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.what = nn.Linear(8, 3), what

    def forward(self, x: torch.Tensor) -> Any:
        return self.what(self.layer(x))


class OwnTrain(nn.Linear):
    """Has a method ``train`` that is no switch."""

    def __init__(self) -> None:
        super().__init__(8, 3)

    def train(self, epochs=10):  # type: ignore[no-untyped-def, override]
        raise AssertionError(epochs)


def trainer(network: nn.Module | None = None, **options: Any) -> Trainer:
    """A trainer of the small classifier."""
    network = network or model()
    defaults: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "optimizer": functools.partial(torch.optim.AdamW, lr=0.01)}
    return Trainer(network, **{**defaults, **options})


def recorded(events: list[Event]) -> Callable[[Trainer, Event], None]:
    """A callback that keeps everything."""
    return lambda trainer, event: events.append(event)


def test_the_loop_does_what_a_hand_written_one_does() -> None:
    by_hand = model()
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=13)
    torch.manual_seed(5)
    for _ in range(2):
        for inputs, targets in loader():
            loss = nn.functional.cross_entropy(by_hand(inputs), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    ours = trainer(schedule=one_cycle(0.05), settings=Settings(optimizer=OptimizerSettings(clip_norm=0.5)))
    torch.manual_seed(5)
    summary = ours.fit(loader(), epochs=2)
    assert summary.updates == 12
    assert summary.epochs == 2
    assert summary.ended == "2 epochs are done."
    for (name, want), got in zip(by_hand.state_dict().items(), ours.model.state_dict().values(), strict=True):
        torch.testing.assert_close(got, want, msg=name)
    assert not ours.model.training


def test_events_tell_what_happened(tmp_path: pathlib.Path) -> None:
    events: list[Event] = []
    log = tmp_path / "deep" / "log.jsonl"
    made = trainer(
        callbacks=[recorded(events), JsonLines(log)],
        log_every=4,
        checkpoint=tmp_path / "checkpoints",
        metrics={"accuracy": lambda outputs, targets: outputs.argmax(1) == targets},
    )
    summary = made.fit(loader(), loader(shuffle=False), epochs=2)
    kinds = [type(event) for event in events]
    closing = [EpochEnded, Validated, Saved]
    assert kinds == [EpochStarted, Progressed, *closing, EpochStarted, Progressed, Progressed, *closing, Ended]
    assert [event.update for event in events] == [0, 4, 6, 6, 6, 6, 8, 12, 12, 12, 12, 12]
    first = events[1]
    assert isinstance(first, Progressed)
    assert first.updates == 12
    assert first.loss > 0
    assert first.examples_per_s > 0
    assert sum(first.shares.values()) == pytest.approx(1, abs=0.02)
    assert set(first.shares) == set(PHASES)
    assert first.median_ms is not None
    assert first.median_ms > 0
    assert first.loss_spread is not None
    assert first.loss_spread > 0
    assert first.p95_ms is None, "four updates have no p95"
    assert first.resident_mb is not None
    assert first.resident_mb > 50
    assert first.allocated_mb is None
    assert summary.spread_ms is not None
    validated = [event for event in events if isinstance(event, Validated)]
    assert set(validated[0].metrics) == {"loss", "accuracy"}
    assert validated[0].best
    assert 0 <= validated[1].metrics["accuracy"] <= 1
    assert summary.metrics == validated[1].metrics
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["event"] for line in lines] == [kind.__name__.lower() for kind in kinds]
    assert "12 updates in" in str(summary)
    assert "validation accuracy" in str(summary)
    assert repr(summary).startswith("Summary(12 updates in ")
    assert "validation accuracy" in summary._repr_html_()


def test_validation_is_the_mean_over_examples_in_evaluation_mode() -> None:
    made = trainer()
    held_out = loader(50, batch_size=16, shuffle=False)  # the last batch is smaller
    made.fit(loader(), held_out, epochs=1)
    inputs, targets = dataset(50).tensors
    with torch.no_grad():
        want = float(nn.functional.cross_entropy(made.model(inputs), targets))
    assert made.results["loss"] == pytest.approx(want, rel=1e-5)


def test_tensorboard_can_read_what_is_written(tmp_path: pathlib.Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trainer(callbacks=[TensorBoard(tmp_path)], log_every=3).fit(loader(), loader(), epochs=1)
    found = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in found.Scalars("train/loss")] == [3, 6]
    assert found.Scalars("validate/loss")[0].value > 0
    assert found.Scalars("memory/resident_mb")[0].value > 50


def test_steps_end_in_the_middle_of_an_epoch_and_a_second_fit_goes_on() -> None:
    made = trainer()
    assert made.fit(loader(), steps=8).updates == 8
    assert (made.position.epoch, made.position.batch) == (1, 2)
    assert made.fit(loader(), steps=10).updates == 2


@pytest.mark.parametrize(
    ("schedule", "rates"), [(linear(warmup=0.0), [1.0, 0.75, 0.5, 0.25]), (cosine(warmup=0.5), [1 / 3, 2 / 3, 1.0, 0.5])]
)
def test_schedules_step_once_per_update(schedule: Any, rates: list[float]) -> None:
    events: list[Event] = []
    made = trainer(
        optimizer=functools.partial(torch.optim.SGD, lr=1.0), schedule=schedule, callbacks=[recorded(events)], log_every=1,
        settings=Settings(data=DataSettings(accumulate=3)),
    )  # fmt: skip
    seen: list[float] = []
    made.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    made.fit(loader(), epochs=2)
    assert seen == pytest.approx(rates)
    assert len([event for event in events if isinstance(event, Progressed)]) == 4


def test_early_stopping_puts_the_best_back() -> None:
    made = trainer(optimizer=functools.partial(torch.optim.SGD, lr=1.0), early_stopping=EarlyStopping(patience=2))
    losses: list[float] = []

    def ruin(trainer: Trainer, event: Event) -> None:
        if isinstance(event, Validated):
            losses.append(event.metrics["loss"])
            trainer.optimizer.param_groups[0]["lr"] = 0.0  # it never recovers
            with torch.no_grad():
                trainer.model[-1].weight.mul_(-20)  # type: ignore[index]

    made.context.callbacks.append(ruin)
    summary = made.fit(loader(), loader(shuffle=False), epochs=50)
    assert len(losses) == 3
    assert summary.best == min(losses) == losses[0]
    assert summary.ended == "The validation's loss did not improve 2 times in a row."
    said = f"The model has the parameters of the best validation, whose loss was {losses[0]:.4g}."
    assert said in str(summary).splitlines()
    inputs, targets = dataset().tensors
    with torch.no_grad():
        assert float(nn.functional.cross_entropy(made.model(inputs), targets)) == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "length", "restored"),
    [
        ({"early_stopping": EarlyStopping()}, {"epochs": 2}, None),  # the last is the best
        ({"early_stopping": EarlyStopping()}, {"steps": 9}, "loss"),  # updates were made after it
        ({"early_stopping": EarlyStopping(restore_best=False)}, {"steps": 9}, None),
        ({}, {"steps": 9}, None),
    ],
)
def test_a_summary_says_whether_the_model_has_other_parameters_than_the_last(
    options: dict[str, Any], length: dict[str, int], restored: str | None
) -> None:
    made = trainer(**options)
    last: list[torch.Tensor] = []
    made.optimizer.register_step_post_hook(lambda *_: last.append(made.model[0].weight.detach().clone()))  # type: ignore[index]
    assert made.fit(loader(), loader(shuffle=False), **length).restored == restored
    assert torch.equal(last[-1], made.model[0].weight) == (restored is None)  # type: ignore[index]


def test_the_average_is_what_is_validated_and_kept() -> None:
    made = trainer(ema=0.5)
    weights: list[torch.Tensor] = []
    made.optimizer.register_step_post_hook(lambda *_: weights.append(made.model[0].weight.detach().clone()))  # type: ignore[index]
    start = made.model[0].weight.detach().clone()  # type: ignore[index]
    made.fit(loader(), epochs=1)
    average = start
    for made_before, weight in enumerate(weights):
        average = torch.lerp(average, weight, 1 - min(0.5, (1 + made_before) / (10 + made_before)))
    torch.testing.assert_close(made.model[0].weight, average)  # type: ignore[index]


def test_a_second_fit_goes_on_from_the_parameters_and_not_from_their_average() -> None:
    def trained(*parts: int) -> nn.Module:
        torch.manual_seed(3)
        made, batches = trainer(nn.Sequential(nn.Linear(8, 3)), ema=0.8), loader(shuffle=False)
        for steps in parts:
            made.fit(batches, steps=steps)
        return made.model

    torch.testing.assert_close(trained(4, 9).state_dict(), trained(9).state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("policy", ["raise", "skip", "stop"])
def test_what_is_not_finite_changes_no_parameter(policy: Any, tmp_path: pathlib.Path) -> None:
    inputs, targets = dataset(64).tensors
    inputs = inputs.clone()
    inputs[40] = math.nan
    batches = [[inputs[i : i + 16], targets[i : i + 16]] for i in range(0, 64, 16)]
    network = nn.Sequential(nn.Linear(8, 3))
    before: list[torch.Tensor] = []
    made = trainer(
        network, settings=Settings(optimizer=OptimizerSettings(nonfinite=policy)), checkpoint=tmp_path, checkpoint_every=1
    )
    made.optimizer.register_step_post_hook(lambda *_: before.append(network[0].weight.detach().clone()))
    if policy == "raise":
        with pytest.raises(NonFiniteError, match=r'The loss was nan .* nonfinite="skip"'):
            made.fit(batches, epochs=1)
    else:
        summary = made.fit(batches, epochs=1)
        assert summary.skipped == 1
        assert summary.updates == (4 if policy == "skip" else 3)
    assert len(before) == (3 if policy == "skip" else 2)
    torch.testing.assert_close(network[0].weight.detach(), before[-1], rtol=0, atol=0)
    assert made.context.checkpoints is not None
    assert all(torch.isfinite(v).all() for v in made.context.checkpoints.load()["model"].values())


def test_what_is_not_finite_is_applied_as_a_loop_by_hand_does_where_nobody_is_to_look() -> None:
    inputs, targets = dataset(64).tensors
    inputs = inputs.clone()
    inputs[40] = math.nan
    batches = [[inputs[i : i + 16], targets[i : i + 16]] for i in range(0, 64, 16)]
    network = nn.Sequential(nn.Linear(8, 3))
    summary = trainer(network, settings=Settings(optimizer=OptimizerSettings(nonfinite="ignore"))).fit(batches, epochs=1)
    assert (summary.updates, summary.skipped) == (4, 0)
    assert torch.isnan(network[0].weight).all()


def test_a_loss_that_is_no_number_is_an_error_in_float16_too() -> None:
    class Spoiled(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs) * math.nan

    with pytest.raises(NonFiniteError, match=r"The loss was nan"):
        trainer(Spoiled(8, 3), settings=Settings(precision=PrecisionSettings(autocast="float16"))).fit(loader(), epochs=1)


def test_what_was_computed_before_a_run_does_not_count() -> None:
    clean, spoiled = nn.Linear(8, 3), nn.Linear(8, 3)
    spoiled.load_state_dict(clean.state_dict())
    spoiled(torch.ones(1, 8)).sum().backward()
    for network in (clean, spoiled):
        trainer(network).fit(loader(shuffle=False), steps=1)
    assert torch.equal(clean.weight, spoiled.weight)


@pytest.mark.parametrize("settings", [Settings(), Settings(data=DataSettings(accumulate=2))])
def test_what_a_callback_differentiates_does_not_count(settings: Settings) -> None:
    def adversary(run: Trainer, event: Event) -> None:
        run.model(torch.ones(1, 8, requires_grad=True)).sum().backward()

    clean, spoiled = nn.Linear(8, 3), nn.Linear(8, 3)
    spoiled.load_state_dict(clean.state_dict())
    trainer(clean, settings=settings).fit(loader(shuffle=False), epochs=1)
    trainer(spoiled, settings=settings, callbacks=[adversary], log_every=1).fit(loader(shuffle=False), epochs=1)
    assert torch.equal(clean.weight, spoiled.weight)


@pytest.mark.parametrize(
    "settings", [Settings(), Settings(data=DataSettings(accumulate=2), optimizer=OptimizerSettings(clip_norm=0.1))]
)
def test_sparse_gradients_are_what_dense_ones_are(settings: Settings) -> None:
    ids = torch.randint(0, 9, (32, 4), generator=torch.Generator().manual_seed(1))
    batches = [[ids[i : i + 8], ids[i : i + 8, 0] % 3] for i in range(0, 32, 8)]

    def trained(*, sparse: bool) -> nn.Module:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Embedding(9, 4, sparse=sparse), nn.Flatten(), nn.Linear(16, 3))
        trainer(network, optimizer=functools.partial(torch.optim.SGD, lr=0.5), settings=settings).fit(batches, epochs=2)
        return network

    torch.testing.assert_close(trained(sparse=True).state_dict(), trained(sparse=False).state_dict())


def test_transformers_style_models_bring_their_own_loss() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 3)

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.layer(inputs), labels)}

    batches = [{"inputs": batch[0], "labels": batch[1]} for batch in loader(shuffle=False)]
    first, second = Own(), Own()
    second.load_state_dict(first.state_dict())
    trainer(first, loss=None).fit(batches, epochs=1)
    trainer(second, loss=lambda model, batch: model(**batch)["loss"]).fit(batches, epochs=1)
    torch.testing.assert_close(first.layer.weight, second.layer.weight)


@pytest.mark.own_process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_update_and_it_can_go_on(number: signal.Signals, tmp_path: pathlib.Path) -> None:
    def interrupt(trainer: Trainer, event: Event) -> None:
        if event.update == 5 and isinstance(event, Progressed):
            os.kill(os.getpid(), number)

    handler = signal.getsignal(number)
    made = trainer(callbacks=[interrupt], log_every=1, checkpoint=tmp_path)
    outer = trainer()  # as of a generator, whose updates alternate with those of a critic
    run = outer.updates(loader(), epochs=3)
    next(run)
    summary = made.fit(loader(), epochs=3)
    assert summary.updates == 5
    assert outer.ending, "a signal reaches every run of the process"
    with pytest.raises(StopIteration) as ended:
        next(run)
    assert number.name in ended.value.value.ended
    assert number.name in summary.ended
    assert signal.getsignal(number) is handler
    again = trainer(checkpoint=tmp_path).resume()
    assert again.position.update == 5
    assert again.fit(loader(), epochs=3).updates == 13


@pytest.mark.own_process
def test_a_second_ctrl_c_ends_it_at_once() -> None:
    def interrupt(trainer: Trainer, event: Event) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trainer(callbacks=[interrupt], log_every=1).fit(loader(), epochs=3)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_runs_that_take_turns_leave_no_handler_whichever_ends_first() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for order in (1, -1):
        runs = [trainer().updates(loader(), epochs=1) for _ in range(3)]
        for _ in range(2):
            for run in runs:
                next(run)
        for run in runs[::order]:
            run.close()
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_it_trains_in_a_thread_where_no_signal_can_be_caught() -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(trainer().fit(loader(), epochs=1).updates))
    thread.start()
    thread.join()
    assert found == [6]


def test_settings_of_torch_are_put_back() -> None:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    seen: list[tuple[int, str]] = []
    note = lambda *_: seen.append((torch.get_num_threads(), torch.get_float32_matmul_precision()))  # noqa: E731
    trainer(settings=Settings(threads=2, precision=PrecisionSettings(tf32=True)), callbacks=[note]).fit(loader(), epochs=1)
    assert seen[0] == (2, "high")
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (threads, precision)


def vector(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that forgot its mean."""
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def frozen() -> nn.Module:
    """A model with nothing to train."""
    return model().requires_grad_(False)


BAD: list[tuple[str, type[TrimtabError], Callable[[], object], str]] = [
    ("vector loss", WorkloadError, lambda: trainer(loss=vector).fit(loader(), epochs=1),
     r"The loss is a tensor of shape \(16,\), but one number is needed. Use reduction='mean', or return its mean\(\)\."),
    ("broadcast targets", WorkloadError, lambda: trainer(loss=nn.MSELoss()).fit([(torch.ones(4, 8), torch.ones(4))], epochs=1),
     r"outputs have shape \(4, 3\) and the targets \(4,\)\. The loss compares them element by element, and would stretch one"),
    ("number as loss", WorkloadError, lambda: trainer(loss=lambda o, t: 3.0).fit(loader(), epochs=1),
     r"The loss is a float, but a tensor with one number is needed\."),
    ("loss without gradient", WorkloadError, lambda: trainer(loss=lambda o, t: o.detach().mean()).fit(loader(), epochs=1),
     r"The loss does not depend on any parameter that is trained"),
    ("no batch", WorkloadError, lambda: trainer().fit([], epochs=1), r"The loader gave no batch\. Check that it has data"),
    ("dropped batch", WorkloadError, lambda: trainer().fit(loader(8, drop_last=True), epochs=1),
     r"Its dataset has 8 examples, fewer than one batch of 16, and drop_last=True\."),
    ("used iterator", WorkloadError, lambda: trainer().fit(iter([[torch.zeros(2, 8), torch.zeros(2).long()]]), epochs=2),
     r"It is an iterator, which can be gone through only once\."),
    ("dataset", UsageError, lambda: trainer().fit(dataset(), epochs=1),  # type: ignore[arg-type]
     r"train is a TensorDataset, a dataset; wrap it: trimtab\.train\.Loader\(dataset, batch=32\)\."),
    ("number as loader", UsageError, lambda: trainer().fit(3, epochs=1),  # type: ignore[arg-type]
     r"train is an int, which cannot be iterated over"),
    ("labels out of range", WorkloadError, lambda: trainer().fit([[torch.zeros(2, 8), torch.tensor([0, 7])]], epochs=1),
     r"A label is 7, but the model has 3 outputs, for labels from 0 to 2\."),
    ("settings as a dict", UsageError, lambda: trainer(settings={"threads": 2}), r"settings is a dict; give trimtab\.Settings"),
    ("stopping by name", UsageError, lambda: trainer(early_stopping="loss"), r"early_stopping is a str; give trimtab\.train\."),
    ("metrics without names", UsageError, lambda: trainer(metrics=[len]), r"metrics is a list; give functions by name"),
    ("average as text", UsageError, lambda: trainer(ema="0.9"), r"ema is a str; give a number, such as 0\.999"),
    ("class as model", UsageError, lambda: trainer(nn.Linear), r"model is Linear, a class, and no model yet\."),
    ("model by name", UsageError, lambda: trainer("resnet50"), r"model is a str; give a torch\.nn\.Module\."),
    ("nothing to train", UsageError, lambda: trainer(frozen()),
     r"There is nothing to train in Sequential: all its 6 parameters have requires_grad=False\."),
    ("no parameters", UsageError, lambda: trainer(nn.ReLU()), r"There is nothing to train in ReLU: it has no parameters\."),
    ("foreign optimizer", UsageError, lambda: trainer(optimizer=torch.optim.SGD(model().parameters(), 0.1)),
     r"The optimizer updates 6 parameters that are not the model's \(the first has shape \(16, 8\)\)"),
    ("optimizer by name", UsageError, lambda: trainer(optimizer="adam"), r"optimizer is a str; give one of torch\.optim"),
    ("optimizer class", UsageError, lambda: trainer(optimizer=lambda p: 3),
     r"The optimizer function returned an int, not a torch\.optim\.Optimizer\."),
    ("optimizer that fails", WorkloadError, lambda: trainer(optimizer=torch.optim.SparseAdam).fit(loader(), epochs=1),
     r"^The optimizer raised: RuntimeError: SparseAdam does not support dense gradients"),
    ("optimizer without parameters", UsageError, lambda: trainer(optimizer=lambda: None),
     r"The optimizer function cannot be called with the parameters: too many positional arguments\. Give one such as lambda"),
    ("optimizer function that fails", WorkloadError, lambda: trainer(optimizer=lambda p: torch.optim.SGD(p, lr=-1.0)),
     r"called with a list of the parameters, raised: ValueError: Invalid learning rate: -1\.0 \(.*test_trainer\.py, line"),
    ("several optimizers", UsageError, lambda: trainer(optimizer=[torch.optim.SGD(nn.Linear(1, 1).parameters())]),
     r"optimizer is a list; give one of .* Several have names: .* The page docs/training-loops\.md shows several optimizers"),
    ("unknown device", UsageError, lambda: trainer(settings=Settings(device="abacus")),
     r"Settings device is 'abacus', which cannot be used here: "),
    ("no length", UsageError, lambda: trainer().fit(loader()), r"takes epochs=\.\.\. or steps=\.\.\.; neither were given\."),
    ("both lengths", UsageError, lambda: trainer().fit(loader(), epochs=1, steps=1), r"both were given\."),
    ("no epochs", UsageError, lambda: trainer().fit(loader(), epochs=0), r"epochs is 0; it must be a whole number"),
    ("loss by name", UsageError, lambda: trainer(loss="mse"), r"loss is a str, which cannot be called"),
    ("class as loss", UsageError, lambda: trainer(loss=nn.CrossEntropyLoss),
     r"loss is CrossEntropyLoss, a class, and no loss yet\. Give what it makes: CrossEntropyLoss\(\)\."),
    ("three parts", WorkloadError, lambda: trainer().fit([[torch.zeros(2, 8)] * 3], epochs=1),
     r"\(inputs, targets\), but the loader gives a list of 3\. Give a loss whose first parameter is called model"),
    ("data in place of a loader", WorkloadError, lambda: trainer().fit((torch.zeros(4, 8), torch.zeros(4)), epochs=1),
     r"but the loader gives a Tensor\. If \(inputs, targets\) of all examples were given in place of a loader, wrap them: "
     r"trimtab\.train\.Loader\(\(inputs, targets\), batch=32\)\."),
    ("answer with a loss", WorkloadError,
     lambda: trainer(loss=lambda model, batch: {"loss": model(batch[0]).sum()}).fit(loader(), epochs=1),
     r"The loss is a dict, but a tensor with one number is needed\. Return the loss that is in it alone: answer\['loss'\], or"),
    ("outputs in a tuple", WorkloadError, lambda: trainer(Returning(lambda x: (x, x))).fit(loader(), epochs=1),
     r"The model returned a tuple of 2: Tensor of shape \(16, 3\), .*, and CrossEntropyLoss was given all of it\. Give it the "
     r"part that it compares: loss=lambda outputs, targets: loss\(outputs\[0\], targets\)\. It raised TypeError"),
    ("outputs in a dict", WorkloadError, lambda: trainer(Returning(lambda x: {"logits": x})).fit(loader(), epochs=1),
     r"The model returned a dict with 'logits', .* loss\(outputs\['logits'\], targets\)"),
    ("logits and loss", WorkloadError, lambda: trainer(Returning(lambda x: (x, x.mean()))).fit(loader(), epochs=1),
     r"number 1 of it looks like a loss that it computed\. Use that: loss=lambda model, batch: model\(\*batch\)\[1\]\."),
    ("logits and loss from the loss", WorkloadError,
     lambda: trainer(Returning(lambda x: (x, x.mean())), loss=lambda model, batch: model(batch[0])).fit(loader(), epochs=1),
     r"The loss returned a tensor of shape \(16, 3\) and a scalar, as models do that return \(logits, loss\)\. Return the"),
    ("logits and loss without a loss", WorkloadError,
     lambda: trainer(Returning(lambda x: (x, x.mean())), loss=None).fit([{"x": torch.zeros(4, 8)}], epochs=1),
     r"an answer with a 'loss' in it is needed\. Take the one that it computed: loss=lambda model, batch: model\(\*\*batch"),
    ("a train() of its own", UsageError, lambda: trainer(nn.Sequential(OwnTrain())),
     r"OwnTrain\.train \(model\.0\) is a method of its own, train\(epochs=10\), .* Give the method another name, such as"),
    ("loss of a batch alone", UsageError, lambda: trainer(loss=lambda batch: batch),
     r"does not take two arguments: too many positional arguments\. A loss is called as loss\(outputs, targets\), but"),
    ("no own loss", WorkloadError, lambda: trainer(loss=None).fit(loader(), epochs=1),
     r"Without loss=\.\.\., batches must be mappings that the model takes as keywords, but this is a list\."),
    ("unknown metric", UsageError,
     lambda: trainer(early_stopping=EarlyStopping(metric="f1", mode="max")).fit(loader(), loader(), epochs=1),
     r"EarlyStopping watches 'f1', but the validation has loss\."),
    ("metric by name", UsageError, lambda: trainer(metrics={"right": "accuracy"}),
     r"The metric 'right' is 'accuracy', which cannot be called\."),
    ("metric of outputs alone", UsageError, lambda: trainer(metrics={"right": lambda outputs: outputs}),
     r"The metric 'right' cannot be called with \(outputs, targets\): too many positional arguments\. Give them by name"),
    ("patience alone", UsageError, lambda: trainer(early_stopping=3),
     r"early_stopping is an int; give trimtab\.train\.EarlyStopping"),
    ("text for patience", UsageError, lambda: EarlyStopping(patience="3"),
     r"EarlyStopping patience is '3'; it must be a number of at least 1\."),
    ("text for a difference", UsageError, lambda: EarlyStopping(min_delta="0.1"),
     r"EarlyStopping min_delta is '0\.1'; it must be a number\."),
    ("checkpoints without a folder", UsageError, lambda: trainer(checkpoint=True),
     r"checkpoint is a bool; give a path, such as 'checkpoints'\."),
    ("text for a share", UsageError, lambda: cosine(warmup="0.1"), r"warmup is '0\.1'; it is a share of the run"),
    ("metric called loss", UsageError,
     lambda: trainer(metrics={"loss": lambda outputs, targets: targets}).fit(loader(), loader(), epochs=1),
     r"metrics has a 'loss', as the validation's own mean is called\."),
    ("metric without a direction", UsageError, lambda: EarlyStopping(metric="accuracy"),
     r"EarlyStopping watches 'accuracy', and nothing says whether more of it is better\. Give mode='max', as for an accuracy"),
    ("schedule without length", UsageError, lambda: trainer(schedule=cosine()).fit((b for b in loader()), epochs=1),
     r"The schedule needs the number of updates, and the loader has no length\. Give fit\(steps=\.\.\.\)\."),
    ("resume from nowhere", UsageError, lambda: trainer().resume(), r"resume\(\) needs to know where the checkpoints are"),
    ("unknown precision", UsageError, lambda: Settings(precision=PrecisionSettings(autocast="bf16")),
     r"Settings precision\.autocast is 'bf16'; it can be 'bfloat16', 'float16', 'auto' or None\."),
    ("text for a number", UsageError, lambda: Settings(data=DataSettings(accumulate="auto")),
     r"Settings data\.accumulate is 'auto'; it can be a whole number\."),
    ("text for a truth", UsageError, lambda: Settings(data=DataSettings(exact_batchnorm="auto")),
     r"Settings data\.exact_batchnorm is 'auto'; it can be True or False\."),
    ("no accumulation", UsageError, lambda: Settings(data=DataSettings(accumulate=0)),
     r"Settings data\.accumulate is 0; it must be above zero\."),
    ("fields of a group", UsageError, lambda: Settings(precision={"tf32": True}),
     r"Settings precision is a dict; write precision=PrecisionSettings\(tf32=\.\.\.\)\."),
    ("a value for a group", UsageError, lambda: Settings(optimizer="fused"),
     r"Settings optimizer is a str; write optimizer=OptimizerSettings\(implementation=\.\.\.\)\."),
    ("a field outside of its group", UsageError, lambda: Settings(accumulate=8),
     r"accumulate is in DataSettings: Settings\(data=DataSettings\(accumulate=8\)\)\."),
    ("a name that is none", UsageError, lambda: Settings().replaced({"data.bach": 8}),
     r"Settings has no field 'data\.bach'\. It has: "),
    ("a batch of inference", UsageError, lambda: trainer(settings=Settings(data=DataSettings(batch=8))),
     r"Settings data\.batch is 8, which is for inference\. .* DataSettings\(micro_batch=8\)\."),
    ("wrong shape", WorkloadError, lambda: trainer().fit([[torch.zeros(2, 5), torch.zeros(2).long()]], epochs=1),
     r"The model or its loss raised: RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "call", "sentence"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_input(kind: type[TrimtabError], call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        call()


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        (
            [lambda event: None],
            "callbacks holds <lambda>, which cannot be called with (trainer, event): too many positional arguments.",
        ),
        (["log.jsonl"], "callbacks holds 'log.jsonl', a str, which cannot be called."),
        (print, "callbacks is print, and no list."),
    ],
)
def test_what_is_no_callback_is_said_before_the_run(callbacks: Any, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Trainer(nn.Linear(1, 1), loss=nn.MSELoss(), optimizer=torch.optim.SGD, callbacks=callbacks)
    assert said in str(caught.value)
    assert str(caught.value).endswith(
        "A callback is called as callback(trainer, event): callbacks=[lambda trainer, event: print(event)]."
    )


def test_shorter_runs_and_predictions(tmp_path: pathlib.Path) -> None:
    data, made = list(loader(shuffle=False)), trainer(schedule=one_cycle(0.1), checkpoint=tmp_path)
    summary = made.fit(data, data, epochs=2, limit_train=2, limit_validate=0.5)
    assert summary.updates == 4
    assert made.scheduler is not None
    assert made.scheduler.total_steps == 5
    figures = made.validate(data[:3])
    assert summary.metrics["loss"] == figures["loss"]
    outputs = made.predict(data)
    with torch.no_grad():
        assert torch.equal(outputs, torch.cat([made.model(x) for x, _ in data]))
    assert [each.shape for each in made.predict([x for x, _ in data], limit=2, joined=False)] == [(16, 3), (16, 3)]
    halved = trainer(settings=Settings(precision=PrecisionSettings(autocast="bfloat16")))
    assert halved.predict(data).dtype == torch.float32
    tried = trainer(checkpoint=tmp_path / "none")
    tried.fit(data, data, steps=100, fast_dev_run=True)
    assert tried.position.update == 1
    several = trainer().fit(data, data, epochs=9, fast_dev_run=3)
    assert several.updates == 3
    assert several.notes == ("fast_dev_run: 3 updates at most, and 3 batches of the validation. No checkpoint is written.",)
    assert not (tmp_path / "none").exists()
    ended = trainer().fit(data, epochs=1000, max_time=1e-9)
    assert (ended.updates, ended.ended) == (1, "Its time is over: max_time is 1e-09 s.")
    assert trainer().fit(data, epochs=1000, max_time="1us").ended == "Its time is over: max_time is 1us."
    assert trainer().fit(data, epochs=1, max_time="2h").ended == "1 epoch is done."
    for options, said in (
        ({"limit_train": 1.5}, "limit_train is 1.5; it is a number of batches, such as 100, or a share"),
        ({"fast_dev_run": "yes"}, "fast_dev_run is 'yes'; it can be True, or a number of updates"),
        ({"max_time": "2"}, "max_time is '2': the unit is missing"),
    ):
        with pytest.raises(UsageError, match=re.escape(said)):
            trainer().fit(data, epochs=1, **options)


def test_the_p95_of_many_updates_is_that_of_numpy() -> None:
    found = Distribution.of([*range(100), math.nan])
    assert found.p95 == pytest.approx(np.quantile(range(100), 0.95))
    assert found.median == 49.5
    assert found.spread == pytest.approx(np.std(range(100), ddof=1))


def test_gradients_are_clipped_by_value() -> None:
    batch, network = next(iter(loader())), nn.Linear(8, 3)
    by_hand, sgd = copy.deepcopy(network), functools.partial(torch.optim.SGD, lr=0.1)
    trainer(network, optimizer=sgd, settings=Settings(optimizer=OptimizerSettings(clip_value=0.01))).fit([batch], steps=1)
    optimizer = sgd(by_hand.parameters())
    nn.functional.cross_entropy(by_hand(batch[0]), batch[1]).backward()
    torch.nn.utils.clip_grad_value_(by_hand.parameters(), 0.01)
    optimizer.step()
    assert torch.equal(network.weight, by_hand.weight)
    assert torch.equal(network.bias, by_hand.bias)
