"""Artifacts: written whole or not at all, loaded only if they are what was written, proven where they arrive."""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import io
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import trimtab
from _places import TESTS
from _studies import comparison
from trimtab._internal.serialization import dumps, to_json
from trimtab.artifact import manifest as _manifest
from trimtab.artifact import verified
from trimtab.artifact.artifact import Artifact, Verification, load, open_artifact, verify, write_artifact
from trimtab.artifact.templates import readme, run_script
from trimtab.artifact.test_vectors import Golden
from trimtab.backends.eager import Eager
from trimtab.cli.measure import _lines
from trimtab.core.backend import BACKENDS
from trimtab.core.candidate import Candidate
from trimtab.core.limits import Limits
from trimtab.core.measurement import Interval
from trimtab.core.recipe import Recipe
from trimtab.core.signature import Dim
from trimtab.core.technique import missing_package, technique_from_json
from trimtab.errors import ArtifactError, CompileError, IntegrityError, TrimtabError, UntrustedError, UsageError
from trimtab.hardware import system
from trimtab.hardware.environment import Environment
from trimtab.measure import host
from trimtab.tensors.comparison import NEAR_TIES

INTERVAL = Interval(2.0, 1.9, 2.1)


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 64, 10)

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.relu(self.norm(self.conv(images))).flatten(1)
        return {"logits": self.head(x), "class": self.head(x).argmax(1)}


def candidate(seed: int = 0) -> Candidate:
    torch.manual_seed(seed)
    return Candidate.of(Digits().eval(), (torch.randn(1, 1, 8, 8),), dynamic={"images": {0: Dim("batch", 1, 64)}})


def write(folder: pathlib.Path, backend: Any = None, seed: int = 0, baseline: bool = True) -> Artifact:
    subject, backend = candidate(seed), backend or Eager()
    executable = backend.compile(subject)
    return write_artifact(
        folder,
        executable=executable,
        recipe=Recipe(backend=backend),
        workload_name="digits",
        golden=Golden.of(subject, executable.signature, rows=[[torch.randn(3, 1, 8, 8)]]),
        evidence={"speedup": INTERVAL, "size_mb": 0.012, "trials": [{"a": 1}]},
        environment=Environment.capture(),
        limits=Limits(max_drop=0.01),
        baseline=Eager(grad_mode="no_grad").compile(subject) if baseline else None,
    )


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return write(tmp_path_factory.mktemp("pristine") / "artifact")


