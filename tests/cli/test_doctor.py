"""``trimtab doctor``: what is examined, and how its words are typed again."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from trimtab.api import doctor as api
from trimtab.cli.doctor import doctor_command, typed_words
from trimtab.errors import UsageError
from trimtab.probe.tracing import Schedule

WORKLOAD = """\
import torch
import trimtab

workload = trimtab.Workload(model=torch.nn.Linear(4, 2), inputs=torch.randn(8, 4), name="small")
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    (tmp_path / "train.py").write_text("import trimtab\nworkload = 3\n", encoding="utf-8")
    (tmp_path / "workload.py").write_text(WORKLOAD, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "module", "typed"),
    [
        (("train.py", "--epochs", "1"), None, "train.py -- --epochs 1"),
        (("train.py",), None, "train.py"),
        (("--epochs", "1"), "train", "-m train -- --epochs 1"),
        (("python", "train.py"), None, "-- python train.py"),
    ],
)
def test_the_next_command_has_the_words_as_they_are_typed(words: tuple[str, ...], module: str | None, typed: str) -> None:
    assert " ".join(typed_words(words, module)) == typed


@pytest.mark.parametrize("reference", ["workload.py", "workload.py:workload"])
def test_a_workload_becomes_a_script_that_is_removed(folder: pathlib.Path, reference: str) -> None:
    assert api.is_workload(reference)
    assert not api.is_workload("train.py")
    with api.workload_steps(reference) as command:
        assert command.script is not None
        text = command.script.read_text(encoding="utf-8")
        assert "model(*args, **kwargs)" in text
        compile(text, "steps", "exec")
    assert not command.script.exists()


def test_wrong_words_are_refused(folder: pathlib.Path) -> None:
    with pytest.raises(UsageError, match="takes no arguments"):
        doctor_command(["workload.py:workload", "--epochs", "1"])
    with pytest.raises(UsageError, match="does not exist"):
        doctor_command(["no.py"])
    with pytest.raises(UsageError, match="Give a script"):
        doctor_command([])
    with pytest.raises(UsageError, match="at least 10 steps"):
        api.checked_steps(3, "--steps")
    for text in ("1,1,3", "1,1,0,1", "a,1,3,1"):
        with pytest.raises(UsageError, match="wait,warm-up,active,repeat"):
            Schedule.parse(text)
    assert Schedule.parse("1, 2,3,4").steps == 25


def examined(folder: pathlib.Path, *words: str) -> Any:
    """The JSON that ``trimtab doctor`` prints."""
    command = [sys.executable, "-m", "trimtab", "doctor", "--json", "--budget", "150s", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_doctor_writes_what_it_is_asked_for_and_leaves_the_script_alone(folder: pathlib.Path) -> None:
    text = (pathlib.Path(__file__).parents[1] / "probe" / "scripts" / "train.py").read_text(encoding="utf-8")
    (folder / "train.py").write_text(text, encoding="utf-8")
    found = examined(folder, "--out", "out", "--write", "patch.diff", "--trace", "traces", "--nvtx", "train.py")
    assert {path.name for path in (folder / "out").iterdir()} == {"report.html", "doctor.json", "trace.json"}
    assert "Flame graph" in (folder / "out" / "report.html").read_text(encoding="utf-8")
    assert any(event["ph"] == "X" for event in json.loads((folder / "out" / "trace.json").read_bytes())["traceEvents"])
    assert any(path.name.endswith(".pt.trace.json") for path in (folder / "traces").iterdir())
    assert "+torch.autograd.set_detect_anomaly(False)" in (folder / "patch.diff").read_text(encoding="utf-8")
    assert found["patch"]["gain"] or found["patch"]["reason"]
    assert (folder / "train.py").read_text(encoding="utf-8") == text
    assert not (folder / "model.pt").exists()
    assert examined(folder, "workload.py")["record"]["anchor"] == "forward"
