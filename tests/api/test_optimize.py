"""The whole of it through the real command line: optimize, report, compare, measure, verify, list, env."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

import trimtab
from _studies import data
from trimtab._internal.serialization import from_json
from trimtab.api.optimize import command_line
from trimtab.cli.main import main
from trimtab.core.measurement import Interval
from trimtab.core.trial import State
from trimtab.errors import IntegrityError, StorageError, UsageError
from trimtab.execution.fork_pool import Workers
from trimtab.execution.process import WorkerProcess
from trimtab.hardware.environment import Environment
from trimtab.study import ranking
from trimtab.study.options import Options
from trimtab.study.record import Record
from trimtab.study.run_folder import run_folder
from trimtab.study.study import Study

WORKLOAD = """
import torch, trimtab
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4)
    )

def workload():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(400, 1, 8, 8, generator=generator)
    labels = model().eval()(images).argmax(1)
    return trimtab.Workload(
        name="tiny",
        model=model,
        inputs=images[:1],
        evaluation=trimtab.Evaluation(data=(images, labels), score=lambda output, target: output.argmax(1) == target),
    )
"""
ENTRY = {"recipe", "state", "reason", "speedup", "latency_ms", "score", "drop", "size_mb", "peak_mb", "cold_s"}


def command(*arguments: str, folder: pathlib.Path, code: int = 0) -> str:
    """Standard output of a command that is run in this process, or standard error if its exit code is to be another than 0."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["trimtab", *arguments])
        patch.setattr(sys, "excepthook", sys.excepthook)  # typer sets its own
        with pytest.raises(SystemExit) as left:
            main()
    assert left.value.code == code, out.getvalue() + err.getvalue()
    return out.getvalue() if code == 0 else err.getvalue()


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> tuple[pathlib.Path, dict]:
    folder = tmp_path_factory.mktemp("study")
    (folder / "tiny.py").write_text(WORKLOAD)
    output = command(
        *("optimize", "tiny.py", "--max-drop", "5%", "--timing", "500ms", "--trials", "5", "--json"), folder=folder
    )
    return folder, json.loads(output)


def test_the_json_of_optimize_has_exactly_what_is_promised(study) -> None:
    folder, result = study
    assert set(result) == {
        *(
            "schema",
            "workload",
            "status",
            "environment",
            "conditions",
            "ladder",
            "trials",
            "best",
            "steps",
            "note",
            "untried",
            "artifact",
            "report",
            "seconds",
        )
    }
    assert result["schema"] == 1
    assert result["workload"] == "tiny"
    assert result["status"] in ("improved", "kept_original")
    assert result["conditions"]["inputs"] == "input: float32[batch=1, 1, 8, 8]"
    assert [rung["rung"] for rung in result["ladder"]] == ["as_written", "tuned", "lossless", "best"]
    for entry in (*result["ladder"], *result["trials"], result["best"]):
        assert set(entry) - {"rung"} == ENTRY
        assert set(entry["speedup"]) == {"value", "low", "high"}
        assert set(entry["latency_ms"]) == {"median", "p90"}
        assert set(entry["score"]) == {"value"}
        assert set(entry["drop"]) == {"value", "upper"}
    assert result["ladder"][0]["speedup"]["value"] == 1.0
    assert {trial["state"] for trial in result["trials"]} <= {"COMPLETE", "SKIPPED", "FAILED", "MISMATCH", "STOPPED"}
    assert all(trial["reason"] for trial in result["trials"] if trial["state"] != "COMPLETE")
    assert json.loads((folder / "runs" / "tiny" / "result.json").read_text())["status"] == result["status"]


def test_every_trial_kept_its_log_and_knows_its_figures(study) -> None:
    folder, result = study
    complete = [trial for trial in result["trials"] if trial["state"] == "COMPLETE"]
    stopped = [
        trial for trial in result["trials"] if trial["state"] == "STOPPED"
    ]  # by a first timing that neighbours disturbed
    assert len(complete) + len(stopped) >= 5
    assert len(complete) >= 3
    for trial in complete:
        assert trial["drop"]["upper"] is not None
        assert trial["cold_s"] > 0
        assert trial["size_mb"] > 0
        assert trial["peak_mb"] >= 0
    logs = list((folder / "runs" / "tiny" / "trials").glob("*/log.txt"))
    assert len(logs) >= len(complete)


