"""What a search tells while it runs: from Python, in a terminal, and where text comes from a stranger's file."""

from __future__ import annotations

import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import types

import pytest
import torch
from rich.console import Console

import trimtab
from _faulty import run, write
from trimtab.api.optimize import Interrupt
from trimtab.backends.eager import Eager
from trimtab.cli._progress import Board, Lines, Quiet
from trimtab.cli.optimize import print_result
from trimtab.core.limits import Limits
from trimtab.core.measurement import Interval
from trimtab.core.recipe import Recipe
from trimtab.core.trial import State, Trial
from trimtab.errors import WorkloadError
from trimtab.study.progress import INTERRUPTED, Printed
from trimtab.study.samplers.sampler import Ask

STRANGE = "x.cpp:100: \x1b]0;owned\x07\x1b[31m no kernel"
PLAIN = "x.cpp:100: "


class Heard(trimtab.Progress):
    """Keeps what it is told, in that order."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def remark(self, sentence: str) -> None:
        self.said.append(sentence)

    def began(self, ask: Ask, finished: int) -> None:
        self.said.append("began")


@pytest.mark.long
def test_a_search_from_python_is_seen_on_standard_error(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(tmp_path, "def made(): return workload()", budget="2m")
    out, err = capsys.readouterr()
    assert err.splitlines()[-1].endswith(f" s] {result.sentence}"), "the verdict is the last line"
    assert out == ""
    assert re.search(r"^\[ +\d+/120 s\] checking the workload with a dry run$", err, re.MULTILINE)
    assert re.search(r"^\[ +\d+/120 s\] trial 0: as_written: eager", err, re.MULTILINE)
    assert re.search(r"^ +complete 1\.00x \(1\.00 to 1\.00\), drop .* \[\d+ s\]$", err, re.MULTILINE)
    with pytest.raises(WorkloadError, match="Evaluation score returned 'good'"):
        run(tmp_path / "silent", "def made(): return workload(score=lambda o, t: 'good')", progress=trimtab.Progress())
    assert capsys.readouterr() == ("", "")


def test_the_first_ctrl_c_is_answered_once() -> None:
    stream = io.StringIO()
    interrupt = Interrupt(Printed(stream))
    interrupt._handle(signal.SIGINT, None)
    assert stream.getvalue().count(INTERRUPTED) == 1
    with pytest.raises(KeyboardInterrupt):
        interrupt._handle(signal.SIGINT, None)
    assert stream.getvalue().count(INTERRUPTED) == 1


def test_a_stream_that_nobody_reads_ends_no_search() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            tried.append(text)
            raise BrokenPipeError(32, "Broken pipe")

    tried: list[str] = []
    closed = io.StringIO()
    closed.close()
    for stream in (Gone(), closed):
        Printed(stream).stage("searching")
    assert "searching" in tried[0]


def test_what_was_assumed_is_told_before_the_search(tmp_path: pathlib.Path) -> None:
    torch.jit.save(torch.jit.trace(torch.nn.Linear(8, 4).eval(), torch.ones(2, 8)), tmp_path / "net.pt")
    progress = Heard()
    workload = trimtab.load_workload(tmp_path / "net.pt", shapes={"input": "2x8"})
    trimtab.optimize(workload, out=tmp_path / "run", trials=1, timing_seconds=0.3, progress=progress)
    before = progress.said[: progress.said.index("began")]
    assert any(sentence.startswith("The inputs are random numbers") for sentence in before)
    assert len(set(before)) == len(before)


def test_a_note_that_was_told_is_not_told_again(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Console(file=io.StringIO(), width=80)
    views = Lines(screen, None, None), Board(screen, None, None), Quiet(screen, None, None)
    for view in views:
        view.remark("The inputs are random numbers.")
    assert [len(view.remarks) for view in views] == [1, 1, 0]
    log = f"confirm/{Recipe(backend=Eager()).hash}/log.txt"
    result = types.SimpleNamespace(
        ladder=lambda: "rung  recipe",
        sentence=STRANGE,
        all_notes=lambda: ["The inputs are random numbers.", "Another."],
        best=None,
        report=None,
        study=types.SimpleNamespace(folder="runs/x", refused=[types.SimpleNamespace(recipe=Recipe(backend=Eager()), log=log)]),
        trials=[],
        seconds=1.0,
    )
    print_result(result, views[0].remarks)  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert "random" not in out
    assert "note: Another." in out
    assert "\x1b" not in out
    assert f"{PLAIN}" in out
    assert f"refused:  runs/x/{log}  (log of eager when it was measured again)" in out


def test_text_of_a_model_file_commands_no_terminal() -> None:
    trial = Trial(recipe=Recipe(backend=Eager()), state=State.FAILED, reason=STRANGE, speedup=Interval(9.0, 0.1, 50.0))
    record = types.SimpleNamespace(trials=[trial], limits=Limits(), objective="latency")
    for kind in (Lines, Board):
        screen = Console(file=io.StringIO(), width=200)
        view = kind(screen, None, None)
        view.ended(trial, record)  # type: ignore[arg-type]
        view.remark(STRANGE)
        said = screen.file.getvalue()  # type: ignore[attr-defined]
        assert not re.search(r"[\x07\x1b]", said)
        assert said.count(PLAIN) == 2
    stream = io.StringIO()
    Printed(stream).ended(trial, record)  # type: ignore[arg-type]
    assert stream.getvalue() == f"           failed unclear (0.10 to 50.00): {PLAIN}]0;owned no kernel [0 s]\n"


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_file_is_no_terminal_whatever_colours_are_asked_for(variable: str, tmp_path: pathlib.Path) -> None:
    def output(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        own = {**os.environ, variable: "1", "TERM": "xterm-256color"}
        done = subprocess.run(
            [sys.executable, "-m", "trimtab", *words], capture_output=True, text=True, timeout=200, check=False, env=own
        )
        assert done.returncode == code, done.stderr
        return done

    assert output("list", "checks").stderr == ""
    if variable == "FORCE_COLOR":
        workload = write(tmp_path, "def made(): return workload(score=lambda output, target: 'good')")
        done = output("optimize", workload, "--max-drop", "10%", "--out", str(tmp_path / "run"), code=3)
        assert "\x1b" not in done.stdout + done.stderr
        assert "checking the workload with a dry run" in done.stdout
        assert "Evaluation score returned 'good'" in done.stderr


def test_a_budget_that_what_must_be_done_exceeds_is_kept_as_well_as_can_be_and_told_of(tmp_path: pathlib.Path) -> None:
    found = run(tmp_path, "def made(): return workload()", budget=1, timing_seconds=60, trials=3)
    (trial,) = found.trials
    timing = trial.comparison
    assert timing is not None
    assert timing.candidate.n * timing.candidate.median < 5e3, "milliseconds; it was not timed for a minute"
    assert found.best is not None
    assert found.best.confirmation.ok
    assert not found.explanations
    *_, looked, took = found.study.notes
    assert looked == "Where the time goes was not looked at, as the budget was over; with a longer one the same command does."
    assert re.fullmatch(r"This took \d+ s, where the budget is 1 s: to check the workload, .* whatever the budget\.", took)
    assert took in found.record().notes
