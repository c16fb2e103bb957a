"""The PyTorch backends: the traps that each of them is built around."""

import dataclasses
import math
import os
import pathlib
import sys
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from _backends import needs_compiler, reloaded
from trimtab.backends.aoti import Aoti
from trimtab.backends.common.exported_program import disagreement, export_program, export_static, program_call, verified
from trimtab.backends.common.other_sizes import other_size
from trimtab.backends.common.scratch import fingerprint
from trimtab.backends.common.torchscript import save_script
from trimtab.backends.eager import Eager
from trimtab.backends.inductor import Inductor
from trimtab.backends.onnxruntime import OnnxRuntime
from trimtab.backends.openvino import OpenVino
from trimtab.backends.torchscript import TorchScript
from trimtab.core.backend import Backend, Executable
from trimtab.core.candidate import Candidate
from trimtab.core.settings import Settings
from trimtab.core.signature import Dim
from trimtab.errors import ArtifactError, CompileError, UsageError
from trimtab.evaluation.reproducibility import weights_of
from trimtab.hardware.environment import Environment
from trimtab.passes.int8_weights import Int8Weights
from trimtab.testing.models import convnet, deciding, encoder, structured


class Baked(nn.Module):
    """Turns a size into a Python number, which a trace keeps for ever."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.sum(0) / float(rows.shape[0])


def candidate_of(model: nn.Module, rows: int = 2, **dim: int) -> Candidate:
    return Candidate.of(model.eval(), (torch.randn(rows, 6),), dynamic={"rows": {0: Dim("batch", **dim)}})


def test_probes_look_at_another_size() -> None:
    candidate = candidate_of(Baked(), rows=3)
    assert other_size(candidate, "batch") == 4
    assert other_size(candidate_of(Baked(), rows=1), "batch") == 2
    assert other_size(candidate_of(Baked(), rows=4, max=4), "batch") == 3
    wrong = disagreement(candidate, lambda leaves: [leaves[0].sum(0)], candidate.leaves)
    assert wrong is not None
    assert wrong.startswith("output is off by")
    with pytest.raises(CompileError, match="at the sizes"):
        verified(candidate, lambda leaves: [leaves[0].sum(0) / 3.0])


def test_a_size_of_one_that_fails_raises_the_lower_bound() -> None:
    candidate = candidate_of(Baked(), rows=3)
    model = candidate.model
    kept = verified(candidate, lambda leaves: [model(leaves[0]) if len(leaves[0]) > 1 else torch.zeros(6)])
    assert kept.dims == (Dim("batch", min=2),)


def test_an_export_that_cannot_keep_a_dimension_freezes_it() -> None:
    class Tied(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows + torch.ones(rows.shape[0]).unsqueeze(1) if rows.shape[0] == 2 else rows + 1

    program, signature = export_program(candidate_of(Tied()))
    assert signature.dims == ()
    assert signature.inputs[0].shape == (2, 6)
    assert program.module()(torch.zeros(2, 6))[0].shape == (2, 6)


def test_one_tensor_given_twice_is_two_inputs() -> None:
    class Difference(nn.Module):
        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return left - 2 * right

    rows = torch.randn(2, 4)
    program, _ = export_static(Candidate.of(Difference(), (rows, rows)))
    assert torch.equal(program_call(program)([rows, rows.flip(0)])[0], rows - 2 * rows.flip(0))


def test_eager_saves_control_flow_on_data(tmp_path: pathlib.Path) -> None:
    candidate = deciding()
    executable = Eager().compile(candidate)
    assert executable.save(tmp_path) == ["script.pt"]
    loaded = Eager().load(tmp_path, executable.signature, executable.settings)
    for rows in (candidate.args[0].abs(), -candidate.args[0].abs()):
        torch.testing.assert_close(loaded(rows), candidate.model(rows))


class Pooled(nn.Module):
    """Pools to 3 x 3 cells of any size, on which ``optimize_for_inference`` makes a module that raises."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool, self.last = nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(3), nn.Conv2d(4, 2, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(self.pool(self.stem(images).relu()))


