"""What every process of a study has to find alike, inputs and data, and what may differ: rounding, calibration, test data."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn

from _labelled import X, Y, top1
from trimtab.core.capture import Call
from trimtab.core.workload import Evaluation, Workload
from trimtab.errors import WorkloadError
from trimtab.evaluation.confirm import judge
from trimtab.evaluation.evaluate import Plan, build
from trimtab.evaluation.prepared_workload import Subject, prepare
from trimtab.evaluation.reference import reference_of
from trimtab.evaluation.reproducibility import (
    TEST,
    _equal_sums,
    calibration_differs,
    check_data,
    fingerprint,
    save_sums,
    saved_test_reference,
    sums_of,
)
from trimtab.execution.jobs.inference import prepare_job, trial_job
from trimtab.study.samplers.ladder import as_written
from trimtab.train import MappedTensors

EXAMPLE = torch.ones(2, 8)


def subject(seed: int = 0, **more: Any) -> Subject:
    """Of labelled data in an order that ``seed`` draws, unless ``more`` has other data."""
    order = torch.randperm(120, generator=torch.Generator().manual_seed(seed))
    judged = Evaluation(data=more.pop("data", (X[order], Y[order])), score=top1, test=more.pop("test", None))
    return prepare(Workload(model=nn.Linear(8, 2).eval(), evaluation=judged, **{"inputs": EXAMPLE} | more))


def test_a_look_tells_drawn_values_from_rounded_ones_of_any_size_and_kind() -> None:
    large = torch.rand(300, 1000)
    kinds: list[Any] = [
        large,
        torch.rand(3, dtype=torch.float64),
        torch.rand(3, dtype=torch.complex64).conj(),
        torch.rand(7).half(),
        torch.randint(9, (40,)),
        torch.rand(40) > 0.5,
        torch.tensor([0.5, -torch.inf, torch.nan]),
    ]
    assert _equal_sums(sums_of(kinds), sums_of([kind.clone() for kind in kinds]))
    assert len(sums_of([large])) < 8, "it is small, however large the values are"
    assert _equal_sums(sums_of([large]), sums_of([large * (1 + 1e-7 * torch.randn_like(large))]))
    for kind in kinds[:4]:
        assert not _equal_sums(sums_of([kind]), sums_of([torch.rand(kind.shape).to(kind.dtype)]))
    for kind in kinds[4:]:
        assert not _equal_sums(sums_of([kind]), sums_of([kind.flip(0)]))
    assert not _equal_sums(sums_of([torch.zeros(2, 3)]), sums_of([torch.zeros(3, 2)]))
    rare = torch.zeros(60, 1000)
    assert not _equal_sums(sums_of([rare]), sums_of([rare.index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(1.0))]))


def test_a_look_sees_what_is_no_tensor_and_what_lies_deep() -> None:
    def made(text: str, number: float) -> Any:
        return [(Call((X,), {"scale": number}), {"names": [text, "b"], "mask": None})]

    assert _equal_sums(sums_of(made("a", 0.1 + 0.2)), sums_of(made("a", 0.3)))
    assert not _equal_sums(sums_of(made("a", 0.5)), sums_of(made("c", 0.5)))
    assert not _equal_sums(sums_of(made("a", 0.5)), sums_of(made("a", 0.6)))
    assert sums_of([object()]).shape == (0, 2)


class Column(nn.Module):
    """Two columns of a table: of one row, each is a single value a whole row away from the next that it does not have."""

    def forward(self, x: torch.Tensor, age: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * 2)[:, 3], (x + age[:, None])[:, 1]


def test_a_single_value_that_was_cut_from_a_column_has_bytes_too(tmp_path: pathlib.Path) -> None:
    table = torch.rand(1, 8)
    workload = Workload(model=Column(), inputs=(table, table[:, 2]), calibration=[(X[:1], X[:1, 2])])
    found = prepare(workload)
    assert found.candidate.leaves[1].stride() == (8,)
    assert fingerprint(found, reference_of(found.model, found.splits.selection, None))
    assert torch.equal(MappedTensors.write(tmp_path / "data", {"x": X[:1, 2]})["x"], X[:1, 2])


@pytest.mark.parametrize("other", ["inputs", "order", "labels"])
def test_other_inputs_or_data_than_in_the_dry_run_are_refused(other: str, tmp_path: pathlib.Path) -> None:
    changed = {"inputs": {"inputs": torch.rand(2, 8)}, "order": {"seed": 1}, "labels": {"data": (X, 1 - Y)}}[other]
    save_sums(tmp_path, subject(**{"data": (X, Y)} if other == "labels" else {}))
    message = "inputs are others each time" if other == "inputs" else "is other data each time that it is read"
    with pytest.raises(WorkloadError, match=rf"{message}.*random\.seed\(0\), np\.random\.seed\(0\), torch\.manual_seed\(0\)"):
        check_data({"reference": str(tmp_path)}, subject(**changed))


def test_calibration_and_test_data_may_be_drawn_anew(tmp_path: pathlib.Path) -> None:
    def drawn() -> Subject:
        return subject(calibration=torch.rand(40, 8), test=(torch.rand(40, 8), Y[:40]))

    job = {"reference": str(tmp_path)}
    save_sums(tmp_path, first := drawn())
    check_data(job, second := drawn())
    assert not calibration_differs(job, first)
    assert calibration_differs(job, second), "which is said where something rests on it"
    reference_of(first.model, first.splits.test, first.workload.evaluation).save(tmp_path / TEST)
    known = saved_test_reference(job, first)
    assert known is not None
    assert known.scores is not None
    assert known.scores.n == 40
    assert saved_test_reference(job, second) is None, "the original is run on them"


def test_a_trial_asks_for_the_data_of_the_dry_run_before_anything_else(tmp_path: pathlib.Path) -> None:
    class Drawn(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, i: int) -> Any:
            return X[i] + torch.from_numpy(np.random.randn(8)).float(), int(Y[i])

    workload = Workload(model=nn.Linear(8, 2).eval(), inputs=EXAMPLE, evaluation=Evaluation(data=Drawn(), score=top1))
    (tmp_path / "workload.pkl").write_bytes(cloudpickle.dumps(workload))
    job = {
        "workload": {"pickle": str(tmp_path / "workload.pkl")},
        "reference": str(tmp_path / "reference"),
        "scratch": str(tmp_path / "scratch"),
        "prepared": str(tmp_path / "prepared"),
        "recipe": as_written().to_json(),
    }
    prepare_job(job, tmp_path)
    shutil.rmtree(tmp_path / "prepared")  # as if the data were too large to keep
    with pytest.raises(WorkloadError, match="is other data each time that it is read"):
        trial_job(job, tmp_path)


def test_a_winner_is_judged_with_the_reference_of_the_dry_run() -> None:
    found, recipe = subject(), as_written()
    executable = build(recipe, found.candidate)[0]
    known = reference_of(found.model, found.splits.test, found.workload.evaluation)
    assert judge(recipe, executable, found.candidate, found, Plan(), known).ok
    other = dataclasses.replace(known, outputs=[[leaf + torch.randn_like(leaf) for leaf in leaves] for leaves in known.outputs])
    assert "On the test data: 'output' has a" in str(judge(recipe, executable, found.candidate, found, Plan(), other).reason)
