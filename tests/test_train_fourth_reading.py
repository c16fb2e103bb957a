"""Random numbers that nobody had seen, averages, data that changes, schedules that end: each of these once went wrong."""

from __future__ import annotations

import functools
import pathlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, SequentialLR, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from trimtab import Settings, Trainer
from trimtab.errors import UsageError, WorkloadError
from trimtab.train.batch_size import find_batch
from trimtab.train.checkpoint import Checkpoints
from trimtab.train.events import Progressed
from trimtab.train.schedule import one_cycle
from trimtab.train.stopping import EarlyStopping, Ema

EPOCH = 8
"""Updates."""
COUNTED = torch.arange(32.0)[:, None]
DATA = TensorDataset(COUNTED, COUNTED)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, and torch's threads as they were afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Line(nn.Module):
    """Remembers the examples that it was trained on, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(1, 1), nn.Dropout(0.1)
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += x[:, 0].tolist()
        found: torch.Tensor = self.drop(self.layer(x / 32))
        return found


def loader(**options: Any) -> DataLoader[Any]:
    """Eight batches of four in a random order."""
    return DataLoader(options.pop("dataset", DATA), **{"batch_size": 4, "shuffle": True, **options})


def trainer(model: nn.Module | None = None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"loss": nn.MSELoss(), "optimizer": functools.partial(torch.optim.SGD, lr=0.01)}
    return Trainer(Line() if model is None else model, **{**defaults, **options})


class Noisy(Dataset[Any]):
    """Adds noise where it is read."""

    def __init__(self, rng: torch.Generator | None = None) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        return place + torch.rand(1, generator=self.rng), torch.ones(1)


class Own(Sampler[list[int]]):
    """Batches from a generator of its own."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(32))
        self.rng.shuffle(order)
        yield from (order[start : start + 4] for start in range(0, 32, 4))

    def __len__(self) -> int:
        return EPOCH


LOADERS: dict[str, Callable[[], Any]] = {
    "workers": lambda: loader(dataset=Noisy(), batch_size=1, num_workers=1, persistent_workers=True),
    "random": lambda: loader(batch_sampler=Own(random.Random(0)), batch_size=1, shuffle=False),
    "numpy": lambda: loader(batch_sampler=Own(np.random.default_rng(0)), batch_size=1, shuffle=False),
    "philox": lambda: loader(batch_sampler=Own(np.random.Generator(np.random.Philox(1))), batch_size=1, shuffle=False),
    "mersenne": lambda: loader(batch_sampler=Own(np.random.RandomState(0)), batch_size=1, shuffle=False),
    "dataset": lambda: loader(dataset=Noisy(torch.Generator()), batch_size=1),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("steps", [EPOCH, EPOCH + 3])
def test_whoever_draws_is_kept_in_the_checkpoint(name: str, steps: int, tmp_path: pathlib.Path) -> None:
    whole = trainer(checkpoint=tmp_path / "whole")
    whole.fit(LOADERS[name](), epochs=3)
    cut = trainer(checkpoint=tmp_path / "cut")
    cut.fit(LOADERS[name](), steps=steps)
    resumed = trainer(checkpoint=tmp_path / "cut").resume()
    summary = resumed.fit(LOADERS[name](), epochs=3)
    assert cut.model.seen + resumed.model.seen == whole.model.seen
    told = [note for note in summary.notes if note.startswith("The loader's workers stay, and what they draw goes on")]
    assert len(told) == (name == "workers")


class Stream(IterableDataset[Any]):
    """What a function gives for the epoch that it has to be told."""

    epoch = -1

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make(self.epoch))


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}], ids=["here", "workers"])
def test_a_dataset_is_told_the_epoch(options: dict[str, Any]) -> None:
    made = trainer()
    dataset = Stream(lambda epoch: [(torch.full((1,), 10.0 * epoch + place), torch.ones(1)) for place in range(2)])
    made.fit(DataLoader(dataset, 1, **options), epochs=3)
    assert made.model.seen == [0, 1, 10, 11, 20, 21]


