"""What a model answers as it was written: numbers that follow a size, inputs that it writes to, complex numbers, classes."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from test_artifact_edges import replayed, shipped
from torch import nn

from _backends import needs_compiler
from trimtab.artifact.test_vectors import Golden
from trimtab.backends.eager import Eager
from trimtab.backends.torchscript import TorchScript
from trimtab.core.backend import BACKENDS
from trimtab.core.candidate import Candidate
from trimtab.core.recipe import Recipe
from trimtab.core.signature import Dim
from trimtab.core.technique import missing_package
from trimtab.core.workload import Evaluation, Workload
from trimtab.data.batches import Batch
from trimtab.errors import UsageError, WorkloadError
from trimtab.evaluation.evaluate import build, runner_for
from trimtab.evaluation.fidelity import output_parity
from trimtab.evaluation.prepared_workload import prepare
from trimtab.evaluation.reference import Reference, drop, predict, reference_of, score
from trimtab.measure.parity import compare_outputs
from trimtab.passes.autocast import Autocast

BATCH = {"x": {0: Dim("batch")}}

# Numbers that follow a size.


class Sized(nn.Module):
    """Gives the size of its batch beside its answer, as backbones give height and width."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.layer(x), x.shape[0]


def test_every_batch_is_held_against_its_own_numbers(tmp_path: pathlib.Path) -> None:
    batches = [Batch(torch.randn(rows, 8), rows=rows) for rows in (64, 64, 22)]
    model = Sized().eval()
    reference_of(model, batches, None).save(tmp_path)
    reference = Reference.load(tmp_path)
    assert [rows for _, rows in reference.nested()] == [64, 64, 22]
    assert len(json.loads((tmp_path / "reference.json").read_text())["structures"]) == 2
    found = compare_outputs(reference.nested(), predict(model, batches, None), exact=True)
    assert found.ok, found.reason


def test_a_signature_keeps_no_number_of_one_size_for_another() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(WorkloadError, match=r"holds other numbers.* at another size of 'batch'.* leave that size fixed"):
        Candidate.of(Sized().eval(), (x,), dynamic=BATCH)
    fixed = Candidate.of(Sized().eval(), (x,))
    assert TorchScript().compile(fixed)(x)[1] == 4

    evaluation = Evaluation(
        data=(torch.randn(300, 8), torch.zeros(300)), score=lambda output, target: output[0].argmax(1) == target
    )
    subject = prepare(Workload(model=Sized(), inputs=x, evaluation=evaluation))
    assert subject.candidate.signature.batch is None
    assert any("batch stays fixed" in note for note in subject.notes)
    reference = reference_of(Eager().compile(subject.candidate), subject.splits.selection, evaluation)
    answers = predict(TorchScript().compile(subject.candidate), subject.splits.selection, evaluation)
    assert compare_outputs(reference.nested(), answers, exact=True).ok


# Inputs that the model writes to.


class Normalising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.sub_(0.5).div_(0.2))


def normalising(x: torch.Tensor) -> Candidate:
    return Candidate.of(Normalising().eval(), (x,), dynamic=BATCH)


def test_a_model_that_normalises_in_place_is_not_called_random() -> None:
    x = torch.rand(40, 6)
    before = x.clone()
    model = Normalising().eval()
    with torch.no_grad():
        want = model(x.clone())
    evaluation = Evaluation(data=[], score=lambda output, target: output[:, 0] > 0)
    batches = [Batch(part, rows=20) for part in x.split(20)]
    for batch in (batches, [Batch({"x": part.inputs}, rows=20) for part in batches]):
        reference = reference_of(Eager().compile(normalising(x[:2])), batch, evaluation)
        assert torch.equal(torch.cat([leaves[0] for leaves in reference.outputs]), want)
    running = dataclasses.replace(evaluation, run=lambda call, item: call(item["x"]))
    reference_of(model, [Batch({"x": part.inputs}, rows=20) for part in batches], running)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    "name", ["eager", "torchscript", "onnxruntime", "openvino", pytest.param("inductor", marks=needs_compiler)]
)
def test_the_example_stays_what_it_is_in_every_step(name: str) -> None:
    if missing_package(BACKENDS[name].requires):
        pytest.skip(f"needs {name}")
    x = torch.rand(3, 6)
    before = x.clone()
    subject = prepare(Workload(model=Normalising(), inputs=x, dynamic=BATCH))
    assert Autocast().why_not(subject.candidate) is None
    executable, _ = build(Recipe(backend=BACKENDS[name]()), subject.candidate)
    for objective in ("latency", "throughput"):
        runner_for(executable, subject.candidate, subject, objective).block(2)
    assert torch.equal(x, before)
    with torch.no_grad():
        want = [subject.model(*(arg.clone() for arg in batch.call[0])) for batch in subject.splits.selection]
    found = compare_outputs(want, predict(executable, subject.splits.selection, None), exact=True)
    assert found.ok, found.reason