@pytest.fixture
def folder(pristine: Artifact, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy that a test may spoil."""
    return pathlib.Path(shutil.copytree(pristine.path, tmp_path / "artifact"))


def reseal(folder: pathlib.Path, change: Callable[[Any], None] = lambda data: None) -> None:
    """What an attacker does: change the manifest, and make all hashes right again."""
    data = json.loads((folder / "manifest.json").read_text())
    data.pop("digest")
    data["files"] = to_json(_manifest.file_facts(folder))
    change(data)
    data["digest"] = _manifest._digest(data)
    (folder / "manifest.json").write_text(dumps(data) + "\n")


HIDING = """
import runpy, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"{{name}} is hidden")
sys.meta_path.insert(0, Hidden())
sys.argv = [{script!r}]
runpy.run_path({script!r}, run_name="__main__")
"""


def run_alone(artifact: Artifact, hidden: set[str]) -> subprocess.CompletedProcess[str]:
    source = HIDING.format(hidden=hidden, script=str(artifact.path / "run.py"))
    return subprocess.run([sys.executable, "-I", "-W", "ignore", "-c", source], capture_output=True, text=True, cwd="/")


def test_the_network_comes_back_as_a_module_that_can_be_trained_on(pristine: Artifact, folder: pathlib.Path) -> None:
    module, case = pristine.module(), pristine.golden().cases[0]
    assert torch.allclose(module(*case.inputs)["logits"], case.outputs[0], atol=1e-5)
    mean = next(buffer for name, buffer in module.named_buffers() if name.endswith("running_mean")).clone()
    optimizer = torch.optim.Adam(module.train().parameters(), lr=1e-3)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(module(*case.inputs)["logits"].square().mean())
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    now = next(buffer for name, buffer in module.named_buffers() if name.endswith("running_mean"))
    assert not torch.equal(mean, now), "batch normalisation learns again"
    assert torch.equal(module.eval()(*case.inputs)["logits"], copy.deepcopy(module)(*case.inputs)["logits"])
    reseal(folder, lambda data: data.update(baseline=None, baseline_reason="It was left out."))
    with pytest.raises(ArtifactError, match="does not hold the network as a module of torch. It was left out."):
        open_artifact(folder).module()
    (folder / "baseline" / "program.pt2").write_bytes(b"another")
    with pytest.raises(IntegrityError, match=r"program.pt2 was changed"):
        open_artifact(folder).module()


# it ships


@pytest.mark.parametrize("name", ["eager", "torchscript", "onnxruntime", "openvino"])
def test_an_artifact_loads_verifies_and_runs_without_trimtab(name: str, tmp_path: pathlib.Path) -> None:
    if name not in BACKENDS or missing_package(BACKENDS[name].requires):
        pytest.skip(f"{name} cannot run here")
    artifact = write(tmp_path / "artifact", BACKENDS[name]())
    model, original = artifact.load(), candidate().model
    for size in (1, 5):
        x = torch.randn(size, 1, 8, 8)
        with torch.no_grad():
            expected = original(x)
        got = model(x)
        assert list(got) == ["logits", "class"]
        torch.testing.assert_close(got["logits"], expected["logits"], rtol=1e-3, atol=1e-4)
    assert verify(artifact.path).ok
    hidden = {"trimtab"} if "torch" in BACKENDS[name]().packages else {"trimtab", "torch"}
    ran = run_alone(artifact, hidden)
    assert ran.returncode == 0, ran.stderr
    assert "largest error" in ran.stdout
    assert len((artifact.path / "run.py").read_text().splitlines()) < 42


def test_run_py_fails_on_wrong_weights(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    other = write(tmp_path / "other", seed=1)
    shutil.copy(other.path / "model" / "program.pt2", folder / "model" / "program.pt2")
    ran = run_alone(Artifact(folder, open_artifact(folder).manifest), {"trimtab"})
    assert ran.returncode == 1
    assert "allowed" in ran.stdout


def test_the_manifest_states_the_facts(pristine: Artifact) -> None:
    manifest = pristine.manifest
    assert manifest.workload == "digits"
    assert Recipe.from_json(manifest.recipe) == Recipe(backend=Eager())
    assert manifest.native_code is False
    assert manifest.limits == Limits(max_drop=0.01)
    assert manifest.evidence == {"speedup": {"value": 2.0, "low": 1.9, "high": 2.1}, "size_mb": 0.012}
    assert manifest.golden.cases == 3
    assert [case.inputs[0].shape[0] for case in pristine.golden().cases] == [1, 3, 3]
    assert set(manifest.files) >= {"run.py", "README.md", "golden.safetensors", "evidence.json", "model/program.pt2"}
    readme = (pristine.path / "README.md").read_text()
    assert "speed-up over the model as written: 2 (95% interval 1.9 to 2.1)" in readme
    assert "`images: float32[batch, 1, 8, 8]`" in readme


def test_the_call_in_the_readme_runs_without_trimtab(pristine: Artifact) -> None:
    found = re.search(r"```python\n(import runpy.*?)```", (pristine.path / "README.md").read_text(), re.DOTALL)
    assert found is not None
    before = "import sys, torch\nsys.modules['trimtab'] = None\nimages = torch.ones(2, 1, 8, 8)"
    script = f"{before}\n{found[1]}\nprint(logits.sum().item(), class_.dtype)"
    ran = subprocess.run([sys.executable, "-c", script], cwd=pristine.path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    total, dtype = ran.stdout.split()
    assert float(total) == pytest.approx(pristine.load().run([torch.ones(2, 1, 8, 8)])[0].sum().item(), abs=1e-4)
    assert dtype == "torch.int64"


def test_no_file_holds_a_pickle_or_a_path_of_this_machine(pristine: Artifact) -> None:
    for path in pristine.path.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert str(pathlib.Path(__file__).parent).encode() not in data
            assert b"data.pkl" not in data


def test_the_public_names_lead_here(pristine: Artifact) -> None:
    model = trimtab.load(pristine.path)
    assert model(torch.randn(2, 1, 8, 8))["logits"].shape == (2, 10)
    assert trimtab.open_artifact(pristine.path).manifest.workload == "digits"


def test_a_copy_is_the_same_artifact(pristine: Artifact, tmp_path: pathlib.Path) -> None:
    copy = pristine.save(tmp_path / "deep" / "copy")
    assert copy.manifest == pristine.manifest
    assert verify(copy.path).ok
    copy.save(tmp_path / "deep" / "copy2").save(tmp_path / "deep" / "copy")  # replacing an artifact is fine
    assert sorted(os.listdir(tmp_path / "deep")) == ["copy", "copy2"]


def test_a_folder_with_something_else_is_left_alone(pristine: Artifact, tmp_path: pathlib.Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    with pytest.raises(ArtifactError, match="is no artifact. Choose another folder"):
        pristine.save(tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


def test_threads_are_taken_over(pristine: Artifact) -> None:
    before = torch.get_num_threads()
    try:
        assert load(pristine.path, threads=1).settings.threads == 1
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_test_vectors_follow_a_dimension_that_the_runtime_froze() -> None:
    subject = candidate()
    wide = [torch.randn(16, 1, 8, 8)]
    with torch.no_grad():
        frozen = subject.signature.without_dims(wide, subject.flat()(*wide))
    golden = Golden.of(subject, frozen, rows=[[torch.randn(40, 1, 8, 8)]])
    assert [case.inputs[0].shape[0] for case in golden.cases] == [16, 16]


def test_tolerance_is_twice_the_measured_error_and_never_below_rounding() -> None:
    golden = Golden.of(candidate(), candidate().signature)
    usual = torch.cat([case.outputs[0].flatten() for case in golden.cases]).double().square().mean().sqrt().item()
    assert golden.tolerances([5.0, 0.0]) == (10.0, NEAR_TIES)
    assert golden.tolerances([0.0, 0.3]) == (pytest.approx(1e-3 * usual), 0.6)


def test_values_far_from_the_usual_ones_do_not_widen_the_tolerance() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.masked_fill(x < -1.0, -1e9), x.argmax(1)

    subject = Candidate.of(Masked(), (torch.randn(64, 16),))
    golden = Golden.of(subject, subject.signature)
    assert golden.tolerances([0.0, 0.0])[0] < 1e-2
    case = golden.cases[0]
    off, turned = case.outputs[0].clone(), case.outputs[1].clone()
    off[off == -1e9] *= 1 + 1e-4  # which rounding may make of it
    turned[:16] += 1
    assert golden.errors(lambda inputs: (off, turned)) == [pytest.approx(1e-4 * golden.scales[0], rel=0.01), 0.25]
    wrong = case.outputs[0] * 0.9
    assert golden.errors(lambda inputs: (wrong, turned))[0] > golden.tolerances([0.0, 0.0])[0]


def test_a_model_whose_outputs_went_wrong_does_not_ship(tmp_path: pathlib.Path) -> None:
    subject = candidate()
    executable = Eager().compile(subject)
    golden = Golden.of(subject, executable.signature)
    executable.run = lambda leaves: [torch.full((1, 10), float("nan")), torch.zeros(1, dtype=torch.int64)]  # type: ignore[method-assign]
    with pytest.raises(CompileError, match="holds NaN; it is not shipped"):
        write_artifact(
            tmp_path / "a",
            executable=executable,
            recipe=Recipe(backend=Eager()),
            workload_name="digits",
            golden=golden,
            evidence={},
            environment=Environment.capture(),
        )
    assert os.listdir(tmp_path) == []


# it refuses


def change_a_byte(folder: pathlib.Path) -> None:
    path = folder / "model" / "program.pt2"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replace_by_folder(folder: pathlib.Path) -> None:
    (folder / "golden.safetensors").unlink()
    (folder / "golden.safetensors").mkdir()


def replace_by_link(folder: pathlib.Path) -> None:
    shutil.move(folder / "model" / "program.pt2", folder.parent / "elsewhere.pt2")
    (folder / "model" / "program.pt2").symlink_to(folder.parent / "elsewhere.pt2")


def link_the_folder(folder: pathlib.Path) -> None:
    shutil.move(folder / "model", folder.parent / "elsewhere")
    (folder / "model").symlink_to(folder.parent / "elsewhere")


SPOILED: list[tuple[Callable[[pathlib.Path], Any], str]] = [
    (change_a_byte, "model/program.pt2 was changed: its contents do not have the hash"),
    (lambda f: (f / "run.py").write_text("shorter"), "run.py was changed: it has 7 bytes"),
    (lambda f: (f / "README.md").unlink(), "README.md is missing"),
    (lambda f: (f / "model" / "evil.so").write_bytes(b"\x7fELF"), "model/evil.so does not belong to the artifact"),
    (replace_by_folder, "golden.safetensors is a folder"),
    (replace_by_link, "model/program.pt2 is a link"),
    (link_the_folder, "model is a link"),
    (lambda f: os.mkfifo(f / "pipe"), "pipe is neither a file nor a folder"),
]


@pytest.mark.parametrize(("spoil", "words"), SPOILED)
def test_a_spoiled_folder_is_refused_in_words(spoil: Callable[[pathlib.Path], Any], words: str, folder: pathlib.Path) -> None:
    spoil(folder)
    with pytest.raises(IntegrityError, match=words):
        load(folder)
    found = verify(folder)
    assert not found.ok
    assert any(words in sentence for sentence in found.integrity)
    assert found.parity is None


def set_path(*keys: Any, value: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = value

    return change


FACTS = {"size": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_path("files", "../../etc/passwd", value=FACTS), "no name inside the artifact"),
        (set_path("files", "/etc/passwd", value=FACTS), "no name inside the artifact"),
        (set_path("files", "model/../run.py", value=FACTS), "no name inside the artifact"),
        (set_path("files", "a\\b", value=FACTS), "no name inside the artifact"),
        (set_path("files", "psutil.py", value=FACTS), "has no place in an artifact"),
        (set_path("files", "run.py", "size", value=2**50), "at most 67108864 are read"),
        (set_path("files", "run.py", "sha256", value="00"), "impossible size or hash"),
        (set_path("schema", value=2), "schema 2 cannot be read"),
        (set_path("surprise", value=1), "unknown field 'surprise'"),
        (set_path("workload", value=7), "expected str"),
        (lambda data: data.pop("signature"), "'signature' is missing"),
        (set_path("signature", "inputs", 0, "shape", value=[2**40, 2**40]), "impossible shape"),
        (set_path("signature", "inputs", 0, "shape", value=[1000, 1000, 8, 8]), "does not fit the signature"),
        (set_path("signature", "inputs", 0, "dtype", value="load"), "which no artifact holds"),
        (set_path("signature", "inputs", 0, "shape", 0, value="other"), "used but not declared"),
        (set_path("signature", "input_structure", "kind", value="list"), "structure of the inputs"),
        (set_path("signature", "output_structure", "items", value=[]), "structure of the outputs"),
        (set_path("golden", "cases", value=10**9), "test vectors"),
        (set_path("golden", "cases", value=2), "does not hold the 2 cases"),
        (set_path("golden", "tolerance", value=[-1.0, 0.0]), "tolerances are positive"),
        (set_path("recipe", "backend", "name", value="os"), "cannot be loaded by this installation"),
        (set_path("recipe", "backend", value="eager"), "cannot be loaded by this installation"),
        (set_path("recipe", value={}), "a recipe without backend"),
        (set_path("native_code", value=True), "wrong about whether"),
    ],
)
def test_a_crafted_manifest_is_refused_in_words(change: Callable[[Any], None], words: str, folder: pathlib.Path) -> None:
    reseal(folder, change)
    with pytest.raises(ArtifactError, match=words):
        verify(folder)


def test_the_manifest_itself_is_guarded(folder: pathlib.Path) -> None:
    path = folder / "manifest.json"
    whole = path.read_text()
    for text, words in (
        (whole.replace('"max_drop": 0.01', '"max_drop": 0.02'), "changed after it was written"),
        (whole + " ", "changed after it was written"),
        (whole[:-100], "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "cannot be read"),
        (" " * (_manifest.MAX_MANIFEST + 1), "at most 4194304 are read"),
    ):
        path.write_text(text)
        with pytest.raises(IntegrityError, match=words):
            open_artifact(folder)
    path.unlink()
    path.symlink_to("/etc/hostname")
    with pytest.raises(IntegrityError, match="not a plain file"):
        open_artifact(folder)
    path.unlink()
    with pytest.raises(ArtifactError, match=r"it has no manifest.json"):
        open_artifact(folder)
    with pytest.raises(ArtifactError, match="There is no artifact folder"):
        load(folder / "absent")


class Touch:
    def __init__(self, marker: pathlib.Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_right_hashes_do_not_make_a_pickle_run(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    buffer = io.BytesIO()
    torch.save(Touch(tmp_path / "touched"), buffer)
    for name in ("model/program.pt2", "golden.safetensors"):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(buffer.getvalue())
        reseal(folder)
        with pytest.raises(IntegrityError):
            verify(folder)
        (folder / name).write_bytes(before)
    assert not (tmp_path / "touched").exists()


def test_machine_code_needs_trust(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Eager, "native_code", True)
    artifact = write(tmp_path / "artifact")
    assert artifact.manifest.native_code
    assert "machine code" in (artifact.path / "README.md").read_text()
    for call in (load, verify):
        with pytest.raises(UntrustedError, match=r"trust=True \(--trust"):
            call(artifact.path)
    assert load(artifact.path, trust=True)(torch.randn(1, 1, 8, 8))["class"].shape == (1,)
    assert verify(artifact.path, trust=True).ok
    reseal(artifact.path, set_path("native_code", value=False))
    with pytest.raises(IntegrityError, match="wrong about whether eager files are machine code"):
        load(artifact.path)


# it proves itself


def test_wrong_outputs_are_found_where_it_arrives(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    other = write(tmp_path / "other", seed=1)
    shutil.copy(other.path / "model" / "program.pt2", folder / "model" / "program.pt2")
    reseal(folder)
    found = verify(folder)
    assert not found.ok
    assert found.parity is not None
    assert "'output.logits' is off by" in (found.parity.reason or "")
    assert (found.parity.max_error or 0) > max(found.parity.tolerance)


def test_another_machine_is_told_in_sentences(folder: pathlib.Path) -> None:
    def change(data: Any) -> None:
        data["environment"]["cpu"] = "Imaginary CPU"
        data["environment"]["versions"]["torch"] = "1.0"

    reseal(folder, change)
    found = verify(folder)
    assert found.ok
    assert any("the artifact was proven on Imaginary CPU" in sentence for sentence in found.differences)
    assert any(sentence.startswith("torch is ") for sentence in found.differences)
    assert json.loads(dumps(found))["promised"]["value"] == 2.0


@pytest.mark.parametrize(("backend", "runtime"), [("onnxruntime", "onnxruntime"), ("eager", "torch")])
def test_files_that_another_version_of_the_runtime_cannot_read_are_no_damage(
    backend: str, runtime: str, tmp_path: pathlib.Path
) -> None:
    """As those of a later version are, which this one cannot know."""
    if missing_package(BACKENDS[backend].requires):
        pytest.skip(f"{backend} cannot run here")
    folder = write(tmp_path / "artifact", BACKENDS[backend](), baseline=False).path
    model = max((folder / "model").iterdir(), key=lambda path: path.stat().st_size)
    model.write_bytes(model.read_bytes()[:50] + b"later" + model.read_bytes()[55:])
    reseal(folder)
    for call in (load, verify):
        with pytest.raises(IntegrityError, match="Copy the artifact again"):
            call(folder)
    reseal(folder, set_path("environment", "versions", runtime, value="99"))
    here = importlib.metadata.version(runtime)
    words = (
        rf"as they were written, cannot be read here: .* {runtime} is {here} here; the artifact was proven with 99\. Install"
    )
    for call in (load, verify):
        with pytest.raises(ArtifactError, match=re.sub(r"\+", r"\\+", words)) as caught:
            call(folder)
        assert not isinstance(caught.value, IntegrityError)


def test_why_no_speed_is_replayed_is_said(pristine: Artifact, tmp_path: pathlib.Path) -> None:
    assert trimtab.verify(pristine.path, speed=False).speed_reason == "It was not asked for."
    bare = write(tmp_path / "bare", baseline=False)
    found = trimtab.verify(bare.path)
    assert found.speed is None
    assert "was not given" in (found.speed_reason or "")
    own = write(tmp_path / "own", BACKENDS["eager"](grad_mode="no_grad"))
    assert trimtab.verify(own.path).speed_reason == "It is the original itself, and nothing is timed against itself."


def test_a_busy_machine_is_said_before_anything_is_timed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, said = write(tmp_path / "own", BACKENDS["eager"](grad_mode="no_grad")), []
    for share in (0.85, 0.1):
        monkeypatch.setattr("trimtab.measure.host.other_load", lambda share=share: host.OtherLoad(share, 2))
        trimtab.verify(own.path, on_progress=said.append)
        trimtab.verify(own.path, speed=False, on_progress=said.append)
    assert said == ["Busy machine: other processes used 85% of these 2 CPUs, so figures will be wide."]
    monkeypatch.setattr("trimtab.measure.host.other_load", lambda: host.OtherLoad(0.85, 2))
    with pytest.raises(ArtifactError, match="There is no artifact folder"):
        trimtab.compare(str(tmp_path / "none"), on_progress=said.append)
    assert len(said) == 2


def test_an_original_that_cannot_be_read_here_is_no_fault_of_the_artifact(folder: pathlib.Path) -> None:
    baseline = folder / "baseline"
    program = next(baseline.rglob("*.pt2"))
    program.write_bytes(program.read_bytes()[:-100])
    reseal(folder)
    found = trimtab.verify(folder)
    assert found.ok
    assert found.parity is not None
    assert found.speed is None
    assert (found.speed_reason or "").startswith("It could not be compared here: ")
    assert str(program) in (found.speed_reason or "")


# it is written whole or not at all

FULL_DISK = """
import resource, signal, sys
sys.path[:0] = {path!r}
import test_artifact as t
from trimtab.errors import ArtifactError
import pathlib
folder = pathlib.Path({folder!r})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    t.write(folder)
except ArtifactError as error:
    print(error)
