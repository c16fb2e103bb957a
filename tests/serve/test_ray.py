"""The written Ray Serve application in a real cluster: two nodes of this machine, a replica on each."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import torch

from trimtab.artifact.artifact import load
from trimtab.serve import deploy
from trimtab.serve.options import Options

SERVE = shutil.which("serve", path=str(pathlib.Path(sys.executable).parent))
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None or SERVE is None, reason="Ray Serve is not installed: pip install 'ray[serve]'"
    ),
]
ROWS = np.random.default_rng(0).normal(size=(2, 16)).astype("f4")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a cluster of two nodes with one core each."""
    port, place = free_port(), tmp_path_factory.mktemp("ray")
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus", "1", "--block", "--disable-usage-stats"]
    head = ["--head", "--port", str(port), "--node-ip-address", "127.0.0.1", "--include-dashboard", "false"]
    head += ["--temp-dir", "/tmp/ray-" + str(port)]  # sockets below it must have short names
    nodes = list[subprocess.Popen[bytes]]()
    try:
        for number, words in enumerate((head, ["--address", f"127.0.0.1:{port}", "--node-ip-address", "127.0.0.1"])):
            with (place / f"node{number}").open("wb") as log:
                nodes.append(
                    subprocess.Popen([*start, *words], env=environment, stdout=log, stderr=log, start_new_session=True)
                )
            end = time.monotonic() + 60
            while number == 0:
                assert time.monotonic() < end
                assert nodes[0].poll() is None, (place / "node0").read_text()
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    time.sleep(0.2)
        yield environment | {"RAY_ADDRESS": f"127.0.0.1:{port}"}
    finally:
        for node in reversed(nodes):
            below = psutil.Process(node.pid).children(recursive=True) if node.poll() is None else []
            node.send_signal(signal.SIGTERM)
            node.wait(60)
            for child in below:
                if child.is_running():
                    child.kill()
        shutil.rmtree("/tmp/ray-" + str(port), ignore_errors=True)


def test_two_replicas_on_two_nodes_answer(net: pathlib.Path, tmp_path: pathlib.Path, cluster: dict[str, str]) -> None:
    options = Options(models={"net": net}, instances=2, threads=1, port=free_port())
    deploy.write(options, "ray", tmp_path / "application")
    with (tmp_path / "log").open("wb") as log:
        assert SERVE is not None
        command = [sys.executable, SERVE, "run", "serve.yaml"]
        running = subprocess.Popen(command, cwd=tmp_path / "application", env=cluster, stdout=log, stderr=log)
    want = load(net)(torch.from_numpy(ROWS))["logits"].numpy()
    tensor = {"name": "x", "shape": [2, 16], "datatype": "FP32", "data": ROWS.flatten().tolist()}

    def ask(body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", options.port, timeout=60)
        connection.request("POST", "/v2/models/net/infer", body)
        answer = connection.getresponse()
        return answer.status, answer.read()

    def replicas() -> list[psutil.Process]:
        found = psutil.process_iter(["cmdline"])
        return [one for one in found if "ServeReplica:net" in " ".join(one.info["cmdline"] or [])]

    try:
        end = time.monotonic() + 120
        while True:
            assert running.poll() is None, (tmp_path / "log").read_text()[-5000:]
            assert time.monotonic() < end, (tmp_path / "log").read_text()[-5000:]
            try:
                if ask(json.dumps({"inputs": [tensor]}).encode())[0] == 200 and len(replicas()) == 2:
                    break
            except OSError:
                pass
            time.sleep(0.5)
        parents = {one.ppid() for one in replicas()}
        assert len(parents) == 2  # each replica is a child of its own node's raylet
        for _ in range(10):
            status, body = ask(json.dumps({"inputs": [tensor]}).encode())
            assert status == 200
            np.testing.assert_allclose(np.reshape(json.loads(body)["outputs"][0]["data"], (2, 4)), want, rtol=1e-4)
        status, body = ask(b'{"inputs": []}')
        assert (status, "The input 'x' is missing" in json.loads(body)["error"]) == (400, True)
    finally:
        running.send_signal(signal.SIGINT)
        running.wait(60)
