"""A script's process: what it sees, where its writes go, and that nothing is left of it."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from trimtab.errors import UsageError
from trimtab.probe.command import Command
from trimtab.probe.launch import ScriptProcess
from trimtab.probe.serving import why_ended

WRITES = """
import os, pathlib, sys
pathlib.Path("old.txt").write_text("changed")
pathlib.Path("new.txt").write_text("new")
os.remove("gone.txt")
print(sys.argv, os.getcwd(), __name__, sys.path[0])
sys.exit(3)
"""


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(WRITES, encoding="utf-8")
    for name in ("old.txt", "gone.txt"):
        (tmp_path / name).write_text("as it was", encoding="utf-8")
    return tmp_path


def test_writes_are_kept_apart_and_listed(folder: pathlib.Path) -> None:
    with ScriptProcess(Command.of("job.py", args=["--a", "1"]), {"mode": "none"}) as process:
        assert process.wait(60) == 3
        if process.contained != "overlay":
            pytest.skip("; ".join(process.notes()))
        assert process.written() == ["gone.txt (removed)", "new.txt", "old.txt"]
        assert process.log() == f"['job.py', '--a', '1'] {folder} __main__ {folder}"
        scratch = process.folder
    assert not scratch.exists()
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.txt")} == {
        "old.txt": "as it was",
        "gone.txt": "as it was",
    }


def test_in_place_the_script_writes(folder: pathlib.Path) -> None:
    with ScriptProcess(Command.of("job.py"), {"mode": "none"}, in_place=True) as process:
        assert process.wait(60) == 3
        assert process.contained == "in place"
    assert sorted(path.name for path in folder.glob("*.txt")) == ["new.txt", "old.txt"]


MAKES = """
import os, pathlib, sys, time
import torch
pathlib.Path("new.txt").write_text("new")
os.makedirs("made", exist_ok=True)
pathlib.Path("made/one.txt").write_text("new")
pathlib.Path("new.txt").write_text("its own file, again")
os.replace("new.txt", "moved.txt")
for act in sys.argv[1:]:
    exec(act)
print("went on", flush=True)
time.sleep(600)
"""


def guarded(act: str) -> ScriptProcess:
    return ScriptProcess(Command.of("job.py", args=[act]), {"mode": "none", "guard": True}, in_place=True)


def ended(process: ScriptProcess) -> int | None:
    """The code of a process that ended, or ``None`` once it went on."""
    deadline = time.monotonic() + 60
    while process.poll() is None and "went on" not in process.log() and time.monotonic() < deadline:
        time.sleep(0.02)
    return process.poll()


@pytest.mark.parametrize(
    "act",
    [
        "open('old.txt', 'a')",
        "os.open('old.txt', os.O_RDWR)",
        "os.remove('old.txt')",
        "os.replace('old.txt', 'other.txt')",
        "os.replace('moved.txt', 'old.txt')",
        "os.truncate('old.txt', 0)",
    ],
)
def test_where_writes_cannot_be_kept_apart_a_file_that_existed_is_not_touched(folder: pathlib.Path, act: str) -> None:
    (folder / "job.py").write_text(MAKES, encoding="utf-8")
    with guarded(act) as process:
        assert ended(process) == 90
        refused = f"was about to write old.txt (job.py:{MAKES.splitlines().index('    exec(act)') + 1}), which exists"
        assert process.refused_write() == refused
        assert why_ended(process, 90) == (
            f"The script {refused}. Its writes cannot be kept apart on this machine; let it write with --in-place."
        )
        assert (folder / "made" / "one.txt").exists()
    assert {path.name for path in folder.iterdir()} == {"gone.txt", "job.py", "old.txt"}
    assert (folder / "old.txt").read_text(encoding="utf-8") == "as it was"


@pytest.mark.parametrize(
    "act",
    [
        "pathlib.Path('made/old.txt').write_text('x'); __import__('shutil').rmtree('made')",
        "os.replace('made', 'kept'); pathlib.Path('kept/one.txt').write_text('again')",
        "os.symlink('old.txt', 'link.txt')",
    ],
)
def test_where_writes_cannot_be_kept_apart_a_script_does_what_it_wants_with_its_own_files(
    folder: pathlib.Path, act: str
) -> None:
    (folder / "job.py").write_text(MAKES, encoding="utf-8")
    with guarded(act) as process:
        assert ended(process) is None, process.refused_write()
        assert (folder / "moved.txt").exists()
    assert {path.name for path in folder.iterdir()} == {"gone.txt", "job.py", "old.txt"}
    assert (folder / "old.txt").read_text(encoding="utf-8") == "as it was"


def test_where_writes_cannot_be_kept_apart_two_runs_at_once_make_the_same_files(folder: pathlib.Path) -> None:
    (folder / "job.py").write_text(MAKES, encoding="utf-8")
    reads = "open('old.txt').close(); open('absent.txt', 'r+') if os.path.exists('absent.txt') else None"
    with guarded(reads) as one:
        assert ended(one) is None
        with guarded(reads) as other:
            assert ended(other) is None
            assert (one.refused_write(), other.refused_write()) == (None, None)
            assert (folder / "moved.txt").exists()
    assert {path.name for path in folder.iterdir()} == {"gone.txt", "job.py", "old.txt"}


STARTS = """
import os, subprocess, time
subprocess.Popen(["sleep", "600"])
subprocess.Popen(["sleep", "600"], start_new_session=True)
open(os.environ["TRIMTAB_TEST"], "w").write(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="children of children are found on Linux only")
def test_killing_trimtab_leaves_no_process_and_no_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, told = tmp_path / "long.py", tmp_path / "pid"
    script.write_text(STARTS, encoding="utf-8")
    driver = (
        "import sys, time\nfrom trimtab.probe.command import Command\nfrom trimtab.probe.launch import ScriptProcess\n"
        f"with ScriptProcess(Command.of({str(script)!r}), {{'mode': 'none'}}, in_place=True) as process:\n"
        "    print(process.folder, flush=True)\n    time.sleep(600)\n"
    )
    environment = {**os.environ, "TRIMTAB_TEST": str(told)}
    with subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        scratch = pathlib.Path(process.stdout.readline().strip())
        deadline = time.monotonic() + 60
        while not (told.exists() and told.read_text(encoding="utf-8")) and time.monotonic() < deadline:
            time.sleep(0.02)
        started = psutil.Process(int(told.read_text(encoding="utf-8")))
        family = [started, *started.children(recursive=True)]
        assert len(family) == 3
        os.kill(process.pid, signal.SIGKILL)
    gone, alive = psutil.wait_procs(family, timeout=60)
    assert (len(gone), alive) == (3, [])
    while scratch.exists() and time.monotonic() < deadline + 60:
        time.sleep(0.02)
    assert not scratch.exists()


