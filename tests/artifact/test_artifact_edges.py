"""Artifacts of unusual models, in unusual places, and from strangers; what their test vectors are made of."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_artifact import reseal, set_path, write
from torch import nn
from typer.testing import CliRunner

import trimtab
from trimtab._internal.serialization import write_text
from trimtab.artifact import templates
from trimtab.artifact.artifact import Artifact, load, open_artifact, verify, write_artifact
from trimtab.artifact.manifest import findings
from trimtab.artifact.staging import fresh_folder
from trimtab.artifact.test_vectors import Golden
from trimtab.backends.aoti import Aoti
from trimtab.backends.common.openvino_conversion import no_telemetry
from trimtab.backends.common.process_lock import quiet
from trimtab.backends.eager import Eager
from trimtab.backends.onnxruntime import OnnxRuntime
from trimtab.backends.openvino import OpenVino
from trimtab.backends.torchscript import TorchScript
from trimtab.cli.main import app
from trimtab.core.backend import Backend
from trimtab.core.candidate import Candidate
from trimtab.core.recipe import Recipe
from trimtab.core.settings import Settings
from trimtab.core.signature import Dim
from trimtab.core.technique import PASSES
from trimtab.errors import ArtifactError, CompileError, IntegrityError, StorageError, UsageError, WorkloadError
from trimtab.hardware.environment import Environment
from trimtab.passes.channels_last import ChannelsLast
from trimtab.study.run_folder import TEMPORARY


def shipped(folder: pathlib.Path, subject: Candidate, backend: Backend, *passes: Any) -> Artifact:
    """The artifact of a model as ``backend`` runs it."""
    executable = backend.compile(subject)
    return write_artifact(
        folder,
        executable=executable,
        recipe=Recipe(passes=passes, backend=backend),
        workload_name="edge",
        golden=Golden.of(subject, executable.signature),
        evidence={},
        environment=Environment.capture(),
    )


def replayed(artifact: Artifact) -> str:
    """What ``run.py`` says, in a process of its own."""
    done = subprocess.run([sys.executable, artifact.path / "run.py"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((artifact.path / "run.py").read_text().splitlines()) < 38
    return done.stdout


def test_a_model_in_bfloat16_runs_alone(tmp_path: pathlib.Path) -> None:
    subject = Candidate.of(nn.Linear(4, 4).bfloat16().eval(), (torch.randn(2, 4).bfloat16(),))
    assert "allowed" in replayed(shipped(tmp_path / "artifact", subject, Eager()))


@pytest.mark.long
def test_machine_code_in_another_layout_runs_alone(tmp_path: pathlib.Path) -> None:
    plain = Candidate.of(nn.Conv2d(3, 8, 3).eval(), (torch.randn(1, 3, 16, 16),))  # whose strides fit either layout
    artifact = shipped(tmp_path / "artifact", ChannelsLast().apply(plain), Aoti(), ChannelsLast())
    replayed(artifact)
    built = json.loads((artifact.path / "model" / "build.json").read_text())
    assert built["layouts"] == ["channels_last"]


def test_machine_code_gets_the_threads_that_it_was_built_for(tmp_path: pathlib.Path) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        artifact = shipped(tmp_path / "artifact", Candidate.of(nn.Linear(4, 4).eval(), (torch.randn(2, 4),)), Aoti())
        torch.set_num_threads(1)  # as on a machine with one core
        assert artifact.load(trust=True)(torch.randn(2, 4)).shape == (2, 4)
        assert torch.get_num_threads() == 2
        assert verify(artifact.path, trust=True).ok
        with pytest.raises(ArtifactError, match="built for 2 threads"):
            artifact.load(trust=True, threads=1)
    finally:
        torch.set_num_threads(threads)


def test_the_allocator_is_left_alone_where_it_is_another() -> None:
    for line in ("sys.platform = 'darwin'", "ctypes.CDLL = lambda name: object()"):
        program = f"import ctypes, sys\n{line}\n{templates._MEMORY}print('fine')"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout == "fine\n"


def test_only_artifacts_are_replaced(tmp_path: pathlib.Path) -> None:
    artifact = write(tmp_path / "one")
    public = tmp_path / "public"
    public.mkdir()
    (public / "manifest.json").write_text('{"name": "an application"}')
    (public / "index.html").write_text("work")
    with pytest.raises(ArtifactError, match=r"public exists and is no artifact. Choose another folder or empty it."):
        artifact.save(public)
    assert (public / "index.html").read_text() == "work"
    copy = artifact.save(tmp_path / "two")
    (copy.path / "__pycache__").mkdir()
    (copy.path / "__pycache__" / "run.cpython-311.pyc").write_bytes(b"")
    artifact.save(copy.path)
    assert not (copy.path / "__pycache__").exists()
    (copy.path / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError, match=r"two holds 'notes.txt' beside an artifact. Move it away"):
        artifact.save(copy.path)
    assert (copy.path / "notes.txt").read_text() == "mine"


@pytest.mark.long
def test_large_test_vectors_are_read_again(tmp_path: pathlib.Path) -> None:
    subject = Candidate.of(nn.ReLU(), (torch.randn(1, 34_000_000),))
    artifact = shipped(tmp_path / "artifact", subject, Eager())
    assert artifact.golden().cases[0].inputs[0].shape == (1, 34_000_000)


@pytest.mark.parametrize("threads", [2**70, 100_000])
def test_a_strangers_threads_are_bounded(tmp_path: pathlib.Path, threads: int) -> None:
    folder = write(tmp_path / "artifact").path
    reseal(folder, set_path("settings", "threads", value=threads))
    with pytest.raises(IntegrityError, match="at most 1024 are started"):
        load(folder)
    with pytest.raises(UsageError, match=f"Settings threads is {threads}; at most 1024"):
        Settings(threads=threads)


def test_what_a_runtime_says_of_a_strangers_inputs_is_a_finding(tmp_path: pathlib.Path) -> None:
    subject = Candidate.of(nn.Linear(4, 4).eval(), (torch.randn(2, 4),))
    folder = shipped(tmp_path / "artifact", subject, OnnxRuntime()).path
    golden = open_artifact(folder).golden()
    wide = [type(case)(tuple(t.double() for t in case.inputs), case.outputs) for case in golden.cases]
    Golden(tuple(wide)).save(folder / "golden.safetensors")
    reseal(folder, set_path("signature", "inputs", 0, "dtype", value="float64"))
    found = verify(folder)
    assert not found.ok
    assert found.parity is not None
    assert "The model failed on a test vector" in str(found.parity.reason)


CLAIMS = (
    *({"value": None}, 3, {"value": "2", "low": 1.0, "high": 3.0}),
    *({"value": value, "low": 1.0, "high": 3.0} for value in (None, 0.0, -1.0)),
)


@pytest.mark.parametrize("name", ["speedup", "baseline_speedup"])
def test_a_claim_that_is_no_interval_is_refused(tmp_path: pathlib.Path, name: str) -> None:
    folder = write(tmp_path / "artifact", baseline=False).path
    for claim in CLAIMS:
        reseal(folder, set_path("evidence", name, value=claim))
        with pytest.raises(IntegrityError, match="states a speed-up that is none"):
            verify(folder)
    reseal(folder, set_path("evidence", name, value={"value": 2.0, "low": 1.0, "high": None}))
    assert verify(folder).ok, "a bound that was not finite when it was written"


def test_a_baseline_of_no_backend_is_refused_in_words(tmp_path: pathlib.Path) -> None:
    folder = write(tmp_path / "artifact").path
    for backend in ({"name": ["x"]}, {"name": "no-such"}):
        reseal(folder, set_path("baseline", "backend", value=backend))
        with pytest.raises(ArtifactError, match="cannot be loaded by this installation"):
            open_artifact(folder).load_baseline()


def test_a_file_that_may_not_be_read_is_a_finding() -> None:
    with tempfile.TemporaryDirectory() as name:
        artifact = write(pathlib.Path(name, "artifact"), baseline=False)
        for path in (pathlib.Path(name), *pathlib.Path(name).rglob("*")):
            path.chmod(0o755)
        (artifact.path / "README.md").chmod(0)
        user = os.geteuid()
        if user == 0:  # who may read everything
            os.seteuid(65534)
        try:
            found = list(findings(artifact.path, artifact.manifest))
        finally:
            os.seteuid(user)
    assert found == ["README.md cannot be read: Permission denied."]


@pytest.mark.parametrize(
    ("shut", "words"),
    [
        (".", r"manifest.json cannot be read: Permission denied. Let this user read the folder and its files."),
        ("model", r"model/program.pt2 cannot be looked at: Permission denied."),
    ],
)
def test_a_folder_that_may_not_be_read_is_not_a_missing_one(shut: str, words: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        artifact = write(pathlib.Path(name, "artifact"), baseline=False)
        for path in (pathlib.Path(name), *pathlib.Path(name).rglob("*")):
            path.chmod(0o755)
        (artifact.path / shut).chmod(0)
        user = os.geteuid()
        if user == 0:  # who may read everything
            os.seteuid(65534)
        try:
            with pytest.raises(ArtifactError, match=words):
                load(artifact.path)
        finally:
            os.seteuid(user)
            (artifact.path / shut).chmod(0o755)


def test_a_stranger_cannot_write_to_the_terminal(tmp_path: pathlib.Path) -> None:
    folder = write(tmp_path / "artifact", baseline=False).path

    def change(data: Any) -> None:
        data["baseline_reason"] = "None.\u001b[2J\u001b[Hforged"

    reseal(folder, change)
    said = CliRunner().invoke(app, ["verify", str(folder)]).output
    assert "None.forged" in said
    assert "\u001b[2J" not in said


def test_nor_can_a_strangers_graph(tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By what the runtime logs itself of a node that fails."""
    onnx = pytest.importorskip("onnx")
    folder = shipped(tmp_path / "artifact", Candidate.of(nn.Linear(4, 4).eval(), (torch.randn(2, 4),)), OnnxRuntime()).path
    model = onnx.load(folder / "model" / "model.onnx")
    output = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = ["before" if name == output else name for name in node.output]
    model.graph.initializer.append(onnx.helper.make_tensor("beyond", onnx.TensorProto.INT64, [2], [0, 7]))
    model.graph.node.append(onnx.helper.make_node("Gather", ["before", "beyond"], [output], name="\u001b[2Jforged"))
    (folder / "model" / "model.onnx").write_bytes(model.SerializeToString())
    reseal(folder)
    said = CliRunner().invoke(app, ["verify", str(folder)]).output + "".join(capfd.readouterr())
    assert "The model failed on a test vector" in said
    assert "forged" in said
    assert "\u001b[2J" not in said


