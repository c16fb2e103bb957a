"""The pace of a training, from the reports that its process writes."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from trimtab._internal.serialization import write_json
from trimtab.study.trainings import RunningTraining


def report(path: pathlib.Path, update: int, seconds: float) -> None:
    known: dict[str, Any] = {"update": update, "updates": 200, "seconds": seconds}
    write_json(path, known)


def test_the_pace_is_that_of_the_running_training_since_its_first_report(tmp_path) -> None:
    report(tmp_path / "stopped.json", 60, 90.0)
    report(tmp_path / "resumed.json", 40, 1.0)
    running = RunningTraining(tmp_path)
    assert not running.new_report(), "reports of earlier runs"
    report(tmp_path / "resumed.json", 50, 31.0)  # a start of 22 s
    assert running.new_report()["update"] == 50
    assert running.needed_s is None
    report(tmp_path / "resumed.json", 60, 39.0)
    assert running.new_report()
    assert running.needed_s is None, "ten updates say little"
    report(tmp_path / "resumed.json", 70, 47.0)
    assert running.new_report()
    assert running.pace_s == pytest.approx(0.8)
    assert running.needed_s == pytest.approx(104.0)
    assert not running.new_report(), "no new one"
    (tmp_path / "resumed.json").unlink()  # the training is complete
    assert not running.new_report()
    assert running.progress["update"] == 70


def test_updates_within_a_moment_tell_no_pace(tmp_path) -> None:
    running = RunningTraining(tmp_path)
    for update, seconds in ((10, 0.1), (100, 2.0)):
        report(tmp_path / "fast.json", update, seconds)
        assert running.new_report()
        assert running.needed_s is None
