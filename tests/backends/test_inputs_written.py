"""Inputs that the model writes to, such as a cache: every runtime writes to the caller's tensors as the model does."""

from __future__ import annotations

import dataclasses
import pathlib
import runpy
from collections.abc import Callable, Sequence

import pytest
import torch
from test_artifact import reseal, set_path
from test_artifact_edges import shipped
from torch import nn

from _backends import needs_compiler, reloaded
from trimtab.artifact.artifact import open_artifact
from trimtab.backends.common.exported_program import disagreement
from trimtab.backends.common.foreign import returning_writes, wrong_graph
from trimtab.backends.eager import Eager
from trimtab.backends.onnxruntime import OnnxRuntime
from trimtab.backends.openvino import OpenVino
from trimtab.core.backend import BACKENDS, Backend, Executable
from trimtab.core.candidate import Candidate
from trimtab.core.recipe import Recipe
from trimtab.core.signature import Dim
from trimtab.core.technique import missing_package
from trimtab.core.trial import State
from trimtab.core.workload import Workload
from trimtab.errors import IntegrityError
from trimtab.evaluation.confirm import load
from trimtab.evaluation.evaluate import Plan, build, evaluate, runner_for, save
from trimtab.evaluation.fidelity import write_mismatch
from trimtab.evaluation.prepared_workload import Subject, fresh_inputs, prepare
from trimtab.evaluation.reference import reference_of
from trimtab.measure.timer import LocalRunner
from trimtab.passes.channels_last import ChannelsLast

DYNAMIC = {"x": {0: Dim("batch")}, "cache": {0: Dim("batch")}}


class Decoder(nn.Module):
    """One step of a decoder: keys go into the cache at ``pos``, and all that is there is looked at."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.key = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, pos: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache[:, pos] = self.key(x).unsqueeze(1)
        return (cache * x.unsqueeze(1)).sum(-1)


def example(rows: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 16), torch.tensor([3]), torch.zeros(rows, 6, 16)


def decoder(backend: Backend | None = None) -> Candidate:
    if backend is not None and (package := missing_package(backend.requires)):
        pytest.skip(f"needs {package}")
    calls = [(example(), {}) for _ in range(4)]
    return Candidate.of(Decoder().eval(), example(), dynamic=DYNAMIC, calibration=calls)


def strided(leaf: torch.Tensor) -> torch.Tensor:
    return torch.stack([leaf, leaf], dim=-1)[..., 0]


def assert_writes(candidate: Candidate, call: Callable[..., object], inputs: Sequence[torch.Tensor], error: float) -> None:
    for laid in (torch.clone, strided):
        own, given = [leaf.clone() for leaf in inputs], [laid(leaf) for leaf in inputs]
        with torch.no_grad():
            want = candidate.model(*own)
        got = call(*given)
        assert isinstance(got, torch.Tensor)
        torch.testing.assert_close(got, want, rtol=0, atol=error)
        torch.testing.assert_close(given, own, rtol=0, atol=error)


QUICK = [BACKENDS[name]() for name in ("eager", "torchscript", "onnxruntime", "openvino")]


@pytest.mark.parametrize(
    "backend", [*QUICK, pytest.param(BACKENDS["inductor"](), marks=[needs_compiler, pytest.mark.long])], ids=str
)
def test_every_runtime_writes_to_the_cache(backend: Backend, tmp_path: pathlib.Path) -> None:
    candidate = decoder(backend)
    assert candidate.signature.writes == ("cache",)
    executable = backend.compile(candidate)
    for each in (executable, reloaded(backend, executable, tmp_path)):
        assert [dim.name for dim in each.signature.dims] == ["batch"]
        for rows in (2, 5):
            assert_writes(candidate, each, example(rows), 1e-5)
        tracked = [leaf.clone() for leaf in candidate.leaves]
        with torch.inference_mode():
            assert each(*tracked).shape == (2, 6)
        assert tracked[2].any()
        each.close()


@pytest.mark.parametrize(
    "backend",
    [OnnxRuntime(precision="int8_dynamic"), OnnxRuntime(precision="int8_static"), OpenVino(precision="int8_weights")],
    ids=str,
)
def test_eight_bits_write_to_the_cache(backend: Backend) -> None:
    candidate = decoder(backend)
    if reason := backend.blocked(candidate):
        pytest.skip(reason)
    own, given = list(example()), candidate.own_leaves()
    given[:2] = own[:2]
    with torch.no_grad():
        candidate.model(*own)
    backend.compile(candidate)(*given)
    assert own[2].abs().max() > 1
    torch.testing.assert_close(given[2], own[2], rtol=0, atol=0.2)


def test_many_requests_are_each_written_to() -> None:
    backend = OpenVino(hint="throughput", streams=2)
    candidate = decoder(backend)
    executable = backend.compile(candidate)
    requests = [[leaf.clone() for leaf in example()] for _ in range(5)]
    own = [[leaf.clone() for leaf in leaves] for leaves in requests]
    with torch.no_grad():
        want = [candidate.model(*leaves) for leaves in own]
    torch.testing.assert_close([outputs[0] for outputs in executable.run_many(requests)], want, rtol=0, atol=1e-5)
    torch.testing.assert_close(requests, own, rtol=0, atol=1e-5)


class Marking(nn.Module):
    """Writes into a map of features, which may be laid out anew on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, image: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        seen[:, :, 1:2] = self.conv(image)[:, :, 1:2]
        return seen * 2