def test_the_artifact_runs_alone_and_like_the_model(study) -> None:
    folder, result = study
    artifact = folder / result["artifact"]
    assert "inputs that were timed: `input: float32[batch=1, 1, 8, 8]`" in (artifact / "README.md").read_text()
    done = subprocess.run([sys.executable, "-I", str(artifact / "run.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    fast = trimtab.load(artifact)
    model = trimtab.load_workload(folder / "tiny.py").build_model().eval()
    images = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        assert np.allclose(fast(images).numpy(), model(images).numpy(), atol=0.2)
    assert not list(artifact.rglob("*.pkl"))


def test_verify_and_measure(study) -> None:
    folder, result = study
    out = command("verify", result["artifact"], "--time", "300ms", folder=folder)
    assert "files:       as written, every hash checked" in out
    assert "outputs:     within tolerance on" in out
    assert "environment: The same as where the artifact was proven." in out
    assert "x the original that travels with it (" in out
    evidence = json.loads((folder / result["artifact"] / "manifest.json").read_text())["evidence"]
    promised, travels = (from_json(Interval, evidence[name]) for name in ("speedup", "baseline_speedup"))
    assert f"; when it was written, {promised.single()} the model as written" in out
    then = re.search(r"x the model as written, which is ([\d.]+)x that original", out)
    assert (then is None) == (promised.vague or travels.vague), "what is measured here is held against it, if it is a number"
    assert then is None or float(then[1]) == pytest.approx(promised.value / travels.value, abs=0.02)
    assert out.rstrip().endswith("verified")
    timed = json.loads(command("measure", result["artifact"], "--vs", "tiny.py", "--time", "300ms", "--json", folder=folder))
    assert timed["comparison"]["ratio"]["low"] <= timed["comparison"]["ratio"]["value"] <= timed["comparison"]["ratio"]["high"]
    exclusive = command("measure", "tiny.py", "--time", "300ms", folder=folder)
    assert "noise: it measures" in exclusive


def test_optimize_writes_the_report_of_what_it_found(study: tuple[pathlib.Path, dict[str, Any]]) -> None:
    folder, result = study
    path = folder / result["report"]
    assert path.parent == folder / "runs" / "tiny"
    whole = path.read_text(encoding="utf-8")
    assert len(data(whole)["trials"]) == len(result["trials"])
    assert any("log" in trial for trial in data(whole)["trials"])
    said = re.sub(r"\s+", " ", whole.replace("&#39;", "'").replace("&#34;", '"'))
    assert " ".join(result["conditions"]["verdict"].split()) in said
    assert result["environment"]["cpu"] in said
    found = Record.read(path.parent)
    assert found.confirmation is not None
    assert str(found.confirmation.recipe) in found.tried
    assert found.started <= str(found.confirmation.measured_at)  # of one run, so by the same clock and in the same form
    assert set(found.ladder[0]["latency_ms"]) == {"median", "p90"}


def test_the_commands_render_a_real_study(study: tuple[pathlib.Path, dict[str, Any]]) -> None:
    folder, _ = study
    said = command("report", "runs/tiny", "--text", folder=folder)
    assert said.startswith("tiny: ")
    assert len(said.splitlines()) <= 40
    written = command("report", "runs/tiny", "-o", "elsewhere.html", folder=folder)
    assert (folder / written.strip()).read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "a study has nothing to be compared with but another one" in command(
        "compare", "runs/tiny", "runs/../runs/tiny", folder=folder, code=2
    )
    shutil.copytree(folder / "runs/tiny", folder / "again")
    sides = json.loads(command("compare", "runs/tiny", "again", "--json", folder=folder))
    assert sides["differences"] == []


def test_a_changed_byte_is_found(study) -> None:
    folder, result = study
    copy = trimtab.open_artifact(folder / result["artifact"]).save(folder / "copy").path
    name = next(p for p in sorted((copy / "model").rglob("*")) if p.is_file())
    data = bytearray(name.read_bytes())
    data[len(data) // 2] ^= 1
    name.write_bytes(bytes(data))
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "verify", str(copy)], capture_output=True, text=True, check=False, cwd=folder
    )
    assert done.returncode == 1
    assert "NOT verified" in done.stdout
    with pytest.raises(IntegrityError):
        trimtab.load(copy)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("optimize", "none.py"), 2, "error[usage]: There is no file 'none.py'"),
        (("optimize", "tiny.py", "--latency", "4"), 2, "error[usage]: --latency is '4': the unit is missing."),
        (
            ("optimize", "tiny.py", "--max-drop", "mlperf"),
            2,
            "error[usage]: --max-drop is 'mlperf', which is not a positive number",
        ),
        (("optimize", "tiny.py", "--objective", "joy"), 2, "Invalid value for '--objective'"),
        (("optimize", "tiny.py:other"), 2, "the file has no 'other'. It has: model, workload."),
        (("optimize", "bad.py"), 3, "error[workload]: bad.py could not be run: ZeroDivisionError: division by zero"),
        (("verify", "nowhere"), 2, "error[artifact]: There is no artifact folder 'nowhere'."),
        (("measure", "nowhere"), 2, "error[artifact]: There is no artifact folder 'nowhere'. A workload is written"),
        (("list", "wishes"), 2, "Invalid value for"),
    ],
)
def test_wrong_use_is_answered_before_anything_runs(study, arguments: tuple[str, ...], code: int, message: str) -> None:
    folder, _ = study
    (folder / "bad.py").write_text("1 / 0")
    assert message in command(*arguments, folder=folder, code=code)


