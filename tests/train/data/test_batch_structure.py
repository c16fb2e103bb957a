"""Batches of any form: how many examples they have, how they are taken apart, joined and moved."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from _runs import settings_of
from trimtab import DataSettings, Settings, Trainer
from trimtab.errors import WorkloadError
from trimtab.tensors.batch_axis import length, uneven
from trimtab.tensors.structure import tensors_of
from trimtab.train.data.batch_structure import join, split
from trimtab.train.data.device_prefetch import mover
from trimtab.train.loss.adapter import copy_containers, examples


def detection(count: int, side: int = 4) -> Any:
    """Images and what is in them, as torchvision's references join them."""
    samples = [(torch.rand(3, side, side), {"v": torch.tensor(1.0), "boxes": torch.rand(2, 4)}) for _ in range(count)]
    return tuple(zip(*samples, strict=True))


X8, Y8 = torch.rand(8, 4), torch.rand(8)
BATCHES: list[tuple[Any, int]] = [
    (detection(10), 10),
    ((tuple(torch.rand(3, 5 + n, 5) for n in range(6)), torch.zeros(6)), 6),
    ([{"ids": torch.zeros(n)} for n in (5, 4, 3)], 3),
    (["a", "b", "c"], 3),
    (([torch.rand(3, 4, 4)] * 2, [{"boxes": torch.rand(5, 4), "labels": torch.zeros(5)}] * 2), 2),
    ({"x": np.zeros((7, 2)), "y": np.zeros(7)}, 7),
    # and what must stay as it is
    ((X8, torch.rand(8, 1)), 8),
    ((X8, torch.rand(20, 6)), 8),
    (((X8, torch.rand(8, 2)), (Y8, torch.rand(8, 3))), 8),
    ([{"x": X8}, {"y": Y8}], 8),
    ([{"x": X8}, {"x": Y8}], 8),
    (((X8[:2], X8[:2]), Y8[:2]), 2),
    ({"kind": ["a", "b"], "x": X8}, 8),
]


@pytest.mark.parametrize(("batch", "count"), BATCHES)
def test_examples_are_counted(batch: Any, count: int) -> None:
    assert examples(batch) == count


def test_lists_of_examples_are_taken_apart_and_joined() -> None:
    for count, size, want in ((10, 4, [4, 3, 3]), (4, 3, [2, 2])):
        whole = detection(count)
        parts = split(whole, size)
        assert [(len(images), len(found)) for images, found in parts] == [(n, n) for n in want]
        again = join(parts)
        assert all(one is other for one, other in zip(again[0], whole[0], strict=True))
        assert list(again[1]) == list(whole[1])
    images = [torch.rand(4, 8, 8) for _ in range(10)]
    with pytest.raises(WorkloadError, match=r"a list of 10 tensors, which may be 10 examples, or columns of 4 each; stack"):
        split(images, 2)
    with pytest.raises(WorkloadError, match="its tensors differ in their first axis"):
        split([[X8, torch.rand(20, 4)], Y8], 2)


@pytest.mark.parametrize(
    "batch",
    [torch.arange(6.0), ["a", "b", "c", "d"], [{"ids": torch.zeros(n)} for n in (5, 4, 3)]],
    ids=["tensor", "texts", "mappings"],
)
def test_a_batch_that_is_no_container_of_columns_is_taken_apart(batch: Any) -> None:
    parts = split(batch, 2)
    assert [examples(part) for part in parts] == [2] * 3 if isinstance(batch, torch.Tensor) else [2, examples(batch) - 2]
    assert str(join(parts)) == str(batch)


def test_unequal_batches_of_lists_count_by_their_examples() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.level = nn.Parameter(torch.zeros(()))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return torch.stack([(model.level - found["v"]) ** 2 for found in batch[1]]).mean()

    few = detection(2)
    many = (detection(10)[0], tuple({"v": torch.tensor(0.0), "boxes": torch.rand(1, 4)} for _ in range(10)))
    optimizer = functools.partial(torch.optim.SGD, lr=0.5)
    made = Trainer(Mean(), loss=loss, optimizer=optimizer, settings=Settings(data=DataSettings(accumulate=2)))
    assert made.fit([many, few], epochs=1).notes == ()
    assert made.model.level.item() == pytest.approx(2 / 12)


