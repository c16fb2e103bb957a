"""``trimtab serve --write``: the written files are parsed by what reads them elsewhere, as far as that is here."""

from __future__ import annotations

import ast
import json
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import yaml
from _serving import Server, write
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trimtab.artifact.artifact import Artifact, load
from trimtab.cli.main import app
from trimtab.errors import UsageError
from trimtab.serve import deploy
from trimtab.serve.batcher import Answer
from trimtab.serve.drift import InputDrift, OutputDrift
from trimtab.serve.metrics import MetricsCollector, ModelMetrics, exposition
from trimtab.serve.options import Options, read_options
from trimtab.serve.protocol import TensorFormat, request_id
from trimtab.serve.replica import Replica

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def onnx_net(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The artifact of :func:`net` in ONNX form; it needs 100 MB."""
    return write(tmp_path_factory.mktemp("onnx") / "artifact", backend="onnxruntime", evidence={"peak_mb": 100.0})


def written(folder: pathlib.Path, kind: str, path: pathlib.Path, **options: Any) -> dict[str, str]:
    """The written files by name."""
    found = deploy.write(Options(models={"net": path}, **options), kind, folder / kind)
    texts = [one for one in found if one.suffix not in (".whl", ".onnx", ".bin", ".safetensors", ".pt2")]
    return {one.relative_to(folder / kind).as_posix(): one.read_text() for one in texts}


def test_an_image_has_the_versions_of_the_proof_and_a_wheel_of_this_trimtab(
    tmp_path: pathlib.Path, onnx_net: Artifact, net: pathlib.Path
) -> None:
    files = written(tmp_path, "docker", onnx_net.path, batch=8, deadline_s=2.0, grpc_port=None)
    head, *rest = files["Dockerfile"].splitlines()
    assert head.startswith("# Not built. ")
    versions = onnx_net.manifest.environment.versions
    pins = dict(line.split("==") for line in files["requirements.txt"].splitlines())
    assert {name: pins[name] for name in ("onnxruntime", "onnx", "numpy")} == {
        name: versions[name] for name in ("onnxruntime", "onnx", "numpy")
    }
    assert "onnxscript" not in pins
    assert set(deploy.SERVER_PACKAGES.values()) < set(pins)
    assert f"FROM python:{onnx_net.manifest.environment.python}-slim" in rest
    assert "torch==" not in files["Dockerfile"]
    assert f"torch=={versions['torch'].partition('+')[0]}+cpu " in written(tmp_path / "torch", "docker", net)["Dockerfile"]
    command = [json.loads(line.partition(" ")[2]) for line in rest if line.startswith(("ENTRYPOINT", "CMD"))]
    assert command[0] == ["trimtab", "serve"]
    assert command[1] == [
        "net=/models/net",
        *["--host", "0.0.0.0", "--port", "8000", "--no-grpc", "--batch", "8", "--deadline", "2000ms"],
    ]
    assert (tmp_path / "docker" / "models" / "net" / "manifest.json").read_bytes() == (
        onnx_net.path / "manifest.json"
    ).read_bytes()
    wheel = next((tmp_path / "docker").glob("*.whl"))
    assert wheel.name in files["Dockerfile"]
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        names = set(archive.namelist())
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "trimtab").rglob("*.py")}
    assert sources <= names
    assert "trimtab/serve/templates/Dockerfile.jinja" in names
    code = "import trimtab.cli.serve, trimtab.serve.front as f; import sys; print(f.__file__, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(wheel)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [f"{wheel}/trimtab/serve/front.py", "False"]


@pytest.mark.long
@pytest.mark.timeout(560)
def test_the_install_lines_of_an_image_give_a_server_without_torch(tmp_path: pathlib.Path, onnx_net: Artifact) -> None:
    """The image itself is not built: there is no Docker daemon. What it installs is installed into a fresh environment."""
    files = written(tmp_path, "docker", onnx_net.path)
    folder, python = tmp_path / "docker", tmp_path / "fresh" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "fresh"], check=True)
    for line in re.findall(r"^RUN pip (.*)$", files["Dockerfile"], re.MULTILINE):
        done = subprocess.run(
            [python, "-m", "pip", *line.replace("/install/", f"{folder}/").split()], capture_output=True, text=True
        )
        if "No matching distribution" in done.stderr or "Connection" in done.stderr:
            pytest.skip(f"packages cannot be installed here: {done.stderr[-300:]}")
        assert done.returncode == 0, done.stderr
    sizes = [path.stat().st_size for path in (tmp_path / "fresh" / "lib").rglob("*") if path.is_file()]
    print(f"installed packages: {sum(sizes) / 1e6:.0f} MB")
    assert subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 1
    more = ("--instances", "1", "--threads", "1", "--batch", "4")
    with Server(tmp_path / "log", f"net={folder / 'models' / 'net'}", *more, python=str(python)) as running:
        row = torch.randn(1, 16)
        status, answer, _ = running.infer(row.tolist())
        assert status == 200
        want = load(onnx_net.path)(row)["logits"].numpy()
        np.testing.assert_allclose(answer["outputs"][0]["data"], want[0], rtol=1e-4, atol=1e-5)


def test_the_written_flags_are_read_as_the_same_options(net: pathlib.Path) -> None:
    more = {"max_wait_s": 0.0025, "deadline_s": 90.0, "p99_s": 0.02, "memory_mb": 1500.0, "max_body_mb": 0.1, "trust": True}
    more |= {"shadow": 0.01, "canary": 0.05, "canary_time_s": 30.0}
    options = Options(models={"net": net}, instances=2, queue=1_000_000, log_requests=True, **more)
    words = deploy.arguments(options)
    flags: dict[str, Any] = {"trust": words.pop(words.index("--trust")), "log_requests": words.pop()}
    for name, value in zip(words[::2], words[1::2], strict=True):
        flags[name.removeprefix("--").replace("-", "_")] = int(value) if value.isdigit() else value
    assert read_options([str(net)], {**flags, "trust": True, "log_requests": True}, None) == options


def test_a_unit_drains_reloads_and_quotes(tmp_path: pathlib.Path, onnx_net: Artifact) -> None:
    odd = tmp_path / "a b%c"
    shutil.copytree(onnx_net.path, odd)
    unit = written(tmp_path, "systemd", odd, p99_s=0.02)["trimtab.service"]
    command = re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    assert command is not None
    assert command[1].endswith(
        f'-m trimtab serve "net={tmp_path}/a b%%c" --host 127.0.0.1 --port 8000 --grpc-port 8001 --p99 20ms'
    )
    assert "ExecReload=/bin/kill -HUP $MAINPID\n" in unit
    assert "TimeoutStopSec=45\n" in unit
    if verify := shutil.which("systemd-analyze"):
        done = subprocess.run([verify, "verify", tmp_path / "systemd" / "trimtab.service"], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_deployment_has_probes_and_the_measured_memory(tmp_path: pathlib.Path, onnx_net: Artifact) -> None:
    text = written(tmp_path, "kubernetes", onnx_net.path, instances=2, threads=2, trust=True)["kubernetes.yaml"]
    deployment, service = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] in written(tmp_path, "docker", onnx_net.path)["Dockerfile"]
    paths = {probe: container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/v2/health/ready", "readiness": "/v2/health/ready", "liveness": "/v2/health/live"}
    assert container["args"][-5:] == ["--instances", "2", "--threads", "2", "--trust"]
    request, limit = (int(container["resources"][kind]["memory"].removesuffix("Mi")) for kind in ("requests", "limits"))
    assert 2 * 100 < request < limit < 2 * request
    assert container["resources"]["requests"]["cpu"] == "4"
    assert pod["terminationGracePeriodSeconds"] > Options(models={}).deadline_s
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    ports = [port["containerPort"] for port in container["ports"]]
    assert [port["targetPort"] for port in service["spec"]["ports"]] == ports == [8000, 8001]


def test_kserve_gets_a_runtime_and_a_service_that_uses_it(tmp_path: pathlib.Path, onnx_net: Artifact) -> None:
    runtime, service = yaml.safe_load_all(written(tmp_path, "kserve", onnx_net.path)["kserve.yaml"])
    assert (runtime["kind"], service["kind"]) == ("ServingRuntime", "InferenceService")
    (container,) = runtime["spec"]["containers"]
    assert (container["name"], container["args"][0], len(container["ports"])) == ("kserve-container", "net=/mnt/models", 1)
    predictor = service["spec"]["predictor"]["model"]
    assert predictor["runtime"] == runtime["metadata"]["name"]
    assert predictor["modelFormat"]["name"] == runtime["spec"]["supportedModelFormats"][0]["name"]


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_triton_gets_the_model_and_a_config_with_its_own_names(
    tmp_path: pathlib.Path, onnx_net: Artifact, backend: str
) -> None:
    path = onnx_net.path if backend == "onnxruntime" else write(tmp_path / "artifact", backend="openvino").path
    text = written(tmp_path, "triton", path, threads=2, max_wait_s=0.001)["net/config.pbtxt"]
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert (config.name, config.backend, config.max_batch_size) == ("net", backend, 64)
    assert [(one.data_type, list(one.dims)) for one in config.input] == [(model_config_pb2.TYPE_FP32, [16])]
    assert [list(one.dims) for one in config.output] == [[4], [1]]
    assert config.output[1].HasField("reshape")
    assert config.dynamic_batching.max_queue_delay_microseconds == 1000
    rows = np.random.default_rng(0).normal(size=(3, 16)).astype("f4")
    folder = tmp_path / "triton" / "net" / "1"
    names = [one.name for one in config.output]
    if backend == "onnxruntime":
        session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
        found = session.run(names, {config.input[0].name: rows})
    else:
        import openvino

        float32 = {"INFERENCE_PRECISION_HINT": "f32"}  # which Triton's backend cannot be told: the file says so
        assert "bfloat16" in text
        answer = openvino.Core().compile_model(folder / "model.xml", "CPU", float32)({config.input[0].name: rows})
        found = [answer[name] for name in names]
    want = load(path)(torch.from_numpy(rows))
    np.testing.assert_allclose(found[0], want["logits"].numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found[1], want["class"].numpy())


def test_ray_gets_an_application_whose_replica_answers_the_protocol(tmp_path: pathlib.Path, net: pathlib.Path) -> None:
    files = written(tmp_path, "ray", net, instances=2, queue=9)
    applications = yaml.safe_load(files["serve.yaml"])["applications"]
    tree = ast.parse(files["application.py"])
    assigned = {
        node.targets[0].id for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert [one["import_path"] for one in applications] == [f"application:{name}" for name in assigned]
    assert applications[0]["route_prefix"] == "/v2/models/net/infer"
    assert "num_replicas=2" in files["application.py"]
    replica = Replica("net", str(net))
    rows = np.random.default_rng(0).normal(size=(2, 16)).astype("f4")
    want = load(net)(torch.from_numpy(rows))["logits"].numpy()
    tensor = {"name": "x", "shape": [2, 16], "datatype": "FP32", "data": rows.flatten().tolist()}
    answer = replica.answer(json.dumps({"inputs": [tensor]}).encode())
    assert answer.status == 200
    np.testing.assert_allclose(np.reshape(json.loads(answer.body)["outputs"][0]["data"], (2, 4)), want, rtol=1e-5)
    tensor = {**tensor, "parameters": {"binary_data_size": rows.nbytes}}
    del tensor["data"]
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    binary = replica.answer(head + rows.tobytes(), str(len(head)))
    length = int(binary.headers["inference-header-content-length"])
    np.testing.assert_allclose(np.frombuffer(binary.body[length : length + 32], "f4").reshape(2, 4), want, rtol=1e-5)
    refused = replica.answer(b'{"inputs": []}')
    assert (refused.status, "The input 'x' is missing" in json.loads(refused.body)["error"]) == (400, True)


def test_what_cannot_be_written_is_refused(tmp_path: pathlib.Path, net: pathlib.Path, onnx_net: Artifact) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for options, kind, folder, sentence in (
        ({}, "docker", "full", "is not an empty folder"),
        ({}, "helm", "new", "Choose one of docker, systemd"),
        ({"token": "secret"}, "docker", "new", "a secret has no place in a written file"),
        ({"port": 0}, "systemd", "new", "--write needs fixed ports"),
        ({}, "kubernetes", "new", "does not state its peak memory. Give --memory 1GB"),
        ({}, "triton", "new", "net runs by eager; Triton is given ONNX and OpenVINO forms"),
    ):
        with pytest.raises(UsageError, match=re.escape(sentence)):
            deploy.write(Options(models={"net": net}, **options), kind, tmp_path / folder)
        assert not (tmp_path / "new").exists()


def test_the_command_writes_and_wants_a_folder(
    tmp_path: pathlib.Path, net: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app(["serve", str(net), "--write", "systemd", "--out", str(tmp_path / "unit")], standalone_mode=False) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "unit" / "trimtab.service")]
    for words, sentence in ((["--write", "systemd"], "Give --out FOLDER"), (["--out", "x"], "Give --write docker")):
        with pytest.raises(UsageError, match=sentence):
            app(["serve", str(net), *words], standalone_mode=False)


def test_the_dashboard_asks_for_metrics_and_labels_that_are_exported() -> None:
    metrics = ModelMetrics("net", "1")
    metrics.count_answer(0.01, Answer([], [], queue_s=0.001, compute_s=0.002))
    metrics.outputs, metrics.inputs = OutputDrift(["y"], [0.1]), InputDrift([TensorFormat.of("x", "float32", [1])], [None])
    for number in range(2):
        metrics.outputs.add([0.01 * number])
        metrics.inputs.add([bytes(4)])
    text = exposition(MetricsCollector(lambda: [(metrics, 0, [1])])).decode()
    exported = {
        found[1]: set(re.findall(r'(\w+)="', found[0])) for found in re.finditer(r"^(trimtab_\w+)\{.*", text, re.MULTILINE)
    }
    dashboard = json.loads((ROOT / "docs" / "serving-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(expressions) >= len(dashboard["panels"]) >= 8
    used = set[str]()
    for expression in expressions:
        names = set(re.findall(r"trimtab_\w+", expression))
        assert names
        assert names <= exported.keys(), expression
        labels = {"job"}.union(*(exported[name] for name in names))
        asked = {word.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for word in group.split(",")}
        assert asked | set(re.findall(r"(\w+)=", expression)) <= labels, expression
        used |= names
    unasked = {re.sub("_(bucket|sum|count)$", "", name) for name in exported} - {
        re.sub("_(bucket|sum|count)$", "", name) for name in used
    }
    assert unasked == set()


@pytest.mark.parametrize(("given", "kept"), [("abc-1", True), (None, False), ("", False), ("a b", False), ("x" * 129, False)])
def test_a_request_keeps_a_plain_id_and_gets_one_otherwise(given: str | None, kept: bool) -> None:
    assert (request_id(given) == given) is kept
    assert request_id(None) != request_id(None)
