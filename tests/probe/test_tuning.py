"""``trimtab tune`` of a script: what was measured is kept, and the same command goes on from it."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from trimtab.core.measurement import Interval
from trimtab.core.script_settings import ScriptSettings
from trimtab.errors import UsageError
from trimtab.hardware.environment import Environment
from trimtab.probe import tuning
from trimtab.probe.command import Command
from trimtab.probe.configuration import Configuration
from trimtab.probe.counterfactuals import OUT_OF_TIME, Outcome
from trimtab.testing.records import sound_records

DEBUG, NONE, LATE = ScriptSettings(debug_off=True), ScriptSettings(set_to_none=True), ScriptSettings(no_grad=True)
SCRIPTS = pathlib.Path(__file__).parent / "scripts"


def test_a_tune_that_was_cut_off_goes_on_from_what_it_measured(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[ScriptSettings]] = []
    confirmed: list[ScriptSettings] = []

    def measure(command: Any, record: Any, settings: list[ScriptSettings], *, on_outcome: Any, **options: Any) -> list[Outcome]:
        asked.append(settings)
        found = [Outcome(settings=one, gain=Interval(1.2, 1.1, 1.3), losses="equal") for one in settings if one != LATE]
        for one in found:
            on_outcome(one)
            if len(asked) == 1:
                raise KeyboardInterrupt
        late = [Outcome(settings=LATE, failed=OUT_OF_TIME)]
        on_outcome(late[0])
        return found + late

    def confirm(command: Any, record: Any, settings: ScriptSettings, **options: Any) -> Outcome:
        confirmed.append(settings)
        return Outcome(settings=settings, gain=Interval(1.4, 1.3, 1.5), losses="equal", how="fresh processes")

    monkeypatch.chdir(tmp_path)
    seen = replace(sound_records()["training"], sources=("data.py", "train.py"))
    monkeypatch.setattr(tuning, "observe", lambda command, **options: seen)
    monkeypatch.setattr(tuning, "measure", measure)
    monkeypatch.setattr(tuning, "confirm", confirm)
    (tmp_path / "train.py").write_text("print('hello')\n", encoding="utf-8")
    (tmp_path / "data.py").write_text("SIZE = 3\n", encoding="utf-8")
    tried: dict[str, Any] = {"settings": [DEBUG, NONE, LATE]}
    with pytest.raises(KeyboardInterrupt):
        tuning.tune_script(Command.of("train.py"), **tried)
    said: list[str] = []
    found = tuning.tune_script(Command.of("train.py"), on_progress=said.append, **tried)
    assert asked == [[DEBUG, NONE, LATE], [NONE, LATE]]
    assert said[0] == f"1 setting of 3 measured before, in {found.folder}"
    assert (found.kept, found.configuration) == (DEBUG.merged(NONE), Configuration.read(tmp_path / "trimtab.toml"))

    with pytest.raises(UsageError, match="Give --overwrite to replace it"):
        tuning.tune_script(Command.of("train.py"), **tried)
    again = tuning.tune_script(Command.of("train.py"), overwrite=True, **tried)
    assert (asked[2:], again.confirmed, confirmed) == ([[LATE]], found.confirmed, [DEBUG.merged(NONE)])
    tuning.tune_script(Command.of("train.py"), overwrite=True, fresh=True, **tried)
    assert asked[3:] == [[DEBUG, NONE, LATE]]

    assert sorted(Configuration.read(tmp_path / "trimtab.toml").files) == ["data.py", "train.py"]
    (tmp_path / "data.py").write_text("SIZE = 4\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"data.py has changed since .*train-tune was begun.* Give --fresh"):
        tuning.tune_script(Command.of("train.py"), overwrite=True, **tried)
    (tmp_path / "train.py").write_text("print('another')\n", encoding="utf-8")
    with pytest.raises(UsageError, match="was made for another text of the script"):
        tuning.tune_script(Command.of("train.py"), overwrite=True, **tried)


def test_what_cannot_be_applied_safely_is_left_out_with_the_reason() -> None:
    sound = sound_records()["training"]
    draws = replace(sound.loaders[0], draws=True, wait_ms=sound.step_ms, batches=sound.steps)
    network = replace(sound.modules[0], compiled=False)
    _, why = tuning.candidate_settings(replace(sound, loaders=(draws,), modules=(network,)), Environment.capture())
    assert f"Another number of workers for {draws.site} was left out: reading an example draws random numbers" in why[-1]
    stream = replace(draws, iterable=True)
    _, why = tuning.candidate_settings(replace(sound, loaders=(stream,)), Environment.capture())
    assert "its data set is iterable, and each worker would read all of it" in why[-1]
    _, why = tuning.candidate_settings(sound, Environment.capture())
    assert not any("workers" in sentence for sentence in why)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_tune_leaves_no_process_and_is_finished_by_the_same_command(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text((SCRIPTS / "train.py").read_text(encoding="utf-8"), encoding="utf-8")
    words = [sys.executable, "-m", "trimtab", "tune", "--budget", "150s", "--json", "train.py"]
    with (tmp_path / "said.txt").open("w") as said:
        first = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=said, env=os.environ)
        limit = time.monotonic() + 300
        second = "no gradients in evaluation mode"  # the first setting is stored before the second begins
        while time.monotonic() < limit and second not in (tmp_path / "said.txt").read_text(encoding="utf-8"):
            assert first.poll() is None
            time.sleep(0.2)
        first.send_signal(signal.SIGKILL)
        first.wait()
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "measured before, in runs/train-tune" in done.stderr
    assert json.loads(done.stdout)["outcomes"]
    assert {path.name for path in tmp_path.iterdir()} <= {"train.py", "said.txt", "runs", "trimtab.toml", "__pycache__"}
