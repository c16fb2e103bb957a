"""Load tests of a folder, and of two servers in turns."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time

import psutil
import pytest
from _serving import Server

from trimtab.errors import UsageError
from trimtab.serve.load_comparison import ROUNDS, compare_servers
from trimtab.serve.load_test import Load, Target, offer_load
from trimtab.serve.own_server import address_of


@pytest.mark.long
def test_an_artifact_is_served_for_as_long_as_it_is_measured(
    net: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    command = [sys.executable, "-m", "trimtab", "load-test", str(net), "--rate", "50", "--time", "1s", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] == found["sent"] > 0
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(net) in (one.info["cmdline"] or [])]


def test_an_artifact_that_cannot_be_served_leaves_no_process(tmp_path: pathlib.Path) -> None:
    before = set(psutil.Process(os.getpid()).children())  # servers of other tests
    with pytest.raises(UsageError, match="cannot be served"), address_of(str(tmp_path)):
        raise AssertionError
    assert set(psutil.Process(os.getpid()).children()) <= before


def test_two_servers_are_compared_in_turns(net: pathlib.Path, tmp_path: pathlib.Path) -> None:
    flags = ["--instances", "1", "--threads", "1", "--batch", "8"]
    with (
        Server(tmp_path / "a", str(net), *flags) as one,
        Server(tmp_path / "b", str(net), *flags, "--max-wait", "50ms") as other,
    ):
        urls = [f"http://127.0.0.1:{server.port}" for server in (one, other)]
        told = list[tuple[str, Load]]()
        found = compare_servers(*urls, rate=40, seconds=3.0, on_load=lambda *facts: told.append(facts))
        assert [url for url, _ in told[:4]] == [urls[0], urls[1], urls[1], urls[0]]
        assert len(told) == 2 * ROUNDS
        assert 1 < found.p50.low < found.p50.value < found.p50.high  # one of them waits for fuller batches
        assert found.errors == ({}, {})
        assert "second against first at 40/s, 10 periods each: p50" in str(found)


def test_a_client_that_stood_still_says_so() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def run(pause_s: float) -> Load:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            asyncio.get_running_loop().call_later(0.1, time.sleep, pause_s)
            load = await offer_load(Target("127.0.0.1", port, b"GET /\n"), rate=200.0, seconds=2.0)
            await asyncio.sleep(0.1)  # until the server has seen that the connections are closed
            return load

    stood = asyncio.run(run(0.4))
    assert stood.ok == stood.sent
    assert stood.latest_s > 0.3
    words = f"; the client stood still for {stood.latest_s:.2f} s"
    assert words in str(dataclasses.replace(stood, late=False))
    assert words not in str(dataclasses.replace(stood, late=True)), "a client that cannot keep the rate is as late"
