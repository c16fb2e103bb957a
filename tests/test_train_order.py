"""The order of examples in a run that goes on: whoever draws it, wherever it was cut, each example comes once."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import pathlib
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, RandomSampler, Sampler, StackDataset, Subset

from _runs import COUNTED, EPOCH, STAYING, Drawing, Stream, loader, told, trainer
from trimtab import Settings
from trimtab.train.batch_size import find_batch
from trimtab.train.clock import HostClock
from trimtab.train.draws import generators_of
from trimtab.train.feed import Feed

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("again", ["resume", "second fit"])
def test_an_epoch_that_is_gone_on_with_has_every_example_once(again: str, tmp_path: pathlib.Path) -> None:
    for generator in (torch.Generator().manual_seed(7), None):
        folder = tmp_path / str(generator is None)
        first = trainer(checkpoint=folder)
        batches = loader(generator=generator)
        first.fit(batches, steps=3)
        seen = first.model.seen[:]
        torch.manual_seed(99)
        if again == "resume":
            first = trainer(checkpoint=folder).resume()
            batches = loader(generator=None if generator is None else torch.Generator().manual_seed(8))
        else:
            first.model.seen.clear()
        first.fit(batches, epochs=1)
        assert sorted(seen + first.model.seen) == list(range(32))


def test_an_iterator_loses_nothing_between_two_runs() -> None:
    made, batches = trainer(), iter(list(loader()))
    made.fit(batches, steps=3)
    made.fit(batches, epochs=1)
    assert sorted(made.model.seen) == list(range(32))


@pytest.mark.parametrize("steps", [3, EPOCH, EPOCH + 3])
def test_workers_that_stay_give_the_order_that_they_would_have_given(steps: int, tmp_path: pathlib.Path) -> None:
    whole = trainer()
    whole.fit(loader(**STAYING), epochs=2)
    cut = trainer(checkpoint=tmp_path)
    cut.fit(loader(**STAYING), steps=steps)
    resumed = trainer(checkpoint=tmp_path).resume()
    resumed.fit(loader(**STAYING), epochs=2)
    assert cut.model.seen + resumed.model.seen == whole.model.seen


@pytest.mark.parametrize("steps", [3, EPOCH + 3])
def test_a_second_run_over_workers_that_stay_has_every_example_once(steps: int) -> None:
    made, batches = trainer(), loader(**STAYING)
    made.fit(batches, steps=steps)
    made.fit(batches, epochs=1 + steps // EPOCH)
    assert sorted(made.model.seen[-32:]) == list(range(32))
    whole = trainer()
    whole.fit(loader(**STAYING), epochs=1 + steps // EPOCH)
    assert made.model.seen == whole.model.seen


def test_workers_of_the_validation_that_stay_leave_the_training_as_it_was(tmp_path: pathlib.Path) -> None:
    whole = trainer()
    whole.fit(loader(), loader(**STAYING), epochs=3)
    cut = trainer(checkpoint=tmp_path)
    cut.fit(loader(), loader(**STAYING), epochs=1)
    resumed = trainer(checkpoint=tmp_path).resume()
    resumed.fit(loader(), loader(**STAYING), epochs=3)
    assert cut.model.seen + resumed.model.seen == whole.model.seen


@pytest.mark.parametrize("settings", [Settings(), Settings(batch="auto", adjust=True, activation_mb=1.0, memory_format="auto")])
def test_a_trainer_goes_with_whoever_had_it_and_workers_that_stay_go_with_it(settings: Settings) -> None:
    trainer().fit(loader(), epochs=1)  # torch keeps what ran while it imported parts of itself
    gc.collect()
    gc.disable()  # which would find it too, but then torch waits five seconds for each of the workers
    try:
        made, batches = trainer(settings=settings), loader(**STAYING)
        made.fit(batches, epochs=2)
        (worker,) = multiprocessing.active_children()
        gone = weakref.ref(made)
        del made, batches
        assert gone() is None
        assert not worker.is_alive()
    finally:
        gc.enable()


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
    "workers": lambda: loader(dataset=Noisy(), batch_size=1, **STAYING),
    "random": lambda: loader(batch_sampler=Own(random.Random(0)), batch_size=1, shuffle=False),
    "numpy": lambda: loader(batch_sampler=Own(np.random.default_rng(0)), batch_size=1, shuffle=False),
    "philox": lambda: loader(batch_sampler=Own(np.random.Generator(np.random.Philox(1))), batch_size=1, shuffle=False),
    "mersenne": lambda: loader(batch_sampler=Own(np.random.RandomState(0)), batch_size=1, shuffle=False),
    "dataset": lambda: loader(dataset=Noisy(torch.Generator()), batch_size=1),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("steps", [EPOCH, EPOCH + 3])
def test_whoever_draws_is_kept_in_the_checkpoint(name: str, steps: int, tmp_path: pathlib.Path) -> None:
    whole = trainer(Drawing, checkpoint=tmp_path / "whole")
    whole.fit(LOADERS[name](), epochs=3)
    cut = trainer(Drawing, checkpoint=tmp_path / "cut")
    cut.fit(LOADERS[name](), steps=steps)
    resumed = trainer(Drawing, checkpoint=tmp_path / "cut").resume()
    summary = resumed.fit(LOADERS[name](), epochs=3)
    assert cut.model.seen + resumed.model.seen == whole.model.seen
    said = [note for note in summary.notes if note.startswith("The loader's workers stay, and what they draw goes on")]
    assert len(said) == (name == "workers")


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
    made = functools.partial(trainer, Drawing, checkpoint_every=100)
    assert made(checkpoint=tmp_path).fit(make(), steps=steps).notes == ()
    (note,) = made(checkpoint=tmp_path).resume().fit(make(), steps=2 * EPOCH).notes
    assert note.startswith("The loader draws from torch's random numbers in the middle of an epoch, as the model does")
    made(checkpoint=tmp_path / "early").fit(forever(), steps=3)
    assert made(checkpoint=tmp_path / "early").resume().fit(forever(), steps=5).notes == ()


def test_a_search_for_the_batch_leaves_the_loader_as_it_was() -> None:
    want = told(plain := trainer(Drawing), "loss")
    plain.fit(loader(), steps=3)
    torch.manual_seed(0)
    got, batches = told(made := trainer(Drawing), "loss"), loader(generator=(own := torch.Generator()))
    before = own.get_state()
    find_batch(made, batches, seconds=0.1, largest=4)
    assert torch.equal(own.get_state(), before)
    find_batch(made, data := loader(), seconds=0.1, largest=4)
    made.fit(data, steps=3)
    assert got == want


@pytest.mark.parametrize("options", [{}, STAYING], ids=["here", "workers"])
def test_a_dataset_is_told_the_epoch(options: dict[str, Any]) -> None:
    made = trainer()
    dataset = Stream(lambda epoch: [(torch.full((1,), 10.0 * epoch + place), torch.ones(1)) for place in range(2)])
    made.fit(DataLoader(dataset, 1, **options), epochs=3)
    assert made.model.seen == [0, 1, 10, 11, 20, 21]


class Shuffled(Sampler[int]):
    """An order per epoch, as DistributedSampler has."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch."""
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        """In order."""
        return iter(range(4))