def forever() -> Iterator[Any]:
    """Epoch after epoch, each in an order that is drawn when its turn comes."""
    while True:
        yield from loader()


def buffered(_: int) -> Iterator[Any]:
    """Each example is drawn when its turn comes."""
    left = list(range(32))
    while left:
        place = left.pop(int(torch.randint(len(left), ())))
        yield COUNTED[place], COUNTED[place]


@pytest.mark.parametrize(("make", "steps"), [(forever, EPOCH + 3), (lambda: DataLoader(Stream(buffered), 4), 3)])
def test_what_cannot_be_gone_through_again_is_said(make: Callable[[], Any], steps: int, tmp_path: pathlib.Path) -> None:
    assert trainer(checkpoint=tmp_path).fit(make(), steps=steps).notes == ()
    (note,) = trainer(checkpoint=tmp_path).resume().fit(make(), steps=2 * EPOCH).notes
    assert note.startswith("The loader draws from torch's random numbers in the middle of an epoch, as the model does")
    trainer(checkpoint=tmp_path / "early").fit(forever(), steps=3)
    assert trainer(checkpoint=tmp_path / "early").resume().fit(forever(), steps=5).notes == ()


def test_an_average_follows_a_short_run_and_begins_with_what_was_loaded(tmp_path: pathlib.Path) -> None:
    made = trainer(model := nn.Linear(1, 1), ema=0.999, optimizer=functools.partial(torch.optim.SGD, lr=0.0))
    model.load_state_dict({"weight": torch.full((1, 1), 5.0), "bias": torch.zeros(1)})
    made.fit(loader(), epochs=1)
    assert model.weight.item() == 5
    average = Ema(model, 0.999)
    with torch.no_grad():
        model.weight.fill_(1)
    for _ in range(50):
        average.update(model)
    assert average.shadow["weight"].item() == pytest.approx(1, abs=1e-3)
    trainer(ema=0.9, checkpoint=tmp_path).fit(loader(), steps=3)
    resumed = trainer(ema=0.9, checkpoint=tmp_path).resume()
    assert resumed.ema is not None
    assert resumed.ema.updates == 3


def test_an_average_of_half_precision_is_kept_in_single() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1)
        average = Ema(model, 0.999)
        average.updates = 10**6
        model.weight.fill_(1.0078125)  # the next number
        for _ in range(100):
            average.update(model)
    kept = average.shadow["weight"].clone()
    assert kept.item() == pytest.approx(1 + 0.0078125 * (1 - 0.999**100), abs=1e-6)
    with average.shown(model):
        assert model.weight.item() == 1
    assert (model.weight.item(), average.shadow["weight"].item()) == (1.0078125, kept.item())


class Sharded(Stream):
    """Gives more batches than its length says."""

    def __len__(self) -> int:
        return 4


def after_a_step(optimizer: torch.optim.Optimizer, updates: int) -> LRScheduler:
    return SequentialLR(optimizer, [StepLR(optimizer, 1), OneCycleLR(optimizer, 0.1, total_steps=updates)], [2])


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
@pytest.mark.parametrize(("schedule", "ended"), [(one_cycle(0.1), 9), (after_a_step, 10)])
def test_a_cycle_stays_at_its_last_rate(schedule: Any, ended: int) -> None:
    data = DataLoader(Sharded(lambda _: [(torch.ones(1), torch.ones(1))] * 6), 1)
    (note,) = trainer(schedule=schedule).fit(data, epochs=2).notes
    assert note.startswith(f"The schedule ended after {ended} updates, and the run makes more")


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("cosine", "schedule is 'cosine', a str, and no schedule. Give one such as trimtab.train.schedule.cosine()"),
        (lambda o: StepLR(o, 1), "which cannot be called with (optimizer, updates): too many positional arguments. Give"),
        (one_cycle, "schedule is one_cycle, which cannot be called with (optimizer, updates)"),
        (lambda o, n: None, "The schedule returned a NoneType, not one of torch.optim.lr_scheduler. Let it return one."),
        (lambda o, n: StepLR(o, n / 0), "The schedule raised: ZeroDivisionError: division by zero (tests/test_train_fourth"),
    ],
)
def test_what_is_no_schedule_is_said(schedule: Any, said: str) -> None:
    with pytest.raises((UsageError, WorkloadError)) as caught:
        trainer(schedule=schedule).fit(loader(), epochs=1)
    assert said in str(caught.value)


