"""A hostile world: clients without a token or that never end, more load than can be done, artifacts that were tampered with."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import http.client
import math
import pathlib
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import tritonclient.grpc
from _serving import Server, write
from torch import nn
from tritonclient.utils import InferenceServerException

from trimtab.artifact.artifact import load
from trimtab.artifact.manifest import FileFacts, Manifest, read_manifest, write_manifest
from trimtab.errors import UsageError
from trimtab.serve.load_test import Access, load_test

ROWS = np.random.default_rng(0).normal(size=(3, 16)).astype("f4")
ONE = ["--instances", "1", "--threads", "1", "--batch", "8"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    """A certificate for this machine that it has signed itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here, which makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    subprocess.run([*words, *names, *files], check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture(scope="module")
def guarded(
    net: pathlib.Path, certificate: tuple[pathlib.Path, pathlib.Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server that speaks TLS and wants a token."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "token").write_text("open sesame\n")
    files = ["--token-file", str(folder / "token"), "--tls-cert", str(certificate[0]), "--tls-key", str(certificate[1])]
    with Server(folder / "log", str(net), *ONE, *files) as running:
        yield running


def test_only_the_right_token_opens_and_only_over_tls(
    guarded: Server, certificate: tuple[pathlib.Path, pathlib.Path], net: pathlib.Path
) -> None:
    trusted = ssl.create_default_context(cafile=str(certificate[0]))

    def ask(path: str, headers: dict[str, str], body: bytes | None = None, context: ssl.SSLContext = trusted) -> int:
        connection = http.client.HTTPSConnection("localhost", guarded.port, context=context, timeout=60)
        connection.request("GET" if body is None else "POST", path, body, headers)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        assert (answer.getheader("www-authenticate") == "Bearer") == (answer.status == 401)
        return answer.status

    right = {"Authorization": "Bearer open sesame"}
    body = b'{"inputs": [{"name": "x", "shape": [1, 16], "datatype": "FP32", "data": [%s]}]}' % b", ".join([b"1"] * 16)
    infer = "/v2/models/net/infer"
    assert [ask(path, {}) for path in ("/v2/health/live", "/v2/health/ready")] == [200, 200]  # probes have no token
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "open sesame"}, {"Authorization": "Bearer \xe9"}):
        assert [ask(path, headers) for path in ("/", "/v2", "/metrics", "/openapi.json")] == [401] * 4
        assert ask(infer, headers, body) == 401
        assert ask("/v2/repository/models/net/unload", headers, b"") == 401
    assert [ask(path, right) for path in ("/", "/v2", "/metrics", "/openapi.json")] == [200] * 4
    assert ask(infer, right, body) == 200
    with pytest.raises(ssl.SSLCertVerificationError):
        ask("/v2/health/live", {}, context=ssl.create_default_context())
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=10) as plain:
        plain.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert not plain.recv(100).startswith(b"HTTP/")
    address, tensor = f"localhost:{guarded.grpc_port}", tritonclient.grpc.InferInput("x", list(ROWS.shape), "FP32")
    tensor.set_data_from_numpy(ROWS)
    with tritonclient.grpc.InferenceServerClient(address, ssl=True, root_certificates=str(certificate[0])) as client:
        assert client.is_server_ready()
        for given in (None, {"authorization": "Bearer wrong"}):
            with pytest.raises(InferenceServerException, match="This server wants a token"):
                client.infer("net", [tensor], headers=given)
        found = client.infer("net", [tensor], headers={"authorization": "Bearer open sesame"}).as_numpy("logits")
        np.testing.assert_allclose(found, load(net)(torch.from_numpy(ROWS))["logits"].numpy(), rtol=1e-5)
    with tritonclient.grpc.InferenceServerClient(address) as client, pytest.raises(InferenceServerException):
        client.is_server_live()
    assert "open sesame" not in guarded.text
    assert "Traceback" not in guarded.text


def test_a_load_test_of_a_guarded_server_takes_its_token_and_certificate(
    guarded: Server, certificate: tuple[pathlib.Path, pathlib.Path]
) -> None:
    url = f"https://localhost:{guarded.port}"
    found = load_test(url, rate=40, seconds=0.5, access=Access("open sesame", certificate[0]))
    assert found is not None
    assert (found.ok, found.errors) == (found.sent, {})
    with pytest.raises(UsageError, match="answered with 401: .*This server wants a token"):
        load_test(url, rate=40, access=Access(None, certificate[0]))
    with pytest.raises(UsageError, match="certificate that is not trusted: .* Give it with --ca"):
        load_test(url, rate=40, access=Access("open sesame"))


def test_the_page_asks_for_the_token(guarded: Server, browser: Any) -> None:
    context = browser.new_context(ignore_https_errors=True)
    page = context.new_page()
    page.goto(f"https://localhost:{guarded.port}/")
    for token, shown in (("wrong", "This token is wrong."), ("open sesame", "Try it")):
        page.get_by_label("Token of this server").fill(token)
        page.get_by_role("button", name="Open").click()
        page.get_by_text(shown).wait_for()
    page.get_by_role("button", name="Compute").click()
    page.locator(".answer table").wait_for()
    assert page.locator(".answer table").is_visible()
    page.reload()  # the token is kept until the tab is closed
    page.get_by_text("Try it").wait_for()
    context.close()


