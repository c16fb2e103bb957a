"""What workloads, and the programs and shells around them, do to processes: each is met, or said, and nothing stays behind."""

from __future__ import annotations

import errno
import fcntl
import inspect
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from _faulty import write
from _workers import that_stay, workers_that_stay
from trimtab._internal.files import os_reason
from trimtab.backends.torchscript import TorchScript
from trimtab.cli._boundary import TerminationSignals
from trimtab.core.recipe import Recipe
from trimtab.core.trial import State
from trimtab.errors import StorageError, UsageError, WorkloadError
from trimtab.evaluation.evaluate import as_trial
from trimtab.execution.fork_pool import Forked, Workers
from trimtab.execution.process import WorkerProcess
from trimtab.study.options import Options
from trimtab.study.run_folder import exclusive
from trimtab.study.study import Study

MADE = "def made(): return workload()"


def begun(folder: pathlib.Path, body: str, **options: float) -> Study:
    """A study of a workload with ``body`` after its dry run."""
    return Study(write(folder, body), folder / "run", Options(timing_s=0.5, **options))


def log_of(folder: pathlib.Path) -> str:
    return (folder / "run" / "prepare" / "log.txt").read_text()


NETS = """
import torch
class Net(torch.nn.Linear):
    pass
def build():
    import late
    print("nets of {place}, late of", late.PLACE)
    return Net(8, 2)
"""
SCRIPT = """
import pathlib, sys, torch, trimtab
from nets import build
from trimtab.study.options import Options
from trimtab.study.study import Study
workload = trimtab.Workload(name="beside", model=build, inputs=(torch.ones(2, 8),))
Study(workload, pathlib.Path(sys.argv[1]), Options())
"""


def test_what_lies_beside_a_script_comes_before_what_is_installed(tmp_path: pathlib.Path) -> None:
    """Also in a folder whose name has in it what separates folders."""
    script, installed = tmp_path / "at 10:30", tmp_path / "installed"
    for folder in (script, installed):
        folder.mkdir()
        (folder / "nets.py").write_text(NETS.format(place=folder.name))
        (folder / "late.py").write_text(f"PLACE = {folder.name!r}")
    (script / "script.py").write_text(SCRIPT)
    path = os.pathsep.join(filter(None, (str(installed), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(script / "script.py"), str(tmp_path / "run")]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path})
    assert "nets of at 10:30, late of at 10:30" in log_of(tmp_path)


def test_threads_that_a_workload_asks_for_too_late_are_told_of(tmp_path: pathlib.Path) -> None:
    """A program of its own would have them, if it asks before it imports torch."""
    number = 1 + int(os.environ["OMP_NUM_THREADS"])
    study = begun(tmp_path, f"os.environ['OMP_NUM_THREADS'] = '{number}'\n{MADE}")
    (note,) = [note for note in study.prepared.notes if "OMP_NUM_THREADS" in note]
    assert note.startswith(f"The workload sets OMP_NUM_THREADS to {number}, which torch does not see here")
    assert f"Write torch.set_num_threads({number}) into the workload" in note
    heard = begun(tmp_path / "run", f"os.environ['OMP_NUM_THREADS'] = '{number}'\ntorch.set_num_threads({number})\n{MADE}")
    assert not any("OMP_NUM_THREADS" in note for note in heard.prepared.notes)


