"""The protocol as the field's clients speak it: HTTP and gRPC, blocking and asyncio, JSON and binary, every route."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import pathlib
import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from _serving import Server, write
from torch import nn
from tritonclient.utils import InferenceServerException

from trimtab.artifact.artifact import load
from trimtab.core.signature import Dim

ROWS = np.random.default_rng(0).normal(size=(3, 16)).astype("f4")
ROOT = pathlib.Path(__file__).parents[2]


class Halves(nn.Module):
    """float16 and bfloat16, in and out."""

    def forward(self, h: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        """Twice ``h``, and ``b`` and one."""
        return {"twice": h * 2, "more": b + 1}


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    inputs = (torch.ones(2, 3, dtype=torch.float16), torch.ones(2, 3, dtype=torch.bfloat16))
    batch = Dim("batch", 1, 64)
    folder = tmp_path_factory.mktemp("halves") / "artifact"
    return write(folder, model=Halves(), inputs=inputs, dynamic={"h": {0: batch}, "b": {0: batch}}, name="halves").path


@pytest.fixture(scope="module")
def server(net: pathlib.Path, halves: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ["--instances", "1", "--threads", "1", "--batch", "8"]
    with Server(log, f"net={net}", f"halves={halves}", *flags) as running:
        yield running
    assert "Traceback" not in running.text


@pytest.fixture(scope="module")
def want(net: pathlib.Path) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in load(net)(torch.from_numpy(ROWS)).items()}


def over_http(rows: np.ndarray, binary: bool) -> tuple[list[Any], list[Any]]:
    tensor = tritonclient.http.InferInput("x", list(rows.shape), "FP32").set_data_from_numpy(rows, binary_data=binary)
    return [tensor], [tritonclient.http.InferRequestedOutput(name, binary_data=binary) for name in ("logits", "class")]


def over_grpc(rows: np.ndarray) -> list[Any]:
    return [tritonclient.grpc.InferInput("x", list(rows.shape), "FP32").set_data_from_numpy(rows)]


def test_every_client_gets_what_the_artifact_gives(server: Server, want: dict[str, np.ndarray]) -> None:
    answers: dict[str, Any] = {}
    urls = {kind: f"127.0.0.1:{port}" for kind, port in (("http", server.port), ("grpc", server.grpc_port))}
    with tritonclient.http.InferenceServerClient(urls["http"]) as http:
        for binary in (True, False):
            inputs, outputs = over_http(ROWS, binary)
            answers[f"http {binary}"] = http.infer("net", inputs, outputs=outputs)
            answers[f"http later {binary}"] = http.async_infer("net", inputs, outputs=outputs).get_result()
        answers["http plain"] = http.infer("net", inputs)
    with tritonclient.grpc.InferenceServerClient(urls["grpc"]) as grpc:
        answers["grpc"] = grpc.infer("net", over_grpc(ROWS), model_version="1")
        found: queue.Queue[Any] = queue.Queue()
        grpc.async_infer("net", over_grpc(ROWS), callback=lambda result, error: found.put(result or error))
        answers["grpc later"] = found.get(timeout=30)

    async def others() -> None:
        async with tritonclient.http.aio.InferenceServerClient(urls["http"]) as client:
            assert await client.is_server_ready()
            for binary in (True, False):
                inputs, outputs = over_http(ROWS, binary)
                answers[f"http aio {binary}"] = await client.infer("net", inputs, outputs=outputs)
        async with tritonclient.grpc.aio.InferenceServerClient(urls["grpc"]) as client:
            assert await client.is_model_ready("net")
            answers["grpc aio"] = await client.infer("net", over_grpc(ROWS))

            async def requests() -> Any:
                for _ in range(2):
                    yield {"model_name": "net", "inputs": over_grpc(ROWS)}

            async for result, error in client.stream_infer(requests()):
                answers["grpc aio stream"] = result or error

    asyncio.run(others())
    assert len(answers) == 11
    for answer in answers.values():
        for name, values in want.items():
            np.testing.assert_allclose(answer.as_numpy(name), values, rtol=1e-5)


def test_gzip_is_refused_with_a_sentence(server: Server) -> None:
    inputs, _ = over_http(ROWS, True)
    with (
        tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.port}") as client,
        pytest.raises(InferenceServerException, match="content encoding 'gzip' is not supported"),
    ):
        client.infer("net", inputs, request_compression_algorithm="gzip")


def test_half_precision_travels_in_both_protocols(server: Server) -> None:
    h = np.array([[1.5, -2, 65504 / 2]], "f2")
    b = np.array([[0.5, -3, 128]], ml_dtypes.bfloat16)  # numpy itself has none
    with (
        tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.port}") as http,
        tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as grpc,
    ):
        for kind, client in ((tritonclient.http, http), (tritonclient.grpc, grpc)):
            inputs = [
                kind.InferInput("h", [1, 3], "FP16").set_data_from_numpy(h),
                kind.InferInput("b", [1, 3], "BF16").set_data_from_numpy(b),
            ]
            answer = client.infer("halves", inputs)
            assert answer.as_numpy("twice").dtype == np.float16
            np.testing.assert_array_equal(answer.as_numpy("twice"), h * 2)
            np.testing.assert_array_equal(answer.as_numpy("more").astype("f4"), (b + 1).astype("f4"))
    tensors = [
        {"name": "h", "shape": [1, 3], "datatype": "FP16", "data": h.tolist()},
        {"name": "b", "shape": [1, 3], "datatype": "BF16", "data": b.astype("f4").tolist()},
    ]
    status, answer, _ = server.ask("POST", "/v2/models/halves/infer", {"inputs": tensors})
    assert status == 200
    assert [output["data"] for output in answer["outputs"]] == [
        (h * 2).flatten().tolist(),
        (b + 1).astype("f4").flatten().tolist(),
    ]


def test_text_is_refused_by_both_protocols_with_what_was_expected(server: Server) -> None:
    text = np.array([[b"ab", b"c", b"d"]], dtype=object)
    sentence = r"Input 'h' has the datatype 'BYTES'; the model takes h: FP16\[batch, 3\]"
    with (
        tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.port}") as http,
        tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as grpc,
    ):
        for kind, client in ((tritonclient.http, http), (tritonclient.grpc, grpc)):
            inputs = [
                kind.InferInput("h", [1, 3], "BYTES").set_data_from_numpy(text),
                kind.InferInput("b", [1, 3], "BF16").set_data_from_numpy(np.zeros((1, 3), ml_dtypes.bfloat16)),
            ]
            with pytest.raises(InferenceServerException, match=sentence):
                client.infer("halves", inputs)
        stub = tritonclient.grpc.service_pb2_grpc.GRPCInferenceServiceStub(grpc._channel)
        request = tritonclient.grpc.service_pb2.ModelInferRequest(model_name="halves")
        request.inputs.add(name="h", datatype="BYTES", shape=[1, 3]).contents.bytes_contents.extend([b"ab", b"c", b"d"])
        with pytest.raises(Exception, match=sentence):
            stub.ModelInfer(request)


ROUTES = {
    "": ["GET", "HEAD"],
    "/health/live": ["GET", "HEAD"],
    "/health/ready": ["GET", "HEAD"],
    "/models": ["GET", "HEAD"],
    "/models/stats": ["GET", "HEAD"],
    **{f"/models/net{version}{path}": ["GET", "HEAD"] for version in ("", "/versions/1") for path in ("", "/ready", "/stats")},
    **{f"/models/net{version}/config": ["GET", "HEAD"] for version in ("", "/versions/1")},
    "/repository/index": ["POST"],
}


def test_every_route_takes_its_methods_and_names_them_to_others(server: Server) -> None:
    for path, methods in ROUTES.items():
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE"):
            status, body, headers = server.ask(method, f"/v2{path}")
            assert status == (200 if method in methods else 405), (method, path)
            if status == 405:
                assert headers["allow"] == ", ".join(methods)
                assert method == "HEAD" or "This route takes" in body["error"]
    assert server.ask("HEAD", "/v2/health/live")[1] == b""
    for path in (
        "/v2/models/net/versions/2/ready",
        "/v2/models/net/versions/1/nothing",
        "/v2/models/net/versions",
        "/v2/health",
    ):
        assert server.ask("GET", path)[0] == 404


def test_load_and_unload_by_the_repository_api(server: Server) -> None:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        client.unload_model("halves")
        assert not client.is_model_ready("halves")
        assert [row["state"] for row in client.get_model_repository_index()] == ["READY", "UNAVAILABLE"]
        client.load_model("halves")
        assert client.is_model_ready("halves")
        assert client.get_model_metadata("halves")["versions"] == ["2"]
        with (
            tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as grpc,
            pytest.raises(InferenceServerException, match=r"Deadline|DEADLINE"),
        ):
            grpc.load_model("halves", client_timeout=0.05)  # a client that does not wait
        while client.get_model_metadata("halves")["versions"] != ["3"] or len(server.instances) > 2:
            time.sleep(0.05)


def test_a_page_of_another_site_changes_nothing(server: Server) -> None:
    path, host = "/v2/repository/models/halves/unload", f"127.0.0.1:{server.port}"
    status, answer, _ = server.ask("POST", path, b"", {"Origin": "https://example.com"})
    assert (status, "A page of 'https://example.com'" in answer["error"]) == (403, True)
    assert server.ask("POST", "/v2/repository/index", b"", {"Origin": f"http://{host}", "Host": host})[0] == 200


@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed: make venv")
def test_requests_drawn_from_the_openapi_document_never_break_the_server(server: Server, tmp_path: pathlib.Path) -> None:
    """Checks of schemathesis that hold whatever the request is: no 500, documented statuses, types and schemas of answers."""
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    words = [
        *["run", f"http://127.0.0.1:{server.port}/openapi.json", "--checks", checks, "--max-examples", "10"],
        *["--exclude-path-regex", "/(load|unload)$", "--seed", "1", "--no-color", "--phases", "examples,coverage,fuzzing"],
        *["--suppress-health-check", "all", "--generation-database", "none"],
    ]
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert server.infer(ROWS.tolist())[0] == 200


KSERVE = """
import asyncio, json, sys
import numpy as np
from kserve import InferenceRESTClient, InferRequest, InferInput
from kserve.inference_client import RESTConfig