def test_torchscript_runs_the_frozen_module_where_the_optimized_one_fails(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    dims = {"images": {0: Dim("batch"), 2: Dim("height", min=12), 3: Dim("width", min=12)}}
    candidate = Candidate.of(Pooled().eval(), (torch.randn(1, 3, 22, 22),), dynamic=dims)
    executable = TorchScript().compile(candidate)
    assert any(note.startswith("The frozen module runs as it is, because torch.jit") for note in executable.notes)
    assert "input size is not divisible" in str(executable.notes)
    assert executable.save(tmp_path) == ["frozen.pt"]
    loaded = TorchScript().load(tmp_path, executable.signature, executable.settings)
    script: dict[str, Any] = {}
    exec(TorchScript().script(), script)  # noqa: S102 - as run.py of an artifact holds it
    run = script["load"](str(tmp_path), 0)
    for images in (torch.randn(1, 3, 22, 22), torch.randn(3, 3, 19, 27)):
        with torch.no_grad():
            wanted = candidate.model(images)
        torch.testing.assert_close(executable(images), wanted)
        torch.testing.assert_close(loaded(images), wanted)
        torch.testing.assert_close(run([images.numpy()])[0], wanted)


def test_torchscript_falls_back_where_the_optimized_module_raises_when_it_is_called(tmp_path: pathlib.Path) -> None:
    """As on a machine on which only ``optimize_for_inference`` fails, and at some sizes only."""
    torch.manual_seed(0)
    dims = {"images": {0: Dim("batch"), 2: Dim("height", min=12), 3: Dim("width", min=12)}}
    candidate = Candidate.of(Pooled().eval(), (torch.randn(1, 3, 20, 20),), dynamic=dims)
    source = torch.jit.trace(candidate.flat(), candidate.args)
    save_script(source, tmp_path)
    loaded = TorchScript().load(tmp_path, candidate.signature, candidate.settings)
    script: dict[str, Any] = {}
    exec(TorchScript().script(), script)  # noqa: S102 - as run.py of an artifact holds it
    run = script["load"](str(tmp_path), 0)
    for images in (torch.randn(1, 3, 20, 20), torch.randn(3, 3, 19, 27), torch.randn(1, 3, 20, 20)):
        with torch.no_grad():
            wanted = candidate.model(images)
        torch.testing.assert_close(loaded(images), wanted)
        torch.testing.assert_close(run([images.numpy()])[0], wanted)
    (note,) = loaded.notes
    assert note.startswith(
        "The frozen module runs as it is, because torch.jit.optimize_for_inference raises RuntimeError: input size"
    )
    assert "The following operation failed" not in note
    again = script["load"](str(tmp_path), 0)
    for run_wrong in (lambda: loaded.run([torch.randn(1, 5, 20, 20)]), lambda: again([torch.randn(1, 5, 20, 20).numpy()])):
        with pytest.raises(RuntimeError):
            run_wrong()
    torch.testing.assert_close(again([images.numpy()])[0], wanted)


def test_torchscript_compiles_the_source_where_a_trace_is_not_safe() -> None:
    candidate = deciding()
    executable = TorchScript().compile(candidate)
    assert executable.notes[0].startswith("Compiled from source, because a trace was not safe")
    rows = -candidate.args[0].abs()
    torch.testing.assert_close(executable(rows), candidate.model(rows))


def test_torchscript_keeps_no_size_that_a_trace_baked() -> None:
    executable = TorchScript().compile(candidate_of(Baked()))
    rows = torch.randn(5, 6)
    assert executable.signature.dims  # from source, where the size stays a size
    torch.testing.assert_close(executable(rows), rows.mean(0))


def test_torchscript_says_what_it_tried() -> None:
    class Hopeless(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows * 2 if sorted({"a": rows.sum().item()}.values())[0] > 0 else rows * 3

    with pytest.raises(CompileError, match=r"Traced: .* From source: torch\.jit\.script"):
        TorchScript().compile(candidate_of(Hopeless()))


def test_torchscript_saves_what_can_be_loaded(tmp_path: pathlib.Path) -> None:
    # after optimize_for_inference a conv net is saved without its weights
    candidate = convnet()
    executable = TorchScript().compile(candidate)
    executable.save(tmp_path)
    loaded = TorchScript().load(tmp_path, executable.signature, executable.settings)
    torch.testing.assert_close(loaded(*candidate.args), candidate.model(*candidate.args), rtol=1e-4, atol=1e-5)
    with pytest.raises(CompileError, match="copy those"):
        loaded.save(tmp_path)


@needs_compiler
def test_inductor_leaves_nothing_behind() -> None:
    import torch._inductor.config as shared

    before = shared.get_config_copy()
    children = {process.pid for process in psutil.Process().children(recursive=True)}
    candidate = structured()
    Inductor(mode="max_autotune").compile(candidate)(*candidate.args)
    after = shared.get_config_copy()
    assert {key for key in before if before[key] != after.get(key)} == set()
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= children


@needs_compiler
def test_inductor_has_no_limit_of_executables() -> None:
    # the compiler gives up after eight versions of one function
    for width in range(3, 13):
        candidate = Candidate.of(nn.Linear(4, width).eval(), (torch.randn(2, 4),))
        executable = Inductor(mode="default").compile(candidate)
        assert not executable.notes
        torch.testing.assert_close(executable(*candidate.args), candidate.model(*candidate.args))


@needs_compiler
def test_mixed_precision_survives_saving(tmp_path: pathlib.Path) -> None:
    candidate = encoder().with_settings({"precision.autocast": "bfloat16"})
    executable = Inductor().compile(candidate)
    executable.save(tmp_path)
    loaded = Inductor().load(tmp_path, executable.signature, executable.settings)
    torch.testing.assert_close(loaded(*candidate.args), executable(*candidate.args), rtol=0.05, atol=0.05)


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert Inductor().why_not_here() == (
        "The C++ compiler 'no-such-compiler', which CXX names, was not found. Set CXX to one that is installed."
    )
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert "Install g++" in str(Aoti().why_not_here())


@pytest.mark.skipif(sys.platform != "linux", reason="the compiler's name is that on Linux")
@pytest.mark.parametrize(
    ("there", "reason"),
    [
        ("gcc", "the C++ compiler g++, which was not found. Install g++ (apt-get install g++) or set CXX."),
        ("clang++", "the C++ compiler g++, which was not found. Set CXX=clang++, which is installed."),
    ],
)
def test_only_the_compiler_counts_that_torch_takes(there: str, reason: str, monkeypatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / there).write_text("#!/bin/sh\necho 12\n")
    (tmp_path / there).chmod(0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Inductor().why_not_here() == f"torch.compile needs {reason}"
    assert Environment.capture().compiler is None


@pytest.fixture(scope="module")
def package() -> Executable:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU()).eval()
    return Aoti().compile(Candidate.of(model, (torch.randn(4, 6),), dynamic={"input": {0: Dim("batch", max=16)}}))


@needs_compiler
def test_aoti_takes_every_size_that_it_promises(package: Executable) -> None:
    assert package.signature.dims == (Dim("batch", max=16),)
    for size in (1, 2, 4, 16):
        assert package(torch.randn(size, 6)).shape == (size, 8)
    with pytest.raises(UsageError, match="'batch' of 'input' is 17"):
        package(torch.randn(17, 6))


@needs_compiler
def test_aoti_is_tied_to_its_threads(package: Executable, tmp_path: pathlib.Path) -> None:
    built = torch.get_num_threads()
    assert package.save(tmp_path) == ["example.pt2", "dynamic.pt2", "build.json"]
    with pytest.raises(ArtifactError, match=f"built for {built} threads? .* threads={built}"):
        Aoti().load(tmp_path, package.signature, Settings(threads=built + 1))
    torch.set_num_threads(built + 1)  # which may also be what another thread of a server has
    seen, run = [], package._example
    try:
        package._example = lambda leaves: seen.append(torch.get_num_threads()) or run(leaves)
        package(torch.randn(4, 6))
        assert (seen, torch.get_num_threads()) == ([built], built + 1)
    finally:
        package._example = run
        torch.set_num_threads(built)


@needs_compiler
def test_aoti_checks_are_on_when_it_is_loaded(package: Executable, tmp_path: pathlib.Path) -> None:
    assert os.environ["AOTI_RUNTIME_CHECK_INPUTS"] == "1"
    raw = torch.randn(4, 6, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="dtype"):
        package.run([raw])  # past the signature's own check, which would have refused it before
    package.save(tmp_path)
    (tmp_path / "build.json").write_text("[]")
    with pytest.raises(ArtifactError, match=r"build\.json cannot be read"):
        Aoti().load(tmp_path, package.signature, package.settings)


def test_settings_reach_the_backends() -> None:
    for backend in (Eager(), TorchScript(), Inductor(), Aoti()):
        assert backend.honours == {"threads", "memory_format", "precision.autocast", "data.batch", "memory.keep_freed"}
        assert backend.exact
    assert Aoti().native_code
    assert dataclasses.replace(Inductor(), mode="default").to_json() == {"name": "inductor", "mode": "default"}


@pytest.mark.long
@needs_compiler
def test_aoti_without_freezing_is_right_too() -> None:
    candidate = Candidate.of(nn.Sequential(nn.Linear(6, 8), nn.Tanh()).eval(), (torch.randn(4, 6),))
    executable = Aoti(mode="default").compile(candidate)
    torch.testing.assert_close(executable(*candidate.args), candidate.model(*candidate.args))
    executable.close()
    with pytest.raises(UsageError, match="was closed"):
        executable(*candidate.args)


class Loop(nn.Module):
    """One step of a recurrent cell for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], 8)
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        scores: torch.Tensor = self.head(state)
        return scores


def looping() -> Candidate:
    dims = {"x": {0: Dim("batch"), 1: Dim("time")}}
    return Candidate.of(Loop().eval(), (torch.randn(2, 4, 6),), dynamic=dims)


def test_eager_writes_what_keeps_the_sizes(tmp_path: pathlib.Path) -> None:
    candidate = looping()
    executable = Eager().compile(candidate)
    loaded = reloaded(Eager(), executable, tmp_path)
    assert [dim.name for dim in loaded.signature.dims] == ["batch", "time"]
    assert "TorchScript" in executable.notes[-1]
    x = torch.randn(3, 7, 6)
    torch.testing.assert_close(loaded(x), candidate.model(x))


def test_sizes_that_are_lost_while_saving_are_told(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(candidate: Candidate) -> Any:
        raise CompileError("no source")

    monkeypatch.setattr("trimtab.backends.eager.script_flat", fails)
    executable = Eager().compile(looping())
    executable.save(tmp_path)
    assert [dim.name for dim in executable.signature.dims] == ["batch"]
    assert executable.notes[-1].startswith("What is saved takes the example's time only")


@pytest.mark.skipif(Inductor().why_not_here() is not None, reason="no C++ compiler")
def test_inductor_promises_no_size_that_it_would_compile_anew() -> None:
    executable = Inductor(mode="default").compile(looping())
    assert executable.signature.dims == ()
    assert "compiled anew" in executable.notes[-1]
    plain = Candidate.of(nn.Linear(6, 3).eval(), (torch.randn(2, 6),), dynamic={"input": {0: Dim("batch", max=8)}})
    kept = Inductor(mode="default").compile(plain)
    assert [dim.name for dim in kept.signature.dims] == ["batch"]
    for rows in range(1, 9):
        kept(torch.randn(rows, 6))


def test_a_model_that_torchao_quantized_is_taken(tmp_path: pathlib.Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")

    def made(seed: int) -> Candidate:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig(set_inductor_config=False))
        return Candidate.of(model, (torch.ones(2, 64),), dynamic={"input": {0: Dim("batch")}})

    candidate = made(0)
    assert fingerprint(candidate) == fingerprint(made(0)) != fingerprint(made(1))
    assert "the model has none" in (Int8Weights().blocked(candidate) or "")
    x = torch.randn(3, 64)
    for backend in (Eager(), OpenVino()):
        if backend.blocked(candidate) is None:
            (tmp_path / backend.name).mkdir()
            loaded = reloaded(backend, backend.compile(candidate), tmp_path / backend.name)
            torch.testing.assert_close(loaded(x), candidate.model(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", [Eager(), TorchScript(), OpenVino(), OnnxRuntime()], ids=str)
def test_an_artifact_runs_on_the_cpu_whatever_the_default_device_is(backend: Backend, tmp_path: pathlib.Path) -> None:
    rows = torch.randn(2, 6)
    candidate = Candidate.of(nn.Linear(6, 3).eval(), (rows,))
    if reason := backend.blocked(candidate):
        pytest.skip(reason)
    executable, script = backend.compile(candidate), dict[str, Any]()
    exec(backend.script(), script)  # noqa: S102 - as run.py does
    torch.set_default_device("meta")  # as somebody with a GPU sets it to that
    try:
        loaded = reloaded(backend, executable, tmp_path)
        found = [loaded(rows), torch.as_tensor(script["load"](str(tmp_path), 1)([rows.numpy()])[0], device="cpu")]
    finally:
        torch.set_default_device(None)
    for out in found:
        torch.testing.assert_close(out, candidate.model(rows))


class Picky(dict):  # type: ignore[type-arg]
    """A configuration with a gap in it."""

    def items(self) -> Any:
        raise LookupError("missing")


def test_a_fingerprint_needs_nothing_of_what_a_model_keeps() -> None:
    def made(**kept: Any) -> Candidate:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 3))
        for name, value in kept.items():
            setattr(net, name, value)
        return Candidate.of(net.eval(), (torch.ones(2, 6),))

    def ring(number: int) -> dict[str, Any]:
        found: dict[str, Any] = {"number": number}
        found["me"] = found
        return found

    plain = fingerprint(made())
    assert fingerprint(made(cfg=Picky(a=1))) == fingerprint(made(cfg=Picky(a=1))) != plain
    assert fingerprint(made(cfg=ring(1))) == fingerprint(made(cfg=ring(1))) != fingerprint(made(cfg=ring(2)))


def test_what_torch_conjugates_on_reading_is_what_is_read() -> None:
    def made(buffer: torch.Tensor) -> nn.Module:
        torch.manual_seed(0)
        net = nn.Linear(6, 3).eval()
        net.register_buffer("h", buffer)
        return net

    z = torch.view_as_complex(torch.arange(8.0).view(4, 2))
    lazy, there = made(z.conj()), made(z.conj().resolve_conj())
    assert weights_of(lazy) == weights_of(there) != weights_of(made(z))
    prints = [fingerprint(Candidate.of(net, (torch.ones(2, 6),))) for net in (lazy, there, made(z))]
    assert prints[0] == prints[1] != prints[2]
    assert weights_of(made(z.conj().imag)) == weights_of(made(z.conj().imag.resolve_neg()))


class RoundedUp(nn.Module):
    """Exports for any size, to a program that cannot be written."""

    def forward(self, rows: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        return rows.sum(1) / math.ceil(rows.shape[1] / 2)


class Mapped(nn.Module):
    def forward(self, rows: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row.sin().sum() + row)(rows)


@pytest.mark.parametrize(("model", "dims"), [(RoundedUp(), ()), (Mapped(), ("batch", "length"))], ids=["rounded", "mapped"])
@pytest.mark.parametrize("backend", [Eager(), pytest.param(Inductor(mode="default"), marks=needs_compiler)], ids=str)
def test_a_program_that_cannot_be_written_is_written_otherwise(
    backend: Backend, model: nn.Module, dims: tuple[str, ...], tmp_path: pathlib.Path
) -> None:
    rows = torch.randn(3, 6)
    candidate = Candidate.of(model.eval(), (rows,), dynamic={"rows": {0: Dim("batch"), 1: Dim("length")}})
    executable = backend.compile(candidate)
    loaded = reloaded(backend, executable, tmp_path)
    assert tuple(dim.name for dim in loaded.signature.dims) == dims
    assert any(
        note.startswith("What is saved takes the example's batch, length only") for note in executable.notes
    ) is not bool(dims)
    torch.testing.assert_close(loaded(rows), model(rows))


@pytest.mark.parametrize("most", [None, 60])
def test_who_loads_a_program_without_trimtab_may_give_the_sizes_that_it_promises(most: int | None, tmp_path) -> None:
    class Kernel(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.exp(-torch.cdist(rows, torch.eye(3)))  # which computes few rows another way than many

    candidate = Candidate.of(Kernel(), (torch.rand(4, 3),), dynamic={"rows": {0: Dim("rows", max=most)}})
    executable = Eager().compile(candidate)
    executable.save(tmp_path)
    assert executable.signature.dims == candidate.signature.dims
    script: dict[str, Any] = {}
    exec(Eager().script(), script)  # noqa: S102 - as run.py does
    call = script["load"](str(tmp_path), None)
    for count in (1, 7, 60):
        rows = torch.rand(count, 3)
        torch.testing.assert_close(call([rows])[0], Kernel()(rows))
    with pytest.raises(RuntimeError):
        call([torch.rand(7, 4)])


@torch.library.custom_op("trimtab_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@halved.register_fake
def _halved_shape(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("backend", [Eager(), TorchScript()], ids=str)
def test_an_operator_of_the_users_own_has_no_file_that_could_not_be_read_again(
    backend: Backend, tmp_path: pathlib.Path
) -> None:
    """Which operators a saved model may call is decided where it is read: a file that is refused there is no form to ship."""

    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.trimtab_tests.halved(x) + 1

    executable = backend.compile(Candidate.of(Halves(), (torch.ones(2, 3),)))
    assert torch.equal(executable(torch.ones(2, 3)), torch.full((2, 3), 1.5))
    with pytest.raises(CompileError, match=r"could not be loaded again: .*trimtab_tests\.halved.* which no saved model may"):
        executable.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
