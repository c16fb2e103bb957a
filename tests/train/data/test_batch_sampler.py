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

from _runs import COUNTED, DATA, EPOCH, STAYING, Drawing, Stream, loader, told, trainer
from trimtab import DataSettings, MemorySettings, Settings
from trimtab.errors import UsageError, WorkloadError
from trimtab.train.autotune.batch_size import find_batch
from trimtab.train.checkpoint.checkpoints import Checkpoints
from trimtab.train.data.loader import Loader
from trimtab.train.data.micro_batches import MicroBatcher
from trimtab.train.data.peek import first_batches
from trimtab.train.runtime.random_generators import generators_of
from trimtab.train.runtime.step_clock import HostClock

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


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(
            adjust=True, memory_format="auto", data=DataSettings(micro_batch="auto"), memory=MemorySettings(activation_mb=1.0)
        ),
    ],
)
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


class Mixed(Sampler[list[int]]):
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
    "workers": lambda: loader(dataset=Noisy(), batch_size=1, num_workers=1),
    "random": lambda: loader(batch_sampler=Mixed(random.Random(0)), batch_size=1, shuffle=False),
    "numpy": lambda: loader(batch_sampler=Mixed(np.random.default_rng(0)), batch_size=1, shuffle=False),
    "philox": lambda: loader(batch_sampler=Mixed(np.random.Generator(np.random.Philox(1))), batch_size=1, shuffle=False),
    "mersenne": lambda: loader(batch_sampler=Mixed(np.random.RandomState(0)), batch_size=1, shuffle=False),
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
    assert resumed.fit(LOADERS[name](), epochs=3).notes == ()
    assert cut.model.seen + resumed.model.seen == whole.model.seen


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


class Placed:
    """Keeps its own position in numbers that go on from epoch to epoch."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.number, self.left, self.fails_at = 0, 0, fails_at

    def __len__(self) -> int:
        return EPOCH

    def __iter__(self) -> Iterator[Any]:
        self.left = self.left or EPOCH
        while self.left:
            if self.number == self.fails_at:
                raise OSError("The network is down.")
            self.number, self.left = self.number + 1, self.left - 1
            yield torch.full((1, 1), float(self.number)), torch.ones(1, 1)

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "left": self.left}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.number, self.left = state_dict["number"], state_dict["left"]


class Own(DataLoader[Any]):
    """A DataLoader with a position, of which this one makes nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("again", ["resume", "second fit"])
@pytest.mark.parametrize("steps", [1, 4, EPOCH, EPOCH + 3])
@pytest.mark.parametrize("validated", [False, True])
def test_a_loader_that_keeps_its_position_goes_on_from_it(
    again: str, steps: int, validated: bool, tmp_path: pathlib.Path
) -> None:
    held_out = list(loader()) if validated else None
    want = told(whole := trainer(Drawing), "loss")
    whole.fit(Placed(), held_out, epochs=3)
    assert whole.model.seen == list(range(1, 3 * EPOCH + 1))
    batches, got = Placed(), told(cut := trainer(Drawing, checkpoint=tmp_path), "loss")
    cut.fit(batches, held_out, steps=steps)
    seen = cut.model.seen[:]
    if again == "resume":
        batches, cut = Placed(), trainer(Drawing, checkpoint=tmp_path).resume()
        rest = told(cut, "loss")
    else:
        cut.model.seen.clear()
        rest = []
    cut.fit(batches, held_out, epochs=3)
    assert seen + cut.model.seen == whole.model.seen
    assert got + rest == want


