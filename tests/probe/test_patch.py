"""Edits of findings as a unified diff."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

from trimtab.core.finding import Finding
from trimtab.core.script_settings import CodeEdit
from trimtab.probe.command import Command
from trimtab.probe.launch import ScriptProcess
from trimtab.probe.patch import make_patch, moved_site

SCRIPT = """\
import torch

for step in range(3):
    writer.add_scalar(
        "loss", step
    )
    losses.append(loss)
"""


def finding(rule: str, site: str, replacement: str | None) -> Finding:
    return Finding(rule=rule, level="note", message="", edit=CodeEdit(site=site, advice="", replacement=replacement))


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    return tmp_path


def test_an_edit_replaces_the_statement_with_its_indentation(folder: pathlib.Path) -> None:
    edits = [
        finding("logging", "train.py:4", 'if step % 50 == 0:\n    writer.add_scalar("loss", step)'),
        finding("memory_growth", "train.py:7", "losses.append(loss.item())"),
    ]
    patch, texts = make_patch(folder, edits)
    assert patch is not None
    assert set(patch.rules) == {"logging", "memory_growth"}
    assert texts[folder / "train.py"].splitlines()[3:] == [
        "    if step % 50 == 0:",
        '        writer.add_scalar("loss", step)',
        "    losses.append(loss.item())",
    ]
    assert (folder / "train.py").read_text(encoding="utf-8") == SCRIPT, "only the patch is written"
    if shutil.which("patch"):
        done = subprocess.run(["patch", "-p1"], cwd=folder, input=patch.text, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout
        assert (folder / "train.py").read_text(encoding="utf-8") == texts[folder / "train.py"]


def test_edits_that_do_not_fit_are_left_out_with_the_reason(folder: pathlib.Path) -> None:
    edits = [
        finding("good", "train.py:7", "losses.append(loss.item())"),
        finding("second", "train.py:7", "losses.append(0)"),
        finding("broken", "train.py:1", "import ("),
        finding("far", "train.py:99", "pass"),
        finding("elsewhere", "other.py:1", "pass"),
        finding("incomplete", "train.py:3", None),
    ]
    patch, _ = make_patch(folder, edits)
    assert patch is not None
    assert patch.rules == ("good",)
    assert [reason.partition(" ")[0] for reason in patch.left_out] == ["far", "second", "broken", "other.py"]


def test_without_a_complete_edit_there_is_no_patch(folder: pathlib.Path) -> None:
    assert make_patch(folder, [finding("incomplete", "train.py:3", None)]) == (None, {})


def test_lines_are_found_again_in_the_patched_file(folder: pathlib.Path) -> None:
    _, texts = make_patch(
        folder, [finding("logging", "train.py:4", "if step % 50 == 0:\n    print(step)\n    print(step)\n    pass")]
    )
    new = {str(path): text for path, text in texts.items()}
    sites = [moved_site(f"train.py:{line}", folder, new) for line in (1, 4, 7)]
    assert sites == ["train.py:1", "train.py:4", "train.py:8"]
    assert moved_site("other.py:3", folder, new) == "other.py:3"
    assert moved_site("somewhere", folder, new) == "somewhere"


def test_a_patched_script_runs_in_the_overlay_and_the_script_stays(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text("print('as written')\n", encoding="utf-8")
    settings = {"files": {str(script): "print('patched')\n"}}
    with ScriptProcess(Command.of(script), {"mode": "run", "settings": settings}) as process:
        process.wait(30)
        if process.contained != "overlay":
            assert "a patch is measured in an overlay only" in process.log()
            pytest.skip("no overlay is allowed here")
        assert process.log() == "patched"
    assert script.read_text(encoding="utf-8") == "print('as written')\n"


def test_a_file_that_no_overlay_holds_is_not_changed(tmp_path: pathlib.Path) -> None:
    (tmp_path / "scripts").mkdir()
    script, other = tmp_path / "scripts" / "hello.py", tmp_path / "helpers.py"
    script.write_text("print('as written')\n", encoding="utf-8")
    other.write_text("x = 1\n", encoding="utf-8")
    (script.parent / "link.py").symlink_to(other)
    for path in (other, script.parent / "link.py"):
        with ScriptProcess(Command.of(script), {"mode": "run", "settings": {"files": {str(path): "x = 2\n"}}}) as process:
            assert process.wait(30) != 0
            assert "in an overlay only" in process.log() or "lies outside of the overlay" in process.log()
        assert other.read_text(encoding="utf-8") == "x = 1\n"
