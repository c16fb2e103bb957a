"""A workload is prepared once: its data is read once, its model built twice, and what cannot be kept is named."""

from __future__ import annotations

import collections
import pathlib
import textwrap
import types
from typing import Any

import pytest
import torch
from torch import nn

import trimtab
from trimtab.errors import WorkloadError
from trimtab.evaluation.materialized import materialize, materialized
from trimtab.evaluation.prepared_workload import prepare
from trimtab.execution.fork_pool import Workers
from trimtab.execution.trial_runner import PREPARED
from trimtab.study.options import Options
from trimtab.study.study import Study

FILE = """
import pathlib, torch, trimtab
log = pathlib.Path({log!r})
def note(what):
    with log.open("a") as file: file.write(what + "\\n")
note("file")
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)
    def forward(self, x): return self.layer(x)
def data():
    note("data")
    x = torch.randn(80, 8, generator=torch.Generator().manual_seed(0))
    return x, x[:, :4].argmax(1)
def model():
    note("model")
    torch.manual_seed(0)
    return Net()
{more}
workload = trimtab.Workload(
    name="once", model=model, inputs=torch.ones(1, 8), calibration=lambda: list(torch.ones(16, 8).split(4)),
    evaluation=trimtab.Evaluation(data=data, score=lambda output, target: output.argmax(1) == target),
)
"""


def run(tmp_path: pathlib.Path, more: str = "") -> tuple[collections.Counter[str], list[str]]:
    """What a study of three recipes with its confirmation reads, and its notes."""
    log, file = tmp_path / "log.txt", tmp_path / "once.py"
    file.write_text(FILE.format(log=str(log), more=textwrap.dedent(more)))
    found = trimtab.optimize(file, trials=2, out=tmp_path / "run", timing_seconds=0.5, progress=trimtab.Progress())
    assert len(found.study.trials) == 3
    assert not (tmp_path / "run" / PREPARED).exists()
    return collections.Counter(log.read_text().split()), found.all_notes()


def test_data_is_read_once_and_the_model_built_twice_in_a_whole_study(tmp_path: pathlib.Path) -> None:
    read, notes = run(tmp_path)
    assert read == {"file": 2, "data": 1, "model": 2}
    assert not [note for note in notes if note.startswith("Every process")]


@pytest.mark.long
def test_a_model_that_cannot_be_pickled_is_built_by_every_process_and_a_note_says_why(tmp_path: pathlib.Path) -> None:
    more = """
    def __getstate__(self): raise TypeError("it holds a socket")
    Net.__getstate__ = __getstate__
    """
    read, notes = run(tmp_path, more)
    assert read["data"] == 1
    assert read["model"] > 4
    assert "Every process of the study builds the model again: it cannot be pickled (TypeError: it holds a socket)." in notes


@pytest.mark.long
def test_a_file_that_leaves_threads_behind_is_read_by_every_process_and_a_note_says_why(tmp_path: pathlib.Path) -> None:
    more = """
    import threading, time
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    time.sleep(2.1)
    """
    read, notes = run(tmp_path, more)
    assert (read["data"], read["model"]) == (1, 2)
    assert read["file"] > 4
    (note,) = (note for note in notes if "reads the workload" in note)
    assert note.startswith("Every process of the study reads the workload again, which takes ")
    assert "because reading it starts threads, which other processes would lack" in note


def test_threads_that_a_file_sets_hold_in_every_process(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "once.py"
    file.write_text(FILE.format(log=str(tmp_path / "log"), more="torch.set_num_threads(1)"))
    with Workers() as workers:
        study = Study(str(file), tmp_path / "run", Options(timing_s=0.3), workers=workers)
        study.search(most=2)
    assert study.prepared.threads == 1
    timed = [trial.comparison for trial in study.trials]
    assert [each and each.candidate.conditions["threads"] for each in timed] == [1, 1]


class Tied(nn.Module):
    """Two layers with one weight, and a buffer that is a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


def labelled(*items: Any) -> trimtab.Evaluation:
    return trimtab.Evaluation(data=list(items), score=lambda output, target: torch.ones(len(output)))


def test_what_is_read_from_disk_is_what_was_prepared(tmp_path: pathlib.Path) -> None:
    rows = torch.randn(64, 4)
    items = [(rows[i : i + 2], {"texts": [f"text {i}", "b"], "n": i}) for i in range(0, 40, 2)]
    workload = trimtab.Workload(model=Tied().eval(), inputs=rows[:2], evaluation=labelled(*items))
    subject = prepare(workload)
    assert materialize(subject, tmp_path / "prepared") == []
    found = materialized(workload, tmp_path / "prepared")
    assert found is not None
    assert found.model.one.weight is found.model.two.weight
    assert torch.equal(found.model.one.weight, subject.model.one.weight)
    assert found.candidate.signature == subject.candidate.signature
    assert [leaf.tolist() for leaf in found.candidate.leaves] == [leaf.tolist() for leaf in subject.candidate.leaves]
    for part in ("calibration", "selection", "test"):
        pairs = zip(getattr(found.splits, part), getattr(subject.splits, part), strict=True)
        assert all(torch.equal(a.inputs, b.inputs) and a.target == b.target for a, b in pairs)
    size = sum(file.stat().st_size for file in (tmp_path / "prepared").iterdir())
    assert size < 200_000, "views of one large tensor are not written with all of it"


def test_without_data_both_halves_stay_one_object(tmp_path: pathlib.Path) -> None:
    workload = trimtab.Workload(model=nn.Linear(4, 2).eval(), inputs=torch.ones(3, 4))
    subject = prepare(workload)
    assert subject.splits.test is subject.splits.selection
    materialize(subject, tmp_path / "prepared")
    found = materialized(workload, tmp_path / "prepared")
    assert found is not None
    assert found.splits.test is found.splits.selection


def test_data_larger_than_half_of_the_free_disk_is_read_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = types.SimpleNamespace(total=0, used=0, free=100)
    monkeypatch.setattr("trimtab.evaluation.materialized.shutil.disk_usage", lambda path: usage)
    workload = trimtab.Workload(model=nn.Linear(4, 2).eval(), inputs=torch.ones(3, 4))
    (note,) = materialize(prepare(workload), tmp_path / "prepared", reading_s=20.4)
    assert note == (
        "Every process of the study reads the data again (20 s each time): it has 0 MB, more than half of the 0 MB that are "
        f"free in {tmp_path / 'prepared'}. Use a run folder on a larger disk, --out FOLDER (in Python, out=...), or read fewer "
        "examples, Evaluation(max_examples=...)."
    )
    assert materialized(workload, tmp_path / "prepared") is None


def test_a_function_that_reads_data_and_raises_is_named() -> None:
    def data() -> Any:
        raise FileNotFoundError("images.npz")

    evaluation = trimtab.Evaluation(data=data, score=lambda output, target: output)
    with pytest.raises(WorkloadError, match=r"The function that reads the evaluation data raised: .*images\.npz"):
        prepare(trimtab.Workload(model=nn.Linear(4, 2), inputs=torch.ones(3, 4), evaluation=evaluation))