def test_a_run_that_is_over_is_not_begun() -> None:
    made = trainer()
    made.fit(loader(), epochs=3)
    for data in (loader(), [(torch.ones(1, 1), torch.ones(1, 1))]):
        with pytest.raises(UsageError, match=r"epochs=3 counts in all, and this trainer has made 3\. Give epochs=6 for 3 more"):
            made.fit(data, epochs=3)
    with pytest.raises(UsageError, match=r"steps=10 counts in all, and this trainer has made 24\. Give steps=34"):
        made.fit(loader(), steps=10)


def test_other_data_has_early_stopping_of_its_own() -> None:
    made = trainer(early_stopping=EarlyStopping(patience=1, min_delta=1e9))
    assert made.fit(loader(), loader(), epochs=9).epochs == 2
    best = made.position.best
    other = [(torch.ones(1, 1), torch.ones(1, 1))] * 3
    summary = made.fit(other, other, epochs=9)
    assert (summary.updates, summary.epochs) == (6, 4)
    assert made.position.best != best


def losses(made: Trainer) -> list[float]:
    """Those of every update to come."""
    found: list[float] = []
    made.log_every = 1
    made.callbacks.append(lambda _, event: found.append(event.loss) if isinstance(event, Progressed) else None)
    return found


@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_run_goes_on_from_its_last_parameters_and_not_from_the_best(ema: float | None) -> None:
    def wild() -> Trainer:
        return trainer(ema=ema, early_stopping=EarlyStopping(patience=50), optimizer=functools.partial(torch.optim.SGD, lr=1.0))

    data = list(loader())
    want = losses(whole := wild())
    whole.fit(data, data, epochs=6)
    got = losses(made := wild())
    made.fit(data, data, epochs=3)
    made.fit(data, data, epochs=6)
    assert got == want
    assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), whole.model.parameters(), strict=True))
    weight = torch.full((1, 1), 0.25)
    made.model.layer.load_state_dict({"weight": weight, "bias": torch.zeros(1)})  # what its owner puts there stays
    made.optimizer.param_groups[0]["lr"] = 0.0
    made.early_stopping, made.best_parameters = None, None
    made.fit(data, epochs=7)
    assert torch.equal(made.model.layer.weight, weight)


def unsized(count: int) -> DataLoader[Any]:
    """A loader that does not say how long it is."""
    return DataLoader(Stream(lambda _: [(COUNTED[place], COUNTED[place]) for place in range(count)]), 1)


@pytest.mark.parametrize(
    ("first", "second", "count", "now"),
    [
        (lambda: loader(batch_size=2), lambda: loader(batch_size=8), 32, "4 batches and not 16"),
        (lambda: unsized(12), lambda: unsized(4), 4, "fewer batches"),
    ],
)
def test_an_epoch_of_another_length_begins_again(first: Any, second: Any, count: int, now: str, tmp_path: pathlib.Path) -> None:
    trainer(checkpoint=tmp_path).fit(first(), steps=10)
    resumed = trainer(checkpoint=tmp_path).resume()
    summary = resumed.fit(second(), epochs=1)
    assert sorted(resumed.model.seen) == list(range(count))
    said = f"The run before ended after batch 10 of an epoch of other data, and this has {now}: the epoch begins again."
    assert summary.notes == (said,)


