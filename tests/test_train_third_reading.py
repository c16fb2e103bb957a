"""Validations that are cut off or fail, other data, models that come from elsewhere: each of these once went wrong."""

from __future__ import annotations

import functools
import os
import pathlib
import signal
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trimtab import Settings, Trainer
from trimtab.errors import UsageError
from trimtab.train.checkpoint import Checkpoints
from trimtab.train.distributed.group import Group
from trimtab.train.events import Event, Progressed, Validated
from trimtab.train.loader import Loader
from trimtab.train.prepare import check_place
from trimtab.train.stopping import EarlyStopping

EPOCH = 8
"""Updates."""
DATA = TensorDataset(torch.arange(32.0)[:, None], torch.arange(32.0)[:, None])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, and torch's threads as they were afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Line(nn.Module):
    """Remembers the examples that it was trained on, and counts the batches that it was validated on."""

    def __init__(self, *, interrupted: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[int] = []
        self.validated = 0
        self.interrupted = interrupted
        """Whether the second batch of a validation brings a SIGTERM."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += x[:, 0].int().tolist()
        else:
            self.validated += 1
            if self.interrupted and self.validated == 2:
                os.kill(os.getpid(), signal.SIGTERM)
        found: torch.Tensor = self.layer(x / 32)
        return found


def loader() -> DataLoader[Any]:
    """Eight batches of four in a random order: each time that it is gone through draws random numbers."""
    return DataLoader(DATA, batch_size=4, shuffle=True)


def trainer(model: nn.Module | None = None, *, interrupted: bool = False, **options: Any) -> Trainer:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"loss": nn.MSELoss(), "optimizer": functools.partial(torch.optim.SGD, lr=0.01)}
    return Trainer(Line(interrupted=interrupted) if model is None else model, **{**defaults, **options})


def validations(made: Trainer) -> list[tuple[int, float]]:
    """The validations of the run to come: after which update, and their loss."""
    found: list[tuple[int, float]] = []

    def watch(_: Trainer, event: Event) -> None:
        if isinstance(event, Validated):
            found.append((event.update, event.metrics["loss"]))

    made.callbacks.append(watch)
    return found


@pytest.mark.own_process
@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": EPOCH}], ids=["epochs", "steps"])
@pytest.mark.parametrize("every", [None, 4])
@pytest.mark.parametrize("again", ["resume", "second fit"])
def test_a_signal_cuts_off_a_validation_and_the_run_that_goes_on_begins_with_it(
    length: dict[str, int], every: int | None, again: str, tmp_path: pathlib.Path
) -> None:
    want = validations(whole := trainer())
    whole.fit(loader(), loader(), **length)
    options: dict[str, Any] = {"checkpoint": tmp_path, "checkpoint_every": every}
    none = validations(made := trainer(interrupted=True, **options))
    batches = loader()
    summary = made.fit(batches, loader(), **length)
    assert summary.ended == "It was interrupted by SIGTERM."
    assert summary.notes[-1] == "The validation was cut off; the run that goes on begins with it."
    assert (summary.updates, made.model.validated, none) == (EPOCH, 2, [])
    assert Checkpoints(tmp_path).update() == EPOCH
    seen = made.model.seen
    if again == "resume":
        made, batches, seen = trainer(**options).resume(), loader(), seen[:]
    got = validations(made)
    assert made.fit(batches, loader(), **length).updates == whole.position.update - EPOCH
    assert got == want
    assert (seen if made.model.seen is seen else seen + made.model.seen) == whole.model.seen
    assert torch.equal(made.model.layer.weight, whole.model.layer.weight)


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


@pytest.mark.own_process
@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Ended(), batch_size=4, num_workers=1, timeout=1),
        lambda: Loader(Ended(), batch=4, workers=1, shuffle=False),
    ],
    ids=["torch", "trimtab"],
)
def test_a_signal_that_ends_the_workers_of_the_validation_cuts_it_off(make: Callable[[], Any], tmp_path: pathlib.Path) -> None:
    made = trainer(checkpoint=tmp_path, ema=0.5)
    summary = made.fit(loader(), make(), epochs=2)
    assert summary.ended == "It was interrupted by SIGTERM."
    assert made.ema is not None
    assert not torch.equal(made.ema.shadow["layer.weight"], made.model.layer.weight)
    found = Checkpoints(tmp_path).load()
    assert (found["position"]["update"], found["position"]["due"]) == (EPOCH, True)
    assert torch.equal(made.model.layer.weight, found["ema"]["layer.weight"])  # what the user has is the average


@pytest.mark.parametrize("kind", [Progressed, Validated])
def test_a_callback_that_fails_at_the_end_of_an_epoch_does_not_cost_it(kind: type[Event], tmp_path: pathlib.Path) -> None:
    def fail(_: Trainer, event: Event) -> None:
        if isinstance(event, kind):
            raise ConnectionError("offline")

    want = validations(whole := trainer())
    whole.fit(loader(), loader(), epochs=2)
    cut = trainer(checkpoint=tmp_path, callbacks=[fail])
    got = validations(cut)
    cut.callbacks.reverse()  # the one that fails comes last
    with pytest.raises(ConnectionError, match="offline"):
        cut.fit(loader(), loader(), epochs=2)
    assert Checkpoints(tmp_path).update() == EPOCH
    rest = validations(resumed := trainer(checkpoint=tmp_path).resume())
    assert resumed.fit(loader(), loader(), epochs=2).updates == EPOCH
    assert got + rest == want
    assert torch.equal(resumed.model.layer.weight, whole.model.layer.weight)


def test_a_stop_that_a_callback_asks_for_leaves_the_validation_whole() -> None:
    def stop(made: Trainer, event: Event) -> None:
        if isinstance(event, Progressed):
            made.stop("enough")

    found = validations(made := trainer(callbacks=[stop]))
    assert made.fit(loader(), loader(), epochs=2).ended == "enough"
    assert [update for update, _ in found] == [EPOCH]


def numbered(start: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of one example, which is its number."""
    return [(torch.full((1, 1), float(start + index)), torch.ones(1, 1)) for index in range(count)]


@pytest.mark.parametrize("make", [list, iter], ids=["list", "iterator"])
@pytest.mark.parametrize("count", [4, 10])
def test_other_data_begins_at_its_beginning(make: Callable[[Any], Any], count: int) -> None:
    made = trainer()
    made.fit(make(numbered(0, 10)), steps=6)
    summary = made.fit(make(numbered(100, count)), epochs=1)
    assert made.model.seen == [*range(6), *range(100, 100 + count)]
    note = "The run before ended after batch 6 of an epoch of other data; this data begins at its beginning."
    assert (summary.updates, summary.notes) == (count, (note,))


def test_the_same_data_goes_on_where_it_was_left() -> None:
    made, data = trainer(), numbered(0, 10)
    made.fit(data, steps=6)
    assert made.fit(data, epochs=1).notes == ()
    assert made.model.seen == [*range(10)]
    made = trainer()
    made.fit(DataLoader(DATA, batch_size=4), steps=6)
    assert made.fit(DataLoader(DATA, batch_size=4), epochs=1).notes == ()
    assert made.model.seen == [*range(32)]
    made.fit(DataLoader(DATA, batch_size=4), steps=EPOCH + 2)
    assert made.fit(DataLoader(DATA, batch_size=8), epochs=2).updates == 4  # as many batches would be other examples


def test_frozen_modules_stay_frozen_under_another_trainer() -> None:
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))
    model[1].eval()
    slow = functools.partial(torch.optim.SGD, lr=1e-6)
    for _ in range(2):
        trainer(model, optimizer=slow).fit(loader(), epochs=1)
        assert model[1].num_batches_tracked == 0
        assert not model.training
    modes: list[bool] = []
    model[2].register_forward_hook(lambda module, *_: modes.append(module.training))
    model[1] = nn.BatchNorm1d(4)
    trainer(model, optimizer=slow).fit(loader(), epochs=1)
    assert model[1].num_batches_tracked == EPOCH
    assert all(modes)
    model.train()[1].eval()  # chosen anew
    trainer(model, optimizer=slow).fit(loader(), epochs=1)
    model.train()
    trainer(model, optimizer=slow).fit(loader(), epochs=1)
    assert model[1].num_batches_tracked == 2 * EPOCH


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
    made.early_stopping = EarlyStopping(metric="right", mode="max", patience=10**6)
    assert made.fit(loader(), loader(), epochs=1).updates == EPOCH
    made = trainer(schedule=plateau("min"), metrics=made.metrics, early_stopping=made.early_stopping)
    with pytest.raises(UsageError, match="has mode='min', but goes by the validation's right, which is watched with"):
        made.fit(loader(), loader(), epochs=2)