@pytest.mark.parametrize("own", [True, False])
def test_the_sampler_within_a_batch_sampler_hears_of_epochs_once(own: bool) -> None:
    sampler, data = Shuffled(), list(range(4))
    loader: DataLoader[int]
    loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 2, False)) if own else DataLoader(data, 2, sampler=sampler)  # type: ignore[arg-type]
    feed = Feed(loader, 1, HostClock(), lambda batch: batch)
    feed.begin(0)
    feed.begin(1)
    assert sampler.epochs == [0, 1]
    Feed(
        DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 2, False)), 1, HostClock(), lambda batch: batch
    ).begin(1)  # type: ignore[arg-type]


class Told(Dataset[int]):
    """A dataset with an epoch and a generator of its own."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.generator = torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch."""
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("join", [lambda a, b: ConcatDataset([a, Subset(b, [1])]), lambda a, b: StackDataset(a=a, b=b)])
def test_the_parts_of_a_joined_dataset_hear_of_epochs_and_keep_their_generators(join: Callable[..., Dataset[Any]]) -> None:
    parts = Told(), Told()
    loader = DataLoader(join(*parts), 2)
    feed = Feed(loader, 1, HostClock(), lambda batch: batch)
    feed.begin(0)
    feed.begin(1)
    assert [part.epochs for part in parts] == [[0, 1]] * 2
    kept = list(generators_of(loader).values())
    assert all(any(part.generator is generator for generator in kept) for part in parts)