"""


@pytest.mark.parametrize("limit", [pytest.param(1000, marks=pytest.mark.long), 12_000])
def test_a_full_disk_leaves_the_old_artifact_and_nothing_half_written(limit: int, folder: pathlib.Path) -> None:
    source = FULL_DISK.format(path=[str(TESTS / "artifact"), str(TESTS)], folder=str(folder), limit=limit)
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", source], capture_output=True, text=True)
    assert "cannot be written" in ran.stdout, ran.stderr
    assert "Nothing was left half-written" in ran.stdout
    assert os.listdir(folder.parent) == ["artifact"]
    assert verify(folder).ok


# damage


def test_random_damage_always_ends_in_an_artifact_error(folder: pathlib.Path) -> None:
    generator = random.Random(0)
    names = [*open_artifact(folder).manifest.files, "manifest.json"]
    for trial in range(60):
        path = folder / names[trial % len(names)]
        before = path.read_bytes()
        damaged = bytearray(before)
        if trial % 2:
            damaged[generator.randrange(len(damaged))] ^= 1 << generator.randrange(8)
        else:
            damaged = damaged[: generator.randrange(len(damaged))]
        path.write_bytes(damaged)
        with pytest.raises(ArtifactError):
            load(folder)
        path.write_bytes(before)
    load(folder)


def test_scrambled_manifests_with_right_hashes_never_crash_the_loader(folder: pathlib.Path) -> None:
    generator = random.Random(2)
    odd = [None, True, -1, 2**70, 1e308, "", "x", "../x", [], {}, [[]], {"a": 1}]
    whole = (folder / "manifest.json").read_text()

    def scramble(node: Any) -> Any:
        if generator.random() < 0.01:
            return generator.choice(odd)
        if isinstance(node, dict):
            return {key: scramble(item) for key, item in node.items()}
        return [scramble(item) for item in node] if isinstance(node, list) else node

    refused = 0
    for _ in range(150):
        changed = scramble(json.loads(whole))
        if not isinstance(changed, dict):
            continue
        changed.pop("digest", None)
        changed["digest"] = _manifest._digest(changed)
        (folder / "manifest.json").write_text(dumps(changed) + "\n")
        try:
            verify(folder)
        except TrimtabError as error:
            refused += 1
            assert textwrap.shorten(str(error), 10000)  # noqa: PT017 - either outcome is right, a crash is not
    assert refused > 50


@pytest.mark.skipif(not system.has_glibc(), reason="needs the GNU C library")
def test_run_py_keeps_freed_memory_where_the_recipe_does(pristine: Artifact, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(pristine.path, folder)
    settings = pristine.manifest.settings.replaced({"memory.keep_freed": True})
    backend = technique_from_json(BACKENDS, pristine.manifest.recipe["backend"])
    text = run_script(dataclasses.replace(pristine.manifest, settings=settings), backend)
    assert "mallopt" in text
    assert "mallopt" not in (folder / "run.py").read_text(encoding="utf-8")
    (folder / "run.py").write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, "run.py"], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "largest error" in done.stdout


def test_an_original_that_cannot_be_written_is_left_out(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Eager, folder: pathlib.Path) -> list[str]:
        raise AssertionError("no pen")

    monkeypatch.setattr("trimtab.backends.eager.EagerExecutable.save", fails)
    artifact = write(tmp_path / "artifact", BACKENDS["torchscript"]())
    assert artifact.manifest.baseline is None
    assert "Writing it failed: AssertionError: no pen" in str(artifact.manifest.baseline_reason)
    assert verify(artifact.path).ok


def test_a_vague_speed_up_is_quoted_by_its_lower_bound(pristine: Artifact) -> None:
    then = to_json(Interval(622.5, 41.31, 9380.0))
    evidence = {"speedup": then, "comparison": to_json(comparison(6.26))}
    vague = dataclasses.replace(pristine.manifest, evidence=evidence)
    assert "speed-up over the model as written: at least 41.31x (95% interval 41.31 to 9380)" in readme(vague, {})
    assert "- while it was timed: others used 0% of the CPUs" in readme(vague, {})
    found = Verification(
        path="artifact",
        ok=True,
        integrity=(),
        differences=(),
        parity=None,
        speed=dataclasses.replace(comparison(6.26), ratio=Interval(6.26, 2.25, 153.18)),
        speed_reason=None,
        promised=then,
        baseline_speedup=to_json(INTERVAL),
    )
    said = "\n".join(_lines(found))
    assert "speed:       at least 2.25x the original that travels with it (2.25 to 153.18); when it was" in said
    assert "\n             measured now: others used " in said
    assert "; when it was written, at least 41.31x the model as written\n" in said


def test_what_a_quiet_machine_measures_stands_beside_the_artifact(folder: pathlib.Path) -> None:
    artifact, quiet = open_artifact(folder), comparison(2.0)
    assert verified.why_not_recorded(quiet) is None
    busy = verified.why_not_recorded(dataclasses.replace(quiet, foreign=0.85))
    assert busy == "Other processes used 85% of the CPUs meanwhile. Verify again when the machine is quiet."
    wide = dataclasses.replace(quiet, ratio=Interval(6.0, 2.0, 150.0))
    assert "between 2.00 and 150.00, which is no figure" in str(verified.why_not_recorded(wide))
    file = verified.write_record(folder, artifact.manifest, quiet)
    assert file == folder.with_name("artifact.verified.json")
    artifact.check()
    found = verified.read_record(folder)
    assert found is not None
    assert found.speed == quiet
    assert str(found).startswith("2.00x (")
    reseal(folder, lambda data: data.update(notes=["another artifact"]))
    assert verified.read_record(folder) is None
    file.write_text("{")
    assert verified.read_record(folder) is None


class Pipeline(nn.Module):
    """Has an artifact where the encoder stood."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(10, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(images)["logits"])