# Complex numbers.


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(self.layer(x)).conj()


def test_complex_outputs_have_a_tolerance_and_both_parts_are_replayed(tmp_path: pathlib.Path) -> None:
    subject = Candidate.of(Spectrum().eval(), (torch.randn(3, 8),))
    artifact = shipped(tmp_path / "artifact", subject, Eager())
    sizes = torch.cat([case.outputs[0].abs().flatten() for case in artifact.golden().cases]).double()
    assert artifact.manifest.golden.tolerance == (pytest.approx(1e-3 * sizes.square().mean().sqrt().item()),)
    assert "allowed" in replayed(artifact)

    from safetensors.torch import load_file, save_file

    vectors = load_file(artifact.path / "golden.safetensors")
    vectors["0.outputs.0"] += 1j  # the real parts stay right
    save_file(vectors, artifact.path / "golden.safetensors")
    with pytest.raises(AssertionError, match="largest error 1, allowed"):
        replayed(artifact)


def test_the_imaginary_part_counts_in_what_the_model_says_twice() -> None:
    turns = iter(range(100))

    def turning(x: torch.Tensor) -> torch.Tensor:
        return torch.complex(x, torch.full_like(x, float(next(turns))))

    batches = [Batch(torch.randn(2, 3), rows=2)]
    with pytest.raises(WorkloadError, match=r"different values for the same input \(by up to 1\)"):
        reference_of(turning, batches, None)
    with pytest.raises(WorkloadError, match="gives NaN: 6 of 6 values"):
        reference_of(lambda x: torch.complex(x, torch.full_like(x, torch.nan)), batches, None)
    reference_of(lambda x: torch.complex(x, x), batches, None)
    subject = Candidate.of(Spectrum().eval(), (torch.full((1, 8), torch.nan),))
    with pytest.raises(UsageError, match="gives NaN on its own inputs"):
        Golden.of(subject, subject.signature)


def test_a_model_that_keeps_something_from_call_to_call_is_told_what_to_do() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return x + self.seen

    with pytest.raises(WorkloadError, match=r"or what it keeps from call to call: make that an input and an output\.$"):
        reference_of(Running().eval(), [Batch(torch.ones(2, 3))], None)


# Classes of the model's own.


class Answer(NamedTuple):
    logits: torch.Tensor
    width: int = 3

    def top1(self) -> torch.Tensor:
        return self.logits.argmax(1)


@dataclasses.dataclass
class Judged:
    logits: torch.Tensor

    @property
    def best(self) -> torch.Tensor:
        return self.logits.argmax(1)


class Classed(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make, self.layer = make, nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self.layer(x))


def right(output: Any, target: torch.Tensor) -> torch.Tensor:
    return (output.top1() if hasattr(output, "width") else output.best) == target


def share(output: Any, target: torch.Tensor) -> float:
    return float((output.top1() == target).double().mean())