def test_wrong_outputs_are_why_the_speed_is_not_compared(tmp_path: pathlib.Path) -> None:
    folder = write(tmp_path / "artifact").path
    reseal(folder, set_path("golden", "tolerance", value=[0.0, 0.0]))
    golden = open_artifact(folder).golden()
    moved = [type(case)(case.inputs, tuple(t + 1 for t in case.outputs)) for case in golden.cases]
    Golden(tuple(moved)).save(folder / "golden.safetensors")
    reseal(folder)
    found = verify(folder)
    assert not found.ok
    assert found.speed_reason == "The outputs are wrong, and the speed of a wrong answer says nothing."


def test_links_and_devices_stay_what_they_are(tmp_path: pathlib.Path) -> None:
    real, link = tmp_path / "real.html", tmp_path / "link.html"
    real.write_text("old")
    link.symlink_to("real.html")
    write_text(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    write_text("/dev/null", "gone")
    assert pathlib.Path("/dev/null").is_char_device()


def test_model_files_are_measured_at_the_sizes_stated(tmp_path: pathlib.Path) -> None:
    torch.jit.script(nn.Linear(8, 8)).save(str(tmp_path / "net.pt"))
    script = tmp_path / "other.py"
    script.write_text(
        "import torch, trimtab\n"
        "def workload(): return trimtab.Workload(model=torch.nn.Linear(8, 8), inputs=torch.randn(3, 8), name='other')\n"
    )
    command = ["measure", str(tmp_path / "net.pt"), "--vs", str(script), "--time", "1s"]
    refused = CliRunner().invoke(app, command)
    assert "TorchScript keeps no shapes" in str(refused.output) + str(refused.exception)
    apart = trimtab.compare(trimtab.load_workload(command[1], shapes={"input": "1x8"}), script, seconds=1)
    assert apart.note is not None
    assert "inputs of different sizes, 1x8 and 3x8" in str(apart)
    told = CliRunner().invoke(app, [*command, "--shape", "input=3x8", "--json"])  # which is for the model file alone
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["note"] is None


# Test vectors.


class Bag(nn.Module):
    """Its offsets begin at 0 and grow, whatever the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 8)

    def forward(self, tokens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.bag(tokens, offsets)


class Positions(nn.Module):
    """A table of eight positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., None] * self.table(torch.arange(x.shape[1]))