@pytest.mark.parametrize("asks", ["input('Really? ')", "breakpoint()"])
def test_a_workload_that_asks_a_question_fails_at_once(asks: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(WorkloadError, match=r"(EOFError|BdbQuit).*\(.*faulty.py, line \d+\)"):
        begun(tmp_path, f"def made():\n    {asks}\n    return workload()")


SILENT = "import sys\nsys.stdout = None\n"


def test_a_workload_may_put_anything_in_the_place_of_the_streams(tmp_path: pathlib.Path) -> None:
    assert begun(tmp_path, SILENT + MADE).prepared.name == "faulty"
    for number, closes in enumerate(("sys.stdout.close()", "os.close(1)")):
        assert begun(tmp_path / str(number), f"import sys\n{closes}\n{MADE}").prepared.name == "faulty"
    with pytest.raises(WorkloadError, match="It raised KeyboardInterrupt; its log has the traceback"):
        begun(tmp_path, f"{SILENT}sys.stderr = open(os.devnull, 'w')\ndef made(): raise KeyboardInterrupt")
    assert "in made" in log_of(tmp_path)


def test_an_error_that_a_workload_makes_of_ours_is_ours(tmp_path: pathlib.Path) -> None:
    body = "class Mine(trimtab.errors.UsageError): ...\ndef made(): raise Mine('The file states no depth.')"
    with pytest.raises(UsageError, match=r"^The file states no depth\.$"):
        begun(tmp_path, body)


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def mute(figures: object) -> tuple[State, str | None]:
    raise Mute


def test_an_error_that_has_no_text_is_told_with_its_place(tmp_path: pathlib.Path) -> None:
    message = r"raised: Mute: <exception str\(\) failed> \(.*faulty.py, line \d+\)\. .*The traceback is in .*log.txt"
    with pytest.raises(WorkloadError, match=message):
        begun(
            tmp_path,
            f"{inspect.getsource(Mute)}def fails(output, target): raise Mute\ndef made(): return workload(score=fails)",
        )
    assert "in fails" in log_of(tmp_path)
    trial = as_trial(Recipe(backend=TorchScript()), mute)
    assert (trial.state, trial.reason) == (State.FAILED, "Mute: <exception str() failed>")


def test_of_a_text_without_end_is_told_as_much_as_can_be_read(tmp_path: pathlib.Path) -> None:
    with pytest.raises(WorkloadError) as caught:
        begun(tmp_path, "def made(): raise KeyError('<' + 'x' * 3_000_000 + '>')")
    told = str(caught.value)
    assert len(told) < 5000
    assert "KeyError: '<xxx" in told
    assert re.search(r"xxx \[\.\.\. 29\d{5} characters more \.\.\.\] xxx.*x>' \(.*line \d+\)\. .*The traceback is in", told)
    assert (tmp_path / "run" / "prepare" / "log.txt").stat().st_size > 3_000_000, "it lacks the rest"
    assert (tmp_path / "run" / "prepare" / "result.json").stat().st_size < 100_000


@pytest.fixture
def many_open_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 3000 if hard == resource.RLIM_INFINITY else min(hard, 3000)
    if wanted < 2000:
        pytest.skip("this system does not let a process open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1200)]
    yield
    for descriptor in held:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_open_files")
def test_a_program_with_many_open_files_has_forks_too(tmp_path: pathlib.Path) -> None:
    with Workers() as workers:
        worker = WorkerProcess({"kind": "nonsense"}, tmp_path, workers)
        assert worker.wait(seconds=60, memory_mb=None).reason == "It raised KeyError: 'nonsense'; its log has the traceback."
    assert sys.platform != "linux" or isinstance(worker._process, Forked)


@pytest.mark.parametrize("ending", ["", "time.sleep(600)"], ids=["by itself", "at its limit"])
def test_what_a_workload_starts_in_a_session_of_its_own_ends_with_its_worker(ending: str, tmp_path: pathlib.Path) -> None:
    starts = (
        "import subprocess\nhelper = subprocess.Popen(['sleep', '600'], start_new_session=True)\nprint(helper.pid, flush=True)"
    )
    body = f"{starts}\n{ending}\n{MADE}"
    if ending:
        with pytest.raises(WorkloadError, match="after its time limit of 15 s"):
            begun(tmp_path, body, trial_s=15)
    else:
        begun(tmp_path, body)
    number = int(log_of(tmp_path).splitlines()[0])
    left = [psutil.Process(number)] if psutil.pid_exists(number) else []
    alive = that_stay(left)
    for process in alive:
        process.kill()
    assert not alive


def test_a_signal_to_end_leaves_nothing_behind(tmp_path: pathlib.Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "trimtab", "optimize", write(tmp_path, MADE), "--out", str(tmp_path / "run"), "--plain"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=os.environ | {"TMPDIR": str(temporary)}) as process:
        assert process.stdout is not None
        while "trial 1" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "interrupted; what was finished is kept. To go on from it: trimtab optimize " in errors
    assert workers_that_stay(tmp_path) == []
    assert list(temporary.glob("trimtab-*")) == []


INTERRUPTED = """
import os, shutil
from trimtab.execution.temporary_folders import remove_temporary_folder, temporary_folder

kept, folder = temporary_folder(), temporary_folder()
assert os.stat(folder).st_mode & 0o777 == 0o700
if os.fork() == 0:
    raise SystemExit  # which has no claim on them
assert os.wait()[1] == 0
assert os.path.isdir(folder)
rmtree, shutil.rmtree = shutil.rmtree, lambda *place, **how: os.kill(os.getpid(), 2)  # Ctrl-C, in the middle of it
try:
    remove_temporary_folder(folder)
except KeyboardInterrupt:
    assert os.path.isdir(folder)
shutil.rmtree = rmtree
print(len(os.listdir(os.path.dirname(folder))))
"""


def test_temporary_folders_are_gone_in_the_end_whatever_interrupts_their_removal(tmp_path: pathlib.Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
    assert list(tmp_path.iterdir()) == []


HOLDING = """
import time
from trimtab.execution.temporary_folders import temporary_folder

print(temporary_folder(), flush=True)
time.sleep(600)
"""


def test_the_temporary_folder_of_a_process_that_was_killed_is_removed_by_the_next_one(tmp_path: pathlib.Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    (foreign := tmp_path / "trimtab-notes").mkdir()
    holding = [
        subprocess.Popen([sys.executable, "-c", HOLDING], env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    killed, new, alive = (pathlib.Path(str(process.stdout and process.stdout.readline()).strip()) for process in holding)
    try:
        for process in holding[:2]:
            process.kill()
            process.wait()
        for folder in (killed, alive, foreign):
            os.utime(folder, (0, 0))
        line = "from trimtab.execution.temporary_folders import temporary_folder; temporary_folder()"
        subprocess.run([sys.executable, "-c", line], env=environment, check=True)
        assert sorted(tmp_path.iterdir()) == sorted([new, alive, foreign])  # of a new one nobody knows yet
    finally:
        holding[2].kill()
        for process in holding:
            process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_to_end_interrupt_a_command(number: signal.Signals) -> None:
    ending = TerminationSignals()
    with pytest.raises(KeyboardInterrupt), ending:
        os.kill(os.getpid(), number)
    assert ending.code == 128 + number
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_signal_that_is_ignored_stays_so(tmp_path: pathlib.Path) -> None:
    line = "import os, signal; from trimtab.cli import main; os.kill(os.getpid(), signal.SIGHUP); main.main()"
    ignoring = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); {line}"
    done = subprocess.run([sys.executable, "-c", ignoring], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_stream_that_somebody_made_non_blocking_is_waited_for() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    says = "from trimtab.cli import _streams\n_streams.prepare()\nfor line in range(1000): print('x' * 1000)"
    with subprocess.Popen([sys.executable, "-c", says], stdout=writer, stderr=subprocess.PIPE) as process:
        os.close(writer)
        time.sleep(1)  # until the pipe is full
        with os.fdopen(reader, "rb") as stream:
            assert len(stream.read()) == 1_001_000
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 0


def fill(held: list[int]) -> None:
    """Open files until there may be no more of them."""
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))


def test_what_the_system_refuses_is_named(tmp_path: pathlib.Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        with pytest.raises(OSError, match="Too many open files") as too_many:
            fill(held)
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    run = tmp_path / "run"
    assert os_reason(too_many.value, run).startswith(f"The study in {run} cannot go on: one process may open no more files (ul")
    elsewhere = tmp_path / "temporary" / "own"
    with pytest.raises(FileNotFoundError) as missing:
        elsewhere.mkdir()
    assert os_reason(missing.value, run) == (
        f"The study in {run} cannot go on for want of {elsewhere}: No such file or directory; mend that."
    )
    own = f"The run folder {elsewhere / 'run'} cannot be written: No such file or directory; mend that or use --out."
    assert os_reason(missing.value, elsewhere / "run") == own  # a folder that holds it is its own


def test_a_folder_without_locks_is_said_to_have_none(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    words = r"lies where files cannot be locked \(No locks available\).* Use --out .* with a folder on a local disk"
    with pytest.raises(StorageError, match=words), exclusive(tmp_path / "run"):
        pass


def test_a_workload_may_clear_its_environment(tmp_path: pathlib.Path) -> None:
    """Also once it is read, when it is built and called: the key of the study's sockets lies there, among other things."""
    study = begun(tmp_path, f"os.environ.clear()\ndef build():\n    os.environ.clear()\n    return nn.Linear(8, 2)\n{CLEARS}")
    study.search(most=1)
    (trial,) = study.trials
    assert trial.state is State.COMPLETE, trial.reason


CLEARS = "def made(): return workload(model=build)"
