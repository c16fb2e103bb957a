"""Data in the forms that real programs give it: nested batches, rows that are no tensors, bounded batches, endless streams."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from _labelled import X, Y, all_batches, classifier, top1
from trimtab.artifact.padded_batches import PaddedExecutable
from trimtab.backends.eager import Eager
from trimtab.backends.onnxruntime import OnnxRuntime
from trimtab.core.candidate import Candidate
from trimtab.core.capture import Call, difference
from trimtab.core.signature import Dim
from trimtab.core.workload import Evaluation, Workload
from trimtab.data.batches import Batch
from trimtab.data.splits import Splits, split
from trimtab.errors import InputError, UsageError, WorkloadError
from trimtab.evaluation.prepared_workload import fresh_inputs, prepare
from trimtab.evaluation.reference import predict, reference_of
from trimtab.tensors.structure import flatten

Pair = collections.namedtuple("Pair", ["label", "text"])  # noqa: PYI024


class Sum(nn.Module):
    """Two inputs, the second of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner(input_ids if attention_mask is None else input_ids * attention_mask)


def workload(data: Any, **more: Any) -> Workload:
    options = {"inputs": torch.randn(1, 4)} | more
    return Workload(model=Sum(), evaluation=Evaluation(data=data, score=top1), **options)


def parts(splits: Splits) -> list[Batch]:
    return [*splits.selection, *splits.test]


TARGETS = {
    "texts": lambda label, text: {"label": label, "text": text, "source": "web"},
    "texts as a loader gives them": lambda label, text: [label, tuple(text)],
    "named": lambda label, text: Pair(label, text),
    "several texts each": lambda label, text: {"label": label, "text": [text, text, text]},
}


@pytest.mark.parametrize("form", TARGETS)
def test_rows_of_targets_stay_with_their_inputs_whatever_they_are(form: str) -> None:
    x, batches = torch.arange(44.0)[:, None].expand(44, 4).contiguous(), []
    for some in x.split(10):
        label, text = some[:, 0].long(), [str(int(row[0])) for row in some]
        batches.append((some, TARGETS[form](label, text)))
    found = parts(split(workload(batches)))
    assert sum(batch.rows for batch in found) == 35
    for batch in found:
        want = batch.inputs[:, 0].tolist()
        by_name = isinstance(batch.target, dict)
        label, text = (batch.target["label"], batch.target["text"]) if by_name else batch.target
        assert label.tolist() == want
        assert type(batch.target) is type(batches[0][1])
        for column in text if isinstance(text[0], (list, tuple)) else [text]:
            assert list(map(float, column)) == want


@pytest.mark.parametrize("target", [lambda y: {"label": y, "what": object()}, lambda y: {"label": y, "what": [["a"] * 5] * 5}])
def test_a_batch_with_something_that_may_or_may_not_be_rows_stays_whole(target: Any) -> None:
    batches = [(torch.randn(5, 4), target(torch.zeros(5, dtype=torch.long))) for _ in range(12)]
    assert {batch.rows for batch in parts(split(workload(batches)))} == {0}
    assert {len(batch.inputs) for batch in parts(split(workload(batches)))} == {5}


def test_batches_with_other_constants_are_not_joined() -> None:
    batches = [(torch.randn(4, 4), {"label": torch.zeros(4), "source": source}) for source in "ab" * 10]
    kinds = {"a": 0, "b": 0}
    for batch in parts(split(workload(batches))):
        kinds[batch.target["source"]] += batch.rows
    assert sum(kinds.values()) == 64
    assert min(kinds.values()) > 10


@pytest.mark.parametrize(
    "inputs",
    [
        lambda x: {"input_ids": x, "attention_mask": x},
        lambda x: (x, x),
        lambda x: x.numpy(),
        lambda x: {"input_ids": {"deep": [x.numpy()]}},
    ],
)
def test_max_examples_counts_examples_in_whatever_they_lie(inputs: Any) -> None:
    read = []

    def endless() -> Any:
        while True:
            read.append(1)
            yield inputs(torch.randn(10, 4)), torch.zeros(10)

    evaluation = Evaluation(data=endless(), score=top1, max_examples=60)
    splits = split(Workload(model=Sum(), inputs=torch.randn(1, 4), evaluation=evaluation))
    assert len(read) == 6
    assert sum(splits.examples().values()) == 60


