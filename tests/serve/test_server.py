"""``trimtab serve`` as users run it: real processes, an artifact, and the clients of the field."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import os
import pathlib
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
from _serving import Server, write
from tritonclient.utils import InferenceServerException

from trimtab.artifact.artifact import load
from trimtab.errors import UsageError
from trimtab.serve import grpc_api
from trimtab.serve.load_test import Load, load_test
from trimtab.serve.protocol import Refusal

ROWS = np.random.default_rng(0).normal(size=(3, 16)).astype("f4")


@pytest.fixture(scope="module")
def server(net: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    with Server(
        log, str(net), "--instances", "2", "--threads", "1", "--batch", "8", "--max-body", "100kB", "--log-requests"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[tritonclient.http.InferenceServerClient]:
    found = tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.port}", concurrency=4)
    yield found
    found.close()


def want(net: pathlib.Path, rows: np.ndarray) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in load(net)(torch.from_numpy(rows)).items()}


def x(rows: np.ndarray, binary: bool = True) -> tritonclient.http.InferInput:
    tensor = tritonclient.http.InferInput("x", list(rows.shape), "FP32")
    return tensor.set_data_from_numpy(rows, binary_data=binary)


def test_front_never_imports_torch() -> None:
    code = (
        "import sys, json, trimtab.cli.main, trimtab.cli.serve, trimtab.serve.front; "
        "print(json.dumps([name for name in ('torch', 'transformers', 'onnxruntime') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_every_read_route(server: Server, client: tritonclient.http.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("net")
    assert client.is_model_ready("net", "1")
    assert client.get_server_metadata()["name"] == "trimtab"
    assert client.get_model_metadata("net") == {
        "name": "net",
        "versions": ["1"],
        "platform": "trimtab_eager",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 16]}],
        "outputs": [
            {"name": "logits", "datatype": "FP32", "shape": [-1, 4]},
            {"name": "class", "datatype": "INT64", "shape": [-1]},
        ],
    }
    config = client.get_model_config("net")
    assert (config["max_batch_size"], config["instance_group"][0]["count"]) == (8, 2)
    assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [16]}]
    assert client.get_model_repository_index() == [{"name": "net", "version": "1", "state": "READY", "reason": ""}]
    assert server.ask("GET", "/v2/health/ready")[:2] == (200, {"ready": True})
    assert server.ask("GET", "/v2/health/live")[:2] == (200, {"live": True})


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_infer_gives_what_the_artifact_gives(
    net: pathlib.Path, client: tritonclient.http.InferenceServerClient, binary_in: bool, binary_out: bool
) -> None:
    outputs = [tritonclient.http.InferRequestedOutput(name, binary_data=binary_out) for name in ("class", "logits")]
    answer = client.infer("net", [x(ROWS, binary_in)], outputs=outputs, request_id="seven")
    for name, values in want(net, ROWS).items():
        np.testing.assert_allclose(answer.as_numpy(name), values, rtol=1e-5)
    assert answer.get_response()["id"] == "seven"
    assert answer.get_response()["model_version"] == "1"


def test_more_rows_than_the_model_takes_are_split(net: pathlib.Path, client: tritonclient.http.InferenceServerClient) -> None:
    rows = np.random.default_rng(1).normal(size=(150, 16)).astype("f4")
    whole = np.concatenate([want(net, rows[start : start + 50])["logits"] for start in range(0, len(rows), 50)])
    np.testing.assert_allclose(client.infer("net", [x(rows)]).as_numpy("logits"), whole, rtol=1e-4, atol=1e-5)


def test_many_clients_get_their_own_answers(net: pathlib.Path, server: Server) -> None:
    rows = np.random.default_rng(2).normal(size=(64, 16)).astype("f4")
    expected = want(net, rows)["logits"]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda row: server.infer([row.tolist()]), rows))
    assert [status for status, _, _ in answers] == [200] * len(rows)
    found = np.array([answer["outputs"][0]["data"] for _, answer, _ in answers])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_refusals(server: Server, client: tritonclient.http.InferenceServerClient) -> None:
    assert server.infer([[1.0] * 15])[:2] == (
        400,
        {"error": "Input 'x' has the shape [1, 15]; the model takes x: FP32[batch, 16]."},
    )
    assert server.infer([[1.0] * 16], model="other")[:2] == (404, {"error": "There is no model 'other'. Served: net."})
    assert server.ask("GET", "/v2/models/net/versions/7")[0] == 404
    assert server.ask("GET", "/nothing")[0] == 404
    assert server.ask("GET", "/v2/models/net/nothing")[0] == 404
    assert server.ask("GET", "/v2/models/net/infer")[0] == 405
    assert server.ask("POST", "/v2/health/live")[0] == 405
    status, answer, _ = server.ask("POST", "/v2/models/net/infer", b"", {"Content-Length": str(10**9)})
    assert (status, answer["error"][:35]) == (413, "The body has 1000000000 bytes; at m")
    assert server.ask("POST", "/v2/models/net/infer", b"x", {"Content-Encoding": "gzip"})[0] == 400
    assert server.infer([[1.0] * 16], parameters={"timeout": -1})[0] == 400
    with pytest.raises(InferenceServerException, match="There is no input 'y'"):
        client.infer("net", [tritonclient.http.InferInput("y", [1], "FP32").set_data_from_numpy(np.zeros(1, "f4"))])
    assert server.ask("POST", "/v2/repository/models/net/load", {"parameters": {"config": "{}"}})[0] == 400
    assert server.ask("POST", "/v2/repository/models/..%2F..%2Fetc/load")[0] == 404


def logged(server: Server, request: str) -> dict[str, Any]:
    """The log line of a request."""
    while not (lines := [line for line in server.text.splitlines() if f'"request_id": "{request}"' in line]):
        time.sleep(0.01)
    (line,) = lines
    found: dict[str, Any] = json.loads(line)
    return found


def test_a_request_keeps_its_id_and_is_logged_with_it(server: Server) -> None:
    tensor = {"name": "x", "shape": [3, 16], "datatype": "FP32", "data": ROWS.flatten().tolist()}
    path = "/v2/models/net/infer"
    status, _, headers = server.ask("POST", path, {"inputs": [tensor]}, {"X-Request-Id": "mine-1"})
    assert (status, headers["x-request-id"]) == (200, "mine-1")
    line = logged(server, "mine-1")
    assert [line[key] for key in ("event", "method", "path", "status", "model", "version", "batch_rows")] == [
        *("request", "POST", path, 200, "net", "1", 3),
    ]
    assert line["ms"] >= line["compute_ms"] > 0
    status, answer, headers = server.ask("POST", path, {"inputs": []}, {"X-Request-Id": "two words"})
    line = logged(server, headers["x-request-id"])
    assert (status, line["status"], line["error"]) == (400, 400, answer["error"])
    assert "two words" not in server.text
    quiet = server.ask("GET", "/metrics")[2]["x-request-id"]
    assert quiet not in server.text


def test_grpc_keeps_the_id_of_a_request_too(server: Server) -> None:
    kinds = grpc_api.messages()
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        infer = channel.unary_unary(
            f"/{grpc_api.SERVICE}/ModelInfer",
            request_serializer=kinds["ModelInferRequest"].SerializeToString,
            response_deserializer=kinds["ModelInferResponse"].FromString,
        )
        tensor = {"name": "x", "datatype": "FP32", "shape": [3, 16]}
        request = kinds["ModelInferRequest"](model_name="net", inputs=[tensor], raw_input_contents=[ROWS.tobytes()])
        _, call = infer.with_call(request, metadata=[("x-request-id", "mine-2")])
        assert dict(call.trailing_metadata())["x-request-id"] == "mine-2"
        assert [logged(server, "mine-2")[key] for key in ("path", "status")] == ["ModelInfer", 200]
        with pytest.raises(grpc.RpcError) as refused:
            infer(kinds["ModelInferRequest"](model_name="other"))
        assert isinstance(refused.value, grpc.Call)
        line = logged(server, str(dict(refused.value.trailing_metadata())["x-request-id"]))
        assert (line["status"], line["error"]) == (404, "There is no model 'other'. Served: net.")


def test_a_chunked_body_over_the_limit_is_refused(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v2/models/net/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"%x\r\n%b\r\n" % (60_000, b" " * 60_000)
        connection.sendall(chunk * 2)
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_half_sent_bodies_and_a_thousand_idle_connections_disturb_nobody(server: Server) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(1000)]
    for connection in idle[:50]:
        connection.sendall(b"POST /v2/models/net/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
    for connection in idle[50:100]:
        connection.sendall(b"POST /v2/models/net/infer HTTP/1.1\r\nHost")
    assert [server.infer(ROWS.tolist())[0] for _ in range(20)] == [200] * 20
    for connection in idle:
        connection.close()
    assert server.infer(ROWS.tolist())[0] == 200


@pytest.fixture(scope="module")
def rpc(server: Server) -> Iterator[tritonclient.grpc.InferenceServerClient]:
    found = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
    yield found
    found.close()


def rpc_x(rows: np.ndarray) -> tritonclient.grpc.InferInput:
    return tritonclient.grpc.InferInput("x", list(rows.shape), "FP32").set_data_from_numpy(rows)


def test_grpc_says_and_computes_the_same(
    net: pathlib.Path, rpc: tritonclient.grpc.InferenceServerClient, client: tritonclient.http.InferenceServerClient
) -> None:
    assert rpc.is_server_live()
    assert rpc.is_server_ready()
    assert rpc.is_model_ready("net", "1")
    assert rpc.get_server_metadata(as_json=True)["name"] == "trimtab"
    found, other = rpc.get_model_metadata("net", as_json=True), client.get_model_metadata("net")
    assert [(t["name"], t["datatype"], [int(n) for n in t["shape"]]) for t in found["outputs"]] == [
        tuple(t.values()) for t in other["outputs"]
    ]
    assert rpc.get_model_config("net", as_json=True)["config"]["max_batch_size"] == 8
    assert rpc.get_model_repository_index(as_json=True)["models"][0]["state"] == "READY"
    answer = rpc.infer("net", [rpc_x(ROWS)], outputs=[tritonclient.grpc.InferRequestedOutput("logits")], request_id="7")
    np.testing.assert_allclose(answer.as_numpy("logits"), want(net, ROWS)["logits"], rtol=1e-5)
    assert answer.get_response().id == "7"
    statistics = rpc.get_inference_statistics("net", as_json=True)["model_stats"][0]
    assert int(statistics["inference_stats"]["success"]["count"]) >= 1
    for name, rows, sentence in (("other", ROWS, "There is no model 'other'"), ("net", ROWS[:, :3], r"has the shape \[3, 3\]")):
        with pytest.raises(InferenceServerException, match=sentence):
            rpc.infer(name, [rpc_x(rows)])


def test_a_grpc_stream_goes_on_after_a_refusal(net: pathlib.Path, rpc: tritonclient.grpc.InferenceServerClient) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    rpc.start_stream(lambda result, error: answers.put((result, error)))
    for rows in (ROWS, ROWS[:, :3], ROWS[:1]):
        rpc.async_stream_infer("net", [rpc_x(rows)])
    found = [answers.get(timeout=30) for _ in range(3)]
    rpc.stop_stream()
    np.testing.assert_allclose(found[0][0].as_numpy("logits"), want(net, ROWS)["logits"], rtol=1e-5)
    assert "has the shape [3, 3]" in str(found[1][1])
    assert found[2][0].as_numpy("logits").shape == (1, 4)


def test_the_grpc_messages_are_those_of_the_field() -> None:
    theirs = tritonclient.grpc.service_pb2.DESCRIPTOR.message_types_by_name
    ours = grpc_api.messages()
    for name, message in ours.items():
        if name in theirs:
            known = {(field.name, field.number, field.type) for field in theirs[name].fields}
            assert {(field.name, field.number, field.type) for field in message.DESCRIPTOR.fields} <= known, name
    request = ours["ModelInferRequest"](inputs=[{"name": "x", "datatype": "INT8", "contents": {"int_contents": [1, -2]}}])
    assert grpc_api._read_inputs(request)["x"][2] == b"\x01\xfe"
    request.inputs[0].contents.int_contents.append(200)
    with pytest.raises(Refusal, match="exceeds INT8"):
        grpc_api._read_inputs(request)


def test_statistics_and_metrics(server: Server, client: tritonclient.http.InferenceServerClient) -> None:
    client.infer("net", [x(ROWS)])
    found = client.get_inference_statistics("net")["model_stats"][0]
    assert found["inference_count"] >= 3
    assert found["inference_stats"]["success"]["count"] >= 1
    assert found["inference_stats"]["compute_infer"]["ns"] > 0
    status, text, _ = server.ask("GET", "/metrics")
    lines = text.decode().splitlines()
    ok = next(line for line in lines if line.startswith('trimtab_requests_total{model="net",outcome="ok",version="1"}'))
    assert status == 200
    assert float(ok.split()[-1]) >= 1
    for name in ("request", "queue", "compute", "overhead"):
        assert any(line.startswith(f"trimtab_{name}_seconds_bucket") for line in lines)
    assert sum(line.startswith("trimtab_instance_resident_bytes{") for line in lines) == 2


def load_while(server: Server, act: Callable[[], object]) -> list[int]:
    """The statuses of the requests that 8 clients send before, during and after ``act``. -1: no connection any more."""
    over = threading.Event()

    def ask(_: int) -> list[int]:
        found = list[int]()
        while not over.is_set():
            try:
                status, answer, _ = server.infer(ROWS.tolist())
            except ConnectionRefusedError:
                return [*found, -1]
            found.append(status)
            assert status != 200 or len(answer["outputs"][0]["data"]) == 12
        return found

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        work = [pool.submit(ask, n) for n in range(8)]
        time.sleep(0.3)
        act()
        time.sleep(0.3)
        over.set()
        return [status for one in work for status in one.result()]


def test_the_openapi_document_has_every_route_and_its_example_is_answered(server: Server) -> None:
    document = server.ask("GET", "/openapi.json")[1]
    for path, methods in document["paths"].items():
        if "get" in methods:
            assert server.ask("GET", path.replace("{version}", "1"))[0] == 200, path
    body = document["paths"]["/v2/models/net/infer"]["post"]["requestBody"]["content"]["application/json"]["example"]
    status, answer, _ = server.ask("POST", "/v2/models/net/infer", body)
    assert (status, [output["name"] for output in answer["outputs"]]) == (200, ["logits", "class"])


def test_the_page_shows_the_card_and_loads_nothing_from_elsewhere(server: Server) -> None:
    status, text, headers = server.ask("GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    shown = text.decode()
    for words in (
        "x: FP32[batch, 16]",
        "2 x 1 thread, batches of up to 8 rows",
        "2 times as fast as the model as written (95% interval 1.9 to 2.1)",
        "Try it",
    ):
        assert words in shown
    assert "http://" not in shown
    assert "https://" not in shown


def test_a_load_test_reports_latency_and_errors(server: Server) -> None:
    url = f"http://127.0.0.1:{server.port}"
    found = load_test(url, rate=100, seconds=1.0, p99_s=5.0)
    assert found is not None
    assert (found.ok, found.errors) == (found.sent, {})
    assert 60 < found.sent < 150
    median, p99, _ = found.quantiles
    assert 0 < median.low <= median.ms <= p99.ms
    assert found.keeps(5.0) or found.late  # a machine that is too busy to send in time proves nothing
    assert not found.keeps(1e-6)
    bad = load_test(url, rate=100, seconds=0.3, body=b"{}")
    assert bad is not None
    assert (bad.ok, set(bad.errors)) == (0, {"400"})
    told = list[Load]()
    best = load_test(url, p99_s=5.0, seconds=0.2, on_load=told.append)
    assert best == max((one for one in told if one.keeps(5.0)), key=lambda one: one.rate, default=None)
    told.clear()
    best = load_test(url, p99_s=1e-6, seconds=0.3, on_load=told.append)
    assert (best, len(told)) == (None, 1)
    with pytest.raises(UsageError, match="No server answers at http://127.0.0.1:1"):
        load_test("http://127.0.0.1:1", rate=1)


def answers_after_sigterm(server: Server) -> list[int]:
    """The statuses of 16 requests that were sent before the server got SIGTERM."""
    rows = np.zeros((4000, 16), "f4").tobytes()
    tensor = {"name": "x", "shape": [4000, 16], "datatype": "FP32", "parameters": {"binary_data_size": len(rows)}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    clients = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=60) for _ in range(16)]
    instances = server.instances
    for instance in instances:
        instance.suspend()  # so that the requests wait, however fast the machine is
    for one in clients:
        one.request("POST", "/v2/models/net/infer", head + rows, {"Inference-Header-Content-Length": str(len(head))})
    while server.waiting < 8:
        time.sleep(0.002)
    server.process.terminate()
    for instance in instances:
        instance.resume()
    return [one.getresponse().status for one in clients]


def test_kill_9_of_an_instance_under_load_loses_nothing(server: Server) -> None:
    victim = server.instances[0]
    found = load_while(server, victim.kill)
    assert set(found) == {200}
    while len(server.instances) < 2:
        time.sleep(0.05)
    assert victim not in server.instances


def test_nothing_is_left_when_the_front_is_killed(net: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with Server(tmp_path / "log", str(net), "--instances", "1", "--threads", "1") as running:
        instances = running.instances
        running.process.kill()
        running.process.wait()
        assert psutil.wait_procs(instances, timeout=5)[1] == []


def test_a_new_version_is_switched_to_without_loss_and_sigterm_answers_what_was_accepted(
    net: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(net, folder)
    with Server(tmp_path / "log", str(folder), "--instances", "1", "--threads", "1", "--batch", "8") as running:
        before = running.infer(ROWS.tolist())[1]
        (folder / "README.md").write_text("changed")
        running.process.send_signal(signal.SIGHUP)  # a broken version: the old one serves on
        while "version not loaded" not in running.text:
            time.sleep(0.05)
        assert "README.md was changed" in running.text
        assert running.infer(ROWS.tolist())[1] == before
        status, answer, _ = running.ask("POST", "/v2/repository/models/net/load")
        assert (status, "README.md was changed" in answer["error"]) == (400, True)
        shutil.rmtree(folder)
        write(folder, seed=1)

        def swap() -> None:
            os.kill(running.process.pid, signal.SIGHUP)
            while '"version serves", "model": "net", "version": "2"' not in running.text:
                time.sleep(0.05)

        assert set(load_while(running, swap)) == {200}
        after = running.infer(ROWS.tolist())[1]
        assert after["model_version"] == "2"
        np.testing.assert_allclose(after["outputs"][0]["data"], want(folder, ROWS)["logits"].flatten(), rtol=1e-4)
        assert len(running.instances) == 1

        assert set(answers_after_sigterm(running)) == {200}
        assert running.process.wait(20) == 0


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda folder: (folder / "README.md").write_text("changed"), "error[integrity]: "),
        (lambda folder: shutil.rmtree(folder), "is no artifact: it has no readable manifest.json"),
    ],
)
def test_what_verify_refuses_is_not_served(
    net: pathlib.Path, tmp_path: pathlib.Path, spoil: Callable[[pathlib.Path], object], sentence: str
) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(net, folder)
    spoil(folder)
    command = [sys.executable, "-m", "trimtab", "serve", str(folder), "--port", "0", "--no-grpc", "--instances", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
