"""Forked workers: as if each were an interpreter of its own, and gone as surely."""

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

from _workers import that_stay
from trimtab.execution.fork_pool import PARENT_DEATH, Workers
from trimtab.execution.preloaded_imports import IMPORTED, write_preload
from trimtab.execution.process import WorkerProcess, environment
from trimtab.study.samplers.ladder import as_written

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Workers are forked on Linux only.")
SPY = """
import os, numpy, torch, trimtab
class Spy(torch.nn.Module):
    def forward(self, x): return x
def workload():
    {act}
    print("spy", os.getppid(), os.getpgid(0), numpy.random.randint(1 << 30), os.environ.get("SPY"),
          *(torch.empty(size).data_ptr() for size in (4000, 1 << 22)), flush=True)
    return trimtab.Workload(name="spy", model=Spy, inputs=(torch.ones(2, 3),))
"""


def job(tmp_path: pathlib.Path, act: str = "pass") -> dict[str, object]:
    """A dry run of a workload that tells about its process."""
    file = tmp_path / "spy.py"
    file.write_text(SPY.format(act=act))
    (tmp_path / "reference").mkdir(exist_ok=True)
    return {
        "kind": "prepare",
        "workload": {"reference": f"{file}:workload"},
        "reference": str(tmp_path / "reference"),
        "prepared": str(tmp_path / "prepared"),
        "recipe": as_written().to_json(),
    }


def told(worker: WorkerProcess) -> list[str]:
    return next(line.split()[1:] for line in worker.log_tail().splitlines() if line.startswith("spy"))


def test_forks_are_each_in_a_group_with_random_numbers_and_an_environment_of_their_own(tmp_path, monkeypatch):
    with Workers() as workers:
        first = WorkerProcess(job(tmp_path), tmp_path / "first", workers)
        assert first.wait(seconds=100, memory_mb=None).reason is None
        monkeypatch.setenv("SPY", "later")
        second = WorkerProcess(job(tmp_path), tmp_path / "second", workers)
        outcome = second.wait(seconds=100, memory_mb=None)
        assert outcome.reason is None
        assert outcome.result["name"] == "spy"
    parent, group, number, variable, *addresses = told(first)
    parent_2, group_2, number_2, variable_2, *addresses_2 = told(second)
    assert parent == parent_2 != str(os.getpid())  # both are forks of one server
    assert (int(group), int(group_2)) == (first.pid, second.pid)
    assert number != number_2
    assert (variable, variable_2) == ("None", "later")
    assert all(one != other for one, other in zip(addresses, addresses_2, strict=True)), "on the heap, and beside it"


WARM = """
import os, sys
os.environ["SPY"] = "set by the workload"
before = set(sys.modules)
import sunau, json, numpy, torch, trimtab, {package}
class Spy(torch.nn.Module):
    def forward(self, x): return x @ x
def workload():
    print("spy", os.getppid(), "sunau" in before, {package}.__name__ in before, flush=True)
    return trimtab.Workload(name="spy", model=Spy, inputs=(torch.ones(512, 512),))
"""