def test_an_item_of_a_run_is_one_example_however_long_it_is() -> None:
    data = [(torch.randn(100, 4), torch.zeros(1)) for _ in range(12)]
    evaluation = Evaluation(data=data, score=lambda o, t: t == 0, run=lambda model, x: model(x)[:1], max_examples=50)
    assert sum(split(Workload(model=Sum(), inputs=torch.randn(1, 4), evaluation=evaluation)).examples().values()) == 12


@pytest.mark.parametrize(
    "item",
    [lambda: "clip.wav", lambda: (torch.randn(7, 4), 16000), lambda: ("clip.wav", torch.randn(1, 4)), lambda: {"path": "x"}],
)
def test_fresh_inputs_are_resampled_where_items_are_no_inputs_of_the_model(item: Any) -> None:
    def run(model: Any, item: Any) -> torch.Tensor:
        return model(torch.ones(1, 4), torch.ones(1, 4))

    x = torch.randn(1, 4), torch.randn(1, 4)
    data = [(item(), torch.zeros(1, dtype=torch.long)) for _ in range(12)]
    evaluation = Evaluation(data=data, score=top1, run=run)
    for calibration in (None, [x]):  # with calibration of its own the example's form is known, that of the items is not
        stated = Workload(model=Sum(), inputs=x, evaluation=evaluation, calibration=calibration, dynamic={})
        found = fresh_inputs(prepare(stated))
        assert [arg.shape for arg in found.args] == [(1, 4), (1, 4)]
        assert set(found.args[0].flatten().tolist()) <= set(x[0].flatten().tolist())


@pytest.mark.parametrize("form", ["dataset", "tensors", "batches"])
def test_batches_keep_within_what_the_workload_states(form: str) -> None:
    x, y = torch.randn(200, 4), torch.zeros(200, dtype=torch.long)
    batches = list(zip(x.split(50), y.split(50), strict=True))
    data = {"dataset": TensorDataset(x, y), "tensors": (x, y), "batches": batches}[form]
    stated = workload(data, dynamic={"input_ids": {0: Dim("batch", max=16)}}, calibration=x[:40])
    subject = prepare(stated)
    found = [*subject.splits.calibration, *parts(subject.splits)]
    assert max(batch.rows for batch in found) == 16
    assert sum(batch.rows for batch in found) == 240
    executable = OnnxRuntime().compile(subject.candidate)
    outputs = predict(PaddedExecutable(executable, subject.candidate.signature), subject.splits.test, stated.evaluation)
    assert [len(output) for output in outputs] == [batch.rows for batch in subject.splits.test]


@pytest.mark.parametrize(("least", "most"), [(1, 6), (3, 6), (2, None)])
@pytest.mark.parametrize("backend", [Eager(), Eager(grad_mode="no_grad"), OnnxRuntime()])
def test_an_executable_is_fitted_to_any_batch(backend: Any, least: int, most: int | None) -> None:
    model = Sum().eval()
    dims = {name: {0: Dim("batch", least, most)} for name in ("input_ids", "attention_mask")}
    candidate = Candidate.of(model, (torch.randn(4, 4), torch.randn(4, 4)), dynamic=dims)
    fitted = PaddedExecutable(backend.compile(candidate), candidate.signature)
    for rows in (1, 2, 5, 6, 7, 13):
        a, b = torch.randn(rows, 4), torch.randn(rows, 4)
        assert torch.allclose(fitted(a, attention_mask=b), model(a, b), atol=1e-5), rows
    if isinstance(backend, OnnxRuntime):
        with pytest.raises(InputError, match="'batch' is 9 in one input and 8 in 'attention_mask'|this was built for"):
            fitted(torch.randn(9, 4), torch.randn(8, 4))
    else:
        assert len(fitted(torch.randn(4, 4))) == 4, "eager takes what the module takes"