def by_method(call: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = call(x).best
    return found


@pytest.mark.parametrize(
    ("make", "asked", "words"),
    [
        (Answer, {"score": right}, r"methods of `Answer`, and no runtime .* only its fields: logits, width\. Use these"),
        (Judged, {"score": right}, r"methods of `Judged`, and no runtime .* only its fields: logits\. Use these"),
        (Answer, {"metric": share}, r"methods of `Answer`"),
        (Judged, {"score": lambda o, t: o == t, "run": by_method}, r"methods of `Judged`.*has no 'best'; it has logits"),
    ],
)
def test_an_evaluation_that_needs_classes_of_the_models_own_is_told_at_once(
    make: Callable[[torch.Tensor], Any], asked: dict[str, Any], words: str
) -> None:
    batches = [Batch(torch.randn(20, 8), torch.zeros(20), rows=20) for _ in range(3)]
    evaluation = Evaluation(data=[], **asked)
    call = Eager().compile(Candidate.of(Classed(make).eval(), (torch.randn(2, 8),), dynamic=BATCH))
    with pytest.raises(WorkloadError, match=words):
        reference_of(call, batches, evaluation)


def test_an_evaluation_that_fails_with_any_class_says_what_it_raised() -> None:
    batches = [Batch(torch.randn(20, 8), torch.zeros(20), rows=20)]
    call = Eager().compile(Candidate.of(Classed(Answer).eval(), (torch.randn(2, 8),), dynamic=BATCH))
    with pytest.raises(WorkloadError, match=r"^Evaluation score raised: AttributeError: .*'nothing'"):
        reference_of(call, batches, Evaluation(data=[], score=lambda output, target: output.nothing))


@pytest.mark.parametrize("make", [Answer, Judged])
def test_fields_are_judged_alike_whoever_answers(make: Callable[[torch.Tensor], Any]) -> None:
    batches = [Batch(torch.randn(20, 8), torch.zeros(20), rows=20) for _ in range(3)]
    candidate = Candidate.of(Classed(make).eval(), (torch.randn(2, 8),), dynamic=BATCH)
    metric = Evaluation(data=[], metric=lambda o, t: float((o.logits.argmax(1) == t).double().mean()))
    for evaluation in (metric, Evaluation(data=[], score=lambda o, t: o.logits.argmax(1) == t)):
        reference = reference_of(Eager().compile(candidate), batches, evaluation)
        answers = predict(TorchScript().compile(candidate), batches, evaluation)
        scores = score(evaluation, answers, batches)
        assert scores == reference.scores
        assert drop(evaluation, reference, scores, answers, batches, 0.5).value == 0


def answering(make: Callable[[torch.Tensor], Any]) -> tuple[Any, list[Batch], Callable[[Any, torch.Tensor], Any]]:
    batches = [Batch(torch.randn(20, 8), torch.zeros(20, dtype=torch.long), rows=20) for _ in range(2)]
    return nn.Linear(8, 3).eval().requires_grad_(False), batches, lambda call, x: make(call(x))


@pytest.mark.parametrize("judge", ["score", "metric"])
@pytest.mark.parametrize(
    "make",
    [lambda y: y.numpy(), lambda y: {"y": y.numpy(), "n": np.float32(3)}, lambda y: [y.numpy(), "text", np.int64(2), None]],
    ids=["array", "dict", "list"],
)
def test_run_may_make_arrays(make: Any, judge: str) -> None:
    model, batches, run = answering(make)

    def logits(found: Any) -> torch.Tensor:
        return found["y"] if isinstance(found, dict) else found[0] if isinstance(found, list) else found

    judges = {
        "score": lambda o, t: logits(o).argmax(1) == t,
        "metric": lambda o, t: float((logits(o).argmax(1) == t).float().mean()),
    }
    evaluation = Evaluation(data=[], run=run, **{judge: judges[judge]})
    reference = reference_of(model, batches, evaluation)
    assert reference.scores is not None
    assert reference.scores.n == 40
    assert compare_outputs(reference.nested(), predict(model, batches, evaluation), exact=True).ok


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda y: {1, 2}, r"^Evaluation run returned \{1, 2\}, a set: return tensors, arrays, numbers, texts, or tuples"),
        (lambda y: [y, object()], r"^Evaluation run returned \[tensor\(.*, a list: return"),
        (lambda y: {0: y}, r"^Evaluation run returned \{0: tensor.*, a dict: return .* dicts \(their keys texts\)"),
    ],
)
def test_what_run_makes_that_cannot_be_compared_is_refused(make: Any, words: str) -> None:
    model, batches, run = answering(make)
    with pytest.raises(UsageError, match=words):
        reference_of(model, batches, Evaluation(data=[], score=lambda o, t: t == 0, run=run))


@pytest.mark.parametrize("make", [lambda y: str(random.random()), lambda y: [y, {"at": random.random()}]])
def test_texts_and_numbers_that_are_drawn_anew_are_told_of(make: Any) -> None:
    model, batches, run = answering(make)
    with pytest.raises(WorkloadError, match=r"different values for the same input\. Asked again, the output.* is .* but the"):
        reference_of(model, batches, Evaluation(data=[], score=lambda o, t: t == 0, run=run))


