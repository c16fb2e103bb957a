"""A runner in another process: real processes, also ones that die, hang, raise or lie."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pickle
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client

import pytest

from _places import TESTS
from _served import KEY, Work
from trimtab.errors import MeasurementError
from trimtab.execution.baseline_servers import BaselineServers
from trimtab.measure.remote import LONGEST_PATH, RemoteRunner, serve
from trimtab.measure.timer import LocalRunner, Runner

SCRIPT = TESTS / "_served.py"
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def address() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="trimtab-test-")  # pytest's own folders are too long for a socket
    yield f"{folder}/s"
    shutil.rmtree(folder)


@pytest.fixture
def start(address: str) -> Iterator[Start]:
    started = []

    def run(mode: str = "works", microseconds: float = 50.0) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(SCRIPT), address, str(microseconds), mode]
        started.append(subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def test_blocks_come_from_the_other_process(start: Start, address: str) -> None:
    process = start()
    with RemoteRunner(address, KEY) as runner:
        assert isinstance(runner, Runner)
        assert runner.pid == process.pid != os.getpid()
        times = runner.block(20)
    assert len(times) == 20
    assert all(ns > 1000 for ns in times)
    assert stat.S_IMODE(os.stat(address).st_mode) == 0o600, "nobody else may connect"


def test_a_server_outlives_its_peers_until_one_says_stop(start: Start, address: str) -> None:
    process = start()
    for _ in range(3):
        with RemoteRunner(address, KEY) as runner:
            assert len(runner.block(2)) == 2
    killed = (
        "import os, sys; from trimtab.measure.remote import RemoteRunner as R; R(sys.argv[1], b'tests').block(1); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", killed, address], check=False).returncode == 9
    runner = RemoteRunner(address, KEY)
    runner.stop()
    assert process.wait(20) == 0
    assert not os.path.exists(address)
    with pytest.raises(MeasurementError, match="is closed"):
        runner.block(1)


@pytest.mark.parametrize("how", ["killed", "dies"])
def test_a_server_that_dies_in_the_middle_is_told_in_a_sentence(start: Start, address: str, how: str) -> None:
    process = start("works" if how == "killed" else "dies", microseconds=20_000)
    runner = RemoteRunner(address, KEY)
    if how == "killed":
        runner.block(1)
        threading.Timer(0.4, process.send_signal, [signal.SIGKILL]).start()
    with pytest.raises(MeasurementError, match=rf"process {process.pid}\) is gone: .* crashed or was killed"):
        runner.block(2000)
    with pytest.raises(MeasurementError, match="is closed"):
        runner.block(1)


def test_a_server_that_hangs_is_given_up(start: Start, address: str) -> None:
    start("hangs")
    runner = RemoteRunner(address, KEY, timeout_s=1.0)
    assert len(runner.block(3)) == 3
    with pytest.raises(MeasurementError, match="did not answer within 1 s"):
        runner.block(10)


def test_what_the_work_raises_is_told_and_the_server_goes_on(start: Start, address: str) -> None:
    start("raises")
    with RemoteRunner(address, KEY) as runner:
        for _ in range(2):
            with pytest.raises(MeasurementError, match="RuntimeError: the kernel is unhappy"):
                runner.block(1)
        with pytest.raises(MeasurementError, match="a block or samples of 1 to"):
            runner.block(0)


def test_nobody_there(address: str) -> None:
    begun = time.monotonic()
    with pytest.raises(MeasurementError, match="No other process could be reached"):
        RemoteRunner(address, KEY, connect_s=0.3)
    assert time.monotonic() - begun < 10


def test_a_second_peer_waits_and_is_told_that_the_server_is_busy(start: Start, address: str) -> None:
    start()
    with RemoteRunner(address, KEY), pytest.raises(MeasurementError, match="busy with another comparison"):
        RemoteRunner(address, KEY, connect_s=0.5)
    with RemoteRunner(address, KEY) as runner:
        assert len(runner.block(1)) == 1


def test_another_key_is_refused_and_nonsense_is_survived(start: Start, address: str) -> None:
    start()
    RemoteRunner(address, KEY).close()
    with pytest.raises(MeasurementError, match="another key"):
        RemoteRunner(address, b"wrong", connect_s=5)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as stranger:
        stranger.connect(address)
        stranger.sendall(b"\x00\x00\x00\x05hello")
    for nonsense in (b"\xff", b"[]", b'{"do": "block", "calls": 1e999}', b"[" * 4000, b"x" * 5000):
        with Client(address, family="AF_UNIX", authkey=KEY) as peer:
            peer.send_bytes(nonsense)
            with pytest.raises((EOFError, OSError)):
                peer.recv_bytes()
    with RemoteRunner(address, KEY) as runner:
        assert len(runner.block(1)) == 1


class Trap:
    """Unpickling this makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


def test_a_pickle_is_never_opened(start: Start, address: str) -> None:
    start()
    trap = f"{address}.trap"
    with RemoteRunner(address, KEY):
        pass
    with Client(address, family="AF_UNIX", authkey=KEY) as peer:
        peer.send_bytes(pickle.dumps(Trap(trap)))
        with pytest.raises((EOFError, OSError)):
            peer.recv_bytes()
    assert not os.path.exists(trap)


def test_addresses_that_cannot_be(tmp_path: pathlib.Path) -> None:
    runner = LocalRunner(Work(1, "works"))
    with pytest.raises(MeasurementError, match=r"is 1\d\d bytes long.*shorter folder"):
        serve(runner, "/tmp/" + "x" * 120, KEY)
    with pytest.raises(MeasurementError, match="A socket cannot be made at"):
        serve(runner, "/nonexistent-folder/s", KEY)


def test_a_socket_that_a_killed_server_left_behind_is_replaced(start: Start, address: str) -> None:
    process = start()
    RemoteRunner(address, KEY).close()
    process.kill()
    process.wait()
    assert os.path.exists(address)
    process = start()
    with RemoteRunner(address, KEY) as runner:
        assert runner.pid == process.pid
        assert json.dumps(runner.block(2))


def test_sockets_lie_where_their_paths_are_short_enough(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("d" * LONGEST_PATH)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with BaselineServers({}, tmp_path) as rivals:
        assert len(os.fsencode(rivals._sockets / "as_written")) <= LONGEST_PATH