@pytest.mark.parametrize(
    ("loss", "batch", "said"),
    [
        (
            lambda outputs, targets: nn.functional.cross_entropy(outputs, targets),
            (torch.rand(4, 1), torch.tensor([0, 0, -100, 0])),
            "Some targets are -100. If the loss leaves them out",
        ),
        (nn.CrossEntropyLoss(), (torch.rand(4, 1), torch.tensor([0, 0, -100, 0])), None),
        (lambda model, batch: model(torch.rand(4, 1)).mean(), {"n": 4}, "Nothing tells how many examples a batch has"),
        (lambda model, batch: (model(torch.rand(4, 1)).mean(), 4), {"n": 4}, None),
    ],
)
def test_what_losses_may_count_for_wrongly_is_said(loss: Any, batch: Any, said: str | None) -> None:
    assert trainer(loss=loss).fit([batch] * 2, epochs=1).notes == ()
    notes = trainer(loss=loss, settings=Settings(accumulate=2)).fit([batch] * 4, epochs=2).notes
    assert [note[: len(said or "")] for note in notes] == ([] if said is None else [said])


def test_parts_are_even_and_a_batch_of_one_is_explained() -> None:
    def normalised(**settings: Any) -> Trainer:
        model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        return trainer(model, settings=Settings(**settings), optimizer=functools.partial(torch.optim.SGD, lr=1e-6))

    assert normalised(batch=10).fit(loader(batch_size=21), epochs=1).updates == 2
    with pytest.raises(WorkloadError, match=r"Expected more than 1 value .*One example has no statistics .* drop_last=True"):
        normalised().fit(loader(batch_size=31), epochs=1)


def test_a_search_for_the_batch_leaves_the_loader_as_it_was() -> None:
    want = losses(plain := trainer())
    plain.fit(loader(), steps=3)
    torch.manual_seed(0)
    got, batches = losses(made := trainer()), loader(generator=(own := torch.Generator()))
    before = own.get_state()
    find_batch(made, batches, seconds=0.1, largest=4)
    assert torch.equal(own.get_state(), before)
    find_batch(made, data := loader(), seconds=0.1, largest=4)
    made.fit(data, steps=3)
    assert got == want


def test_an_update_that_stands_for_nothing_changes_nothing() -> None:
    ignored = (torch.rand(4, 1), torch.full((4,), -100))
    made = trainer(loss=nn.CrossEntropyLoss(), settings=Settings(accumulate=2))
    before = made.model.layer.weight.detach().clone()
    assert made.fit([ignored] * 2, epochs=1).loss == 0
    assert torch.equal(made.model.layer.weight, before)


@pytest.mark.filterwarnings("ignore:Sparse (CSR|BSR|invariant)")
def test_sparse_buffers_are_kept(tmp_path: pathlib.Path) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.register_buffer("near", torch.eye(4).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.near, self.layer(x))

    trainer(Graph(), checkpoint=tmp_path, ema=0.9).fit(loader(), epochs=1)
    assert trainer(Graph(), checkpoint=tmp_path, ema=0.9).resume().fit(loader(), epochs=2).updates == EPOCH
    dense = torch.eye(4)
    made = [dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsr((2, 2))]
    Checkpoints(tmp_path / "all").save(1, {"all": made})
    for one, other in zip(Checkpoints(tmp_path / "all").load()["all"], made, strict=True):
        assert one.layout == other.layout
        assert torch.equal(one.to_dense(), dense)
    with pytest.raises(
        UsageError, match="A tensor with the layout torch._mkldnn cannot be kept in a checkpoint. Make it dense"
    ):
        Checkpoints(tmp_path / "none").save(1, {"x": dense.to_mkldnn()})


def test_metrics_that_cannot_be_had_are_refused_at_once() -> None:
    batches = [{"x": torch.ones(2, 1)}]
    made = trainer(loss=lambda model, batch: model(batch["x"]).mean(), metrics={"right": lambda outputs, targets: outputs})
    with pytest.raises(UsageError, match=r"The metric 'right' needs batches of \(inputs, targets\)"):
        made.fit(batches, iter(batches), epochs=1)
    assert made.position.update == 0
