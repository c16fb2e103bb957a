"""Loaders: the order of batches, what is read, how lengths are bucketed, and that workers change nothing."""

from __future__ import annotations

import collections
import doctest
import functools
import multiprocessing
import pathlib
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

from trimtab import DataSettings, Settings, Trainer
from trimtab.errors import UsageError
from trimtab.train import Collate, Loader, MappedTensors
from trimtab.train.data.loader_position import is_seekable
from trimtab.train.data.readers import Columns, RowSubset, source_of
from trimtab.train.distributed.data_sharding import share

X, Y = torch.arange(60.0).reshape(20, 3), torch.arange(20)
LENGTHS = np.random.default_rng(0).lognormal(4, 0.8, 400).astype(int) + 1


def test_the_example_in_the_docstring_runs() -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(Loader, globs={"torch": torch, "Loader": Loader})
    assert doctest.DocTestRunner().run(example) == (0, 5)


class Augmented(Dataset[Any]):
    """Draws from all three generators."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, place: int) -> tuple[torch.Tensor, float, int]:
        return X[place] + torch.rand(3), float(np.random.rand()), random.randrange(10**6)


class Many(Dataset[Any]):
    """Is asked for lists of examples only."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, place: int) -> Any:
        raise AssertionError("one by one")

    def __getitems__(self, places: list[int]) -> Any:
        return [{"x": X[place], "name": f"no {place}"} for place in places]


class Pair(NamedTuple):
    """A named tuple of columns."""

    x: torch.Tensor
    y: torch.Tensor


def flat(batch: Any) -> list[torch.Tensor]:
    return [torch.as_tensor(item) for item in (batch.values() if isinstance(batch, dict) else batch)]


def same(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(
        all(torch.equal(a, b) for a, b in zip(flat(p), flat(q), strict=True)) for p, q in zip(one, other, strict=True)
    )


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 5), st.booleans(), st.booleans(), st.integers(0, 3), st.booleans())
def test_every_rank_has_as_many_batches_and_no_example_is_had_twice(
    count: int, batch: int, ranks: int, shuffle: bool, drop_last: bool, epoch: int, bucketed: bool
) -> None:
    if drop_last and count < batch * ranks:
        return
    lengths = LENGTHS[:count] if bucketed else None
    loaders = [
        Loader(torch.arange(count), batch, shuffle=shuffle, drop_last=drop_last, lengths=lengths, rank=rank, size=ranks)
        for rank in range(ranks)
    ]
    for loader in loaders:
        loader.seek(epoch, 0)
    batches = [list(loader) for loader in loaders]
    assert len({len(own) for own in batches} | {len(loader) for loader in loaders}) == 1
    seen = collections.Counter(int(x) for own in batches for each in own for x in each)
    assert all(1 <= len(each) <= batch for own in batches for each in own)
    if drop_last:
        assert len(seen) == count // (batch * ranks) * batch * ranks
        assert set(seen.values()) == {1}
    else:
        assert set(seen) == set(range(count))
        assert seen.total() - count < ranks


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(0, 3), st.booleans(), st.sampled_from([None, 5]), st.sampled_from([1, 8]))
def test_a_padded_batch_keeps_the_budget_of_tokens(
    ranks: int, epoch: int, shuffle: bool, batch: int | None, whole: int
) -> None:
    texts = [torch.arange(length) for length in LENGTHS]
    seen: list[int] = []
    steps = set()
    for rank in range(ranks):
        collate = Collate(multiple=whole, pad=-1)
        loader = Loader(
            texts, batch, shuffle=shuffle, lengths=len, tokens=2048, collate=collate, rank=rank, size=ranks, seed=epoch
        )
        loader.seek(epoch, 0)
        batches = list(loader)
        steps |= {len(batches), len(loader)}
        assert all(each.numel() <= 2048 and len(each) <= (batch or 10**6) for each in batches)
        seen += [int((row >= 0).sum()) for each in batches for row in each]
    assert sorted(seen) == sorted(LENGTHS.tolist())
    assert len(steps) == 1


