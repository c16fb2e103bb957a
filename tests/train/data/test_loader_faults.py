"""Bad data: what a Loader says of it, and when."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from _places import ROOT
from trimtab.errors import StorageError, UsageError, WorkloadError
from trimtab.train.data.collate import Collate
from trimtab.train.data.loader import Loader
from trimtab.train.data.memory_mapped import HEADER, MappedTensors


class Faulty(Dataset[Any]):
    """Fails at one example."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 12

    def __getitem__(self, place: int) -> Any:
        if place == 7 and self.fault == "raise":
            raise KeyError("no such file")
        if place == 7 and self.fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if place == 7 and self.fault == "interrupt":  # which ends a worker with a batch on its way
            raise KeyboardInterrupt
        return {"image": torch.zeros(3, 4, 5 if place == 7 and self.fault == "shape" else 4), "label": place}


class Stream(IterableDataset[int]):
    """Has no places."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


X = torch.zeros(6, 2)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([],), {}, "The dataset is empty"),
        ((torch.empty(0, 3),), {}, "The dataset is empty"),
        ((X, 0), {}, "batch is 0; it must be a whole number of at least 1"),
        ((X, 2.5), {}, "batch is 2.5"),
        ((X,), {"workers": -1}, "workers is -1"),
        ((X,), {"seed": -1}, "seed is -1"),
        (((X, X[:4]),), {}, "The columns of the dataset differ in length (0: 6, 1: 4)"),
        (({"x": X, "labels": [1, 2]},), {}, "differ in length (x: 6, labels: 2)"),
        ((X,), {"lengths": [1, 2]}, "lengths has shape (2,), but the dataset has 6 examples"),
        ((X,), {"lengths": [1.5] * 6}, "lengths are of type float64"),
        ((X,), {"lengths": [1, 2, 3, -4, 5, 6]}, "lengths[3] is -4"),
        ((X,), {"lengths": [1, 2, 30, 4, 5, 6], "tokens": 20}, "Example 2 has a length of 30, more than a whole batch"),
        ((X,), {"tokens": 20}, "tokens=... needs lengths=..."),
        ((X, 8), {"drop_last": True}, "6 examples cannot make a batch of 8"),
        ((X,), {"rank": 2, "size": 2}, "rank is 2, but with size=2 ranks go from 0 to 1"),
        ((Stream(),), {}, "The dataset is a Stream, which cannot be read by place"),
        ((7,), {}, "The dataset is an int, which cannot be read by place"),
        ((X,), {"collate": 3}, "collate is an int"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused_at_once(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Loader(*arguments, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "raise",
            "The dataset raised on example 7: KeyError: 'no such file' (tests/train/data/test_loader_faults.py, line 36)",
        ),
        ("shape", "Examples at 'image' cannot be joined to a batch: their shapes are (3, 4, 4), (3, 4, 5)"),
    ],
)
def test_the_example_and_the_place_are_named(fault: str, message: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    loader = Loader(Faulty(fault), 4, shuffle=False, workers=workers)
    with pytest.raises(WorkloadError) as caught:
        list(loader)
    assert message in str(caught.value)
    if workers:
        assert "test_loader_faults.py" in caught.value.__notes__[0] or fault == "shape"
        assert "Traceback" in caught.value.__notes__[0]


@pytest.mark.parametrize("fault", ["die", "interrupt"])
def test_a_worker_that_has_ended_is_told_of_and_replaced(fault: str) -> None:
    data = Faulty(fault)
    loader = Loader(data, 4, shuffle=False, workers=1)
    with pytest.raises(WorkloadError, match="A process that reads data died: .*give fewer workers \\(now 1\\)"):
        list(loader)
    data.fault = ""
    loader.seek(0, 0)
    assert [batch["label"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


SMALL = """
import resource, torch
from torch.utils.data import Dataset, get_worker_info
from trimtab.train.data.loader import Loader
class Small(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, place):
        assert get_worker_info() is not None
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))  # which holds for shared memory too
        return {"rows": [torch.zeros(1000)]}
list(Loader(Small(), 4, workers=1))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs shared memory that a limit holds for")
def test_too_little_shared_memory_is_said_and_not_waited_for() -> None:
    done = subprocess.run([sys.executable, "-c", SMALL], capture_output=True, text=True, timeout=120, check=False)
    assert "WorkloadError: A batch cannot be handed over: unable to" in done.stderr
    assert "(/dev/shm) is full" in done.stderr


