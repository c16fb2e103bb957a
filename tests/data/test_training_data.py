"""Examples for passes that train: where they come from, and that none of them judges."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trimtab
from trimtab.core.training_examples import TrainingExamples
from trimtab.errors import UsageError
from trimtab.evaluation.prepared_workload import Subject, prepare

ROWS, LABELS = torch.randn(600, 4), torch.randint(3, (600,))


def subject(training: Any, rows: torch.Tensor = ROWS[:200], calibration: Any = None) -> Subject:
    evaluation = trimtab.Evaluation(data=(rows, LABELS[: len(rows)]), score=lambda output, target: output.argmax(1) == target)
    given = None if training is None else trimtab.Training(data=training, loss=nn.CrossEntropyLoss())
    workload = trimtab.Workload(
        model=nn.Linear(4, 3), inputs=rows[:1], evaluation=evaluation, training=given, calibration=calibration
    )
    return prepare(workload, compress=True)


def examples(found: Subject) -> TrainingExamples:
    assert found.candidate.training is not None
    return found.candidate.training


def test_a_loader_a_list_and_a_function_give_the_same_examples() -> None:
    pairs = list(zip(ROWS[200:].split(50), LABELS[200:].split(50), strict=True))
    loader = DataLoader(TensorDataset(ROWS[200:], LABELS[200:]), 50)
    found = [examples(subject(data)) for data in (pairs, lambda: pairs, loader)]
    assert len({each.digest for each in found}) == 1
    assert found[0].examples == 360
    assert sum(len(inputs[0]) for inputs, _ in found[0].held_out) == 40
    assert all(target is not None for _, target in found[0].batches)
    other = examples(subject([(rows, labels + 1) for rows, labels in pairs]))
    assert other.digest != found[0].digest, "the labels count"


@pytest.mark.parametrize("data", [list(ROWS[200:].split(50)), DataLoader(TensorDataset(ROWS[200:]), 50)])
def test_labels_are_not_needed(data: Any) -> None:
    found = examples(subject(data))
    assert found.examples == 360
    assert {target for _, target in found.batches} == {None}


def test_names_of_a_mapping_that_the_model_does_not_take_are_left_out() -> None:
    found = examples(subject([{"input": rows, "other": rows} for rows in ROWS[200:].split(50)]))
    assert {tuple(inputs) for inputs, _ in found.batches} == {("input",)}


def test_examples_that_judge_are_left_out_and_many_are_refused() -> None:
    found = subject(list(ROWS[150:].split(50)))  # 50 of 450, of which some calibrate and do not judge
    both = next(note for note in found.notes if "left out" in note)
    judging = found.splits.selection + found.splits.test
    seen = {tuple(row.tolist()) for batch in judging for row in batch.inputs}
    kept = [row for inputs, _ in (*examples(found).batches, *examples(found).held_out) for row in inputs[0]]
    assert f"{450 - len(kept)} of the 450 examples" in both
    assert not any(tuple(row.tolist()) in seen for row in kept)
    with pytest.raises(UsageError, match="judged by what it was trained on"):
        subject(list(ROWS[:200].split(50)))


def test_without_training_data_the_calibration_inputs_are_used() -> None:
    found = subject(None, calibration=ROWS[200:400])
    assert examples(found).source == "calibration inputs"
    assert examples(found).examples == 180
    assert any("180 of the calibration inputs, without labels. So few seldom suffice" in note for note in found.notes)


def test_nothing_to_train_on_is_a_note() -> None:
    found = subject([ROWS[200:210]])
    assert found.candidate.training is None
    assert any("Nothing can be trained on: there are 10 examples in the training data" in note for note in found.notes)


def test_batches_that_the_model_does_not_take_are_refused() -> None:
    with pytest.raises(UsageError, match="Batch 0 of the training data is"):
        subject([torch.zeros(5, dtype=torch.long)])
    with pytest.raises(UsageError, match="The training data is empty"):
        subject([])


def test_a_study_that_does_not_compress_reads_nothing() -> None:
    def read() -> Any:
        raise AssertionError("read")

    workload = trimtab.Workload(model=nn.Linear(4, 3), inputs=ROWS[:1], training=trimtab.Training(data=read))
    assert prepare(workload).candidate.training is None