def test_buckets_waste_little_and_are_mixed_anew() -> None:
    loader = Loader([torch.full((n,), place + 1) for place, n in enumerate(LENGTHS)], lengths=LENGTHS, tokens=2048)
    epochs = [list(loader) for _ in range(2)]
    who = [{tuple(sorted(batch.amax(1).tolist())) for batch in epoch} for epoch in epochs]
    assert [len(each) for each in who] == [len(loader)] * 2
    assert len(who[0] & who[1]) < len(loader) / 2
    assert LENGTHS.sum() / sum(batch.numel() for batch in epochs[0]) > 0.85
    widths = [batch.shape[1] for batch in epochs[0]]
    assert widths != sorted(widths)


def test_epochs_differ_and_repeat() -> None:
    loader, again = Loader(Y, 4), Loader(Y, 4)
    first, second = torch.cat(list(loader)), torch.cat(list(loader))
    assert not torch.equal(first, second)
    assert torch.equal(torch.cat(list(again)), first)
    again.seek(1, 0)
    assert torch.equal(torch.cat(list(again)), second)
    assert not torch.equal(torch.cat(list(Loader(Y, 4, seed=1))), first)
    assert torch.equal(torch.cat(list(Loader(Y, 4, shuffle=False))), Y)


@pytest.mark.parametrize("data", [Augmented(), (X, Y), {"x": X.numpy(), "y": Y}], ids=["items", "tuple", "mapping"])
def test_workers_read_the_same_and_from_anywhere(data: Any) -> None:
    here, elsewhere = Loader(data, 3), Loader(data, 3, workers=2)
    assert is_seekable(here)
    before = torch.get_rng_state()
    epochs = [list(here), list(here)]
    assert same(list(elsewhere), epochs[0])
    assert torch.equal(before, torch.get_rng_state())
    assert same(list(elsewhere), epochs[1])  # by the same workers
    for loader in (here, elsewhere):
        loader.seek(1, 4)
        assert same(list(loader), epochs[1][4:])
    started = iter(elsewhere)
    next(started)
    elsewhere.retune(workers=1, prefetch=1)
    elsewhere.seek(0, 2)
    assert same(list(elsewhere), epochs[0][2:])
    with pytest.raises(ValueError, match="begun anew"):
        next(started)


def test_trainers_of_several_processes_leave_a_loader_alone() -> None:
    loader = Loader(X)
    assert share(loader, "train", 1, 2, seed=0) is loader