def test_list_and_env(study) -> None:
    folder, _ = study
    rows = json.loads(command("list", "backends", "--json", folder=folder))
    assert [row["name"] for row in rows] == sorted(trimtab.BACKENDS)
    assert all(row["summary"] for row in rows)
    found = json.loads(command("env", "--json", folder=folder))
    assert found["fingerprint"] == trimtab.Environment.capture().fingerprint
    assert "GFLOP/s" in command("env", folder=folder)


def test_an_in_memory_model_through_the_api(tmp_path) -> None:
    inputs = torch.randn(200, 6)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    workload = trimtab.Workload(name="memory", model=model, inputs=inputs[:2], calibration=[inputs[:64], inputs[64:]])
    result = trimtab.optimize(workload, out=tmp_path / "run", trials=3, timing_seconds=0.5, note="  for the ticket ")
    assert result.best is not None
    assert result.best.artifact is not None
    saved = result.best.artifact.save(tmp_path / "out")
    fast = saved.load()
    with torch.no_grad():
        assert torch.allclose(fast(inputs[:2]), model.eval()(inputs[:2]), atol=0.05)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert "as_written" in str(result.ladder())
    assert any("No labels were given" in note for note in result.study.prepared.notes)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["note"] == "for the ticket"
    assert Record.read(tmp_path / "run").note == "for the ticket"