def test_what_is_loaded_says_in_one_line_what_it_is(pristine: Artifact) -> None:
    takes = "images: float32[batch, 1, 8, 8]"
    assert repr(pristine) == f"Artifact('{pristine.path}', digits: {takes})"
    loaded = load(pristine.path)
    assert repr(loaded) == f"FlatExecutable({takes})"
    assert f"<p>FlatExecutable</p><table><tr><th>takes</th><td>{takes}</td></tr>" in loaded._repr_html_()
    assert f"digits: eager. Takes {takes}.</p><p>2.00x (1.90 to 2.10) the model as written" in pristine._repr_html_()


def test_an_artifact_is_a_module_where_the_model_stood(pristine: Artifact, tmp_path: pathlib.Path) -> None:
    encoder = load(pristine.path, as_module=True)
    assert isinstance(encoder, nn.Module)
    torch.manual_seed(1)
    pipeline, images = Pipeline(encoder), torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        wanted = candidate().model(images)["logits"]
    torch.testing.assert_close(encoder(images)["logits"], wanted)
    assert [name for name, _ in pipeline.named_parameters()] == ["head.weight", "head.bias"]
    assert not pipeline.train().encoder.training
    pipeline(images).sum().backward()
    assert pipeline.head.weight.grad is not None
    assert pipeline.to("cpu").eval().encoder is encoder
    for moved in (lambda: pipeline.to("meta"), lambda: encoder.double(), lambda: encoder.half()):
        with pytest.raises(UsageError, match="It runs on the CPU, in the precision that it was built for"):
            moved()
    torch.save(pipeline, tmp_path / "pipeline.pt")
    again = torch.load(tmp_path / "pipeline.pt", weights_only=False)
    torch.testing.assert_close(again(images), pipeline(images))
    torch.testing.assert_close(copy.deepcopy(encoder)(images)["logits"], wanted)
    assert str(pristine.path) in repr(pipeline)
