"""Models of unusual manners: sizes refused, numbers that follow a size, inputs written to, odd names of fields, complex."""

from __future__ import annotations

import copy
import dataclasses
import json
import pathlib
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from test_artifact_edges import replayed, shipped
from trimtab._json import dumps, from_json
from trimtab._machine import no_compiler
from trimtab._tree import Record, Structure, flatten, opened, unflatten
from trimtab.artifact import Golden
from trimtab.backends._owned import owned
from trimtab.backends.eager import Eager
from trimtab.backends.inductor import Inductor
from trimtab.backends.torchscript import TorchScript
from trimtab.candidate import Candidate
from trimtab.contracts import BACKENDS, Backend, missing_package
from trimtab.errors import UsageError, WorkloadError
from trimtab.evaluate import runner_for, start
from trimtab.measure.parity import compare_outputs
from trimtab.passes.autocast import Autocast
from trimtab.recipe import Recipe
from trimtab.reference import Reference, predict, refer
from trimtab.signature import Dim
from trimtab.splits import Batch
from trimtab.subject import prepare
from trimtab.workload import Evaluation, Workload

BATCH = {"x": {0: Dim("batch")}}

# test vectors


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
    with pytest.raises(IndexError):
        Golden.of(long, long.signature)


# numbers that follow a size


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
    refer(model, batches, None).save(tmp_path)
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
    reference = refer(Eager().compile(subject.candidate), subject.splits.selection, evaluation)
    answers = predict(TorchScript().compile(subject.candidate), subject.splits.selection, evaluation)
    assert compare_outputs(reference.nested(), answers, exact=True).ok


# inputs that the model writes to


class Normalising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.sub_(0.5).div_(0.2))


needs_compiler = pytest.mark.skipif(no_compiler() is not None, reason="needs a C++ compiler")


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
        reference = refer(Eager().compile(normalising(x[:2])), batch, evaluation)
        assert torch.equal(torch.cat([leaves[0] for leaves in reference.outputs]), want)
    running = dataclasses.replace(evaluation, run=lambda call, item: call(item["x"]))
    refer(model, [Batch({"x": part.inputs}, rows=20) for part in batches], running)
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
    executable, _ = start(Recipe(backend=BACKENDS[name]()), subject.candidate)
    for objective in ("latency", "throughput"):
        runner_for(executable, subject.candidate, subject, objective).block(2)
    assert torch.equal(x, before)
    with torch.no_grad():
        want = [subject.model(*(arg.clone() for arg in batch.call[0])) for batch in subject.splits.selection]
    found = compare_outputs(want, predict(executable, subject.splits.selection, None), exact=True)
    assert found.ok, found.reason


# structures


@dataclasses.dataclass
class ActorCritic:
    values: torch.Tensor
    items: torch.Tensor
    class_name: torch.Tensor
    keys: int = 3
    _private: str = "p"


class Best(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x.topk(3), {"max": x.max(1)}


def actor_critic(*tensors: torch.Tensor) -> Record:
    found = flatten(ActorCritic(*tensors))
    return unflatten(found[1], found[0])


def test_a_field_may_be_called_as_a_method_of_dict_is() -> None:
    tensors = [torch.full((2,), float(i)) for i in range(3)]
    record = actor_critic(*tensors)
    assert isinstance(record, Record)
    for found in (record, copy.copy(record), pickle.loads(pickle.dumps(record))):  # noqa: S301
        assert [found.values.tolist(), found.items.tolist(), found.class_name.tolist()] == [[0, 0], [1, 1], [2, 2]]
        assert (found.keys, found._private, found[3], found["keys"]) == (3, "p", 3, 3)
        assert [*found] == ["values", "items", "class_name", "keys", "_private"]
        assert found.to_tuple()[1].tolist() == [1, 1]
        assert flatten(found)[1] == flatten(ActorCritic(*tensors))[1]
    with pytest.raises(AttributeError, match="The output has no 'logits'; it has values, items"):
        _ = record.logits
    parts, again = opened(record) or ([], None)
    assert again is not None
    assert again(parts).values is tensors[0]


def test_what_is_made_in_inference_mode_is_copied_under_any_name() -> None:
    with torch.inference_mode():
        record = actor_critic(*(torch.ones(2) for _ in range(3)))
    found = owned(record)
    assert found.items.add_(1).tolist() == found.items.tolist() == [2, 2]


@pytest.mark.parametrize(
    "backend", [Eager(), TorchScript(), pytest.param(Inductor(mode="default"), marks=needs_compiler)], ids=str
)
def test_named_results_of_torch_keep_their_names(backend: Backend, tmp_path: pathlib.Path) -> None:
    x = torch.randn(4, 5)
    subject = Candidate.of(Best(), (x,), dynamic=BATCH)
    assert [spec.name for spec in subject.signature.outputs] == [
        *("output.0.values", "output.0.indices", "output.1.max.values", "output.1.max.indices"),
    ]
    executable = backend.compile(subject)
    executable.save(tmp_path)
    for each in (executable, backend.load(tmp_path, executable.signature, executable.settings)):
        found = each(x)
        assert torch.equal(found[0].indices, x.topk(3).indices)
        assert torch.equal(found[1]["max"].values, x.max(1).values)
    parts, again = opened(x.max(1)) or ([], None)
    assert again is not None
    assert torch.equal(again(iter(parts)).indices, parts[1])


def test_source_finds_named_results_by_place() -> None:
    class Decided(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            best = x.topk(2)
            return best if bool(x.sum() > 0) else (-x).topk(2)

    subject = Candidate.of(Decided(), (torch.ones(4, 5),))
    executable = TorchScript().compile(subject)
    assert any("from source" in note for note in executable.notes)
    x = -torch.rand(4, 5)
    assert torch.equal(executable(x).values, (-x).topk(2).values)


def test_the_class_of_a_named_tuple_is_made_once() -> None:
    structure = Structure("namedtuple", ("values", "indices"), (Structure("tensor"), Structure("tensor")), "topk")
    leaves = [torch.zeros(1), torch.zeros(1)]
    assert type(unflatten(structure, leaves)) is type(unflatten(from_json(Structure, json.loads(dumps(structure))), leaves))


# complex numbers


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(self.layer(x)).conj()


def test_complex_outputs_have_a_tolerance_and_both_parts_are_replayed(tmp_path: pathlib.Path) -> None:
    subject = Candidate.of(Spectrum().eval(), (torch.randn(3, 8),))
    artifact = shipped(tmp_path / "artifact", subject, Eager())
    largest = max(case.outputs[0].abs().max().item() for case in artifact.golden().cases)
    assert artifact.manifest.golden.tolerance == (pytest.approx(1e-3 * largest),)
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
        refer(turning, batches, None)
    with pytest.raises(WorkloadError, match="gives NaN: 6 of 6 values"):
        refer(lambda x: torch.complex(x, torch.full_like(x, torch.nan)), batches, None)
    refer(lambda x: torch.complex(x, x), batches, None)
    subject = Candidate.of(Spectrum().eval(), (torch.full((1, 8), torch.nan),))
    with pytest.raises(UsageError, match="gives NaN on its own inputs"):
        Golden.of(subject, subject.signature)