class Named(NamedTuple):
    """A batch within a batch."""

    inputs: torch.Tensor
    name: tuple[str, ...]


def test_what_is_no_tensor_stays_with_its_example() -> None:
    inputs, names = torch.arange(8.0)[:, None].expand(8, 4), [f"{i}" for i in range(8)]
    whole = {
        "inputs": inputs,
        "names": names,
        "pair": Named(inputs, tuple(names)),
        "ids": np.arange(8),
        "kind": ["a", "b"],
        "n": 3,
    }
    parts = split(whole, 3)
    assert [part["names"] for part in parts] == [names[:3], names[3:6], names[6:]]
    assert [part["pair"].name for part in parts] == [tuple(names[:3]), tuple(names[3:6]), tuple(names[6:])]
    assert [part["ids"].tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert all(part["kind"] == ["a", "b"] and part["n"] == 3 for part in parts)
    again = join(parts)
    assert again["names"] == names
    assert again["pair"].name == tuple(names)
    assert again["ids"].tolist() == list(range(8))
    assert again["kind"] == ["a", "b"]
    assert torch.equal(again["inputs"], inputs)
    assert join([["x", "y"], ["z"]]) == ["x", "y", "z"]  # no tensor at all


@dataclasses.dataclass(frozen=True)
class Labelled:
    """A batch that is a dataclass; what its class computes from what it is given is not computed again."""

    x: torch.Tensor
    y: torch.Tensor
    names: list[str]
    kind: str = "labelled"
    twice: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", self.x * 2)
        object.__setattr__(self, "twice", self.x)


def labelled(count: int = 8) -> Labelled:
    draw = torch.Generator().manual_seed(count)
    made = torch.randn(count, 4, generator=draw), torch.randint(0, 3, (count,), generator=draw)
    return Labelled(*made, [f"{place}" for place in range(count)])


def test_dataclasses_are_counted_taken_apart_joined_and_moved() -> None:
    whole = labelled()
    assert examples(whole) == 8
    assert len(tensors_of(whole)) == 3
    parts = split(whole, 3)
    assert [part.names for part in parts] == [["0", "1", "2"], ["3", "4", "5"], ["6", "7"]]
    assert torch.equal(torch.cat([part.twice for part in parts]), whole.x)
    assert {part.kind for part in parts} == {"labelled"}
    again = join(parts)
    assert isinstance(again, Labelled)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(again), tensors_of(whole), strict=True))
    assert again.names == whole.names
    moved = mover(torch.device("meta"))([whole])
    assert moved[0].x.is_meta
    assert not whole.x.is_meta
    own = copy_containers(whole)
    own.names.append("mine")
    assert len(whole.names) == 8


