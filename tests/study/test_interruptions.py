"""Studies that are stopped, killed, run again or run out of disk: each says so, and nothing is lost."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest

import trimtab
from _faulty import run, write
from _workers import that_stay, workers, workers_that_stay
from trimtab.core import search_space
from trimtab.core.trial import State, Trial
from trimtab.errors import ArtifactError, StorageError, TrimtabError, UsageError, WorkloadError
from trimtab.study.options import Options
from trimtab.study.samplers.ladder import as_written
from trimtab.study.study import Study

QUICK = {each.name for each in search_space.backends() if each.cost == "seconds" and each.name != "eager"}
"""Runtimes that compile in seconds."""


def test_a_second_run_repeats_nothing_and_another_study_is_refused(tmp_path) -> None:
    reference = write(tmp_path, "def made(): return workload()")
    options = {"out": tmp_path / "run", "limits": trimtab.Limits(max_drop=0.1), "timing_seconds": 0.5}
    first = trimtab.optimize(reference, trials=1, **options)
    assert first.best is not None
    assert first.best.artifact is not None
    assert first.best.confirmation.parity is not None, "its files were judged on the test data"
    assert first.best.confirmation.speedup is None, "with nothing else tried, the original is not timed against itself"
    assert "timed" not in (first.best.artifact.path / "README.md").read_text()
    left = tmp_path / "run" / "scratch" / ".own-killed"  # by a worker
    left.mkdir()
    second = trimtab.optimize(reference, trials=1, **options)
    assert not left.exists()
    hashes = [trial.recipe.hash for trial in second.trials]
    assert len(hashes) == len(set(hashes)) > len(first.trials)
    assert [t.recipe for t in second.trials[: len(first.trials)]] == [t.recipe for t in first.trials]
    with pytest.raises(UsageError, match="was made for another objective: 'latency' there, 'throughput' now"):
        trimtab.optimize(reference, objective="throughput", **options)
    slower = write(
        tmp_path, "Model.forward = lambda self, x: (time.sleep(0.02), self.layer(x))[1]\ndef made(): return workload()"
    )
    with pytest.raises(UsageError, match=r"was made for other code \(changed since: faulty\), whose figures may not hold"):
        trimtab.optimize(slower, **options)
    other = write(tmp_path, "torch.manual_seed(1)\ndef made(): return workload()")
    with pytest.raises(UsageError, match="was made for another workload"):
        trimtab.optimize(other, **options)


def test_fresh_forgets_a_study_and_nothing_else(tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="holds 'thesis.txt', which no study made. Use another --out"):
        run(tmp_path, "def made(): return workload()", fresh=True)
    assert (tmp_path / "run" / "thesis.txt").exists()
    (tmp_path / "run" / "thesis.txt").unlink()
    (tmp_path / "run" / "study.db").write_text("not a database")
    assert run(tmp_path, "def made(): return workload()", fresh=True).trials


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ("hello {", {}),
        ("def made(): return workload(score=lambda o, t: 1 / 0)", {}),
        ("def made(): return workload()", {"storage": "sqlite:////no/such/folder/study.db"}),
    ],
)
def test_fresh_forgets_nothing_where_the_new_study_cannot_begin(body: str, options: dict[str, str], tmp_path) -> None:
    kept = {
        "study.db": "trials",
        "workload.json": "whose",
        "artifact/manifest.json": "hours of work",
        "record.json": '{"workload": "net"}',
        "net-report.html": "the verdict",
    }
    for name, text in kept.items():
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text(text)
    with pytest.raises(TrimtabError) as caught:
        run(tmp_path, body, fresh=True, **options)
    assert isinstance(caught.value, StorageError if options else WorkloadError)
    assert {name: (tmp_path / "run" / name).read_text() for name in kept} == kept
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == {".lock", "prepare", "study.db", "workload.json", "artifact", "record.json", "net-report.html"}


@pytest.mark.long
def test_studies_in_one_database_are_not_in_each_other_s_way(tmp_path) -> None:
    """Their names are those of workloads, and people call theirs alike."""
    reference, shared = write(tmp_path, "def made(): return workload()"), f"sqlite:///{tmp_path}/shared.db"

    def study(folder: str, **options: Any) -> Study:
        return Study(reference, tmp_path / folder, Options(**options))

    first = study("one", storage=shared)
    kept = first.tell(Trial(recipe=as_written(), state=State.FAILED, reason="It was slow.", ended_by="time", limit=600.0))
    assert study("two", storage=shared, objective="size", fresh=True).trials == []
    assert study("one", storage=shared, trial_s=600.0).trials == [kept]
    assert study("one", storage=shared, trial_s=900.0).trials == []


def test_impossible_limits_get_an_answer(tmp_path) -> None:
    result = run(tmp_path, "def made(): return workload()", trials=1, limits=trimtab.Limits(max_drop=0.1, latency_ms=1e-6))
    assert result.status == "limits_not_met"
    assert result.best is None
    assert result.sentence.startswith("Nothing but the original was tried. Its latency of ")
    assert "is above the limit of 1e-06 ms." in result.sentence


def command(folder: pathlib.Path, body: str, *options: str) -> subprocess.Popen[str]:
    where = str(folder / "run")
    arguments = ["optimize", write(folder, body), "--out", where, "--max-drop", "10%", "--timing", "500ms", *options]
    return subprocess.Popen(
        [sys.executable, "-m", "trimtab", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(process: subprocess.Popen[str], word: str) -> list[str]:
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if word in line:
            return lines
    raise AssertionError(f"{word!r} never came:\n{''.join(lines)}")


def test_kill_9_leaves_no_worker_and_the_same_command_goes_on(tmp_path) -> None:
    body = "def made(): return workload()"
    process = command(tmp_path, body)
    wait_for(process, "trial 2")
    assert workers(tmp_path)
    family = psutil.Process(process.pid).children(recursive=True)  # those that others are forked from, too
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert that_stay(family) == []
    assert workers_that_stay(tmp_path) == []
    options = {"limits": trimtab.Limits(max_drop=0.1), "timing_seconds": 0.5}
    before = trimtab.optimize(write(tmp_path, body), out=tmp_path / "run", trials=1, **options)
    hashes = [trial.recipe.hash for trial in before.trials]
    assert len(hashes) == len(set(hashes)) >= 3
    assert before.trials[0].recipe == as_written()


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounting a small tmpfs needs root on Linux")
def test_a_full_disk_is_said_to_be_full(tmp_path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("this system does not let us mount a tmpfs")
    try:
        reference = write(tmp_path, "def made(): return workload()")
        options = {"out": disk / "run", "trials": 1, "limits": trimtab.Limits(max_drop=0.1), "timing_seconds": 0.5}
        first = trimtab.optimize(reference, **options)
        free = shutil.disk_usage(disk).free
        (disk / "ballast").write_bytes(b"x" * max(free - 8192, 0))
        with pytest.raises(TrimtabError, match=r"disk .*is full|disk is full"):
            trimtab.optimize(reference, **options)
        (disk / "ballast").unlink()
        again = trimtab.optimize(reference, **options)
        assert [t.recipe for t in again.trials][: len(first.trials)] == [t.recipe for t in first.trials]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_what_is_not_an_artifact_in_its_place_is_said_before_the_search(tmp_path) -> None:
    mine, left = tmp_path / "run" / "artifact" / "notes.txt", tmp_path / "run" / ".artifact.abc123.tmp"
    mine.parent.mkdir(parents=True)
    mine.write_text("years of work")
    (left / "new").mkdir(parents=True)
    with pytest.raises(ArtifactError, match="artifact exists and is no artifact. Choose another folder or empty it"):
        run(tmp_path, "def made(): return workload()")
    assert not (tmp_path / "run" / "record.json").exists()
    assert mine.read_text() == "years of work"
    assert not left.exists(), "of a run that was killed while it wrote"


@pytest.mark.long
def test_an_artifact_that_cannot_be_written_is_not_held_against_the_winner(tmp_path) -> None:
    body = f"""
    os.makedirs({str(tmp_path / "run" / "artifact")!r}, exist_ok=True)
    open({str(tmp_path / "run" / "artifact" / "notes.txt")!r}, "w").close()
    def made(): return workload()
    """
    with pytest.raises(StorageError, match="artifact exists and is no artifact"):
        run(tmp_path, body)


@pytest.mark.long
def test_a_conversion_that_takes_long_leaves_the_other_runtimes_their_time(tmp_path) -> None:
    """Its trial ends before the budget does, and the same command tries it again."""
    hung = tmp_path / "hung"
    hung.touch()
    body = f"""
    def forward(self, x):
        while torch.onnx.is_in_onnx_export() and os.path.exists({str(hung)!r}):
            time.sleep(0.1)
        return self.layer(x)
    Model.forward = forward
    def made(): return workload()
    """
    options = {"budget": "1m", "trials": len(QUICK) + 1}
    first = {trial.recipe.backend.name: trial for trial in run(tmp_path, body, **options).trials if trial.stage == "lossless"}
    assert {name for name, trial in first.items() if trial.speedup is not None} == QUICK - {"onnxruntime"}
    stopped = first["onnxruntime"]
    assert (stopped.state, stopped.ended_by) == (State.STOPPED, "time")
    assert str(stopped.reason).startswith("Rule 'share': it still ran after ")
    hung.unlink()
    again = run(tmp_path, body, **options | {"trials": 1}).trials
    assert again[-1].recipe == stopped.recipe
    assert again[-1].speedup is not None
    assert len(again) == len(QUICK) + 2, "its last trial counts"