@pytest.mark.parametrize("verb", [trimtab.optimize, trimtab.tune])
@pytest.mark.parametrize(
    ("workload", "options", "message"),
    [
        (torch.nn.Linear(8, 2), {}, r"needs a trimtab.Workload, such as .*, or a reference .*, not a Linear"),
        (b"m.py", {}, "not a bytes"),
        ("m.py", {"worker_memory_mb": "4GB"}, "worker_memory_mb is '4GB'; it must be a plain number above zero"),
        ("m.py", {"trial_seconds": "5m"}, "trial_seconds is '5m'; it must be a plain number"),
        ("m.py", {"budget": [10]}, r"budget is \[10\]; it must be a plain number"),
        ("m.py", {"trial_seconds": math.inf}, "trial_seconds is inf; it must have an end"),
        ("m.py", {"timing_seconds": math.inf}, "timing_seconds is inf; it must have an end"),
        ("m.py", {"storage": pathlib.Path("studies.db")}, r"storage is PosixPath\(.*; give the URL of a database, such as"),
        ("m.py", {"storage": ""}, "storage is ''; give the URL of a database"),
        ("m.py", {"progress": False}, "progress is False; give a trimtab.Progress, which by itself is silent"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused(verb, workload: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        verb(workload, **options)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "7"])
def test_a_seed_that_no_sampler_takes_is_refused(seed: Any) -> None:
    with pytest.raises(UsageError, match=f"seed is {seed!r}; it must be a whole number from 0 to 4294967295"):
        trimtab.optimize("m.py", sampler="tpe", seed=seed)


def test_a_note_that_is_no_text_is_refused() -> None:
    with pytest.raises(UsageError, match="note is an int; give a text"):
        trimtab.optimize("m.py", note=5)  # type: ignore[arg-type]


def test_a_limit_of_throughput_needs_the_objective_that_measures_it() -> None:
    with pytest.raises(UsageError, match="give objective='throughput'"):
        trimtab.optimize("m.py", limits=trimtab.Limits(throughput=200))
    with pytest.raises(UsageError, match="Limits throughput=200 is for inference"):
        trimtab.tune("m.py", limits=trimtab.Limits(throughput="200/s"))  # type: ignore[arg-type]


def test_a_path_is_a_reference_and_a_name_that_is_too_long_no_folder(tmp_path) -> None:
    with pytest.raises(StorageError, match="cannot be written: File name too long; mend that or use --out"):
        trimtab.optimize(tmp_path / "m.py", out=tmp_path / ("x" * 300))


def test_a_file_s_name_that_is_no_utf_8_gives_the_run_folder_one_that_is() -> None:
    assert run_folder(os.fsdecode(b"mod\xe9l.py:made"), None) == pathlib.Path("runs/mod_l-made")
    with pytest.raises(UsageError, match=r"The name of the run folder runs/mod\?l is no UTF-8. Give another with --out"):
        run_folder("m.py", os.fsdecode(b"runs/mod\xe9l"))


def test_the_command_that_goes_on_says_limits_to_the_last_digit(tmp_path) -> None:
    limits = trimtab.Limits(latency_ms=1.2345678, size_mb=5.0)
    words = command_line("a b.py", Options(limits=limits, worker_mb=4000.0), 90, None, tmp_path)
    given = "--latency 1.2345678ms --size 5MB --budget 90s --worker-memory 4000MB"
    assert words == f"trimtab optimize 'a b.py' {given} --out {tmp_path}"


def test_an_exception_in_a_worker_is_named(tmp_path) -> None:
    outcome = WorkerProcess({"kind": "nonsense"}, tmp_path).wait(seconds=60, memory_mb=None)
    assert outcome.reason == "It raised KeyError: 'nonsense'; its log has the traceback."


def test_of_a_log_of_any_size_the_end_alone_is_read(tmp_path) -> None:
    worker = WorkerProcess({"kind": "nonsense"}, tmp_path)
    worker.wait(seconds=60, memory_mb=None)
    with (tmp_path / "log.txt").open("r+b") as log:
        log.truncate(2 << 30)  # which takes no room on the disk
        log.seek(0, os.SEEK_END)
        log.write(b"\nthe first\nthe last\n")
    tracemalloc.start()
    try:
        assert worker.log_tail(2) == "the first\nthe last"
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
    again = WorkerProcess({"kind": "nonsense"}, tmp_path)
    again.wait(seconds=60, memory_mb=None)
    assert "the last" not in again.log_tail(), "what earlier workers said is theirs"


@pytest.mark.slow
def test_time_is_kept_for_a_confirmation_only_once_there_is_something_to_confirm(tmp_path: pathlib.Path) -> None:
    (tmp_path / "tiny.py").write_text(WORKLOAD)
    with Workers() as workers:
        study = Study(str(tmp_path / "tiny.py"), tmp_path / "run", Options(timing_s=0.5), workers=workers)
        now = time.monotonic()
        # over at once, if the time for a confirmation counted from the start
        study.search(deadline=now + 3600, reserve=lambda: 7200)
        *before, last = study.trials
        eager = ranking.best_eager(study.trials)
        assert study.leader is last is not eager
        assert {trial.recipe.backend.name for trial in before if trial.state is State.COMPLETE} >= {"eager"}
        study.search(deadline=now + 3600, reserve=lambda: 7200)
        assert study.trials[-1] is last


def test_what_a_check_finds_is_said(tmp_path: pathlib.Path) -> None:
    threads = Environment.capture().usable_cores + 3
    (tmp_path / "tiny.py").write_text(WORKLOAD + f"\ntorch.set_num_threads({threads})\n")
    study = Study(str(tmp_path / "tiny.py"), tmp_path / "run", Options(timing_s=0.5))
    (finding,) = study.prepared.findings
    assert finding.rule == "oversubscription"
    assert finding.evidence["threads"] == threads
    assert finding.message in study.prepared.notes
    assert str(finding.remedy) == f"threads(count={finding.evidence['usable_cores']}) + eager"


@pytest.mark.long
def test_trials_count_recipes_besides_the_model_as_written(tmp_path) -> None:
    workload = trimtab.Workload(model=torch.nn.Linear(8, 8).eval(), inputs=torch.randn(1, 8))
    result = trimtab.optimize(workload, out=tmp_path / "run", trials=1, timing_seconds=0.2)
    assert [trial.recipe == result.study.baseline for trial in result.trials] == [True, False]