class Unpicklable(Dataset[Any]):
    """Its examples hold something that no worker can send."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 4

    def __getitem__(self, place: int) -> Any:
        return {"x": torch.zeros(2), "extra": self.make()}


def first(examples: list[Any]) -> Any:
    """A collate function that keeps whatever the examples hold."""
    return {"x": torch.stack([example["x"] for example in examples]), "extra": examples[0]["extra"]}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: (place for place in range(3)), "A batch holds a generator, which a worker cannot send"),
        (lambda: lambda: 3, "A batch holds a function, which a worker cannot send"),
        (threading.Lock, "A batch holds a lock, which a worker cannot send"),
        (lambda: torch.ones(2, requires_grad=True) * 2, "A batch holds a Tensor, which a worker cannot send"),
    ],
    ids=["generator", "function", "lock", "gradients"],
)
def test_a_batch_that_cannot_be_pickled_is_an_error_and_not_waited_for(make: Callable[[], Any], message: str) -> None:
    data = Unpicklable(make)
    loader = Loader(data, 2, workers=1, collate=first)
    with pytest.raises(WorkloadError, match=message) as caught:
        list(loader)
    assert "or read in this process with workers=0" in str(caught.value)
    assert len(list(Loader(data, 2, workers=0, collate=first))) == 2
    data.make = dict
    assert [batch["extra"] for batch in loader] == [{}, {}]


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([{"a": 1}, {"b": 1}], "different keys: the first has ['a'], that at place 1 ['b']"),
        ([{"m": {"a": 1}}, {"m": 3}], "Examples of one batch at 'm' have different keys"),
        ([(1, 2), (1, 2, 3)], "have different numbers of items (2, 3)"),
        ([torch.zeros(()), torch.zeros(1)], "their shapes are (), (1,)"),
        ([torch.zeros(2, 3), torch.zeros(2)], "their shapes are (2,), (2, 3)"),
        ([(1, 2), (None, 2)], "Examples at '0' are of different types (NoneType, int)"),
        ([{"x": [[1, 2], [3]]}] * 2, "An example at 'x', a list, cannot become a tensor"),
    ],
)
def test_what_cannot_be_joined_is_named(examples: list[Any], message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        Collate()(examples)
    assert message in str(caught.value)


def test_mapped_tensors_say_what_is_wrong(tmp_path: pathlib.Path) -> None:
    with pytest.raises(StorageError, match="holds no tensors.json"):
        MappedTensors(tmp_path)
    folder = tmp_path / "data"
    for arrays, message in (
        ({}, "nothing to write"),
        ({"../x": X}, "is no name"),
        ({"x": 3}, "x is an int"),
        ({"x": []}, "x has no parts"),
        ({"x": [X, X[:, :1]]}, "Parts of x differ: rows of shape \\(2,\\), torch.float32, and of \\(1,\\)"),
        ({"x": ["a"]}, "x has a part that is no array"),
    ):
        with pytest.raises(UsageError, match=message):
            MappedTensors.write(folder, arrays)
        assert list(tmp_path.iterdir()) == []
    MappedTensors.write(folder, {"x": X})
    with pytest.raises(UsageError, match="exists already"):
        MappedTensors.write(folder, {"x": X})
    with (folder / "x.bin").open("ab") as file:
        file.write(b"more")
    with pytest.raises(StorageError, match=r"x\.bin has 52 bytes instead of 48"):
        MappedTensors(folder)
    header = (folder / HEADER).read_text(encoding="utf-8")
    (folder / HEADER).write_text(header.replace("x.bin", "../x.bin"), encoding="utf-8")
    with pytest.raises(StorageError, match="which is no tensor beside it"):
        MappedTensors(folder)
    (folder / HEADER).write_text("{}", encoding="utf-8")
    with pytest.raises(StorageError, match="cannot be read: KeyError"):
        MappedTensors(folder)


def test_a_mask_of_nothing_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"There is no 'input_ids' to make the mask 'mask' for; the examples have ids\."):
        Collate(mask="mask")([{"ids": [1, 2]}, {"ids": [3]}])


def test_a_mask_is_made_of_what_lies_deeper() -> None:
    pair = {"first": {"input_ids": [1, 2]}, "rating": 0.5}, {"first": {"input_ids": [3]}, "rating": 0.1}
    assert Collate(mask="mask")(pair)["first"]["mask"].tolist() == [[1, 1], [1, 0]]
