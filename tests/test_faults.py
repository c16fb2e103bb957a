"""Faults of a workload, a machine and a user. Each ends in the right state with a sentence, and nothing is lost."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

import trimtab
from trimtab.errors import TrimtabError, UsageError, WorkloadError
from trimtab.study.sampler import as_written
from trimtab.trial import State

HEAD = """
import ctypes, os, time, torch, trimtab
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
    def forward(self, x):
        return self.layer(x)

def data(n=240):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 8, generator=g)
    return x, (x.sum(1) > 0).long()

def top1(output, target):
    return output.argmax(1) == target

def workload(model=None, score=top1, **more):
    evaluation = trimtab.Evaluation(data=data(), score=score)
    return trimtab.Workload(name="faulty", model=model or Model, inputs=torch.randn(2, 8), evaluation=evaluation, **more)

torch.manual_seed(0)
"""


def write(folder: pathlib.Path, body: str) -> str:
    """A workload file with ``body`` below the common head; its reference."""
    path = folder / "faulty.py"
    path.write_text(HEAD + textwrap.dedent(body))
    return f"{path}:made"


def run(folder: pathlib.Path, body: str, **options):
    options = {"trials": 1, "out": folder / "run", "limits": trimtab.Limits(max_drop=0.1), "timing_seconds": 0.5} | options
    return trimtab.optimize(write(folder, body), **options)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param(
            """
            class Bad(Model):
                def forward(self, x):
                    ctypes.string_at(0)
            def made(): return workload(Bad)
            """,
            r"failed in its dry run, before the first trial. It crashed with a segmentation fault \(SIGSEGV\); its log has",
            id="segfault",
        ),
        pytest.param(
            """
            class Bad(Model):
                def forward(self, x):
                    os._exit(7)
            def made(): return workload(Bad)
            """,
            r"It exited with code 7 without a result, as if the code called os._exit or sys.exit",
            id="os._exit",
        ),
        pytest.param(
            """
            class Bad(Model):
                def forward(self, x):
                    time.sleep(3600)
            def made(): return workload(Bad)
            """,
            r"It still ran after its time limit of 12 s and was killed; see its log for where it hung",
            id="hang",
        ),
        pytest.param(
            """
            class Bad(Model):
                def forward(self, x):
                    self.kept = getattr(self, "kept", []) + [torch.ones(50_000_000)]
                    time.sleep(0.1)
                    return self.forward(x)
            def made(): return workload(Bad)
            """,
            r"It used \d+ MB, more than its memory limit of 1500 MB, and was killed",
            id="memory",
        ),
        pytest.param(
            """
            def raises(output, target): raise KeyError("label")
            def made(): return workload(score=raises)
            """,
            r"Evaluation score raised: KeyError: 'label'",
            id="score-raises",
        ),
        pytest.param(
            "def made(): return workload(score=lambda o, t: 'good')",
            r"Evaluation score returned 'good', a str; it must return a tensor with one score per example",
            id="score-string",
        ),
        pytest.param(
            "def made(): return workload(score=lambda o, t: torch.tensor(0.5))",
            r"Evaluation score returned 1 scores for a batch of \d+; it must return one per example.*use metric=... instead",
            id="score-mean",
        ),
        pytest.param(
            """
            class Bad(Model):
                def forward(self, x):
                    return self.layer(x) / 0 * 0
            def made(): return workload(Bad)
            """,
            r"The model as written gives NaN: \d+ of \d+ values of output 0 on batch 0",
            id="nan",
        ),
        pytest.param(
            """
            class Bad(Model):
                calls = 0
                def forward(self, x):
                    Bad.calls += 1
                    return self.layer(x).repeat(1, 1 + Bad.calls % 3)
            def made(): return workload(Bad)
            """,
            r"gives outputs of .* and then of .* for the same input|axes for one size|output 'output'|different",
            id="shapes",
        ),
        pytest.param(
            """
            class Bad(Model):
                def forward(self, x):
                    return nn.functional.dropout(self.layer(x), 0.5, training=True)
            def made(): return workload(Bad)
            """,
            r"gives different values for the same input \(by up to .*\). Turn off what is random in it",
            id="random",
        ),
    ],
)
def test_a_workload_that_fails_is_said_to_fail(tmp_path, body: str, message: str) -> None:
    limits = {"trial_seconds": 12} if "3600" in body else {"worker_memory_mb": 1500} if "50_000_000" in body else {}
    with pytest.raises(WorkloadError, match=message):
        run(tmp_path, body, **limits)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            """
            class Plain(nn.Module):
                def forward(self, x):
                    return torch.stack([x.sum(1) * -1, x.sum(1)], 1)
            def made(): return workload(Plain)
            """,
            id="no-parameters",
        ),
        pytest.param("def made(): return workload(Model().train())", id="training-mode"),
        pytest.param(
            """
            class Unused(Model):
                def forward(self, x, y=None):
                    return self.layer(x)
            def made():
                batch = lambda x: (x, torch.zeros(len(x), 3))
                x, t = data()
                evaluation = trimtab.Evaluation(data=[(batch(a), b) for a, b in zip(x.split(20), t.split(20))], score=top1)
                return trimtab.Workload(name="faulty", model=Unused, inputs=batch(torch.randn(2, 8)), evaluation=evaluation)
            """,
            id="unused-input",
        ),
        pytest.param(
            """
            class Shared(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.a = nn.Linear(8, 8)
                    self.b = nn.Linear(8, 8)
                    self.b.weight = self.a.weight
                def forward(self, x):
                    return self.b(self.a(x))[:, :2]
            def made(): return workload(Shared)
            """,
            id="shared-weights",
        ),
    ],
)
def test_an_odd_workload_works(tmp_path, body: str) -> None:
    result = run(tmp_path, body, trials=2)
    states = {str(trial.recipe): (trial.state, trial.reason) for trial in result.trials}
    assert result.status in ("improved", "kept_original"), states
    assert result.best is not None
    assert result.best.artifact is not None, result.best.trial.notes
    assert result.trials[0].state is State.COMPLETE


def test_control_flow_on_data_is_caught_by_parity_or_refused(tmp_path) -> None:
    body = """
    class Branches(Model):
        def forward(self, x):
            if x.sum() > 0:
                return self.layer(x)
            return -2 * self.layer(x)
    def made(): return workload(Branches)
    """
    result = run(tmp_path, body, trials=6)
    for trial in result.trials:
        if trial.state is State.COMPLETE:
            assert trial.parity is not None
            assert trial.parity.ok, trial
        else:
            assert trial.reason, trial
    assert {trial.recipe.backend.name for trial in result.trials if trial.state is State.COMPLETE} >= {"eager"}


def test_a_recipe_that_crashes_its_process_loses_nothing(tmp_path) -> None:
    body = """
    class Crashes(Model):
        def forward(self, x):
            if torch.jit.is_tracing() or torch.compiler.is_compiling():
                os.abort()
            return self.layer(x)
    def made(): return workload(Crashes)
    """
    result = run(tmp_path, body, trials=7)
    failed = [trial for trial in result.trials if trial.state is State.FAILED]
    assert failed
    assert all(trial.reason == "It aborted (SIGABRT); its log has the stack." for trial in failed), failed
    assert all((tmp_path / "run" / str(trial.log)).read_text() for trial in failed)
    assert result.status in ("kept_original", "improved")


def test_a_second_run_repeats_nothing_and_another_study_is_refused(tmp_path) -> None:
    reference = write(tmp_path, "def made(): return workload()")
    options = {"out": tmp_path / "run", "limits": trimtab.Limits(max_drop=0.1), "timing_seconds": 0.5}
    first = trimtab.optimize(reference, trials=2, **options)
    second = trimtab.optimize(reference, trials=1, **options)
    hashes = [trial.recipe.hash for trial in second.trials]
    assert len(hashes) == len(set(hashes)) > len(first.trials)
    assert [t.recipe for t in second.trials[: len(first.trials)]] == [t.recipe for t in first.trials]
    with pytest.raises(UsageError, match="was made for another objective: 'latency' there, 'throughput' now"):
        trimtab.optimize(reference, objective="throughput", **options)
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


def test_impossible_limits_get_an_answer(tmp_path) -> None:
    result = run(tmp_path, "def made(): return workload()", trials=3, limits=trimtab.Limits(max_drop=0.1, latency_ms=1e-6))
    assert result.status == "limits_not_met"
    assert result.best is None
    assert "Nothing meets latency 1e-06 ms. The nearest is" in result.sentence
    assert "The latency limit is what binds" in result.sentence


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


def workers() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if "trimtab.study.worker" in (p.info["cmdline"] or [])]


def workers_that_stay() -> list[psutil.Process]:
    """Workers that are still there after a while: the system takes a moment to end a process that was killed."""
    deadline = time.monotonic() + 10
    while workers() and time.monotonic() < deadline:
        time.sleep(0.1)
    return workers()


def test_kill_9_leaves_no_worker_and_the_same_command_goes_on(tmp_path) -> None:
    body = "def made(): return workload()"
    process = command(tmp_path, body)
    wait_for(process, "trial 2")
    assert workers()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert workers_that_stay() == []
    before = trimtab.optimize(write(tmp_path, body), out=tmp_path / "run", trials=1, limits=trimtab.Limits(max_drop=0.1))
    hashes = [trial.recipe.hash for trial in before.trials]
    assert len(hashes) == len(set(hashes)) >= 3
    assert before.trials[0].recipe == as_written()


def test_ctrl_c_ends_with_the_best_so_far_and_twice_at_once(tmp_path) -> None:
    body = "def made(): return workload()"
    process = command(tmp_path, body)
    wait_for(process, "trial 2")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert "interrupted: finishing with the best so far; press Ctrl-C again to stop at once" in output
    assert "as_written" in output
    assert "artifact:" in output
    again = command(tmp_path, body)
    wait_for(again, "trial 3")
    again.send_signal(signal.SIGINT)
    wait_for(again, "interrupted")
    again.send_signal(signal.SIGINT)
    output, _ = again.communicate(timeout=30)
    assert again.returncode == 130
    assert "interrupted; what was finished is kept, and the same command goes on from it" in output
    assert workers_that_stay() == []


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
