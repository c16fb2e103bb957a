"""The process of an instance: artifacts of ONNX Runtime and OpenVINO are served without torch, with the same answers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.http
from _serving import Server, write

from trimtab.artifact.artifact import Artifact, load
from trimtab.backends.common import array_models
from trimtab.core.backend import Executable
from trimtab.core.signature import Dim
from trimtab.errors import IntegrityError, UsageError
from trimtab.serve.connection import Instance
from trimtab.serve.frames import unpack
from trimtab.serve.instance.load import load_artifact
from trimtab.serve.instance.served import Served
from trimtab.serve.options import read_options
from trimtab.serve.shared_memory import SharedMemory

WITHOUT_TORCH = """
import sys
class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("torch is not installed here", name="torch")
sys.meta_path.insert(0, Refuses())
"""


@pytest.fixture(scope="module", params=["onnxruntime", "openvino"])
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return write(tmp_path_factory.mktemp(request.param) / "artifact", backend=request.param)


def test_a_server_without_torch_gives_what_the_artifact_gives(
    artifact: Artifact, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_TORCH)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    assert subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).returncode == 1
    rows = np.random.default_rng(0).normal(size=(150, 16)).astype("f4")
    with Server(tmp_path / "log", str(artifact.path), "--instances", "1", "--threads", "1", "--batch", "8") as running:
        for count in (1, 3, 150):
            status, answer, _ = running.infer(rows[:count].tolist())
            assert status == 200
            found = {output["name"]: np.reshape(output["data"], output["shape"]) for output in answer["outputs"]}
            parts = [load(artifact.path)(torch.from_numpy(part)) for part in np.array_split(rows[:count], -(-count // 50))]
            for name in ("logits", "class"):
                want = np.concatenate([part[name].numpy() for part in parts])
                np.testing.assert_allclose(found[name], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "onnxruntime", "openvino"])
def test_calls_in_arrays_are_calls_of_the_artifact(tmp_path: pathlib.Path, backend: str) -> None:
    class Mixed(torch.nn.Module):
        def forward(self, x: torch.Tensor, keep: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.where(keep, x, -x) * 2, n + 1

    inputs = (torch.randn(4, 3), torch.rand(4, 3) > 0.5, torch.arange(4))
    dim = {0: Dim("batch", 2, 8, step=2)}
    made = write(tmp_path / "a", model=Mixed(), inputs=inputs, dynamic=dict.fromkeys(("x", "keep", "n"), dim), backend=backend)
    served = Served(load_artifact(made.path, trust=False, threads=1))
    served.check_parity()
    for rows in (1, 2, 5, 19):
        x, keep, n = torch.randn(rows, 3), torch.rand(rows, 3) > 0.5, torch.arange(rows)
        doubled, next_n = served.call([x.numpy(), keep.numpy(), n.numpy()])
        np.testing.assert_allclose(doubled, (torch.where(keep, x, -x) * 2).numpy(), rtol=1e-6)
        np.testing.assert_array_equal(next_n, n.numpy() + 1)
    description = served.description()
    assert [tensor["name"] for tensor in description["inputs"]] == ["x", "keep", "n"]
    assert description["dims"] == {"batch": (2, 8, 2)}
    assert description["known"][2]["high"] >= 3.0
    assert set(description["known"][1]["values"]) <= {0.0, 1.0}
    assert "values" not in description["known"][0]
    json.dumps(description["example"])


def test_wrong_outputs_and_changed_files_are_refused_without_torch(
    artifact: Artifact, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = artifact.save(tmp_path / "copy")
    for kind in (array_models.OnnxArrays, array_models.OpenVinoArrays):
        right = kind.__call__
        monkeypatch.setattr(kind, "__call__", lambda self, arrays, right=right: [array + 1 for array in right(self, arrays)])
    with pytest.raises(IntegrityError, match="The output 'output.logits' is off by"):
        Served(load_artifact(copy.path, trust=False, threads=None)).check_parity()
    next((copy.path / "model").iterdir()).write_bytes(b"x")
    with pytest.raises(IntegrityError, match="is not what was written"):
        load_artifact(copy.path, trust=False, threads=None)


def test_bfloat16_travels_as_its_bits(tmp_path: pathlib.Path) -> None:
    model = torch.nn.Linear(4, 2).bfloat16()
    x = torch.randn(3, 4).bfloat16()
    made = write(tmp_path / "a", model=model, inputs=(x[:2],), dynamic={"input": {0: Dim("batch", 1, 8)}})
    served = Served(load_artifact(made.path, trust=False, threads=None))
    served.check_parity()
    (found,) = served.call([x.view(torch.uint16).numpy()])
    assert found.dtype == np.uint16
    torch.testing.assert_close(torch.from_numpy(found).view(torch.bfloat16), load(made.path)(x))
    assert abs(served.description()["known"][0]["mean"] - float(made.golden().cases[0].inputs[0].float().mean())) < 1.0


def test_an_instance_of_onnx_runtime_holds_no_torch(artifact: Artifact) -> None:
    settings: dict[str, Any] = {"path": str(artifact.path), "trust": False, "threads": 1, "rows": 4, "cores": None}

    async def maps() -> str:
        instance = Instance(settings, lambda *_: None, lambda _: None)
        await instance.start()
        found = pathlib.Path(f"/proc/{instance.pid}/maps").read_text()
        await instance.stop()
        return found

    if not os.path.exists("/proc/self/maps"):
        pytest.skip("needs /proc")
    assert "libtorch" not in asyncio.run(maps())


def test_large_tensors_travel_in_shared_memory(tmp_path: pathlib.Path) -> None:
    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, x.sum(1)

    made = write(tmp_path / "a", model=Two(), inputs=(torch.randn(2, 5000),), backend="onnxruntime")
    with Server(tmp_path / "log", f"net={made.path}", "--instances", "1", "--threads", "1", "--batch", "32") as running:
        for rows in (1, 40, 3, 64):  # 20 kB to 1.3 MB
            x = np.random.default_rng(rows).normal(size=(rows, 5000)).astype("f4")
            client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{running.port}")
            asked = tritonclient.http.InferInput("x", [rows, 5000], "FP32").set_data_from_numpy(x)
            answer = client.infer("net", [asked])
            names = [output["name"] for output in answer.get_response()["outputs"]]
            np.testing.assert_allclose(answer.as_numpy(names[0]), 2 * x, rtol=1e-6)
            np.testing.assert_allclose(answer.as_numpy(names[1]), x.sum(1), rtol=1e-3, atol=1e-3)
            client.close()


def test_shared_memory_grows_and_refuses_what_is_not_there() -> None:
    memory = SharedMemory.create()
    if memory is None:
        pytest.skip("this system has no anonymous files")
    reader = SharedMemory(os.dup(memory.descriptor))
    for size in (3, 5000, 70, 1 << 20):
        total = memory.write([[b"a" * size], [b"b", b"c" * size]])
        first, second = unpack(reader.view(total), [size, size + 1])
        assert (bytes(first), bytes(second)) == (b"a" * size, b"b" + b"c" * size)
    with pytest.raises(ValueError, match="is said to be in"):
        reader.view(1 << 30)
    memory.close()
    reader.close()


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_instances_of_an_executable_answer_threads_at_the_same_time(tmp_path: pathlib.Path, runtime: str) -> None:
    made = write(tmp_path / "a", backend=runtime)
    executable = load(made.path, threads=1)
    rows = torch.randn(8, 40, 16)
    want = [executable(part)["logits"] for part in rows]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:

        def calls(number: int, instance: Executable) -> list[torch.Tensor]:
            return [instance(rows[number + 4 * turn % 8])["logits"] for turn in range(40)]

        answers = list(pool.map(calls, range(4), executable.instances(4)))
    for number, found in enumerate(answers):
        for turn, answer in enumerate(found):
            torch.testing.assert_close(answer, want[number + 4 * turn % 8])
    with pytest.raises(UsageError, match="at least one"):
        executable.instances(0)


def test_an_executable_of_torch_is_not_multiplied(net: pathlib.Path) -> None:
    executable = load(net)
    assert executable.instances(1) == [executable]
    with pytest.raises(UsageError, match="one call at a time"):
        executable.instances(2)


def test_new_files_in_a_watched_folder_are_loaded(net: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(net, folder)
    one = ["--instances", "1", "--threads", "1", "--batch", "4", "--watch", "200ms"]
    with Server(tmp_path / "log", f"net={folder}", *one) as running:
        row = [[1.0] * 16]
        before = running.infer(row)[1]
        (folder / "README.md").write_text("changed")
        while "version not loaded" not in running.text:
            time.sleep(0.05)
        assert running.infer(row)[1] == before
        write(folder, seed=7)
        while (after := running.infer(row)[1])["model_version"] == "1":
            time.sleep(0.05)
        want = load(folder)(torch.ones(1, 16))["logits"].numpy()
        np.testing.assert_allclose(after["outputs"][0]["data"], want[0], rtol=1e-4)
        assert running.text.count("new files") == 2


def test_a_device_that_no_artifact_runs_on_is_refused(net: pathlib.Path) -> None:
    with pytest.raises(UsageError, match="is a model of eager that was built and proven for the CPU"):
        read_options([str(net)], {"device": "cuda:0"}, None)
    with pytest.raises(UsageError, match="it is cpu, or a GPU such as cuda:0"):
        read_options([str(net)], {"device": "tpu"}, None)
    assert read_options([str(net)], {"device": "cpu", "watch": "2s"}, None).watch_s == 2.0