class Once(Dataset[Any]):
    """Remembers which examples were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 20

    def __getitem__(self, place: int) -> int:
        self.read.append(place)
        return place


def test_seeking_reads_nothing_of_what_was_before() -> None:
    data = Once()
    loader = Loader(data, 4)
    loader.seek(0, 3)
    assert data.read == [int(x) for batch in loader for x in batch]
    assert len(data.read) == 8


def test_arrays_are_read_as_a_whole() -> None:
    stacked: Any = TensorDataset(X, Y)
    for data in (stacked, (X, Y), (X.numpy(), Y.numpy()), Pair(X, Y), {"x": X, "y": Y}, X):
        assert isinstance(source_of(data, None), Columns)
    for batch in Loader(Pair(X, Y), 6, shuffle=False):
        assert isinstance(batch, Pair)
        assert torch.equal(batch.x, X[batch.y])
    half, rest = random_split(stacked, [0.5, 0.5], torch.Generator().manual_seed(0))
    assert isinstance(source_of(half, None), RowSubset)
    found = [int(y) for part in (half, rest) for batch in Loader(part, 4) for y in batch[1]]
    assert sorted(found) == Y.tolist()
    assert torch.equal(next(iter(Loader(half, 4, shuffle=False)))[0], X[half.indices[:4]])
    assert [batch["name"] for batch in Loader(Many(), 10, shuffle=False)] == [
        [f"no {place}" for place in range(start, start + 10)] for start in (0, 10)
    ]
    assert torch.equal(next(iter(Loader(Subset(Many(), [3, 5]), 2, shuffle=False)))["x"], X[[3, 5]])


def test_a_batch_is_no_view_of_the_data() -> None:
    for shuffle in (True, False):
        data = torch.zeros(8, 2)
        for batch in Loader(data, 4, shuffle=shuffle):
            batch += 1
        assert not data.any()


def test_a_mapping_may_hold_lists_and_a_custom_collate_gets_examples() -> None:
    tokens = {"input_ids": [[1], [2, 3], [4, 5, 6]], "labels": [[7], [8, 9], [10, 11, 12]], "text": ["a", "b", "c"]}
    (batch,) = Loader(tokens, 3, shuffle=False)
    assert batch["input_ids"].tolist() == [[1, 0, 0], [2, 3, 0], [4, 5, 6]]
    assert batch["labels"].tolist() == [[7, -100, -100], [8, 9, -100], [10, 11, 12]]
    assert batch["text"] == ["a", "b", "c"]
    (own,) = Loader(tokens, 3, shuffle=False, collate=lambda examples: [example["text"] for example in examples])
    assert own == ["a", "b", "c"]


def test_mapped_tensors_are_shared_and_pickled_by_name(tmp_path: pathlib.Path) -> None:
    parts = (torch.full((2, 2), float(number), dtype=torch.bfloat16) for number in range(3))
    mapped = MappedTensors.write(tmp_path / "data", {"x": np.arange(12.0).reshape(6, 2), "y": parts, "none": torch.empty(6, 0)})
    assert torch.equal(mapped["x"], torch.arange(12.0, dtype=torch.float64).reshape(6, 2))
    assert mapped["y"].tolist() == [[number // 2] * 2 for number in range(6)]
    mapped["x"][0] = 99  # stays here
    assert MappedTensors(tmp_path / "data")["x"][0, 0] == 0
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_first_row, (mapped,)) == [2.0, 3.0]
    for batch in Loader(mapped, 2, workers=1):
        assert batch["y"].shape == batch["x"].shape
        assert batch["none"].shape == (2, 0)
    array = np.lib.format.open_memmap(str(tmp_path / "x.npy"), mode="w+", dtype=np.float32, shape=(5, 2))
    array[:] = 3
    array.flush()
    assert next(iter(Loader(np.load(tmp_path / "x.npy", mmap_mode="r"), 5))).tolist() == [[3.0, 3.0]] * 5


def _first_row(mapped: MappedTensors) -> list[float]:
    row: list[float] = mapped["x"][1].tolist()
    return row


def test_collate_joins_what_examples_are_made_of() -> None:
    examples = [
        {"x": torch.ones(n, 2), "a": np.arange(n), "n": n, "f": 0.5, "b": True, "s": "w", "t": (n, [torch.ones(1), None])}
        for n in (1, 3)
    ]
    batch = Collate(pad={"x": 9, "a": -1})(examples)
    assert batch["x"][0].tolist() == [[1, 1], [9, 9], [9, 9]]
    assert batch["a"].tolist() == [[0, -1, -1], [0, 1, 2]]
    assert (batch["n"].dtype, batch["f"].dtype, batch["b"].dtype) == (torch.int64, torch.float32, torch.bool)
    assert batch["s"] == ["w", "w"]
    assert batch["t"][0].tolist() == [1, 3]
    assert batch["t"][1][0].shape == (2, 1)
    assert batch["t"][1][1] == [None, None]
    assert Collate()([np.float64(1), np.float64(2)]).dtype == torch.float64
    assert Collate()([[], [1, 2]]).tolist() == [[0, 0], [1, 2]]
    assert Collate()([Pair(X[0], Y[0]), Pair(X[1], Y[1])]).x.shape == (2, 3)


def test_targets_are_padded_with_what_losses_leave_out() -> None:
    pairs = [(torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])), (torch.tensor([1]), torch.tensor([4]))]
    (batch,) = Loader(pairs, batch=2, shuffle=False)
    assert batch[0].tolist() == [[1, 2, 3], [1, 0, 0]]
    assert batch[1].tolist() == [[4, 5, 6], [4, -100, -100]]
    (columns,) = Loader({"x": [x for x, _ in pairs], "target": [y for _, y in pairs]}, batch=2, shuffle=False)
    assert torch.equal(columns["target"], batch[1])
    (named,) = Loader([{"x": x, "tags": y} for x, y in pairs], batch=2, shuffle=False)
    assert torch.equal(named["tags"], batch[1])
    for pad, want in (({1: 0}, 0), ({1: 7}, 7), ({0: 7}, -100), (9, 9), (0, -100)):
        assert Collate(pad=pad)(pairs)[1][1].tolist() == [4, want, want]
    assert Collate(pad=9)([{"labels": y} for _, y in pairs])["labels"][1].tolist() == [4, -100, -100]
    assert Collate(multiple=4)(pairs[:1] * 2)[1].tolist() == [[4, 5, 6, -100]] * 2
    for kind in (torch.float32, torch.bool, torch.uint8):
        floats = Collate()([(x, y.to(kind)) for x, y in pairs])
        assert floats[1][1, 1:].tolist() == [0, 0]
    assert Collate()([(x, x, y) for x, y in pairs])[1][1].tolist() == [1, 0, 0]
    assert Collate()([{"pair": pair} for pair in pairs])["pair"][1][1].tolist() == [4, 0, 0]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_padded_in_targets_counts_for_nothing(accumulate: int) -> None:
    random = torch.Generator().manual_seed(0)
    lengths = [5, 1, 2, 4, 3, 3, 1, 5]
    rows = [(torch.randint(9, (n,), generator=random), torch.randint(3, (n,), generator=random)) for n in lengths]
    model = nn.Sequential(nn.Embedding(9, 3), Turned())
    want = nn.functional.cross_entropy(torch.cat([model[0](x) for x, _ in rows]), torch.cat([y for _, y in rows]))
    (wanted,) = torch.autograd.grad(want, model[0].weight)
    before = model[0].weight.detach().clone()
    made = Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=functools.partial(torch.optim.SGD, lr=1.0),
        settings=Settings(data=DataSettings(accumulate=accumulate)),
        progress=False,
    )
    made.fit(Loader(rows, batch=8 // accumulate, shuffle=False), steps=1)
    torch.testing.assert_close(before - model[0].weight, wanted)


class Turned(nn.Module):
    """Classes before places, as torch's losses have them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