def test_keyword_inputs_of_the_data_may_come_in_any_order() -> None:
    x = torch.randn(40, 4)
    batches = [({"attention_mask": x[i : i + 8], "input_ids": x[i : i + 8]}, torch.zeros(8)) for i in range(0, 40, 8)]
    example = {"input_ids": x[:1], "attention_mask": x[:1]}
    for inputs in (example, (x[:1], x[:1]), Call((x[:1],), {"attention_mask": x[:1]})):
        subject = prepare(workload(batches, inputs=inputs))
        assert [spec.shape for spec in subject.candidate.signature.inputs] == [("batch", 4)] * 2
        assert [row.shape[1] for row in subject.candidate.flat_calibration()[0]] == [4, 4]
        assert fresh_inputs(subject) is not subject.candidate
    with pytest.raises(UsageError, match="attention_mask is given in call 1 and missing in call 2"):
        prepare(workload([({"input_ids": x[:8]}, torch.zeros(8))] * 5, inputs=example))


def test_a_difference_always_has_a_place() -> None:
    one, two = ({"a": torch.ones(1), "b": torch.ones(1)}, {"b": torch.ones(1), "a": torch.ones(1)})
    assert difference(flatten(((), one))[1], flatten(((), two))[1], 1, 2) == (
        "the call is a dict with a, b in call 1 and a dict with b, a in call 2"
    )
    assert difference(flatten(((one,), {}))[1], flatten(((two,), {}))[1], 1, 2) == (
        "argument 0 is a dict with a, b in call 1 and a dict with b, a in call 2"
    )
    assert difference(flatten(((Pair(1, 2),), {}))[1], flatten((((1, 2),), {}))[1], 1, 2) == (
        "argument 0 is a Pair with label, text in call 1 and a tuple of 2 in call 2"
    )


def test_arrays_are_tensors_wherever_they_lie() -> None:
    batches = [({"input_ids": np.ones((6, 4), np.float32)}, Pair(np.zeros(6), None)) for _ in range(8)]
    found = parts(split(workload(batches)))
    assert all(isinstance(batch.target, Pair) and isinstance(batch.target.label, torch.Tensor) for batch in found)
    assert sum(batch.rows for batch in found) == 38


@dataclasses.dataclass
class Counted(Dataset[Any]):
    n: int
    item: Callable[[int], Any]
    read: int = 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        self.read += 1
        return self.item(i)