def test_a_list_of_dataclasses_has_an_entry_per_example() -> None:
    graphs = [labelled(count) for count in (5, 3, 4)]
    assert examples(graphs) == 3
    assert [len(part) for part in split(graphs, 2)] == [2, 1]
    assert examples((graphs, torch.zeros(3))) == 3
    plain = dataclasses.make_dataclass("Plain", ["x"])
    for count in (8, 2):
        pair = plain(torch.ones(count, 3)), plain(torch.ones(count))  # inputs and targets
        assert examples(pair) == count
        assert [(len(one.x), len(two.x)) for one, two in split(pair, count // 2)] == [(count // 2, count // 2)] * 2


@pytest.mark.parametrize("count", [8, 2])
def test_two_mappings_beside_labels_or_alone_are_the_sides_of_a_comparison(count: int) -> None:
    sides = [{"x": torch.ones(count, 3)}, {"x": torch.zeros(count, 3)}]
    assert examples({"pair": sides}) == examples((tuple(sides), torch.ones(count))) == count
    halves = split((tuple(sides), torch.ones(count)), count // 2)
    assert [(len(one["x"]), len(two["x"]), len(labels)) for (one, two), labels in halves] == [(count // 2,) * 3] * 2


def test_batches_that_are_dataclasses_are_trained_on_in_parts_as_whole() -> None:
    def loss(model: nn.Module, batch: Labelled) -> torch.Tensor:
        assert len(batch.names) == len(batch.x)
        return nn.functional.cross_entropy(model(batch.x), batch.y)

    def weight(**settings: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = functools.partial(torch.optim.SGD, lr=0.5)
        made = Trainer(model, loss=loss, optimizer=optimizer, settings=settings_of(**settings), progress=False)
        assert made.fit([labelled(8), labelled(3), labelled(6)], epochs=1).notes == ()
        return model.weight.detach()

    torch.testing.assert_close(weight(micro_batch=2), weight())
    torch.testing.assert_close(weight(accumulate=3, micro_batch=2), weight(accumulate=3, joined=True))


class Graph:
    """Moves in place, as some libraries' batches do."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> Graph:
        """Itself, there."""
        self.nodes = self.nodes.to(device)
        return self


def test_objects_that_can_move_themselves_do() -> None:
    move, graph = mover(torch.device("meta")), Graph(torch.ones(2))
    packed, moved = move([pack_sequence([torch.ones(3), torch.ones(2)]), graph])
    assert isinstance(packed, PackedSequence)
    assert packed.data.is_meta
    assert packed.batch_sizes.device == torch.device("cpu")
    assert moved.nodes.is_meta
    assert not graph.nodes.is_meta
    encoding = pytest.importorskip("transformers").BatchEncoding({"input_ids": torch.ones(2, 3)}, n_sequences=1)
    there = move(encoding)
    assert there.input_ids.is_meta
    assert there.n_sequences == 1
    assert not encoding.input_ids.is_meta


class Last(nn.Module):
    """Classifies packed sequences by the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Any) -> torch.Tensor:
        found: torch.Tensor = self.head(self.lstm(x)[1][0][-1])
        return found


def test_packed_sequences_are_one_input_and_count_as_examples() -> None:
    batch = (pack_sequence([torch.randn(4, 3), torch.randn(2, 3)]), torch.tensor([0, 1]))
    assert examples(batch) == 2
    slow = functools.partial(torch.optim.SGD, lr=1e-4)
    found = Trainer(Last(), loss=nn.CrossEntropyLoss(), optimizer=slow).fit([batch] * 3, epochs=1)
    assert found.updates == 3


def test_packed_sequences_are_neither_taken_apart_nor_joined() -> None:
    batch = {"x": pack_sequence([torch.ones(4, 3), torch.ones(2, 3), torch.ones(1, 3)]), "y": torch.arange(3)}
    with pytest.raises(WorkloadError, match=r"micro-batches of 2: it holds a packed sequence, of which torch takes no rows\."):
        split(batch, 2)
    assert split(batch, 3) == [batch]
    with pytest.raises(WorkloadError, match=r"cannot be joined with others: it holds a packed sequence.*\. Give tensors"):
        join([batch, batch])
    assert uneven({**batch, "y": torch.zeros(4)}) == "3 packed sequences, (4,)"


@pytest.mark.parametrize(
    "batch",
    [
        [torch.rand(n, 4) for n in (5, 2, 7)],
        (tuple(torch.rand(3, 5, 5) for _ in range(6)), tuple(torch.rand(n, 4) for n in range(6))),
    ],
    ids=["a list alone", "two lists"],
)
def test_lists_of_tensors_whose_number_nothing_else_confirms_are_doubted_and_not_cut(batch: Any) -> None:
    assert uneven(batch)
    with pytest.raises(WorkloadError, match="its tensors differ in their first axis"):
        split(batch, 2)


def test_batches_that_cannot_be_joined_make_the_same_update_apart() -> None:
    torch.manual_seed(0)
    inputs = [torch.randint(9, (2, length)) for length in (4, 4, 3, 4)]
    batches = [(each, torch.randint(3, (2,))) for each in inputs]

    def learnt(**settings: Any) -> list[float]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 3))
        made = settings_of(threads=1, accumulate=2, **settings)
        trainer = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.5), settings=made)
        assert trainer.fit(batches, epochs=1).updates == 2
        return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]

    assert learnt(joined=True) == pytest.approx(learnt(), rel=1e-4, abs=1e-6)
    with pytest.raises(WorkloadError, match="exact_batchnorm runs .* as one. Tensors can be joined"):
        learnt(exact_batchnorm=True)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_has_as_many_examples_as_it_has_tensors(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 5), torch.randn(3, 5)], layout=layout)
    assert length((nested, torch.zeros(2))) == length({"name": "", "x": nested}) == 2
    assert uneven((nested, torch.zeros(2))) is None
    assert "(3,)" in (uneven((nested, torch.zeros(3))) or "")


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_batches_that_torch_takes_no_rows_of_stay_whole(layout: torch.layout) -> None:
    rows = [torch.randn(n, 4) for n in (2, 5, 3, 1)]
    batch = (torch.nested.nested_tensor(rows, layout=layout), torch.randn(4, 3))
    with pytest.raises(WorkloadError, match=r"micro-batches of 2: it holds a nested tensor, of which torch takes no rows\."):
        split(batch, 2)
    with pytest.raises(WorkloadError, match="cannot be joined with others: it holds a nested tensor"):
        join([batch, batch])
    assert split(batch, 4) == [batch]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        means = torch.stack([model(row).mean(0) for row in batch[0].unbind()])
        return nn.functional.mse_loss(means, batch[1])

    made = Trainer(
        nn.Linear(4, 3), loss=loss, optimizer=torch.optim.SGD, settings=Settings(data=DataSettings(micro_batch="auto"))
    )
    summary = made.fit([batch] * 3, epochs=1)
    assert summary.settings.data.micro_batch is None
    (note,) = summary.notes
    assert note.startswith(
        "data.micro_batch=None: batches stay whole. A batch cannot be taken apart into micro-batches of 2: it holds a "
    )
    assert "of which torch takes no rows. Make the loader's batches smaller" in note


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_sparse_batches_are_taken_apart_and_joined() -> None:
    rows = torch.eye(6)
    batch = (rows.to_sparse(), torch.arange(6))
    parts = split(batch, 2)
    assert [part[0].to_dense().tolist() for part in parts] == [part.tolist() for part in rows.split(2)]
    assert torch.equal(join(parts)[0].to_dense(), rows)
    with pytest.raises(WorkloadError, match=r"it holds a tensor of the layout torch\.sparse_csr, of which"):
        split((rows.to_sparse_csr(), torch.arange(6)), 2)


def test_auto_leaves_batches_whole_whose_tensors_differ_in_their_first_axis() -> None:
    def batch(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.randn(count, 4), torch.randint(0, 3, (count,)), torch.randn(3, 2)

    def loss(model: Any, graphs: Any) -> torch.Tensor:
        nodes, places, wanted = graphs
        return (torch.zeros(3, 2).index_add(0, places, model(nodes)) - wanted).square().mean()

    torch.manual_seed(0)
    batches, models = [batch(7), batch(9)], [nn.Linear(4, 2), nn.Linear(4, 2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, size in zip(models, (None, "auto"), strict=True):
        made = Trainer(model, loss=loss, optimizer=torch.optim.SGD, settings=Settings(data=DataSettings(micro_batch=size)))  # type: ignore[arg-type]
        summary = made.fit(batches, epochs=2)
    assert summary.updates == 4
    assert made.settings.data.micro_batch is None
    assert made.notes[0].startswith(
        "data.micro_batch=None: batches stay whole. A batch cannot be taken apart into micro-batches of 4: its "
    )
    assert torch.equal(models[0].weight, models[1].weight)