def test_a_script_ends_when_little_memory_is_left(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "long.py").write_text("import time; time.sleep(600)\n", encoding="utf-8")
    monkeypatch.setattr("trimtab.probe.launch.LEAST_MEMORY", 2.0)
    with ScriptProcess(Command.of(tmp_path / "long.py"), {"mode": "none"}) as process:
        assert process.wait(60) == 1
        assert process.log() == "MemoryError: trimtab ended the script, because less than 200% of the memory was left"


def test_stopping_kills_and_keeps_what_was_left(tmp_path: pathlib.Path) -> None:
    (tmp_path / "long.py").write_text("print('here', flush=True)\nimport time; time.sleep(600)\n", encoding="utf-8")
    with ScriptProcess(Command.of(tmp_path / "long.py"), {"mode": "none"}) as process:
        while not process.log():
            assert process.poll() is None
            time.sleep(0.02)
        process.stop()
        assert process.poll() == -signal.SIGKILL
        assert process.log() == "here"


def test_the_plan_and_a_hidden_sitecustomize_reach_every_interpreter(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = tmp_path / "theirs"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import builtins\nbuiltins.THEIRS = True\n", encoding="utf-8")
    (tmp_path / "job.py").write_text(
        "import json, os, sys, sitecustomize\n"
        "mode = json.loads(os.environ['TRIMTAB_PLAN'])['mode']\n"
        "print(json.dumps([THEIRS, sitecustomize.__file__, mode, 'boot' in str(sys.path)]))\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", str(hidden))
    with ScriptProcess(Command.of(tmp_path / "job.py"), {"mode": "none"}) as process:
        assert process.wait(60) == 0
        assert json.loads(process.log()) == [True, str(hidden / "sitecustomize.py"), "none", False]


def test_commands(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "package"
    package.mkdir()
    (package / "train.py").write_text("", encoding="utf-8")
    module = Command.of(module="package.train", args=["--x"])
    assert module.argv == (sys.executable, "-m", "package.train", "--x")
    assert (module.script, module.folder, module.name) == (package / "train.py", tmp_path, "package.train")
    launched = Command.of(launcher=["torchrun", "package/train.py", "-v"])
    assert pathlib.Path(launched.argv[0]).is_file()
    assert launched.argv[1:] == ("package/train.py", "-v")
    assert (launched.folder, launched.name) == (package, "train.py")
    for wrong, message in (
        ({"script": "none.py"}, "none.py does not exist"),
        ({"script": "package"}, "package is a folder"),
        ({"module": "no_such_module"}, "no module 'no_such_module'"),
        ({"launcher": ["no-such-launcher"]}, "no program 'no-such-launcher'"),
        ({}, "give one of"),
    ):
        with pytest.raises(UsageError, match=message):
            Command.of(**wrong)  # type: ignore[arg-type]