def test_only_what_leads_with_a_dynamic_dimension_is_turned_in_a_test_vector() -> None:
    inputs = torch.randint(0, 50, (9,)), torch.tensor([0, 4, 6])
    subject = Candidate.of(Bag().eval(), inputs, dynamic={"tokens": {0: Dim("tokens")}})
    golden = Golden.of(subject, subject.signature)
    assert [case.inputs[1].tolist() for case in golden.cases] == [[0, 4, 6]] * 2
    tokens = golden.cases[1].inputs[0]
    assert torch.equal(tokens, torch.cat([inputs[0], inputs[0][:2]]).flip(0))


def test_a_test_vector_that_the_model_refuses_is_left_out() -> None:
    subject = Candidate.of(Positions().eval(), (torch.randn(2, 7),), dynamic={"x": {1: Dim("length")}})
    golden = Golden.of(
        subject, subject.signature, rows=[[torch.randn(2, 5)], [torch.randn(2, 9)], [torch.full((2, 7), torch.nan)]]
    )
    assert [tuple(case.inputs[0].shape) for case in golden.cases] == [(2, 7), (2, 5)]
    broken = dataclasses.replace(subject, args=(torch.full((2, 7), torch.nan),))
    with pytest.raises(UsageError, match="gives NaN on its own inputs"):
        Golden.of(broken, broken.signature)
    long = dataclasses.replace(subject, args=(torch.randn(2, 9),))
    with pytest.raises(WorkloadError, match="failed on a test vector: IndexError"):
        Golden.of(long, long.signature)