def test_calibration_is_drawn_from_the_whole_of_a_dataset_and_no_more_than_that_is_read() -> None:
    data = Counted(5000, lambda i: torch.full((8,), float(i // 500)))
    subject = prepare(Workload(model=nn.Linear(8, 2).eval(), inputs=X[:1], calibration=data))
    assert {float(value) for batch in all_batches(subject) for value in batch.inputs[:, 0]} == set(map(float, range(10)))
    assert data.read < 260
    assert "The calibration data has 5000 examples; 256 of them, drawn at random, are used." in subject.notes


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(torch.ones(8))


def test_endless_calibration_ends_and_labels_in_it_are_refused_at_once() -> None:
    subject = prepare(Workload(model=nn.Linear(8, 2).eval(), inputs=X[:1], calibration=Endless()))
    assert sum(batch.rows for batch in all_batches(subject)) == 256
    data = Counted(5000, lambda i: (X[i % 120], i % 2))
    with pytest.raises(UsageError, match="made of pairs, of which the first half .* Give the inputs without labels"):
        prepare(Workload(model=nn.Linear(8, 2).eval(), inputs=X[:1], calibration=data))
    assert data.read == 1


NAMES = np.array(["neg", "pos"])
UNKNOWN = torch.where(torch.arange(120) % 3 == 0, torch.nan, Y.float())


@pytest.mark.parametrize(
    ("data", "score"),
    [
        ((X, UNKNOWN), lambda o, t: -(o[:, 0] - t).abs().nan_to_num()),
        ([(X[:60], Y[:60].tolist()), (X[60:], Y[60:].tolist())], top1),
        ((X, Y.tolist()), top1),
        (({"input": X}, Y), top1),
        ((X.numpy(), Y.numpy()), top1),
        ([(X.numpy()[:, ::-1], Y.numpy().astype(">i8"))], top1),
        ([(X.numpy(), Y.numpy().astype(object))], top1),
        ([(X, NAMES[Y.numpy()])], lambda o, t: torch.tensor([NAMES[int(k)] == name for k, name in zip(o.argmax(1), t)])),  # noqa: B905
    ],
    ids=["unknown", "lists", "list", "dict", "arrays", "reversed", "objects", "texts"],
)
def test_labelled_data_of_many_kinds(data: Any, score: Any) -> None:
    judged = Evaluation(data=data, score=score)
    subject = prepare(Workload(model=nn.Linear(8, 2).eval(), inputs=X[:1], evaluation=judged))
    assert subject.splits.examples() == {"calibration": 24, "selection": 48, "test": 48}
    assert reference_of(subject.model, subject.splits.test, judged).scores.n == 48


def test_masks_of_infinity_are_inputs_and_ragged_examples_need_a_collate_fn() -> None:
    class Masked(nn.Linear):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return super().forward(x * torch.softmax(mask, -1))

    mask = torch.zeros(120, 8)
    mask[:, 6:] = -torch.inf
    assert prepare(classifier([((X, mask), Y)], model=Masked(8, 2).eval(), inputs=(X[:1], mask[:1])))
    with pytest.raises(UsageError, match=r"cannot be put together into batches: .* Give a DataLoader with your own collate_fn"):
        prepare(classifier(Counted(40, lambda i: (torch.ones(3 + i % 5), i % 2))))


def test_methods_of_inputs_do_not_cross() -> None:
    @dataclasses.dataclass
    class Halves:
        x: torch.Tensor
        y: torch.Tensor

        def joined(self) -> torch.Tensor:
            return torch.cat([self.x, self.y], 1)

    class Joining(nn.Linear):
        def forward(self, pair: Any) -> torch.Tensor:
            return super().forward(pair.joined())

    with pytest.raises(WorkloadError, match="uses methods of `Halves`, which do not cross .* Pass its tensors"):
        prepare(Workload(model=Joining(8, 2).eval(), inputs=(Halves(X[:1, :4], X[:1, 4:]),)))


class Endlessly(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat((X, Y))


@pytest.mark.parametrize(
    ("data", "first"),
    [
        ([(X, Y)] * 3, "1 of 3 items"),
        (DataLoader(TensorDataset(X, Y), batch_size=30), "2 of 4 items"),
        (DataLoader(Endlessly(), batch_size=None), "1 items"),
        (TensorDataset(X, Y), None),
        ([(X[:50], Y[:50])], None),
    ],
    ids=["list", "loader", "endless", "drawn at random", "all"],
)
def test_where_only_the_first_of_the_labelled_data_are_read_a_note_says_so(data: Any, first: str | None) -> None:
    judged = Evaluation(data=data, score=top1, max_examples=60)
    notes = prepare(Workload(model=nn.Linear(8, 2).eval(), inputs=X[:1], evaluation=judged)).notes
    said = f"The first {first} of the evaluation data are used, as max_examples=60 says. If they are sorted, give them in "
    expected = [] if first is None else [said + "random order."]
    assert [note for note in notes if note.startswith("The first")] == expected


class Streamed(IterableDataset[Any]):
    def __init__(self, *columns: torch.Tensor) -> None:
        self.columns = columns

    def __iter__(self) -> Iterator[Any]:
        return iter(TensorDataset(*self.columns)) if len(self.columns) > 1 else iter(self.columns[0])


class Counting(Streamed):
    def __len__(self) -> int:
        return len(self.columns[0])


def rows(subject: Any) -> set[tuple[float, ...]]:
    return {tuple(row.tolist()) for batch in all_batches(subject) for row in batch.call[0][0]}


@pytest.mark.parametrize("form", [Streamed, Counting])
@pytest.mark.parametrize("most", [4096, 50])
def test_streams_give_examples_as_a_dataset_does(form: Any, most: int) -> None:
    judged = Evaluation(data=form(X, Y), score=top1, max_examples=most)
    subject = prepare(Workload(model=nn.Linear(8, 2).eval(), inputs=X[:1], evaluation=judged))
    assert rows(subject) == {tuple(row.tolist()) for row in X[:most]}
    assert all(batch.rows for batch in all_batches(subject))
    said = [note for note in subject.notes if note.startswith("The first")]
    given = "50 of 120" if form is Counting else "50"
    assert [note.partition(" items")[0] for note in said] == ([f"The first {given}"] if most == 50 else [])
    each = Evaluation(data=form(X, Y), score=lambda o, t: o[:1, 0], run=lambda model, x: model(x[None]))
    assert len(all_batches(prepare(Workload(model=nn.Linear(8, 2).eval(), inputs=X[:1], evaluation=each)))) == 120


@pytest.mark.parametrize("form", [Streamed, Counting])
def test_streams_of_inputs_are_calibrated_on(form: Any) -> None:
    many = X.repeat(3, 1)
    subject = prepare(Workload(model=nn.Linear(8, 2).eval(), inputs=X[:1], calibration=form(many)))
    assert sum(batch.rows for batch in all_batches(subject)) == 256
    said = "The calibration data has 360 items; the first 256 are used."
    assert (said in subject.notes) == (form is Counting)


def test_calibration_from_a_loader_of_unknown_length() -> None:
    loader = DataLoader(Endless(), batch_size=32)
    subject = prepare(Workload(model=nn.Linear(8, 2).eval(), inputs=X[:1], calibration=loader))
    assert sum(batch.rows for batch in all_batches(subject)) == 256


@pytest.mark.parametrize("where", ["evaluation", "calibration"])
def test_a_loader_that_shuffles_is_read_in_one_order(where: str) -> None:
    """``DataLoader(shuffle=True)`` is what everybody has; each process of a study reads it, and must see the same data."""
    rows = torch.arange(64.0).view(64, 1)
    labelled = DataLoader(TensorDataset(rows, torch.arange(64)), batch_size=8, shuffle=True)
    evaluation = Evaluation(data=labelled, score=lambda output, target: output[:, 0] > 0)
    given: dict[str, Any] = {"evaluation": evaluation, "calibration": DataLoader(rows, batch_size=8, shuffle=True)}  # type: ignore[arg-type]
    workload = Workload(model=nn.Linear(1, 1).eval(), inputs=rows[:1], **{where: given[where]})

    def read() -> tuple[list[torch.Tensor], tuple[str, ...]]:
        found = split(workload)
        return [
            leaf for batch in (*found.calibration, *found.selection, *found.test) for leaf in flatten(batch.call, "x")[0]
        ], found.notes

    (first, notes), (second, _) = read(), read()
    assert all(map(torch.equal, first, second))
    assert sorted(torch.cat(first).flatten().tolist()) == rows.flatten().tolist()
    assert any(note.startswith(f"The DataLoader of the {where} data shuffles") for note in notes)


IMAGE = type("Image", (), {"__module__": "PIL.Image"})
"""Stands for PIL's class, because Pillow may be missing."""


class Photos(Dataset[Any]):
    """Pairs of an image, as PIL reads it, and a label."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return IMAGE(), index % 2


@pytest.mark.parametrize("form", [Photos, lambda: DataLoader(Photos(), 4), lambda: [Photos()[i] for i in range(24)]])
def test_images_that_are_no_tensors_are_answered_with_the_transform(form: Callable[[], Any]) -> None:
    """As a dataset, behind a loader, and in a list."""
    with pytest.raises(UsageError, match=r"evaluation data holds PIL images.*transform=transforms\.ToTensor\(\)"):
        split(workload(form()))


def test_a_loader_in_place_of_the_inputs_is_answered_with_its_first_batch() -> None:
    """Inputs are what one call takes."""
    loader = DataLoader(TensorDataset(X, Y), batch_size=8)
    forms = {"inputs=next(iter(loader))[0][:1]": loader, "inputs=next(loader)[0][:1]": iter(loader)}
    for fix, form in (forms | {"inputs=dataset[0][0][None]": loader.dataset}).items():
        with pytest.raises(UsageError, match="which yields many examples") as raised:
            workload([], inputs=form)
        assert str(raised.value).endswith(f"{fix}.")
