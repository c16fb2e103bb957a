"""The scripts of ``examples/scripts``: each has an entry, an edit by hand that applies, and runs."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import tomllib
from typing import Any

import pytest

SCRIPTS = pathlib.Path(__file__).parents[2] / "examples" / "scripts"
TABLE: list[dict[str, Any]] = tomllib.loads((SCRIPTS / "causes.toml").read_text(encoding="utf-8"))["script"]
PLANTED = [row for row in TABLE if row["checks"]]
FAST = {"gpt_chars", "forecast"}


def copied(folder: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(SCRIPTS, folder / "scripts", ignore=shutil.ignore_patterns("runs", "__pycache__")))


def checked_steps(row: dict[str, Any], folder: pathlib.Path, count: int = 3) -> str:
    """What the script prints when it makes ``count`` steps in ``folder``."""
    option = [f"{row['count']}{count}"] if row["count"].endswith("=") else [row["count"], str(count)]
    command = [sys.executable, *row["command"], *option]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_script_has_an_entry_and_every_planted_cause_an_edit() -> None:
    names = [row["name"] for row in TABLE]
    found = {path.stem for path in SCRIPTS.glob("*.py")} | {path.parent.name for path in SCRIPTS.glob("*/__init__.py")}
    assert sorted(names) == sorted(found)
    assert {path.stem for path in (SCRIPTS / "by_hand").iterdir()} == {row["name"] for row in PLANTED}
    assert (len(TABLE), len(PLANTED)) == (20, 17)
    assert [row["set"] for row in TABLE].count("development") == 12
    assert sum(row["set"] == "held out" for row in TABLE) == 8


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["name"])
def test_entries_are_complete(row: dict[str, Any]) -> None:
    assert set(row) - {"cause"} == {"name", "command", "set", "checks", "outside", "count", "steps"}
    assert ("cause" in row) == bool(row["checks"])
    script = SCRIPTS / (row["command"][1].replace(".", "/") + ".py" if row["command"][0] == "-m" else row["command"][0])
    text = script.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 100
    assert row["count"].rstrip("=").lstrip("-").replace("-", "_") in text.replace("-", "_")


def test_edits_by_hand_apply(tmp_path: pathlib.Path) -> None:
    folder = copied(tmp_path)
    for row in PLANTED:
        diff = SCRIPTS / "by_hand" / f"{row['name']}.diff"
        done = subprocess.run(["git", "apply", str(diff)], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    for path in folder.rglob("*.py"):
        compile(path.read_text(encoding="utf-8"), str(path), "exec")


@pytest.mark.parametrize("row", [row for row in TABLE if row["name"] in FAST], ids=lambda row: row["name"])
def test_scripts_run(row: dict[str, Any], tmp_path: pathlib.Path) -> None:
    checked_steps(row, copied(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["name"])
def test_every_script_runs_and_so_does_its_edit(row: dict[str, Any], tmp_path: pathlib.Path) -> None:
    folder = copied(tmp_path)
    written = checked_steps(row, folder)
    if row in PLANTED:
        diff = SCRIPTS / "by_hand" / f"{row['name']}.diff"
        subprocess.run(["git", "apply", str(diff)], cwd=folder, check=True)
        assert len(checked_steps(row, folder).splitlines()) == len(written.splitlines())