class Placed(nn.Linear):
    """Says that its parameters are on a GPU."""

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield types.SimpleNamespace(device=torch.device("cuda", 1))


def test_a_model_is_not_taken_off_its_gpu() -> None:
    said = r"The model is on cuda, and Settings device is 'cpu', where it would be trained\. Give Settings\(device='cuda'\), or"
    with pytest.raises(UsageError, match=said):
        trainer(Placed(1, 1))
    check_place(Placed(1, 1), torch.device("cuda", 0))
    check_place(nn.Linear(1, 1, device="meta"), torch.device("cuda"))
    check_place(nn.Linear(1, 1), torch.device("cuda"))


def lazy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 1))


def random_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 2, generator=made), torch.randn(4, 1, generator=made)) for _ in range(5)]


@pytest.mark.parametrize("settings", [Settings(nonfinite="skip"), Settings(segments=2)], ids=["skip", "segments"])
def test_lazy_modules_are_made_by_the_first_update(settings: Settings) -> None:
    found = []
    for options in ({}, {"settings": settings}):
        made = trainer(lazy(), **options)
        made.fit(random_batches(), epochs=1)
        assert made.model[1].num_batches_tracked == 5
        found.append(made.model.state_dict())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_run_of_lazy_modules_can_be_gone_on_with(ema: float | None, tmp_path: pathlib.Path) -> None:
    data = random_batches()
    whole = trainer(lazy(), ema=ema)
    whole.fit(data, data, epochs=2)
    trainer(lazy(), ema=ema, checkpoint=tmp_path).fit(data, data, epochs=1)
    resumed = trainer(lazy(), ema=ema, checkpoint=tmp_path).resume()
    assert resumed.fit(data, data, epochs=2).updates == 5
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_what_lazy_modules_cannot_have_is_said() -> None:
    model = nn.Sequential(nn.LazyConv2d(2, 1), nn.Flatten(), nn.LazyLinear(1))
    with pytest.raises(UsageError, match="Lazy modules have no memory_format before a forward pass: call the model once"):
        trainer(model, settings=Settings(memory_format="channels_last")).fit(random_batches(), epochs=1)
    with pytest.raises(UsageError, match=r"0\.weight has no shape before a forward pass, and all processes must begin with"):
        Group.__new__(Group).place(model, Settings())


def with_model(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


@pytest.mark.parametrize(("loss", "calls"), [(nn.MSELoss(), 1), (with_model, 2)], ids=["of outputs", "of the model"])
def test_a_validation_calls_the_model_no_more_often_for_more_metrics(loss: Any, calls: int) -> None:
    metrics = {
        "far": lambda outputs, targets: (outputs - targets).abs() > 1,
        "error": lambda outputs, targets: (outputs - targets).square(),
        "mean": lambda outputs, targets: outputs.mean(),
    }
    made = trainer(loss=loss, metrics=metrics)
    found = made.fit(loader(), loader(), epochs=1).metrics
    assert made.model.validated == calls * EPOCH
    with torch.no_grad():
        outputs = made.model(DATA.tensors[0])
    wanted = {"loss": (error := (outputs - DATA.tensors[1]).square().mean()), "error": error, "mean": outputs.mean()}
    wanted["far"] = ((outputs - DATA.tensors[1]).abs() > 1).double().mean()
    assert found == pytest.approx({name: float(value) for name, value in wanted.items()}, rel=1e-5)
