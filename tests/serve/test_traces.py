"""OpenTelemetry traces of a real server, written by the SDK's own exporter."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import subprocess
import sys
from typing import Any

import grpc
import pytest
from _serving import Server

from trimtab.errors import MissingPackageError
from trimtab.serve import grpc_api
from trimtab.serve.traces import tracer

SDK = importlib.util.find_spec("opentelemetry") is not None and importlib.util.find_spec("opentelemetry.sdk") is not None
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def spans(text: str) -> list[dict[str, Any]]:
    """The spans that the console exporter has printed."""
    found, decoder = [], json.JSONDecoder()
    for match in re.finditer(r"^\{$", text, re.MULTILINE):
        found.append(decoder.raw_decode(text, match.start())[0])
    return found


@pytest.mark.skipif(not SDK, reason="opentelemetry-sdk is not installed: make venv")
def test_a_request_is_a_span_with_queue_batch_and_compute(
    net: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "shop")
    with Server(tmp_path / "log", str(net), "--instances", "1", "--threads", "1", "--batch", "8") as server:
        tensor = {"name": "x", "shape": [1, 16], "datatype": "FP32", "data": [1] * 16}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
        assert server.ask("POST", "/v2/models/net/infer", {"inputs": [tensor]}, headers)[0] == 200
        assert server.infer([[1.0] * 16], model="other")[0] == 404
        kinds = grpc_api.messages()
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            infer = channel.unary_unary(
                f"/{grpc_api.SERVICE}/ModelInfer", request_serializer=kinds["ModelInferRequest"].SerializeToString
            )
            given = {"name": "x", "datatype": "FP32", "shape": [1, 16]}
            infer(kinds["ModelInferRequest"](model_name="net", inputs=[given], raw_input_contents=[bytes(64)]))
        assert server.ask("GET", "/metrics")[0] == 200
        assert server.stop() == 0  # exports what is left
        found = spans(server.text)
    requests = [one for one in found if one["kind"] == "SpanKind.SERVER"]
    assert [one["name"] for one in requests] == ["HTTP POST", "HTTP POST", "inference.GRPCInferenceService/ModelInfer"]
    first, refused, third = requests
    assert (first["context"]["trace_id"], first["parent_id"]) == (f"0x{TRACE}", f"0x{PARENT}")
    assert first["resource"]["attributes"]["service.name"] == "shop"
    told = first["attributes"]
    assert [told[name] for name in ("http.response.status_code", "trimtab.model", "trimtab.request_id")] == [200, "net", "mine"]
    assert (refused["attributes"]["http.response.status_code"], third["attributes"]["rpc.grpc.status_code"]) == (404, 0)
    for request in (first, third):
        below = {one["name"]: one for one in found if one["context"]["trace_id"] == request["context"]["trace_id"]}
        assert {"queue", "batch", "compute"} < below.keys()
        parents = {name: below[name]["parent_id"] for name in ("queue", "batch", "compute")}
        own = request["context"]["span_id"]
        assert parents == {"queue": own, "batch": own, "compute": below["batch"]["context"]["span_id"]}
        times = [below["queue"]["start_time"], below["queue"]["end_time"], below["compute"]["start_time"]]
        times += [below["compute"]["end_time"], below["batch"]["end_time"], request["end_time"]]
        assert times == sorted(times)
    assert not [one for one in found if one["context"]["trace_id"] == refused["context"]["trace_id"] and one is not refused]


def test_without_an_exporter_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracer() is None
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert tracer() is None
    code = "import sys, trimtab.serve.front; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(not SDK, reason="opentelemetry-sdk is not installed: make venv")
def test_an_exporter_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "nothing_of_the_kind")
    with pytest.raises(MissingPackageError, match="'nothing_of_the_kind' of OTEL_TRACES_EXPORTER is not installed"):
        tracer()
