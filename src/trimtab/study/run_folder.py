"""The run folder of a study: its lock, its files, and replacing one study by another."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator

from trimtab._internal.files import NO_LOCKS, delete, os_reason, path_of, put_back, set_aside
from trimtab._internal.locks import locked
from trimtab.artifact.verified import SUFFIX
from trimtab.core.workload import Workload
from trimtab.errors import StorageError, UsageError
from trimtab.execution.trial_runner import PREPARE, PREPARED, REFERENCE, RIVALS, SCRATCH, TRIALS
from trimtab.study import confirmation_starts
from trimtab.study.confirmation import CONFIRM_FOLDER
from trimtab.study.final_selection import EXPLAIN
from trimtab.study.record import OWNER, RECORD, report_name
from trimtab.study.result import ARTIFACT
from trimtab.study.runoff import RUNOFF
from trimtab.study.training import SETTINGS_FOLDER
from trimtab.study.trainings import TRAININGS

RESULT_FILE = "result.json"
LOCK = ".lock"
ENTRIES = {
    *(LOCK, OWNER, RECORD, RESULT_FILE, "study.db", "study.db-journal", "workload.pkl", "settings.json"),
    *(ARTIFACT, f"{ARTIFACT}{SUFFIX}", PREPARE, PREPARED, REFERENCE, SCRATCH, TRIALS, TRAININGS, SETTINGS_FOLDER),
    *(RIVALS, RUNOFF, confirmation_starts.FOLDER, CONFIRM_FOLDER, EXPLAIN),
}
"""Files of a study in its run folder. Other files belong to the user."""
TEMPORARY = re.compile(r"\..*\.tmp")
"""Names of temporary files of killed processes."""
FRESH, DONE = ".fresh.", ".done."
"""Prefixes of the folders with the old study: while a new one begins, and after that, until it is deleted."""


@contextlib.contextmanager
def disk_errors(folder: pathlib.Path) -> Iterator[None]:
    """A block whose ``OSError`` becomes a ``StorageError`` about the run folder."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{os_reason(error, folder)} What is finished is kept; the same command goes on from it.") from error


@contextlib.contextmanager
def starting_afresh(folder: pathlib.Path) -> Iterator[None]:
    """A block that begins another study in ``folder``. The old study is moved aside, and deleted after the block.

    If the block raises, for example because the workload fails, the old study is restored.

    Raises:
        UsageError: the folder has files that no study made.
    """
    own = {*ENTRIES, _report_in(folder)}
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in own and not TEMPORARY.fullmatch(path.name))
    if foreign:
        raise UsageError(
            f"--fresh deletes a run folder, but {folder} holds {foreign[0]!r}, which no study made. Use another --out (in "
            "Python, out=...)."
        )
    aside = pathlib.Path(tempfile.mkdtemp(prefix=FRESH, suffix=".tmp", dir=folder))
    old = [entry.name for entry in folder.iterdir() if entry.name not in (LOCK, aside.name)]
    with set_aside(folder, old, aside, ENTRIES - {LOCK, PREPARE}):
        try:
            yield
        except BaseException:
            if os.path.lexists(folder / PREPARE):  # the log of the dry run explains the error
                delete(aside / PREPARE)
            raise
    done = aside.with_name(aside.name.replace(FRESH, DONE, 1))
    aside.rename(done)  # from here on the old study is not restored
    shutil.rmtree(done, ignore_errors=True)


def _report_in(folder: pathlib.Path) -> str | None:
    """File name of the report of the study in ``folder``; ``None`` if there is no study, or its record is damaged."""
    try:
        return report_name(json.loads((folder / RECORD).read_text(encoding="utf-8"))["workload"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def exclusive(folder: pathlib.Path) -> Iterator[None]:
    """A block with an exclusive lock on run folder ``folder``. The lock ends with the process.

    Raises:
        UsageError: another process holds the lock.
        StorageError: the file system has no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as held:
        try:
            free = locked(held.fileno())
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            raise StorageError(
                f"The run folder {folder} lies where files cannot be locked ({error.strerror}), which is what keeps two runs, "
                "and their databases, apart. Use --out (in Python, out=...) with a folder on a local disk."
            ) from None
        if not free:
            raise UsageError(
                f"Another process is at work in {folder}. Wait for it, end it with Ctrl-C there, or use another --out (in "
                "Python, out=...)."
            )
        _recover(folder)
        try:
            yield
        finally:
            shutil.rmtree(folder / PREPARED, ignore_errors=True)  # a later run prepares the workload again


def _recover(folder: pathlib.Path) -> None:
    """Restore the study that a killed process had moved aside, and delete temporary files."""
    for left in folder.glob(f"{FRESH}*.tmp"):
        put_back(left, folder)
    for left in (*folder.glob(f"{DONE}*.tmp"), *folder.glob(f".{ARTIFACT}.*.tmp")):
        shutil.rmtree(left, ignore_errors=True)


def run_folder(workload: Workload | str, out: str | pathlib.Path | None, suffix: str = "") -> pathlib.Path:
    """The run folder: ``out``, or else ``runs/`` with the name of the workload or of its file, and ``suffix``.

    Raises:
        UsageError: ``out`` is no path, is a file, or its name is no UTF-8, which some libraries require.
    """
    if out is not None:
        folder = path_of(out, "out", "runs/model")
        if os.path.exists(folder) and not os.path.isdir(folder):  # pathlib raises for some paths
            raise UsageError(f"The run folder {folder} is a file. Give a folder with --out (in Python, out=...).")
        if (readable := str(folder).encode(errors="replace").decode()) != str(folder):
            raise UsageError(
                f"The name of the run folder {readable} is no UTF-8. Give another with --out (in Python, out=...)."
            )
        return folder
    if isinstance(workload, Workload):
        return pathlib.Path("runs") / f"{workload.name}{suffix}"
    place, _, name = workload.rpartition(":") if not workload.endswith(".py") else (workload, "", "")
    stem = pathlib.Path(place).stem if place.endswith(".py") else place
    whole = f"{stem}-{name}{suffix}" if name else f"{stem}{suffix}"
    return pathlib.Path("runs") / whole.encode(errors="replace").decode().replace("?", "_")
