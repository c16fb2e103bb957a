"""A study on a busy machine: one thread for everything, said at the start, and kept by what goes on from it."""

from __future__ import annotations

import itertools
import pathlib

import pytest
import torch
from torch import nn

import trimtab
from trimtab.artifact.artifact import open_artifact
from trimtab.measure.host import BUSY, OtherLoad, other_load
from trimtab.study.study import Study


class Said(trimtab.Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def remark(self, sentence: str) -> None:
        self.lines.append(sentence)


def workload() -> trimtab.Workload:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).eval()
    return trimtab.Workload(model=layers, inputs=torch.randn(4, 64), name="busy")


def optimized(
    out: pathlib.Path, monkeypatch: pytest.MonkeyPatch, share: float, trials: int, later: float | None = None
) -> tuple[trimtab.Result, list[str]]:
    """A study beside processes that use ``share`` of the CPUs, and ``later`` from the second look at them on."""
    looks = itertools.chain([share], itertools.repeat(share if later is None else later))
    monkeypatch.setattr("trimtab.study.study.other_load", lambda: OtherLoad(next(looks), 2))
    said = Said()
    found = trimtab.optimize(workload(), trials=trials, out=out, timing_seconds=0.4, progress=said)
    return found, said.lines


def threads(study: Study) -> set[object]:
    return {trial.comparison.candidate.conditions["threads"] for trial in study.trials if trial.comparison is not None}


def test_everything_has_one_thread_and_the_result_says_so(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, said = optimized(tmp_path / "run", monkeypatch, 0.85, 4)
    assert said[0] == "Busy machine: other processes used 85% of these 2 CPUs, so everything is timed with one thread."
    assert threads(found.study) == {1}
    assert not [trial for trial in found.study.trials if "threads" in str(trial.recipe) and trial.state != "SKIPPED"]
    assert found.best is not None
    assert found.best.artifact is not None
    artifact = open_artifact(found.best.artifact.path)
    assert artifact.manifest.evidence["thread_limit"] == 1
    assert artifact.load().settings.threads == 1
    if found.status == "improved":
        assert ", with one thread each (" in found.sentence
    (note,) = (note for note in found.all_notes() if note.startswith("As this study began"))
    assert note.startswith("As this study began, other processes used 85% of these 2 CPUs: all of it is timed with one thread")

    # a quiet machine now; ratios must stay comparable
    again, said = optimized(tmp_path / "run", monkeypatch, 0.0, 1, later=0.9)
    assert "Busy machine now: other processes used 90% of these 2 CPUs, so figures will be wide." in said
    assert len(again.study.trials) > len(found.study.trials)
    assert threads(again.study) == {1}


@pytest.mark.long
def test_a_quiet_machine_has_all_threads_and_no_word_about_it(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, said = optimized(tmp_path / "run", monkeypatch, BUSY - 0.01, 1)
    assert threads(found.study) == {found.study.prepared.threads}
    assert not [line for line in (*said, *found.all_notes()) if "other processes" in line]


def test_what_others_use_is_a_share_of_the_cpus() -> None:
    found = other_load(0.2)
    if found is None:
        pytest.skip("This machine has no /proc/stat.")
    assert 0.0 <= found.share <= 1.0
    assert str(OtherLoad(0.5, 1)) == "other processes used 50% of this CPU"