def test_a_position_within_an_update_is_not_saved(tmp_path: pathlib.Path) -> None:
    made = functools.partial(trainer, settings=Settings(data=DataSettings(accumulate=2)), checkpoint=tmp_path)
    for fails_at, place in ((5, None), (4, {"batch": 4, "state": {"number": 4, "left": 4}})):
        first = made(checkpoint=tmp_path / str(fails_at))
        with pytest.raises(WorkloadError, match=r"The network is down\."):
            first.fit(Placed(fails_at), epochs=1)
        assert Checkpoints(tmp_path / str(fails_at)).load()["loader"] == [place]
        resumed = made(checkpoint=tmp_path / str(fails_at)).resume()
        resumed.fit(Placed(), epochs=1)
        assert resumed.model.seen[-4:] == [5, 6, 7, 8]


def test_a_position_is_taken_up_before_a_validation_that_is_due(tmp_path: pathlib.Path) -> None:
    class Broken(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            raise OSError("The network is down.")

    with pytest.raises(WorkloadError, match=r"The network is down\."):
        trainer(checkpoint=tmp_path).fit(Placed(), Broken(loader()), epochs=2)
    resumed = trainer(checkpoint=tmp_path).resume()
    assert resumed.position.due
    resumed.fit(Placed(), list(loader()), epochs=2)
    assert resumed.model.seen == list(range(EPOCH + 1, 2 * EPOCH + 1))


def test_looking_at_batches_leaves_the_position() -> None:
    batches = Placed()
    first, again = first_batches(batches, 2)
    assert [batch[0].item() for batch in (*first, *again)] == [1, 2, *range(1, EPOCH + 1)]


def test_a_position_that_no_checkpoint_holds_is_refused_after_the_first_update(tmp_path: pathlib.Path) -> None:
    class Strange(Placed):
        def state_dict(self) -> dict[str, Any]:
            return {"lock": object()}

    made = trainer(checkpoint=tmp_path)
    with pytest.raises(UsageError, match=r"The state of the loader cannot be saved\. A builtins\.object cannot be kept"):
        made.fit(Strange(), epochs=1)
    assert made.position.update == 1


WORKERS = "No checkpoint holds the random generators of the loader's worker processes: if the dataset draws from them, "
HERE = "If the loader draws from torch's own generator in the middle of an epoch, as the model does, a resumed run may "


@pytest.mark.parametrize(
    ("make", "told"),
    [
        pytest.param(lambda: loader(**STAYING), WORKERS, id="persistent workers"),
        pytest.param(lambda: Own(DATA, 4, num_workers=1), WORKERS, id="workers of a loader with a position"),
        pytest.param(forever, HERE, id="iterator"),
        pytest.param(lambda: DataLoader(Stream(buffered), 4), HERE, id="stream"),
        pytest.param(lambda: DataLoader(Stream(buffered), 4, **STAYING), None, id="workers that are told the epoch"),
        pytest.param(lambda: loader(num_workers=1), None, id="workers"),
        pytest.param(lambda: Loader(DATA, 4, workers=1), None, id="trimtab"),
        pytest.param(lambda: Placed(), None, id="position"),
    ],
)
def test_a_run_notes_once_where_a_resumed_one_may_see_something_else(
    make: Callable[[], Any], told: str | None, tmp_path: pathlib.Path
) -> None:
    made = functools.partial(trainer, Drawing, checkpoint_every=100)
    first = made(checkpoint=tmp_path).fit(make(), steps=EPOCH + 3).notes
    resumed = made(checkpoint=tmp_path).resume().fit(make(), steps=2 * EPOCH).notes
    for notes in (first, resumed):
        assert [note[: len(told or "")] for note in notes] == ([] if told is None else [told])
    assert made().fit(make(), steps=EPOCH).notes == ()


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
    feed = MicroBatcher(loader, 1, HostClock(), lambda batch: batch)
    feed.begin(0)
    feed.begin(1)
    assert sampler.epochs == [0, 1]
    MicroBatcher(
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
    feed = MicroBatcher(loader, 1, HostClock(), lambda batch: batch)
    feed.begin(0)
    feed.begin(1)
    assert [part.epochs for part in parts] == [[0, 1]] * 2
    kept = list(generators_of(loader).values())
    assert all(any(part.generator is generator for generator in kept) for part in parts)