@pytest.mark.parametrize("package", ["chunk", "threads_at_import", "asks_a_gpu_at_import", "fails_at_import"])
def test_what_the_workload_imports_is_imported_once_for_all(tmp_path, monkeypatch, package):
    """A standard module is; where a package starts a thread, which no fork would have, or asks the driver of a GPU, which
    answers no fork then, nothing is, and nothing fails."""
    job_ = job(tmp_path)
    site = tmp_path / "site"
    site.mkdir()
    (site / "threads_at_import.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    (site / "asks_a_gpu_at_import.py").write_text(  # what torch says in forks of a process that asked it; here is none to ask
        "import os, torch\nasked = os.getpid()\ntorch.cuda._is_in_bad_fork = lambda: os.getpid() != asked\n"
    )
    (site / "fails_at_import.py").write_text(  # the second time, which is in the server
        "import pathlib\nseen = pathlib.Path(__file__).with_name('seen')\n"
        "seen.open('a').write('x')\nif len(seen.read_text()) == 2: raise ImportError('not now')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    (tmp_path / "spy.py").write_text(WARM.format(package=package))
    with Workers() as workers:
        first = WorkerProcess(job_, tmp_path / "first", workers)
        assert first.wait(seconds=100, memory_mb=None).reason is None
        noted = json.loads((tmp_path / "first" / IMPORTED).read_text())
        assert "sunau" in noted["modules"]
        assert "spy" not in noted["modules"]
        assert noted["environment"]["SPY"] == "set by the workload"
        noted["modules"].append(package)  # as if it were installed
        (tmp_path / "first" / IMPORTED).write_text(json.dumps(noted))
        workers.warm(write_preload(tmp_path / "first", {"reference": "nowhere.py:none"}, 1, {}), seconds=10)
        second = WorkerProcess(job_, tmp_path / "second", workers, warm=True)
        assert second.wait(seconds=100, memory_mb=None).reason is None
        plain = WorkerProcess(job_, tmp_path / "third", workers, warm=False)
        assert plain.wait(seconds=100, memory_mb=None).reason is None
    warm = package not in ("threads_at_import", "asks_a_gpu_at_import")
    assert told(first)[1:] == told(plain)[1:] == ["False", "False"]
    assert told(second)[1:] == [str(warm), str(package == "chunk")]
    assert (told(second)[0] != told(first)[0]) == warm


def test_a_workload_may_change_the_working_folder(tmp_path, monkeypatch):
    job_ = job(tmp_path, f"os.chdir({os.sep!r})")
    monkeypatch.chdir(tmp_path)
    with Workers() as workers:
        for number, forks in enumerate((workers, None)):
            worker = WorkerProcess(job_, pathlib.Path(f"run{number}"), forks)
            assert worker.wait(seconds=100, memory_mb=None).reason is None


def test_a_thread_that_goes_on_does_not_keep_a_worker_that_failed(tmp_path):
    act = "import threading, time; threading.Thread(target=time.sleep, args=(300,)).start(); raise KeyboardInterrupt"
    worker = WorkerProcess(job(tmp_path, act), tmp_path / "run")
    assert "It raised KeyboardInterrupt" in worker.wait(seconds=60, memory_mb=None).reason


def test_without_workers_it_is_an_interpreter_of_its_own(tmp_path):
    worker = WorkerProcess(job(tmp_path), tmp_path / "one")
    assert worker.wait(seconds=100, memory_mb=None).reason is None
    assert told(worker)[0] == str(os.getpid())


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        ("os._exit(3)", "It exited with code 3 without a result, as if the code called os._exit or sys.exit; see its log."),
        ("import sys; sys.exit(4)", "it called sys.exit(4)"),
        ("import ctypes; ctypes.string_at(0)", "It crashed with a segmentation fault (SIGSEGV); its log has the stack."),
        ("import time; time.sleep(600)", "It still ran after its time limit of 3 s and was killed"),
        (
            "import signal, threading; threading.Event().wait(1.0); os.kill(os.getpid(), signal.SIGKILL)",
            "It was killed (SIGKILL), most likely by the system for want of memory; the same command tries it again.",
        ),
    ],
)
def test_how_a_fork_ends_is_known(tmp_path, act, reason):
    with Workers() as workers:
        WorkerProcess(job(tmp_path), tmp_path / "warm", workers).wait(seconds=100, memory_mb=None)
        worker = WorkerProcess(job(tmp_path, act), tmp_path / "one", workers)
        outcome = worker.wait(seconds=3 if "sleep" in act else 100, memory_mb=1e6)
    assert outcome.reason is not None
    assert reason in outcome.reason
    limits = {"sleep": ("time", 3), "SIGKILL": ("memory", 0.0)}  # of which there is always more than that
    assert (outcome.ended_by, outcome.limit) == next((limits[word] for word in limits if word in act), (None, None))
    if "ctypes" in act:
        assert "Segmentation fault" in worker.log_tail(200)
    assert not psutil.pid_exists(worker.pid)


def test_a_server_that_is_killed_takes_its_forks_along_and_is_not_needed(tmp_path):
    with Workers() as workers:
        worker = WorkerProcess(job(tmp_path, "import time; time.sleep(600)"), tmp_path / "one", workers)
        server = psutil.Process(worker.pid).parent()
        assert server is not None
        server.kill()
        outcome = worker.wait(seconds=100, memory_mb=None)
        assert outcome.reason is not None
        assert outcome.reason.startswith("It was killed (SIGKILL)")
        instead = WorkerProcess(job(tmp_path), tmp_path / "two", workers)
        assert instead.wait(seconds=100, memory_mb=None).reason is None
        assert told(instead)[0] == str(os.getpid())