@pytest.mark.parametrize(
    "backend", [Eager(), BACKENDS["torchscript"](), pytest.param(BACKENDS["inductor"](), marks=needs_compiler)], ids=str
)
def test_another_layout_is_written_back(backend: Backend) -> None:
    inputs = torch.randn(2, 3, 4, 4), torch.zeros(2, 3, 4, 4)
    candidate = ChannelsLast().apply(Candidate.of(Marking().eval(), inputs))
    assert_writes(candidate, backend.compile(candidate), inputs, 1e-5)


class Doing(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.function(x)
        return x * 2


@pytest.mark.parametrize(
    ("function", "writes"),
    [
        (lambda x: x + 1, False),
        (lambda x: x.clone().sub_(1), False),
        (lambda x: x.clamp_(0, 1), True),  # which leaves these values as they are
        (lambda x: x[:1].zero_(), True),
        (lambda x: x.numpy().fill(3), True),  # of which torch knows nothing
        (lambda x: x.unsqueeze_(0).squeeze_(0), True),  # counts as a write, and does no harm as one
    ],
)
def test_writes_are_known(function: Callable[[torch.Tensor], object], writes: bool) -> None:
    x = torch.rand(2, 3)
    candidate = Candidate.of(Doing(function).eval(), (x,))
    assert candidate.signature.writes == ("x",) * writes
    with torch.inference_mode():  # where torch counts nothing
        again = Candidate.of(Doing(function).eval(), (x.clone(),))
    assert again.signature.writes in (candidate.signature.writes, ())


@pytest.mark.parametrize("backend", [*QUICK, pytest.param(BACKENDS["aoti"](), marks=needs_compiler)], ids=str)
def test_an_artifact_says_so_and_its_script_writes_too(backend: Backend, tmp_path: pathlib.Path) -> None:
    candidate = decoder(backend)
    if backend.native_code:  # one package is enough to wait for
        candidate = Candidate.of(candidate.model, candidate.args)
    artifact = shipped(tmp_path / "artifact", candidate, backend)
    assert artifact.manifest.signature.writes == ("cache",)
    text = (artifact.path / "README.md").read_text()
    assert "A call writes to `cache`, as the original does. Give it memory that may be written to." in text
    assert_writes(decoder(), artifact.load(trust=True), example(), 1e-5)

    script = runpy.run_path(str(artifact.path / "run.py"))
    run = script["load"](str(artifact.path / "model"), None)
    own = list(example())
    as_tensors = backend.packages == ("torch",)
    given = [leaf.clone() if as_tensors else leaf.clone().numpy() for leaf in own]
    with torch.no_grad():
        want = Decoder().eval()(*own)
    (got,) = run(given)
    torch.testing.assert_close(torch.as_tensor(got), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.as_tensor(given[2]), own[2], rtol=0, atol=1e-5)


def test_a_manifest_that_names_no_input_is_refused(tmp_path: pathlib.Path) -> None:
    artifact = shipped(tmp_path / "artifact", decoder(), Eager())
    reseal(artifact.path, set_path("signature", "writes", value=["weights"]))
    with pytest.raises(IntegrityError, match="'weights', which is no input"):
        open_artifact(artifact.path)


def test_artifacts_without_writes_have_the_script_that_they_had(tmp_path: pathlib.Path) -> None:
    subject = Candidate.of(nn.Linear(4, 4).eval(), (torch.randn(2, 4),))
    artifact = shipped(tmp_path / "artifact", subject, Eager())
    assert "plain = load" not in (artifact.path / "run.py").read_text()
    assert "writes" not in (artifact.path / "README.md").read_text()


@pytest.fixture
def subject() -> Subject:
    return prepare(Workload(name="decoder", model=Decoder, inputs=example(), dynamic=DYNAMIC))


def test_the_study_is_told(subject: Subject) -> None:
    note = next(note for note in subject.notes if "writes" in note)
    assert note.startswith("The model writes to its input 'cache'. Whatever ships does so too, and was held to it.")


class Forgetful(Executable):
    """Answers as the model, and leaves its inputs alone, as a plug-in might that knows of nothing else."""

    def __init__(self, candidate: Candidate, error: float | None = None) -> None:
        super().__init__(candidate.signature, candidate.settings)
        self.model, self.error = candidate.model, error

    def run(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        own = [leaf.clone() for leaf in leaves]
        with torch.no_grad():
            outputs = [self.model(*own)]
        if self.error is not None:
            leaves[2].copy_(own[2] + self.error)
        return outputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forgetting(Backend):
    name = "forgetting"

    def compile(self, candidate: Candidate) -> Executable:
        return Forgetful(candidate)

    def load(self, *args: object) -> Executable:
        raise NotImplementedError

    def script(self) -> str:
        raise NotImplementedError


def test_a_runtime_that_does_not_write_is_a_mismatch(subject: Subject, tmp_path: pathlib.Path) -> None:
    call = build(Recipe(backend=Eager()), subject.candidate)[0]
    reference = reference_of(call, subject.splits.selection, None)
    rival = LocalRunner(lambda: call(*subject.candidate.args))
    trial = evaluate(Recipe(backend=Forgetting()), subject, reference, rival, plan=Plan(), folder=tmp_path)
    assert trial.state is State.MISMATCH
    assert trial.parity is not None
    assert trial.parity.ok, "its outputs are right, call by call"
    assert trial.reason == (
        "It leaves the input 'cache' as it was, where the model writes to it. Have the model return it as an output instead, "
        "and pass that to the next call."
    )


def test_the_confirmation_starts_from_inputs_that_nobody_wrote_to(subject: Subject, tmp_path: pathlib.Path) -> None:
    backend = OnnxRuntime()
    if package := missing_package(backend.requires):
        pytest.skip(f"needs {package}")
    recipe = Recipe(backend=backend)
    executable = build(recipe, subject.candidate)[0]
    save(executable, tmp_path)
    loaded, candidate = load(recipe, tmp_path, fresh_inputs(subject))
    assert not candidate.leaves[2].any(), "its cache is empty"
    assert write_mismatch(loaded, subject.model, candidate, exact=True, max_error=None) is None


def test_what_is_there_already_may_be_written_again() -> None:
    candidate = decoder()
    args = [leaf.clone() for leaf in candidate.leaves]
    with torch.no_grad():
        candidate.model(*args)
    args[2] *= 1 + 1e-7  # what a runtime that rounds otherwise left there
    full = dataclasses.replace(candidate, args=tuple(args))
    assert write_mismatch(Forgetful(full), full.model, full, exact=True, max_error=None) is None


@pytest.mark.parametrize(("error", "exact", "words"), [(0.0, True, None), (0.01, False, None), (0.5, True, "centred error")])
def test_what_is_written_is_held_against_what_the_model_writes(error: float, exact: bool, words: str | None) -> None:
    candidate = decoder()
    found = write_mismatch(Forgetful(candidate, error), candidate.model, candidate, exact=exact, max_error=0.1)
    assert (found is None) is (words is None)
    assert found is None or (found.startswith("It writes something else to the input 'cache'") and str(words) in found)


def test_converted_graphs_are_held_to_what_is_written() -> None:
    candidate = decoder()
    model = candidate.model

    def forgetful(leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            return [model(*(leaf.clone() for leaf in leaves))]

    said = str(disagreement(candidate, forgetful, candidate.leaves))
    assert said.startswith("what it writes to cache is off by"), said
    graph = returning_writes(candidate)
    said = str(wrong_graph(lambda leaves: [*forgetful(leaves), leaves[2]], graph, graph.signature))
    assert said.startswith("output 1 is off by"), said
    assert (
        returning_writes(Candidate.of(nn.Linear(2, 2).eval(), (torch.ones(1, 2),))).signature.output_structure.kind == "tensor"
    )


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_every_timed_call_finds_the_inputs_as_they_were(objective: str) -> None:
    class Halving(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(float(x.abs().max()))
            return x.mul_(0.5)

    seen: list[float] = []
    subject = prepare(Workload(name="halving", model=Halving(), inputs=torch.ones(2, 3)))
    executable = Eager().compile(subject.candidate)
    runner = runner_for(executable, subject.candidate, subject, objective)  # type: ignore[arg-type]
    seen.clear()
    assert len(runner.block(6)) == 6
    assert set(seen) == {1.0}