async def main(url):
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    rows = np.load(sys.argv[2])
    answers = []
    for binary in (False, True):
        tensor = InferInput("x", list(rows.shape), "FP32")
        tensor.set_data_from_numpy(rows, binary_data=binary)
        answer = await client.infer(url, InferRequest(model_name="net", infer_inputs=[tensor]), model_name="net")
        answers.append(np.asarray(answer.outputs[0].as_numpy()).reshape(len(rows), -1).tolist())
    ready = [await client.is_server_live(url), await client.is_server_ready(url), await client.is_model_ready(url, "net")]
    print(json.dumps({"answers": answers, "ready": ready}))

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.long
def test_the_client_of_kserve(server: Server, want: dict[str, np.ndarray], tmp_path: pathlib.Path) -> None:
    python = os.environ.get("TRIMTAB_KSERVE_PYTHON", str(ROOT / ".venv-kserve" / "bin" / "python"))
    if not pathlib.Path(python).exists():
        pytest.skip("kserve pins other versions of what the tests use, so it needs an environment of its own: make kserve")
    np.save(tmp_path / "rows.npy", ROWS)
    words = [python, "-c", KSERVE, f"http://127.0.0.1:{server.port}", str(tmp_path / "rows.npy")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ready"] == [True, True, True]
    for answer in found["answers"]:
        np.testing.assert_allclose(answer, want["logits"], rtol=1e-4)
