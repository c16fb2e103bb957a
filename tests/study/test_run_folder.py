"""What makes way for a new study or artifact: gone once that has come about, and back where it has not."""

from __future__ import annotations

import errno
import os
import pathlib
import tempfile

import pytest
from test_artifact import write

from trimtab.artifact.staging import check_replaceable, fresh_folder
from trimtab.errors import ArtifactError
from trimtab.study.run_folder import exclusive, starting_afresh

STUDY = {
    "study.db": "trials",
    "workload.json": "whose",
    "artifact/manifest.json": "hours of work",
    "trials/a/log.txt": "a log",
    "trainings/a/log.txt": "of a smaller network",
}


def made(folder: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    """A folder with ``files``."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def found(folder: pathlib.Path) -> dict[str, str]:
    """The files of ``folder``, hidden ones too."""
    return {path.relative_to(folder).as_posix(): path.read_text("latin-1") for path in folder.rglob("*") if path.is_file()}


def test_what_was_moved_is_back_where_something_cannot_be(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, STUDY)
    real, moves = os.replace, list[str]()

    def third(source: pathlib.Path, target: pathlib.Path) -> None:
        moves.append(str(source))
        if len(moves) == 3:
            raise PermissionError(errno.EACCES, "Permission denied")
        real(source, target)

    monkeypatch.setattr(os, "replace", third)
    with pytest.raises(PermissionError), starting_afresh(tmp_path):
        raise AssertionError("the block was begun")
    assert len(moves) == 5
    assert found(tmp_path) == STUDY
    assert not list(tmp_path.glob(".*"))


def test_what_a_study_wrote_that_could_not_begin_is_gone(tmp_path: pathlib.Path) -> None:
    def begin() -> None:
        assert found(tmp_path / "artifact") == {}
        made(tmp_path, {"workload.json": "another's", "record.json": "its record", "prepare/log.txt": "why it failed"})
        raise KeyError

    made(tmp_path, STUDY | {"prepare/log.txt": "the old dry run"})
    with pytest.raises(KeyError), starting_afresh(tmp_path):
        begin()
    assert found(tmp_path) == STUDY | {"prepare/log.txt": "why it failed"}


def test_a_killed_beginning_is_undone_by_the_next_run_and_a_killed_end_is_done(tmp_path: pathlib.Path) -> None:
    made(tmp_path, {"workload.json": "another's", "trials/b/log.txt": "new"})
    made(tmp_path / ".fresh.abc123.tmp", {name: text for name, text in STUDY.items() if name != "study.db"})
    made(tmp_path, {"study.db": "trials"})  # which was not moved yet
    made(tmp_path / ".done.abc123.tmp", {"study.db": "those of a study that was to be forgotten"})
    with exclusive(tmp_path):
        assert found(tmp_path) == STUDY | {".lock": ""}


def test_the_old_study_stays_where_it_is_while_it_cannot_be_put_back(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*paths: pathlib.Path) -> None:
        monkeypatch.setattr(os, "replace", broken)
        raise OSError(errno.EIO, "Input/output error")

    made(tmp_path, STUDY)
    with pytest.raises(OSError, match="Input/output"), starting_afresh(tmp_path):
        broken()
    monkeypatch.undo()
    with exclusive(tmp_path):
        assert found(tmp_path) == STUDY | {".lock": ""}


def test_an_artifact_that_cannot_come_up_leaves_an_empty_folder_empty(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace

    def fails(source: pathlib.Path, target: pathlib.Path) -> None:
        if source.name == "new":
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(ArtifactError, match="Input/output error"), fresh_folder(tmp_path / "empty") as folder:
        made(folder, {"a": "1", "manifest.json": "2", "z": "3"})
    assert os.listdir(tmp_path / "empty") == []
    assert os.listdir(tmp_path) == ["empty"]


def test_a_folder_that_may_not_be_written_is_refused_before_anything_is_made() -> None:
    with tempfile.TemporaryDirectory() as name:
        artifact = write(pathlib.Path(name, "artifact"), baseline=False)
        for path in (pathlib.Path(name), *pathlib.Path(name).rglob("*")):
            path.chmod(0o777 if path == pathlib.Path(name) else 0o755)
        user = os.geteuid()
        if user == 0:  # who may write everywhere
            os.seteuid(65534)
        else:
            artifact.path.chmod(0o555)
        try:
            for refused in (lambda: check_replaceable(artifact.path), lambda: artifact.save(artifact.path)):
                with pytest.raises(ArtifactError, match=r"artifact may not be written, so no artifact can take its place. Let"):
                    refused()
            assert os.listdir(name) == ["artifact"]
        finally:
            os.seteuid(user)
            artifact.path.chmod(0o755)