class Detector(nn.Module):
    """As many rows as it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layer(x)
        keep = y[:, 4] > 0
        return {"boxes": y[keep, :4], "scores": y[keep, 4]}


def test_outputs_of_any_length_are_verified(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    candidate = Candidate.of(Detector().eval(), (torch.randn(32, 16),))
    executable = Eager().compile(candidate)
    golden = Golden.of(candidate, candidate.signature, [[torch.randn(32, 16)] for _ in range(3)])
    assert len({case.outputs[1].shape for case in golden.cases}) > 1
    written = write_artifact(
        tmp_path / "artifact",
        executable=executable,
        recipe=Recipe(backend=Eager()),
        workload_name="detector",
        golden=golden,
        evidence={},
        environment=Environment.capture(),
    )
    assert [spec.shape for spec in written.manifest.signature.outputs] == [("?", 4), ("?",)]
    assert verify(written.path).ok


class Above(nn.Module):
    """What lies above a threshold: more or less of it where that is another."""

    def __init__(self, threshold: float, width: int = 3) -> None:
        super().__init__()
        self.threshold, self.width = threshold, width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x[:, 0] > self.threshold, : self.width]


@pytest.mark.parametrize(
    ("exact", "width", "kept"), [(False, 3, 1), (True, 3, None), (False, 2, None)], ids=["lossy", "exact", "another width"]
)
def test_vectors_of_which_a_lossy_recipe_finds_more_are_left_out(
    tmp_path: pathlib.Path, exact: bool, width: int, kept: int | None
) -> None:
    rows = torch.tensor([[1.0, 1, 1], [2.0, 2, 2], [-1.0, 0, 0]])
    whole = {"x": {0: Dim("rows")}}
    original = Candidate.of(Above(0.0).eval(), (rows,), dynamic=whole)
    changed = Candidate.of(Above(-0.5, width).eval(), (rows,), dynamic=whole)
    assert original.signature.outputs[0].shape[0] == "?"
    executable, recipe = Eager().compile(changed), Recipe(passes=() if exact else (PASSES["autocast"](),), backend=Eager())
    assert recipe.exact is exact

    def written() -> Artifact:
        return write_artifact(
            tmp_path / "artifact",
            executable=executable,
            recipe=recipe,
            workload_name="above",
            golden=Golden((Golden.of(original, executable.signature).cases[0], *more.cases)),
            evidence={},
            environment=Environment.capture(),
        )

    near = Candidate.of(original.model, (torch.tensor([[-0.2, 1, 1], [2.0, 2, 2]]),))  # of which the other finds one more
    more = Golden.of(near, near.signature)
    if kept is None:
        with pytest.raises(CompileError, match="has another shape or dtype than the model's"):
            written()
    else:
        assert written().manifest.golden.cases == kept


# Beside a server.


@pytest.mark.parametrize("backend", [Eager(), TorchScript(), OnnxRuntime(), OpenVino()], ids=str)
def test_a_loaded_model_stays_what_it_was_when_its_files_are_overwritten(tmp_path: pathlib.Path, backend: Backend) -> None:
    def net(seed: int) -> Candidate:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8)).eval()
        return Candidate.of(model, (torch.randn(1, 64),), dynamic={"input": {0: Dim("batch", 1, 64)}})

    here, other = (shipped(tmp_path / str(seed), net(seed), backend).path for seed in (0, 1))
    fast, x = load(here), torch.randn(4, 64)
    fast(x[:1])
    for path in (path for path in other.rglob("*") if path.is_file()):
        with (here / path.relative_to(other)).open("r+b") as file:
            file.write(path.read_bytes())
    with torch.no_grad():
        for rows in (x[:1], x):
            torch.testing.assert_close(fast(rows), net(0).model(rows), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_path("environment", "isa", value=["avx2", "avx4096"]), r"for a processor with avx4096 \(.*\), which this"),
        (set_path("environment", "machine", value="m68k"), "for a processor with m68k"),
    ],
)
def test_machine_code_for_another_processor_is_not_run(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None], words: str
) -> None:
    monkeypatch.setattr(Eager, "native_code", True)
    folder = write(tmp_path / "artifact", baseline=False).path
    assert verify(folder, trust=True).ok
    reseal(folder, change)
    for call in (load, verify):
        with pytest.raises(ArtifactError, match=words):
            call(folder, trust=True)
    monkeypatch.setattr(Eager, "native_code", False)
    reseal(folder, set_path("native_code", value=False))
    assert verify(folder).ok, "what is no machine code goes with any processor"


@pytest.mark.parametrize(
    ("backend", "torchs"), [(Eager(), 2), (OnnxRuntime(), 1), (OpenVino(), 1)], ids=["eager", "onnxruntime", "openvino"]
)
def test_a_model_that_was_loaded_before_a_fork_is_refused_after_it(
    tmp_path: pathlib.Path, backend: Backend, torchs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it has one thread. What is refused would hang where the parent has called it; torch's number, one in a worker of a
    DataLoader, says nothing of a runtime that has threads of its own."""
    folder, threads = write(tmp_path / "artifact", backend, baseline=False).path, torch.get_num_threads()
    x = torch.randn(1, 1, 8, 8)
    monkeypatch.setattr("trimtab.core.backend.affinity", lambda: 2)
    try:
        torch.set_num_threads(torchs)
        many = load(folder)
        exclusive = load(folder, threads=1)
        exclusive(x)
        torch.set_num_threads(torchs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer versions of Python warn of a fork beside threads
            child = os.fork()
        if child == 0:
            try:
                many(x)
            except UsageError as error:
                torch.set_num_threads(1)  # as loading with one does
                os._exit(0 if "Load it in each process and not before" in str(error) and "class" in exclusive(x) else 1)
            os._exit(2)
    finally:
        torch.set_num_threads(threads)
    until = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended == (child, 0)


@pytest.mark.parametrize("shared", [quiet, no_telemetry])
def test_two_threads_put_back_what_they_share(shared: Callable[[], Any]) -> None:
    def state() -> tuple[Any, ...]:
        return sys.stderr, list(warnings.filters), sys.modules.get("openvino_telemetry", "none")

    def late() -> None:
        with shared():
            entered.set()
            left.wait()

    before, entered, left = state(), threading.Event(), threading.Event()
    other = threading.Thread(target=late)
    with shared():
        other.start()
        entered.wait(0.2)  # in vain where they take turns
    left.set()
    other.join()
    assert state() == before


def test_loading_leaves_standard_error_to_other_threads() -> None:
    stream = sys.stderr
    with quiet(stream=False):
        assert sys.stderr is stream


def test_what_is_left_of_a_killed_writer_is_known_by_its_name(tmp_path: pathlib.Path) -> None:
    with fresh_folder(tmp_path / "artifact"):
        assert [bool(TEMPORARY.fullmatch(path.name)) for path in tmp_path.iterdir()] == [True]


def test_an_old_file_that_cannot_be_deleted_is_no_failure_to_write(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "artifact", baseline=False)
    remove = os.rmdir

    def busy(path: Any, **options: Any) -> None:
        if str(path).endswith("model"):
            raise OSError("Directory not empty")  # as on a network's file system, of what a server has open
        remove(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr("os.rmdir", busy)
        assert write(tmp_path / "artifact", seed=1, baseline=False).path.exists()
    assert verify(tmp_path / "artifact").ok


def test_a_speed_that_cannot_be_measured_leaves_the_verdict(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "artifact").path
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    found = trimtab.verify(folder)
    assert found.ok
    assert str(found.speed_reason).startswith("It could not be compared here: What two processes are timed with")
    with pytest.raises(StorageError, match="name a folder that can be written with TMPDIR"):
        trimtab.compare(folder)