def changed(folder: pathlib.Path, **facts: object) -> None:
    """Write a manifest with other facts, whose digest is right."""
    write_manifest(folder, dataclasses.replace(read_manifest(folder), **facts))


def listing(manifest: Manifest, name: str) -> dict[str, FileFacts]:
    return {**manifest.files, name: FileFacts(size=5, sha256="0" * 64)}


def outside(folder: pathlib.Path) -> None:
    (folder.parent / "outside").write_text("hello")
    changed(folder, files=listing(read_manifest(folder), "../outside"))


def link(folder: pathlib.Path) -> None:
    (folder / "model" / "extra").symlink_to("/etc/passwd")


def weights(folder: pathlib.Path) -> None:
    file = max((path for path in (folder / "model").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


MACHINE_CODE = {"passes": [], "backend": {"name": "aoti"}}
HOSTILE: list[tuple[Callable[[pathlib.Path], None], str]] = [
    (outside, r"manifest\.json .*'?\.\./outside"),
    (link, "model/extra is a link"),
    (weights, "its contents do not have the hash"),
    (lambda folder: changed(folder, native_code=True), "is wrong about whether eager files are machine code"),
    (
        lambda folder: changed(folder, native_code=True, recipe={"passes": [], "backend": {"name": "aoti"}}),
        "machine code .*--trust",
    ),
    (lambda folder: (folder / "manifest.json").write_bytes(b"[" * 100_000), "manifest.json cannot be read"),
]


def test_a_hostile_artifact_is_not_loaded_and_the_old_version_serves_on(net: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(net, folder)
    with Server(tmp_path / "log", str(folder), *ONE) as server:
        before = server.infer(ROWS.tolist())[1]
        for spoil, sentence in HOSTILE:
            shutil.rmtree(folder)
            shutil.copytree(net, folder)
            spoil(folder)
            status, answer, _ = server.ask("POST", "/v2/repository/models/net/load")
            assert status == 400
            assert re.search(sentence, answer["error"]), answer
            assert server.infer(ROWS.tolist())[1] == before
            assert len(server.instances) == 1
        assert "Traceback" not in server.text


class Slow(nn.Module):
    """Twice the input, after some work."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1200, 1200), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice ``x``."""
        return 2 * x + (self.weight @ self.weight)[:1, :16]


def bucket(server: Server, name: str, share: float) -> tuple[float, float]:
    """The bounds of the histogram's bucket in which the quantile ``share`` of its values lies."""
    text = server.ask("GET", "/metrics")[1].decode()
    found = re.findall(rf'^trimtab_{name}_bucket\{{le="([^"]+)".*\}} (\S+)$', text, re.MULTILINE)
    counts = {float(most): float(count) for most, count in found}
    most = min(most for most, count in counts.items() if count >= share * counts[math.inf] > 0)
    return max([0.0, *(other for other in counts if other < most)]), most


@pytest.mark.parametrize("seconds", [3.0, pytest.param(30.0, marks=pytest.mark.long)])
def test_twice_the_capacity_refuses_the_rest_and_loses_nothing(tmp_path: pathlib.Path, seconds: float) -> None:
    folder = write(tmp_path / "artifact", model=Slow(), name="slow").path
    flags = ["--instances", "1", "--threads", "1", "--batch", "2", "--queue", "8", "--deadline", "1s"]
    with Server(tmp_path / "log", str(folder), *flags) as server:
        url, body = f"http://127.0.0.1:{server.port}", ROWS[:2].tolist()
        assert [server.infer(body, model="slow")[0] for _ in range(3)] == [200] * 3
        start = time.perf_counter()
        assert [server.infer(body, model="slow")[0] for _ in range(20)] == [200] * 20
        capacity = 2 * 20 / (time.perf_counter() - start)  # at most: a lone client leaves the server idle between requests
        over, told, depths = threading.Event(), collections.Counter[int](), list[int]()

        def check() -> None:
            while not over.is_set():
                status, answer, headers = server.infer(body, model="slow")
                told[status] += 1
                if status == 200:
                    np.testing.assert_allclose(answer["outputs"][0]["data"], 2 * ROWS[:2].flatten(), rtol=1e-5)
                elif status == 503:
                    assert (headers["retry-after"], "queue of 8 requests is full" in answer["error"]) == ("1", True)
                depths.append(server.waiting)

        checker = threading.Thread(target=check)
        checker.start()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:  # the browser's event loop runs in this thread
            found = pool.submit(load_test, url, rate=2 * capacity, seconds=seconds, rows=2).result()
        over.set()
        checker.join()
        assert found is not None
        assert found.ok > 0
        assert set(found.errors) <= {"503", "504"}
        assert found.errors
        assert found.ok + sum(found.errors.values()) == found.sent
        assert set(told) <= {200, 503, 504}
        assert max(depths) <= 8
        assert bucket(server, "queue_seconds", 1.0)[1] <= 1.0  # no accepted request waited longer than its deadline,
        longest = 9 * bucket(server, "batch_seconds", 1.0)[1]  # or for more batches than the queue holds and the one before
        assert bucket(server, "queue_seconds", 0.99)[0] < longest
        assert server.infer(body, model="slow")[0] == 200
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) == 1
        assert server.stop() == 0