@pytest.mark.parametrize("side", ["right", "left"])
def test_collate_makes_masks_and_whole_lengths(side: Any) -> None:
    examples = [{"input_ids": [1] * n, "labels": [1] * n} for n in (2, 3)]
    batch = Collate(mask="attention_mask", multiple=8, side=side)(examples)
    assert {tuple(item.shape) for item in batch.values()} == {(2, 8)}
    assert torch.equal(batch["attention_mask"], batch["input_ids"])
    assert torch.equal(batch["labels"] != -100, batch["input_ids"] == 1)
    assert batch["attention_mask"][0, 0] == (side == "right")


class Decoding:
    """Counts what it decodes; an example may also be drawn."""

    def __init__(self, *, draws: bool = False) -> None:
        self.decoded, self.draws = 0, draws

    def __len__(self) -> int:
        return 10

    def __getitem__(self, place: int) -> dict[str, Any]:
        self.decoded += 1
        return {"x": torch.full((3,), float(place)) + (torch.rand(3) if self.draws else 0), "y": place}


def _noisy(example: dict[str, Any]) -> dict[str, Any]:
    example["x"] += torch.rand(3)  # in place, which the cache must not see
    return example


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("where", ["1MB", "folder", "200B"])
def test_a_cache_decodes_each_example_once_and_changes_no_batch(where: str, workers: int, tmp_path: pathlib.Path) -> None:
    place = tmp_path / "cache" if where == "folder" else where.replace("200B", "0.2kB")
    options: dict[str, Any] = {"batch": 4, "seed": 3, "transform": _noisy, "workers": workers}
    plain, dataset = Loader(Decoding(), **options), Decoding()
    cached = Loader(dataset, cache=place, **options)
    for _ in range(3):
        for one, other in zip(plain, cached, strict=True):
            assert torch.equal(one["x"], other["x"])
            assert torch.equal(one["y"], other["y"])
    if not workers:
        assert dataset.decoded == (30 - 2 * 1 if where == "200B" else 10)
    if where == "folder":
        again = Decoding()
        assert len(list(Loader(again, cache=place, batch=4))) == 3
        assert again.decoded == 0
        with pytest.raises(UsageError, match="is of a Decoding with 10 examples, and this dataset is a list with 1"):
            Loader([1], cache=place)


def test_what_cannot_be_cached_is_said(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=r"draws random numbers as it reads an example.*transform=function"):
        list(Loader(Decoding(draws=True), cache="1MB"))
    with pytest.raises(UsageError, match="cache is for a dataset that reads one example after the other"):
        Loader(torch.ones(4, 2), cache="1MB")
    with pytest.raises(UsageError, match="Example 0 cannot be cached in files: a set"):
        list(Loader([{1}], cache=tmp_path / "x", shuffle=False))
