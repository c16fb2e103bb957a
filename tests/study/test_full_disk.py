"""A disk that is full is nobody's failure: the study ends with a sentence, and goes on once there is space."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from _faulty import write
from trimtab._internal.files import out_of_space
from trimtab.backends.torchscript import TorchScript
from trimtab.core.recipe import Recipe
from trimtab.core.trial import State
from trimtab.errors import ArtifactError, CompileError, StorageError
from trimtab.evaluation.evaluate import as_trial
from trimtab.execution.fork_pool import Workers
from trimtab.study.final_selection import finish
from trimtab.study.options import Options
from trimtab.study.samplers.sampler import Ask
from trimtab.study.study import Study
from trimtab.train.telemetry.events import JsonLines, Remarked

ROOT_ONLY = pytest.mark.skipif(
    os.geteuid() != 0 or sys.platform != "linux", reason="mounting a small tmpfs needs root on Linux"
)
ROOM = 400
"""The kB that are left: enough for every log and result, too little for any model."""
BIG = """
def made():
    return trimtab.Workload(model=nn.Linear(1500, 1500), inputs=torch.randn(1, 1500))
"""
WORDY = """
class Wordy(nn.Module):
    def forward(self, x):
        return x.repeat(1, 60_000)

def made():
    return trimtab.Workload(model=Wordy(), inputs=torch.randn(1, 10))
"""


@pytest.fixture
def disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A disk of 6 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)], check=False).returncode:
        pytest.skip("this system does not let us mount a tmpfs")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def resize(disk: pathlib.Path, kilobytes: int) -> None:
    """Give ``disk`` another size."""
    subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", str(disk)], check=True)


def fill(disk: pathlib.Path) -> None:
    """Leave little room on ``disk``."""
    resize(disk, shutil.disk_usage(disk).used // 1024 + ROOM)


def caused(error: BaseException, cause: BaseException | None, *, handled: bool = False) -> BaseException:
    """``error`` as it is after ``raise error from cause``, or where it was raised while ``cause`` was handled."""
    if handled:
        error.__context__ = cause
    else:
        error.__cause__ = cause
    return error


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
LOOP = ValueError("a circle")


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (FULL, True),
        (caused(ArtifactError("cannot be written"), FULL), True),
        (caused(KeyError("model"), caused(CompileError("no form"), FULL), handled=True), True),
        (shutil.Error([("a", "b", str(FULL))]), True),
        (Exception("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 1344 vs 1286"), True),
        (RuntimeError("[enforce fail] . PytorchStreamWriter failed writing file data/0: file write failed"), True),
        (RuntimeError("unable to write to file </torch_12_34>: No space left on device (28)"), False),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), True),
        (RuntimeError("Error while serializing: Disk quota exceeded (os error 122)"), True),
        (OSError(errno.EACCES, "Permission denied"), False),
        (RuntimeError("unexpected position 3 in the sequence"), False),
        (caused(LOOP, LOOP), False),
        (None, False),
    ],
)
def test_a_full_disk_is_known_whoever_met_it(error: BaseException | None, *, full: bool) -> None:
    assert out_of_space(error) is full


def test_a_full_disk_is_no_failure_of_the_recipe() -> None:
    def line(figures: dict[str, object]) -> tuple[State, str | None]:
        raise FULL

    with pytest.raises(OSError, match="No space left"):
        as_trial(Recipe(backend=TorchScript()), line)


@pytest.mark.long
@ROOT_ONLY
def test_what_did_not_fit_is_tried_again_once_there_is_space(disk: pathlib.Path) -> None:
    """The space left is less than a model and more than a result, so that a failure could be kept for good."""
    reference = write(disk.parent, BIG)
    with Workers() as workers:
        study = Study(reference, disk / "run", Options(timing_s=0.2), workers=workers)
        asked = [study.baseline, Recipe(backend=TorchScript())]
        study.sampler.ask = lambda trials, facts: next(  # type: ignore[method-assign]
            (Ask("lossless", recipe) for recipe in asked if recipe not in [trial.recipe for trial in trials]), None
        )
        for recipe in asked:
            with pytest.raises(StorageError, match=r"could not be written: the disk is full.* the same command goes on"):
                study.search(most=1)
            assert recipe not in [trial.recipe for trial in study.trials]
            resize(disk, 200 * 1024)
            study.search(most=1)
            trial = study.trials[-1]
            assert (trial.recipe, trial.state) == (recipe, State.COMPLETE), trial.reason
            assert trial.size_mb is not None
            fill(disk)
        with pytest.raises(StorageError, match="the disk is full"):
            finish(study)
        resize(disk, 200 * 1024)
        best = finish(study)[2]
        assert best is not None
        assert best.artifact is not None


@ROOT_ONLY
def test_a_disk_that_is_full_in_the_dry_run_is_not_held_against_the_workload(disk: pathlib.Path) -> None:
    reference = write(disk.parent, WORDY)
    resize(disk, 1024)
    with pytest.raises(StorageError, match="the disk is full"):
        Study(reference, disk / "run", Options(timing_s=0.2))


@ROOT_ONLY
def test_a_log_of_events_keeps_whole_lines(disk: pathlib.Path) -> None:
    log, told = JsonLines(disk / "log.jsonl"), Remarked(update=1, epoch=0, text="x" * 100_000)

    def write_lines(count: int) -> None:
        for _ in range(count):
            log(None, told)  # type: ignore[arg-type]

    with pytest.raises(StorageError, match=r"log\.jsonl cannot be written: No space left on device\. Make room"):
        write_lines(100)
    resize(disk, 200 * 1024)
    write_lines(1)
    lines = [json.loads(line) for line in (disk / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) > 50
    assert all(len(line["text"]) == 100_000 for line in lines)