def test_a_study_that_is_killed_leaves_neither_server_nor_fork(tmp_path):
    grandchild = "import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
    script = tmp_path / "study.py"
    script.write_text(
        "import json, pathlib, sys, time\n"
        "from trimtab.execution.fork_pool import Workers\nfrom trimtab.execution.process import WorkerProcess\n"
        "with Workers() as workers:\n"
        "    job = json.loads(sys.argv[1])\n"
        "    print(WorkerProcess(job, pathlib.Path(sys.argv[2]), workers).pid, flush=True)\n    time.sleep(600)\n"
    )
    command = [sys.executable, str(script), json.dumps(job(tmp_path, grandchild)), str(tmp_path / "one")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as study:
        assert study.stdout is not None
        worker = psutil.Process(int(study.stdout.readline()))
        deadline = time.monotonic() + 60
        while not worker.children() and time.monotonic() < deadline:
            time.sleep(0.1)
        family = [worker.parent(), worker, *worker.children()]
        assert len(family) == 3
        os.kill(study.pid, signal.SIGKILL)
    alive = that_stay([one for one in family if one is not None])
    for one in alive:
        one.kill()
    assert not alive


def test_nothing_is_imported_from_the_current_folder(tmp_path: pathlib.Path) -> None:
    """It may be the folder of a stranger's artifact."""
    (tmp_path / "stranger.py").write_text("print('executed')")
    command = [sys.executable, "-P", PARENT_DEATH, str(os.getpid()), "stranger"]
    pipe = subprocess.PIPE
    # in a session of its own, because the end of its input kills its whole group
    with subprocess.Popen(command, cwd=tmp_path, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True) as worker:
        assert worker.stdout is not None
        assert worker.stderr is not None
        assert worker.stdout.read() == b""
        assert b"No module named stranger" in worker.stderr.read()


def test_temporary_files_go_with_the_worker_and_what_torch_compiled_stays(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    act = "import tempfile; print('made', tempfile.mkdtemp(), os.environ['TORCHINDUCTOR_CACHE_DIR'], flush=True)"

    def made(worker: WorkerProcess) -> list[str]:
        return next((line.split()[1:] for line in worker.log_tail().splitlines() if line.startswith("made")), [])

    with Workers() as workers:
        ended = [WorkerProcess(job(tmp_path, act), tmp_path / name, forks) for name, forks in (("a", workers), ("b", None))]
        for worker in ended:
            assert worker.wait(seconds=100, memory_mb=None).reason is None
        killed = WorkerProcess(job(tmp_path, f"{act}; import time; time.sleep(600)"), tmp_path / "c", workers)
        while killed.alive and not made(killed):
            time.sleep(0.05)
        assert os.path.isdir(made(killed)[0])
        killed.kill()
    places, caches = zip(*map(made, (*ended, killed)), strict=True)
    assert len({os.path.dirname(place) for place in places}) == 3
    assert not any(map(os.path.exists, map(os.path.dirname, places)))
    assert len(set(caches)) == 1
    assert not caches[0].startswith(tuple(map(os.path.dirname, places)))


DAEMON = """
    import ctypes, time
    begun, begins = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            print("daemon", os.getpid(), flush=True)
            os.write(begins, b"x")
            time.sleep(600)
        os._exit(0)
    os.wait()
    os.read(begun, 1)
    {end}"""


@pytest.mark.parametrize(
    ("end", "forked"),
    [
        *[(end, True) for end in ("pass", "os._exit(0)", "ctypes.string_at(0)", "time.sleep(600)")],
        *[(end, False) for end in ("pass", "time.sleep(600)")],
    ],
)
def test_what_left_its_group_and_its_parent_ends_with_the_worker(tmp_path, end, forked):
    with Workers() as workers:
        worker = WorkerProcess(job(tmp_path, DAEMON.format(end=end)), tmp_path / "one", workers if forked else None)
        while worker.alive and "daemon" not in worker.log_tail(200):
            time.sleep(0.05)
        if "sleep" in end:
            worker.kill()
        else:
            worker.wait(seconds=100, memory_mb=None)
        number = int(worker.log_tail(200).partition("daemon ")[2].split()[0])
        alive = that_stay([psutil.Process(number)] if psutil.pid_exists(number) else [])
        for process in alive:
            process.kill()
        assert not alive
        if forked:  # by a server that minded none of it
            again = WorkerProcess(job(tmp_path), tmp_path / "two", workers)
            assert again.wait(seconds=100, memory_mb=None).reason is None
            assert int(told(again)[0]) == workers._server.pid
