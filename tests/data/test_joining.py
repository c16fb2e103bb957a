"""Metrics of the whole set: what they are given, in whatever structure a model answers, and what a resample of it is."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from _labelled import X, Y, accuracy
from trimtab.core.workload import Evaluation
from trimtab.data.batches import Batch
from trimtab.data.joining import example_counts, joined
from trimtab.errors import WorkloadError
from trimtab.evaluation.reference import drop, least_drop, predict, reference_of, score
from trimtab.tensors.structure import flatten, unflatten

Named = collections.namedtuple("Named", ["logits", "hidden"])  # noqa: PYI024


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    scale: float = 2.0


@dataclasses.dataclass
class ModelOutput(collections.OrderedDict):
    """As in transformers: a dataclass, a mapping and attributes in one."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits


def recurrent(x: torch.Tensor) -> Any:
    y, (h, c) = LSTM(x)
    return y[:, -1], (h, c)


torch.manual_seed(0)
LSTM = nn.LSTM(4, 3, 2, batch_first=True).eval()
LINEAR = nn.Linear(4, 3)


def flat(x: torch.Tensor) -> torch.Tensor:
    return LINEAR(x[:, 0])


ANSWERS: dict[str, tuple[Any, Any]] = {
    "tensor": (flat, lambda out: out),
    "dict": (lambda x: {"logits": flat(x), "note": "made", "loss": None}, lambda out: out["logits"]),
    "model output": (lambda x: ModelOutput(flat(x)), lambda out: out.logits),
    "dataclass": (lambda x: Answer(flat(x)), lambda out: out.logits * out.scale),
    "named tuple": (lambda x: Named(flat(x), None), lambda out: out.logits),
    "list": (lambda x: [x[:, 0], flat(x)], lambda out: out[1]),
    "lstm": (recurrent, lambda out: out[0]),
    "scalar beside": (lambda x: (flat(x), x.mean()), lambda out: out[0]),
}


def batches() -> list[Batch]:
    x, y = torch.randn(23, 5, 4, generator=torch.Generator().manual_seed(1)), torch.arange(23) % 3
    return [Batch(x[i : i + 8], y[i : i + 8], len(x[i : i + 8])) for i in range(0, 23, 8)]


@pytest.mark.parametrize("form", ANSWERS)
def test_a_metric_is_given_the_structure_of_the_model_in_every_resample(form: str) -> None:
    model, logits = ANSWERS[form]
    seen = []

    def accuracy(outputs: Any, targets: torch.Tensor) -> float:
        seen.append((logits(outputs), targets))
        return float((seen[-1][0].argmax(1) == targets).float().mean())

    evaluation, data = Evaluation(data=[], metric=accuracy), batches()
    with torch.no_grad():
        reference = reference_of(model, data, evaluation)
        outputs = predict(model, data, evaluation)
    whole = torch.cat([logits(unflatten(*reversed(flatten(output)))) for output in outputs])
    assert reference.scores is not None
    assert reference.scores.n == 23
    assert torch.equal(seen[0][0], whole)
    found = drop(evaluation, reference, score(evaluation, outputs, data), outputs, data, 0.1)
    assert found.value == 0
    assert found.n == 23
    assert "cannot be resampled" not in found.method
    rows = {tuple(row.tolist()): int(target) for row, target in zip(whole, seen[0][1], strict=True)}
    assert len(seen) > 100
    for resampled, targets in seen[-4:]:
        assert len(resampled) == 23
        assert [rows[tuple(row.tolist())] for row in resampled] == targets.tolist(), "rows and targets stay together"


def test_what_is_not_of_the_examples_is_a_list_of_what_every_batch_has() -> None:
    values = [{"y": torch.ones(n, 2) * n, "h": torch.ones(2, n, 3), "kind": "a", "n": n} for n in (4, 3)]
    pick = joined(values, [4, 3])
    whole, some = pick(None), pick(torch.tensor([6, 0, 0]))
    assert whole["y"].shape == (7, 2)
    assert some["y"][:, 0].tolist() == [3, 4, 4]
    for found in (whole, some):
        assert [h.shape for h in found["h"]] == [(2, 4, 3), (2, 3, 3)]
        assert (found["kind"], found["n"]) == ("a", [4, 3])


