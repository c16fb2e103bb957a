"""The words of ``trimtab tune`` and ``trimtab run``: scripts, modules, launchers and workloads."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner

from trimtab.cli import script_run, script_tune
from trimtab.cli._script import command_of, is_workload
from trimtab.cli.main import app
from trimtab.errors import UsageError


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    (tmp_path / "train.py").write_text("print('hello')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_words_are_a_script_a_launcher_or_a_workload(folder: pathlib.Path) -> None:
    assert command_of(["train.py", "--epochs", "1"], None).argv == (sys.executable, "train.py", "--epochs", "1")
    assert command_of([sys.executable, "train.py"], None).script == folder / "train.py"
    assert command_of(["--epochs", "1"], "train").argv == (sys.executable, "-m", "train", "--epochs", "1")
    assert is_workload(["train.py:workload"], None)
    assert not is_workload(["train.py"], None)
    with pytest.raises(UsageError, match="Give a script"):
        command_of([], None)


def test_run_passes_arguments_after_dashes(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Running:
        @staticmethod
        def run(command: Any, **options: Any) -> None:
            seen.update(argv=command.argv, **options)

    monkeypatch.setattr(script_run, "lazy_import", lambda name: Running)
    done = CliRunner().invoke(app, ["run", "--anyway", "train.py", "--", "--epochs", "1"])
    assert done.exit_code == 0, done.output
    assert seen == {"argv": (sys.executable, "train.py", "--epochs", "1"), "path": None, "anyway": True, "watch_s": None}


def test_tune_takes_workloads_of_training(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Api:
        @staticmethod
        def tune(workload: str, **options: Any) -> str:
            seen.update(workload=workload, **options)
            return "tuned"

    monkeypatch.setattr(script_tune, "lazy_import", lambda name: Api)
    done = CliRunner().invoke(app, ["tune", "train.py:training", "--budget", "30s"])
    assert done.exit_code == 0, done.output
    assert seen == {"workload": "train.py:training", "budget": 30.0, "out": None, "fresh": False}


SHIFTING = """
import time, torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(160):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.002 if step < 70 else 0.02)
print("end")
"""


def test_run_watches_a_long_training_and_tells_when_it_shifts(folder: pathlib.Path) -> None:
    (folder / "train.py").write_text(SHIFTING, encoding="utf-8")
    words = [sys.executable, "-m", "trimtab", "run", "--watch", "--every", "0.01s", "train.py"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "end\n"
    first, *told = done.stderr.splitlines()
    assert "there is no" in first
    assert re.search(r"^trimtab: the split of a step has shifted by step \d+: .* takes \d+%, before \d+%", told[-1])