class Several(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x[:, :3], x[:, 3:6], x[:, 6].long(), {"more": x[:, 7:]}


def naming(*outputs: str) -> Evaluation:
    return Evaluation(data=[], score=lambda o, t: t == 0, outputs=outputs)


def test_outputs_that_an_evaluation_names_are_known_before_anything_is_tried() -> None:
    batches = [Batch(torch.randn(20, 8), torch.zeros(20), rows=20) for _ in range(2)]
    known = r"which is no floating-point output of the model\. Those are: '0', '1', '3\.more'\.$"
    for wrong in ("logits", "2", "output"):
        with pytest.raises(UsageError, match=rf"^Evaluation outputs names '{wrong}', {known}"):
            reference_of(Several(), batches, naming("0", wrong))
    with pytest.raises(UsageError, match=r"Those are: 'output'\.$"):
        reference_of(lambda x: x, batches, naming("x"))
    assert reference_of(Several(), batches, naming("0", "output.3.more")).scores is not None
    assert reference_of(lambda x: x, batches, naming("output")).scores is not None
    assert reference_of(lambda x: {"output": x, "more": x}, batches, naming("output")).scores is not None
    for odd in ("logits", 5, [0]):
        with pytest.raises(UsageError, match=r"^Evaluation outputs is .*; give a tuple of names, such as \('logits',\)\.$"):
            Evaluation(data=[], score=lambda o, t: t == 0, outputs=odd)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outputs", "lost"),
    [(None, "output.1"), (("0",), None), ((), None), (("0", "1"), "output.1"), (("3.more",), "output.3.more")],
    ids=["unsaid", "another", "none", "both", "nested"],
)
def test_the_outputs_that_count_are_not_lost_whatever_the_score_says(outputs: Any, lost: str | None) -> None:
    candidate = Candidate.of(Several().eval(), (torch.randn(2, 8),), dynamic=BATCH)
    batches = [Batch(torch.randn(20, 8), torch.zeros(20), rows=20)]
    evaluation = Evaluation(data=[], score=lambda o, t: t == 0, outputs=outputs)
    reference = reference_of(Several(), batches, evaluation)
    found = [(a, 0 * b, c, {"more": 0 * d["more"]}) for a, b, c, d in reference.nested()]
    parity = output_parity(reference, found, candidate.signature, evaluation, exact=False, max_error=0.05)
    assert parity.ok is (lost is None)
    assert lost is None or str(parity.reason).startswith(f"{lost!r} has a centred error of 1")
    assert not output_parity(reference, found, candidate.signature, evaluation, exact=True, max_error=0.05).ok


@pytest.mark.parametrize("named", [False, True])
def test_what_run_makes_is_made_for_the_score_unless_it_is_named(named: bool) -> None:
    model, batches, run = answering(lambda y: (y, y + 1))
    evaluation = Evaluation(data=[], score=lambda o, t: t == 0, run=run, outputs=("1",) if named else None)
    reference = reference_of(model, batches, evaluation)
    signature = Candidate.of(model, (torch.randn(2, 8),)).signature
    found = [(0 * a, 0 * b) for a, b in reference.nested()]
    assert output_parity(reference, found, signature, evaluation, exact=False, max_error=0.05).ok is not named


def test_what_run_makes_may_have_methods_as_it_makes_it_for_every_runtime() -> None:
    batches = [Batch(torch.randn(20, 8), torch.zeros(20), rows=20)]
    evaluation = Evaluation(data=[], score=lambda o, t: o.top1() == t, run=lambda call, x: Answer(call(x)))
    candidate = Candidate.of(Classed(lambda logits: logits).eval(), (torch.randn(2, 8),), dynamic=BATCH)
    reference = reference_of(Eager().compile(candidate), batches, evaluation)
    assert score(evaluation, predict(TorchScript().compile(candidate), batches, evaluation), batches) == reference.scores


@pytest.mark.parametrize("remembers", [False, True])
def test_a_score_that_is_not_the_same_twice_is_refused(remembers: bool) -> None:
    seen: list[float] = []

    def judge(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append(0.1)
        return torch.full((len(target),), sum(seen)) if remembers else torch.rand(len(target))

    batches = [Batch(torch.randn(8, 3), torch.zeros(8), 8) for _ in range(3)]
    words = r"Evaluation score gives 0\.\d+ and then 0\.\d+ for the same output and target\. Leave out what is random in it"
    with pytest.raises(WorkloadError, match=words):
        reference_of(nn.Linear(3, 2), batches, Evaluation(data=[], score=judge))


def test_a_score_may_write_to_what_it_is_given() -> None:
    def judge(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = output.argmax(1) == target
        output.zero_(), target.zero_()
        return found

    batches = [Batch(torch.randn(8, 3), torch.randint(0, 2, (8,)), 8) for _ in range(2)]
    found = reference_of(nn.Linear(3, 2), batches, Evaluation(data=[], score=judge)).scores
    assert found is not None
    assert found.n == 16