def test_lists_with_an_item_for_every_example_are_strung_together() -> None:
    texts = [{"text": ["a", "b"], "boxes": [torch.ones(3, 4), torch.ones(0, 4)]}, {"text": ("c",), "boxes": [torch.ones(5, 4)]}]
    some = joined(texts, [2, 1])(torch.tensor([2, 0]))
    assert some["text"] == ["c", "a"]
    assert [len(boxes) for boxes in some["boxes"]] == [5, 3]


def test_items_that_stay_whole_are_examples_themselves_unless_their_sizes_agree() -> None:
    frames, labels = [torch.zeros(5, 3), torch.zeros(2, 3)], [torch.zeros(5), torch.zeros(2)]
    assert example_counts(frames, labels, [0, 0]) == [5, 2]
    boxes = [torch.zeros(7, 4), torch.zeros(2, 4)]
    assert example_counts(frames, boxes, [0, 0]) == [1, 1]
    assert [len(item) for item in joined(boxes, [1, 1])(torch.tensor([1, 1, 0]))] == [2, 2, 7]
    assert joined([1, 0, 2], [1, 1, 1])(torch.tensor([2, 2])).tolist() == [2, 2]
    assert joined(["x", "y"], [1, 1])(torch.tensor([1])) == ["y"]
    assert joined([torch.tensor(1.0), torch.tensor(2.0)], [1, 1])(None).tolist() == [1, 2]


def test_joined_dataclasses_and_named_tuples_keep_their_class() -> None:
    found = joined([Answer(torch.ones(2, 3)), Answer(torch.ones(1, 3))], [2, 1])(None)
    assert isinstance(found, Answer)
    assert found.logits.shape == (3, 3)
    assert (found.loss, found.scale) == (None, 2.0)
    named = joined([Named(torch.ones(2), None)] * 2, [2, 2])(torch.tensor([0]))
    assert isinstance(named, Named)


def test_other_sizes_that_differ_are_named() -> None:
    with pytest.raises(WorkloadError, match=r"cannot be joined for the metric: .*Pad them to one size, or use score=\.\.\."):
        joined([torch.ones(2, 5), torch.ones(2, 6)], [2, 2])


def test_a_score_that_works_in_place_leaves_the_reference_alone() -> None:
    def in_place(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.zero_().argmax(1) == target

    evaluation = Evaluation(data=[], score=in_place)
    with torch.no_grad():
        reference = reference_of(flat, batches(), evaluation)
        want = [flat(batch.inputs) for batch in batches()]
    assert all(np.array_equal(a, b[0]) for a, b in zip(want, reference.outputs, strict=True))


def test_a_metric_may_return_an_array_of_no_axes() -> None:
    judged = Evaluation(data=(X, Y), metric=lambda o, t: np.asarray(accuracy(o, t)))
    assert reference_of(nn.Linear(8, 2), [Batch(X, Y, 120)], judged).scores.n == 120


@pytest.mark.parametrize("kind", ["score", "metric"])
def test_what_no_loss_at_all_cannot_be_told_from_is_known(kind: str) -> None:
    def right(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return outputs.argmax(1) == targets

    judges = {"score": right, "metric": lambda *both: right(*both).float().mean()}
    judge = Evaluation(data=[], **{kind: judges[kind]})
    data = [Batch(batch.inputs, flat(batch.inputs).argmax(1), batch.rows) for batch in batches()]
    found = least_drop(judge, reference_of(flat, data, judge), data)
    assert found is not None
    assert (found.value, found.n) == (0.0, 23)
    assert 0.11 < found.upper < 0.14, "about 3/n"


def test_a_metric_that_keeps_what_it_was_asked_is_refused_before_anything_is_compared() -> None:
    """It is fed both sides of every comparison, and so in the end finds them alike."""
    right: list[float] = []

    def running(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        right.extend((outputs.argmax(1) == targets).tolist())
        return float(np.mean(right))

    with pytest.raises(WorkloadError, match=r"for the same outputs and targets\. Have it keep nothing from call to call"):
        reference_of(flat, batches(), Evaluation(data=[], metric=running))


def confirmed(model: Any, data: list[Batch], evaluation: Evaluation) -> Any:
    """The drop of answers that are the reference's own."""
    with torch.no_grad():
        reference = reference_of(model, data, evaluation)
        outputs = predict(model, data, evaluation)
    found = score(evaluation, outputs, data)
    assert found == reference.scores
    return drop(evaluation, reference, found, outputs, data, 0.1)


def test_a_score_may_write_to_its_targets() -> None:
    def right(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        target.numpy()[:] -= 1  # which torch does not count
        return output.argmax(1) == target

    data = [Batch(batch.inputs, flat(batch.inputs).argmax(1) + 1, batch.rows) for batch in batches()]
    assert confirmed(flat, data, Evaluation(data=[], score=right)).value == 0
    assert reference_of(flat, data, Evaluation(data=[], score=right)).scores.value == 1.0


def test_a_metric_may_write_to_what_is_as_long_as_it_is() -> None:
    seen: list[float] = []

    def agreement(outputs: list[torch.Tensor], targets: dict[str, list[torch.Tensor]]) -> float:
        pairs = list(zip(outputs, targets["boxes"], strict=True))
        for pair in pairs:
            for boxes in pair:
                boxes[:, 2:] += boxes[:, :2]  # corners, from their sizes
        seen.append(-float(torch.stack([(found[:-1] - wanted).abs().mean() for found, wanted in pairs]).mean()))
        return seen[-1]

    boxes = [torch.rand(count, 4, generator=torch.Generator().manual_seed(count)) for count in range(2, 14)]
    data = [Batch(item, {"boxes": item.clone()}) for item in boxes]
    lost = confirmed(lambda item: torch.cat([item, item[:1]]), data, Evaluation(data=[], metric=agreement))
    assert lost.value == 0
    assert set(seen) == {0.0}, "every resample is right too"


def test_a_metric_that_works_in_place_judges_both_sides_alike() -> None:
    def error(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return float((outputs.mul_(3).add_(1) - targets).square().mean())

    data = [Batch(batch.inputs, 3 * flat(batch.inputs).detach() + 1, batch.rows) for batch in batches()]
    lost = confirmed(flat, data, Evaluation(data=[], metric=error, higher_is_better=False))
    assert lost.value == 0


@pytest.mark.parametrize("kind", [float, bool, int, np.float32, np.bool_])
def test_of_one_example_a_score_may_be_a_plain_number(kind: Any) -> None:
    data = [Batch(batch.inputs[:1], batch.target[:1], 1) for batch in batches()]
    found = reference_of(flat, data, Evaluation(data=[], score=lambda output, target: kind(output.argmax(1) == target))).scores
    assert found is not None
    right = [float(flat(batch.inputs).argmax(1) == batch.target) for batch in data]
    assert found.each == tuple(right)


@pytest.mark.parametrize("ordered", [False, True])
def test_what_a_failure_costs_is_asked_of_the_metric(ordered: bool) -> None:
    classes = torch.arange(300) % 10
    classes = classes.sort().values if ordered else classes  # each beside others of its class
    answers = nn.functional.one_hot(classes, 10).float()
    answers[::100] = answers[::100].roll(1, 1)
    data = [Batch(answers[i : i + 50], classes[i : i + 50], 50) for i in range(0, 300, 50)]
    wrong = Evaluation(data=[], higher_is_better=False, metric=lambda o, t: float((o.argmax(1) != t).float().mean()))
    lost = confirmed(nn.Identity(), data, wrong)
    assert lost.upper >= 0.7 * 3 / 300


def test_an_item_that_is_one_example_is_what_a_metric_is_resampled_by() -> None:
    data = [Batch(torch.randn(30, 5, 4), torch.arange(30) % 3, single=True) for _ in range(6)]
    seen: list[torch.Tensor] = []

    def share(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        seen.append(targets)
        return float((outputs.argmax(1) == targets).float().mean())

    lost = confirmed(flat, data, Evaluation(data=[], metric=share))
    assert lost.n == 6
    assert lost.upper > 0.1, "of six items nobody knows much"
    assert all(torch.equal(targets.view(6, 30), (torch.arange(30) % 3).expand(6, 30)) for targets in seen), "they stay whole"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (lambda target: np.ones(()), "1 score for a batch of 120"),
        (lambda target: [[1.0] * (i + 1) for i in range(len(target))], "it must return a tensor with one score per example"),
        (lambda target: [torch.ones(i + 1) for i in range(len(target))], "it must return a tensor with one score per example"),
    ],
)
def test_scores_in_a_form_that_is_no_list_of_numbers_are_refused(found: Any, words: str) -> None:
    with pytest.raises(WorkloadError, match=f"^Evaluation score returned .*{words}"):
        reference_of(nn.Linear(8, 2), [Batch(X, Y, 120)], Evaluation(data=[], score=lambda output, target: found(target)))
