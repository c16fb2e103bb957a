"""Workloads, limits, splits, subjects: what a user states, and what is found before the first trial."""

from __future__ import annotations

import ctypes
import dataclasses
import pathlib
import textwrap
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader, TensorDataset

import trimtab
from _labelled import X
from trimtab._internal.serialization import from_json, to_json
from trimtab._internal.user_code import IN_WORKER
from trimtab.artifact.padded_batches import PaddedExecutable
from trimtab.backends.onnxruntime import OnnxRuntime
from trimtab.core.candidate import Candidate
from trimtab.core.limits import Limits
from trimtab.core.signature import Dim
from trimtab.core.workload import Evaluation, Training, Workload
from trimtab.data.splits import split
from trimtab.errors import CompileError, InputError, UsageError, WorkloadError
from trimtab.evaluation import reproducibility
from trimtab.evaluation.evaluate import TORCH_THREADS
from trimtab.evaluation.prepared_workload import fresh_inputs, prepare
from trimtab.evaluation.reference import Reference, predict
from trimtab.execution.jobs.inference import baseline_job, prepare_job, read_workload
from trimtab.execution.process import environment
from trimtab.execution.workload_transfer import workload_source
from trimtab.importers.load import load_workload
from trimtab.passes.int8_weights import Int8Weights
from trimtab.study.samplers.ladder import as_written


def top1(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.argmax(1) == target


def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def labelled(n: int = 100) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 4, generator=generator), torch.arange(n) % 3


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def test_splits_never_share_an_example_and_are_the_same_every_time() -> None:
    inputs, targets = labelled()
    inputs[:, 0] = torch.arange(100)
    workload = Workload(model=linear, inputs=inputs[:1], evaluation=Evaluation(data=(inputs, targets), score=top1))
    first, second = split(workload), split(workload)
    ids = [{int(i) for batch in part for i in batch.inputs[:, 0]} for part in (first.calibration, first.selection, first.test)]
    assert [len(part) for part in ids] == [20, 40, 40]
    assert not ids[0] & ids[1]
    assert not ids[1] & ids[2]
    assert not ids[0] & ids[2]
    assert torch.equal(first.selection[0].inputs, second.selection[0].inputs)
    assert all(int(i) % 3 == int(t) for b in first.test for i, t in zip(b.inputs[:, 0], b.target, strict=True))
    assert "20 examples with labels" in first.notes[0]
    assert "40 examples select and 40 test" in first.notes[1]


def test_own_calibration_and_test_data_leave_everything_to_selection() -> None:
    data = labelled()
    evaluation = Evaluation(data=data, test=labelled(10), score=top1)
    splits = split(Workload(model=linear, inputs=data[0][:1], evaluation=evaluation, calibration=[data[0][:8]]))
    assert sum(batch.rows for batch in splits.selection) == 100
    assert sum(batch.rows for batch in splits.test) == 10
    assert splits.notes == ()


@pytest.mark.parametrize("form", ["dataset", "batches", "pair"])
def test_a_batch_that_is_stated_to_be_fixed_is_never_taken_apart(form: str) -> None:
    inputs, targets = labelled(100)
    pair = TensorDataset(inputs, targets)
    data = {"dataset": pair, "batches": DataLoader(pair, batch_size=16), "pair": (inputs, targets)}[form]
    workload = Workload(model=linear, inputs=inputs[:16], evaluation=Evaluation(data=data, score=top1), dynamic={})
    subject = prepare(workload)
    parts = (subject.splits.calibration, subject.splits.selection, subject.splits.test)
    assert [[batch.rows for batch in part] for part in parts] == [[16], [16] * 2, [16] * 3]
    assert "4 examples of the evaluation data are left out: they do not fill a batch of 16, which is fixed." in subject.notes
    executable = OnnxRuntime().compile(subject.candidate)
    assert executable.signature.batch is None
    evaluation, batches = workload.evaluation, subject.splits.test
    want, got = (
        predict(call, batches, evaluation)
        for call in (subject.model, PaddedExecutable(executable, subject.candidate.signature))
    )
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(want, got, strict=True))


def test_data_that_fits_no_fixed_batch_is_refused() -> None:
    inputs, targets = labelled(60)
    workload = Workload(model=linear, inputs=inputs[:16], calibration=[inputs[:10], inputs[10:22]], dynamic={})
    with pytest.raises(UsageError) as caught:
        prepare(workload)
    assert str(caught.value) == (
        "The model takes 16 examples at a time, but the batches of the calibration data have 10, 12. Give batches of 16, "
        "or let the batch be dynamic."
    )
    few = Evaluation(data=(inputs[:32], targets[:32]), score=top1)
    with pytest.raises(UsageError, match="holds 32 examples, too few to split. Give at least three batches of 16, better"):
        prepare(Workload(model=linear, inputs=inputs[:16], evaluation=few, dynamic={}))


@pytest.mark.parametrize(("batches", "own"), [(1, (0, 0)), (2, (1, 0)), (4, (1, 1))])
def test_what_fixed_batches_are_too_few_for_is_stood_in_for(batches: int, own: tuple[int, int]) -> None:
    given = [labelled(16 * batches)[0][16 * i : 16 * (i + 1)] for i in range(batches)]
    subject = prepare(Workload(model=linear, inputs=given[0], calibration=given, dynamic={}))
    for part, count in zip((subject.splits.selection, subject.splits.test), own, strict=True):
        assert sum(batch.rows for batch in part) == 16 * count
        assert all(len(batch.call[0][0]) == 16 for batch in part)
        assert part


class OnlySixteen(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(16, 2, 2).flatten(1))


def test_a_batch_that_the_model_fixes_itself_is_never_taken_apart() -> None:
    inputs, targets = labelled(160)
    evaluation = Evaluation(data=(inputs, targets), score=top1)
    subject = prepare(Workload(model=OnlySixteen(4, 3), inputs=inputs[:16], evaluation=evaluation))
    parts = (subject.splits.calibration, subject.splits.selection, subject.splits.test)
    assert {batch.rows for part in parts for batch in part} == {16}
    assert {args[0].shape for args, _ in subject.candidate.calibration} == {(16, 4)}
    assert any("batch stays fixed" in note for note in subject.notes), subject.notes


def test_data_that_can_be_read_once_only_is_not_read_again() -> None:
    inputs, targets = labelled(160)
    pairs = ((inputs[i : i + 16], targets[i : i + 16]) for i in range(0, 160, 16))
    workload = Workload(model=OnlySixteen(4, 3), inputs=inputs[:16], evaluation=Evaluation(data=pairs, score=top1))
    assert sum(batch.rows for batch in prepare(workload).splits.test) > 0


@pytest.mark.parametrize("form", ["dataset", "batches", "pair", "dicts"])
def test_every_form_of_data(form: str) -> None:
    inputs, targets = labelled(60)
    batches = [(inputs[i : i + 10], targets[i : i + 10]) for i in range(0, 60, 10)]
    data = {
        "dataset": TensorDataset(inputs, targets),
        "batches": batches,
        "pair": (inputs, targets),
        "dicts": [({"input": x.numpy()}, y) for x, y in batches],
    }[form]
    splits = split(Workload(model=linear, inputs=inputs[:1], evaluation=Evaluation(data=data, score=top1)))
    assert sum(batch.rows for batch in (*splits.calibration, *splits.selection, *splits.test)) == 60


def test_items_of_a_run_stay_whole() -> None:
    data = [(torch.randn(7, 4), torch.zeros(7)) for _ in range(12)]
    evaluation = Evaluation(data=data, score=lambda o, t: o[:, 0], run=lambda model, x: model(x))
    splits = split(Workload(model=linear, inputs=data[0][0], evaluation=evaluation))
    assert all(len(batch.inputs) == 7 for batch in (*splits.calibration, *splits.selection, *splits.test))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "The evaluation data is empty. It must yield (inputs, target) pairs."),
        ([torch.zeros(3, 4)] * 20, "Item 0 of the evaluation data is a Tensor; each must be a pair (inputs, target)."),
        ([(1, 2, 3)] * 20, "Item 0 of the evaluation data is a tuple of 3; each must be a pair (inputs, target)."),
        (5, "The evaluation data is an int; give a Dataset, an iterable of batches or (inputs, targets)."),
        (
            [(torch.tensor([[float("nan"), 1.0]]), torch.zeros(1))] * 20,
            "Item 0 of the evaluation data holds NaN: 1 of 2 values. Clean the data first.",
        ),
        (
            (torch.zeros(0, 2), torch.zeros(0)),
            "The evaluation data is empty: its inputs and targets have no rows. Give some examples.",
        ),
        (
            (torch.zeros(4, 2), torch.zeros(3)),
            "The evaluation data has inputs for 4 examples but targets for 3. Give one for each.",
        ),
    ],
)
def test_bad_data_is_named(data: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        split(Workload(model=linear, inputs=torch.zeros(1, 4), evaluation=Evaluation(data=data, score=top1)))
    assert str(caught.value) == message


def test_limits() -> None:
    limits = Limits.parse(max_drop="0.5%", latency="4ms", memory="1GB", size="5MB")
    assert (limits.max_drop, limits.latency_ms, limits.memory_mb, limits.size_mb) == pytest.approx((0.005, 4.0, 1000.0, 5.0))
    assert Limits(max_drop="mlperf-99.9").drop_limit(0.8) == pytest.approx(0.0008)
    assert Limits().drop_limit(0.5) == pytest.approx(0.005)
    with pytest.raises(UsageError, match=r"max_drop is 'mlperf'; use a number like 0.005 or one of mlperf-99, mlperf-99.9"):
        Limits(max_drop="mlperf")
    with pytest.raises(UsageError, match="latency_ms is 0; a limit is a positive number"):
        Limits(latency_ms=0)
    assert Limits(max_drop=np.float32(0.25)).drop_limit(0.5) == 0.25
    assert Limits(max_drop=np.int64(0)).drop_limit(0.5) == 0
    with pytest.raises(UsageError, match="max_drop is nan; a limit is a finite number"):
        Limits(max_drop=np.float32("nan"))


def test_limits_are_read_from_texts_with_units() -> None:
    """Each in the unit of its field, as a budget is; the numbers are what is stored and compared."""
    texts: dict[str, Any] = {
        "max_drop": "0.5%", "max_error": "5%", "latency_ms": "4ms", "memory_mb": "1GB", "size_mb": "5MB",
        "throughput": "12000/min",
    }  # fmt: skip
    numbers = Limits(max_drop=0.005, max_error=0.05, latency_ms=4.0, memory_mb=1000.0, size_mb=5.0, throughput=200.0)
    assert Limits(**texts) == numbers
    assert from_json(Limits, to_json(numbers)) == numbers
    assert Limits.parse(throughput="200/s").throughput == 200


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"latency_ms": "4"}, "latency_ms is '4': the unit is missing. Write it like 4ms, 90s or 10m."),
        ({"latency_ms": [4]}, "latency_ms is [4]; give a number or a text with a unit, such as '4ms'."),
        ({"max_drop": [1]}, "max_drop is [1]; give a number or a text with a unit, such as '0.5%'."),
        ({"max_drop": "-1%"}, "max_drop is '-1%'; use a number like 0.005 or one of mlperf-99, mlperf-99.9."),
        ({"size_mb": "5ms"}, "size_mb is '5ms': 'ms' is not a unit of it. Write it like 5MB or 1.5GB."),
        ({"throughput": "200"}, "throughput is '200', which is no rate. Write it like 200/s or 12000/min."),
        ({"throughput": "0/s"}, "throughput is '0/s', which is no rate. Write it like 200/s or 12000/min."),
        ({"throughput": 0}, "throughput is 0; a limit is a positive number."),
        ({"max_error": "5"},
         "max_error is '5', which allows outputs to be off by 500% of what they vary by. If 5% was meant, write max_error=5%."),
    ],
)  # fmt: skip
def test_a_limit_that_is_none_is_answered_with_how_to_write_it(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Limits(**given)
    assert str(caught.value) == message


def test_an_error_without_its_percent_sign_is_refused_and_none_at_all_is_not() -> None:
    assert [Limits.parse(max_error=text).max_error for text in ("5%", "0.05", "100%", "100.0")] == [0.05, 0.05, 1.0, 100.0]
    for text in ("5", "1", "99"):
        with pytest.raises(UsageError) as caught:
            Limits.parse(max_error=text)
        assert str(caught.value) == (
            f"--max-error is '{text}', which allows outputs to be off by {text}00% of what they vary by. If {text}% was meant, "
            f"write --max-error {text}%."
        )
    assert Limits(max_error=5.0).max_error == 5.0, "who computes it in Python has no percent sign to forget"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "defines no workload"),
        ("workload = 3", "is an int; it must be a trimtab.Workload or a function that returns one"),
        ("def workload(): return None", "is None; it must be a trimtab.Workload"),
    ],
)
def test_a_file_without_a_workload(tmp_path, text: str, message: str) -> None:
    (tmp_path / "wl_bad.py").write_text(text)
    with pytest.raises(UsageError) as caught:
        load_workload(tmp_path / "wl_bad.py")
    assert message in str(caught.value)


def test_references(tmp_path) -> None:
    (tmp_path / "wl_good.py").write_text(
        textwrap.dedent(
            """
            import torch, trimtab
            def make():
                return trimtab.Workload(name="made", model=torch.nn.Linear(2, 2), inputs=torch.randn(1, 2))
            """
        )
    )
    assert load_workload(f"{tmp_path / 'wl_good.py'}:make").name == "made"
    with pytest.raises(UsageError, match="the file has no 'other'. It has: make"):
        load_workload(f"{tmp_path / 'wl_good.py'}:other")
    with pytest.raises(UsageError, match="There is no file"):
        load_workload(tmp_path / "none.py")
    with pytest.raises(UsageError, match="There is no module 'no_such_package.x'"):
        load_workload("no_such_package.x:workload")
    (tmp_path / "wl_raises.py").write_text("1 / 0")
    with pytest.raises(WorkloadError, match="could not be run: ZeroDivisionError: division by zero"):
        load_workload(tmp_path / "wl_raises.py")


def test_dynamic_dimensions_are_what_the_data_shows() -> None:
    data = labelled(60)
    model = linear().train()
    subject = prepare(Workload(model=model, inputs=data[0][:1], evaluation=Evaluation(data=data, score=top1)))
    assert [str(spec) for spec in subject.candidate.signature.inputs] == ["input: float32[batch, 4]"]
    assert [str(spec) for spec in subject.candidate.signature.outputs] == ["output: float32[batch, 3]"]
    assert not subject.model.training
    assert "came in training mode" in subject.notes[0]
    other = fresh_inputs(subject)
    assert other.args[0].shape == (1, 4)
    assert not torch.equal(other.args[0], data[0][:1])


def test_parts_in_training_mode_are_told_of() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 3)).eval()
    model[1].train()  # as one does whose predictions are averaged
    notes = prepare(Workload(model=model, inputs=torch.ones(1, 4))).notes
    assert notes[0] == "A part of the model came in training mode: 1. It is measured, and ships, in evaluation mode."
    assert not model[1].training
    assert not any("training mode" in note for note in prepare(Workload(model=model, inputs=torch.ones(1, 4))).notes)


def test_threads_that_the_workload_gives_torch_are_told_of(tmp_path: pathlib.Path, one_thread: None) -> None:
    (tmp_path / "workload.pkl").write_bytes(cloudpickle.dumps(Workload(model=linear(), inputs=torch.ones(1, 4))))
    paths = {name: str(tmp_path / name) for name in ("reference", "prepared")}
    job = {"workload": {"pickle": str(tmp_path / "workload.pkl")}, **paths}
    notes = prepare_job({**job, "recipe": as_written().to_json()}, tmp_path)["notes"]
    said = f"The workload gives torch 1 of {TORCH_THREADS} threads. Other runtimes get as many, unless a recipe says more."
    assert said in notes


def test_calibration_is_recorded_where_run_calls_the_model() -> None:
    data = [((torch.randn(3, 4), torch.randn(3, 4)), torch.zeros(3)) for _ in range(20)]

    def pair(model, inputs):
        return (model(inputs[0]) * model(inputs[1])).sum(1)

    evaluation = Evaluation(data=data, metric=lambda o, t: float(o.mean()), run=pair)
    subject = prepare(Workload(model=linear, inputs=data[0][0][0], evaluation=evaluation))
    assert len(subject.candidate.calibration) == 2 * len(subject.splits.calibration)
    assert subject.candidate.calibration[0][0][0].shape == (3, 4)


@pytest.mark.parametrize("calibration", [None, [torch.randn(8, 4)]], ids=["recorded", "given"])
def test_sizes_are_those_of_the_calls_that_run_makes(calibration: Any) -> None:
    data = [((torch.randn(3, 4), torch.randn(3, 4)), torch.zeros(3)) for _ in range(20)]

    def pair(model: Any, inputs: Any) -> torch.Tensor:
        return (model(inputs[0]) * model(inputs[1])).sum(1)

    evaluation = Evaluation(data=data, metric=lambda o, t: float(o.mean()), run=pair)
    workload = Workload(model=linear, inputs=torch.randn(1, 4), evaluation=evaluation, calibration=calibration)
    subject = prepare(workload)
    assert [dim.name for dim in subject.candidate.signature.dims] == ["batch"]
    assert {len(args[0]) for args, _ in subject.candidate.calibration} == ({3} if calibration is None else {8})
    executable = OnnxRuntime().compile(subject.candidate)
    want, got = (predict(call, subject.splits.test, evaluation) for call in (subject.model, executable))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(want, got, strict=True))
    assert fresh_inputs(subject).args[0].shape == (1, 4)


def test_calls_of_another_form_are_no_sizes() -> None:
    class Stateful(nn.Linear):
        def forward(self, x: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x) + (0 if state is None else state.sum())

    def run(model: Any, x: torch.Tensor) -> torch.Tensor:
        first = model(x[:2])  # without the state that the example has, and in other numbers, and of nothing
        model(x[:0], torch.ones(3))
        return model(x, first[0])

    evaluation = Evaluation(data=[(torch.randn(5, 4), 0.0) for _ in range(12)], score=lambda o, t: o.mean()[None], run=run)
    subject = prepare(Workload(model=Stateful(4, 3), inputs=(torch.randn(1, 4), torch.zeros(3)), evaluation=evaluation))
    assert [str(spec) for spec in subject.candidate.signature.inputs] == ["x: float32[batch, 4]", "state: float32[3]"]
    assert len(subject.candidate.calibration) == 3 * len(subject.splits.calibration)


def test_workload_faults_are_the_users() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise IndexError("no such row")

    with pytest.raises(WorkloadError, match="The model failed on the example inputs: IndexError: no such row"):
        prepare(Workload(model=Broken(), inputs=torch.zeros(1)))
    with pytest.raises(WorkloadError, match="returned an int, not an nn.Module"):
        prepare(Workload(model=lambda: 3, inputs=torch.zeros(1)))
    with pytest.raises(UsageError, match="takes score=... .* or metric=... .*; both was given"):
        Evaluation(data=[], score=top1, metric=lambda o, t: 0.0)
    with pytest.raises(UsageError, match="dynamic names the input 'x', but the inputs are input"):
        prepare(Workload(model=linear, inputs=torch.zeros(1, 4), dynamic={"x": {0: "batch"}}))


class Two(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"sum": (a + b) * scale, "first": a[:, :1]}


def test_signature_binds_like_python_does_and_checks() -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    candidate = Candidate.of(
        Two(), (x, y), {"scale": 2.0}, dynamic={"a": {0: Dim("batch", 1, 8)}, "b": {0: Dim("batch", 1, 8)}}
    )
    signature = candidate.signature
    assert [str(s) for s in signature.outputs] == ["output.sum: float32[batch, 3]", "output.first: float32[batch, 1]"]
    for args, kwargs in [((x, y), {"scale": 2.0}), ((x,), {"scale": 2.0, "b": y}), ((), {"b": y, "a": x, "scale": 2.0})]:
        assert all(p is q for p, q in zip(signature.bind(args, kwargs), (x, y), strict=True))
    assert signature.sizes([x, y]) == {"batch": 2}
    for leaves, message in [
        ([x, y[:1]], "Dimension 'batch' is 2 in one input and 1 in 'b'. Give one size in all."),
        ([x.double(), y], "Input a: float64[2, 3] was given, but this was built for a: float32[batch, 3]."),
        ([x[:, :2], y], "Input a: float32[2, 2] was given, but this was built for a: float32[batch, 3]."),
        ([torch.randn(9, 3)] * 2, "Dimension 'batch' of 'a' is 9; this was built for 1 to 8."),
    ]:
        with pytest.raises(InputError) as caught:
            signature.check(leaves)
        assert str(caught.value) == message
    with pytest.raises(InputError, match="There is no input 'c'"):
        signature.bind((x, y), {"scale": 2.0, "c": y})
    with pytest.raises(InputError, match="The input 'b' is missing"):
        signature.bind((x,), {"scale": 2.0})
    with pytest.raises(InputError, match=r"'scale' is missing. This was built for a: float.*\] with scale=2.0\.$"):
        signature.bind((x, y), {})
    with pytest.raises(InputError, match="The input 'scale' is 3.0, but this was built for 2.0."):
        signature.bind((x, y), {"scale": 3.0})
    with pytest.raises(InputError, match="3 inputs were given by position; this was built for 2: a: float32"):
        signature.bind((x, y, x), {"scale": 2.0})


def test_inputs_and_outputs_may_share_memory(tmp_path: pathlib.Path) -> None:
    class Shared(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
            total = a + b
            return {"all": total, "first": total[:, 0], "again": total}

    x = torch.randn(3, 4)
    workload = Workload(name="shared", model=Shared(), inputs=(x, x))
    (tmp_path / "workload.pkl").write_bytes(cloudpickle.dumps(workload))
    paths = {name: str(tmp_path / name) for name in ("reference", "prepared")}
    job = {"workload": {"pickle": str(tmp_path / "workload.pkl")}, **paths}
    assert prepare_job({**job, "recipe": as_written().to_json()}, tmp_path)["name"] == "shared"
    kept = Reference.load(tmp_path / "reference").outputs[0]
    assert torch.equal(kept[0], 2 * x)
    assert torch.equal(kept[1], 2 * x[:, 0])


@pytest.mark.parametrize("dynamic", [{"input": [0]}, {"input": {0: torch.export.Dim("b")}}, {"input": {0: None}}, ["input"]])
def test_dynamic_in_another_form_is_refused_with_the_right_one(dynamic: Any) -> None:
    with pytest.raises(UsageError, match=r'Workload dynamic .* Give {"name of the input": {0: "batch"}}'):
        Workload(model=nn.Linear(8, 2), inputs=X[:1], dynamic=dynamic)


def test_models_that_cannot_be_pickled_or_have_no_shapes_are_refused_with_the_way_out(tmp_path: pathlib.Path) -> None:
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 2))
    with pytest.raises(UsageError, match="cannot be handed to worker processes: .* or give model= a function that builds it"):
        workload_source(Workload(model=nn.Sequential(normed), inputs=X[:1]), tmp_path)
    for what in (torch.jit.script(twice), ctypes.pointer(ctypes.c_int(3))):
        held = nn.Linear(8, 2).eval()
        held.what = what
        with pytest.raises(UsageError, match="cannot be handed to worker processes"):
            workload_source(Workload(model=held, inputs=X[:1]), tmp_path)
        with pytest.raises(CompileError, match=r"cannot be copied: .*Make copy.deepcopy\(model\) work"):
            Candidate.of(held, (X[:1],)).own_model()
    compiled = nn.Sequential(nn.Linear(8, 2))
    compiled[0].compile(backend="eager")
    with pytest.raises(UsageError, match=r"compiled in place, .* Give model= a function that builds and compiles it"):
        workload_source(Workload(model=compiled, inputs=X[:1]), tmp_path)
    with pytest.raises(WorkloadError, match="'weight' has no shape yet.* Call it once on the inputs before handing it over"):
        prepare(Workload(model=nn.LazyLinear(2), inputs=X[:1]))


def test_tensors_that_no_runtime_takes_are_named() -> None:
    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to_dense().to(torch.complex128)

    with pytest.raises(UsageError, match=r"The input 'x' is a sparse tensor \(sparse_coo\).* \.to_dense\(\)"):
        prepare(Workload(model=Wide(), inputs=(torch.eye(5).to_sparse(),)))
    with pytest.raises(UsageError, match=r"The output 'output' has the dtype complex128.* Use complex64"):
        prepare(Workload(model=Wide(), inputs=X[:1]))


def test_what_lies_on_a_gpu_is_refused() -> None:
    with FakeTensorMode():  # which has every device
        away = torch.empty(2, 2, device="cuda:0")
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"^The workload's inputs are on cuda:0\. .* give the model as model\.cpu\(\)"):
        prepare(Workload(name="away", model=model, inputs=away))
    model.weight = nn.Parameter(away)
    with pytest.raises(UsageError, match=r"^The model's 'weight' is on cuda:0\. .* give the model as model\.cpu\(\)"):
        prepare(Workload(name="away", model=model, inputs=torch.ones(1, 2)))


def test_a_script_that_reads_its_arguments_finds_none(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
        import argparse, torch, trimtab
        parser = argparse.ArgumentParser()
        parser.add_argument("--width", type=int, default={default})
        asked = parser.parse_args()
        workload = trimtab.Workload(name="w", model=torch.nn.Linear(asked.width, 2), inputs=torch.ones(1, asked.width))
    """
    monkeypatch.setattr("sys.argv", ["trimtab", "optimize", "--budget", "5m"])
    for name, default in (("with_default", "3"), ("without", "None, required=True")):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text.format(default=default)))
    assert load_workload(tmp_path / "with_default.py").inputs.shape == (1, 3)
    with pytest.raises(WorkloadError, match=r"could not be run: it called sys\.exit\(2\).*Try it alone: python "):
        load_workload(tmp_path / "without.py")


def test_a_function_that_reads_its_arguments_finds_none_either(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "late.py"
    path.write_text(
        textwrap.dedent(
            """
            import sys, torch, trimtab
            def build(): return torch.nn.Linear(3 + len(sys.argv[1:]), 2)
            def workload(): return trimtab.Workload(name="w", model=build, inputs=torch.ones(1, 3 + len(sys.argv[1:])))
            """
        )
    )
    monkeypatch.setattr("sys.argv", ["worker.py", "a", "b"])
    assert load_workload(path).inputs.shape == (1, 3)
    found = read_workload({"reference": str(path)})  # as workers do, which call the functions of a workload later on
    assert found.build_model().in_features == 3


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda w: trimtab.optimize(w, limits=0.01), "limits is 0.01; give trimtab.Limits, such as Limits(max_drop=0.01)."),
        (
            lambda w: trimtab.optimize(w, objective="Latency"),
            "objective is 'Latency'; it can be latency, throughput, memory, size.",
        ),
        (lambda w: trimtab.compare(w, objective="size"), "objective is 'size'; what is timed can be latency or throughput."),
        (lambda w: trimtab.compare(w, seconds="1s"), "seconds is '1s'; it must be a plain number above zero, without a unit."),
        (
            lambda w: dataclasses.replace(w, evaluation=(torch.ones(2, 2), torch.ones(2))),
            "Workload evaluation is a tuple; give a trimtab.Evaluation.",
        ),
        (lambda w: dataclasses.replace(w, training={}), "Workload training is a dict; give a trimtab.Training."),
    ],
)
def test_arguments_of_another_type_are_told_of_before_anything_runs(
    call: Any, sentence: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as raised:
        call(Workload(name="w", model=nn.Linear(2, 2), inputs=torch.ones(1, 2)))
    assert str(raised.value) == sentence
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", [trimtab.optimize, trimtab.tune, trimtab.compare])
def test_what_a_file_starts_while_a_worker_reads_it_is_refused(what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IN_WORKER, environment()[IN_WORKER])
    with pytest.raises(UsageError, match=f'trimtab.{what.__name__} is called by the very file .* if __name__ == "__main__":'):
        what("model.py")


def test_a_package_that_misses_another_is_there(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_here").mkdir()
    (tmp_path / "half_here" / "__init__.py").write_text("import no_such_dependency")
    (tmp_path / "half_here" / "work.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkloadError, match="No module named 'no_such_dependency'"):
        load_workload("half_here.work:workload")


def test_the_order_of_keys_means_nothing_and_the_first_difference_is_named() -> None:
    class Nested(torch.nn.Module):
        def forward(self, x: torch.Tensor, batch: dict[str, Any], *, more: Any = None) -> torch.Tensor:
            return x + batch["user"] - batch["item"]["id"] + more[0]

    x, user, item, other, more = (torch.full((2,), float(i)) for i in range(5))
    batch = {"user": user, "item": {"id": item, "other": other}, "k": 3}
    signature = Candidate.of(Nested(), (x, batch), {"more": (more,)}).signature
    turned = {"k": 3, "item": {"other": other, "id": item}, "user": user}
    for given in (batch, turned):
        found = signature.bind((x, given), {"more": (more,)})
        assert all(p is q for p, q in zip(found, (x, user, item, other, more), strict=True))
    for args, kwargs, words in (
        ((x, turned | {"k": 4}), {"more": (more,)}, "The input 'batch.k' is 4, but this was built for 3."),
        (
            (x, turned | {"item": item}),
            {"more": (more,)},
            "The input 'batch.item' is a tensor, but this was built for a dict with",
        ),
        (
            (x, {"user": user}),
            {"more": (more,)},
            "The input 'batch' is a dict with user, but this was built for a dict with user, ",
        ),
        ((x, turned), {"more": [more]}, "The input 'more' is a list of 1, but this was built for a tuple of 1."),
    ):
        with pytest.raises(InputError) as caught:
            signature.bind(args, kwargs)
        assert str(caught.value).startswith(words)


def test_the_repr_is_one_line_without_weights() -> None:
    workload = Workload(name="small", model=nn.Linear(2, 3), inputs=torch.zeros(1, 2))
    assert repr(workload) == "Workload('small', Linear, mode='infer')"
    evaluation = trimtab.Evaluation(data=[], score=lambda output, target: output)
    inputs = {"x": torch.zeros(1, 2), "<state>": [torch.zeros(3)]}
    dynamic = {"x": {0: "batch"}}
    workload = Workload(name="made", model=lambda: nn.Linear(2, 3), inputs=inputs, evaluation=evaluation, dynamic=dynamic)
    assert repr(workload) == "Workload('made', <lambda>, mode='infer', with an evaluation)"
    assert workload._repr_html_() == (
        "<p>Workload(&#x27;made&#x27;, &lt;lambda&gt;, mode=&#x27;infer&#x27;, with an evaluation)</p><table>"
        "<tr><th>inputs</th><td>x float32[1, 2], &lt;state&gt;[0] float32[3]</td></tr>"
        "<tr><th>dynamic sizes</th><td>batch (axis 0 of x)</td></tr><tr><th>judged by</th><td>&lt;lambda&gt;</td></tr></table>"
    )


def test_an_exported_module_is_a_model_like_any_other() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Dropout()).eval()
    exported = torch.export.export(net, (torch.ones(2, 4),)).module()
    for model, told in ((exported, False), (nn.Sequential(exported), True)):
        subject = prepare(Workload(model=model, inputs=torch.ones(2, 4)))
        assert any("training mode" in note for note in subject.notes) == told, "its graph is in evaluation mode"
        assert torch.equal(subject.candidate.flat()(torch.ones(2, 4))[0], net(torch.ones(2, 4)))


class Stages(nn.Module):
    """Keeps a part as it is, and forgets to return itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_a_model_whose_train_returns_nothing_is_measured_as_written(tmp_path: pathlib.Path) -> None:
    workload = Workload(model=Stages(), inputs=torch.ones(1, 4))
    (tmp_path / "w.pkl").write_bytes(cloudpickle.dumps(workload))
    reproducibility.save_sums(tmp_path / "reference", prepare(workload))
    job = {"workload": {"pickle": str(tmp_path / "w.pkl")}, "reference": str(tmp_path / "reference"), "weights": {}}
    assert baseline_job(job, tmp_path)["peak_mb"] is not None
    Int8Weights().apply(Candidate.of(workload.model, (torch.ones(1, 4),)))


@pytest.mark.parametrize(
    ("cls", "values", "given", "message"),
    [
        (
            Workload,
            (),
            {"model": linear, "input": 1},
            "Workload has no field 'input'. Did you mean 'inputs'? It takes: ",
        ),
        (Workload, (linear,), {}, "Workload takes its fields by name, as in Workload(model=...); 1 without one cannot be told"),
        (Workload, (), {"inputs": 1}, "Workload has no model=..., which it needs. It takes: model, inputs, name, "),
        (Evaluation, (), {"data": [], "fn": top1}, "Evaluation has no field 'fn'. It takes: data, score, metric, run, test, "),
        (Limits, (), {"latency": 4}, "Limits has no field 'latency'. Did you mean 'latency_ms'? It takes: max_drop, "),
        (trimtab.Settings, (), {"treads": 1}, "Settings has no field 'treads'. Did you mean 'threads'? It takes: threads, "),
    ],
)
def test_a_field_that_does_not_exist_is_answered_with_those_that_do(
    cls: type, values: tuple[Any, ...], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        cls(*values, **given)
    assert str(caught.value).startswith(message)
    with pytest.raises(UsageError, match="has no field 'x'"):
        dataclasses.replace(Limits(), x=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Workload(model=linear, inputs=1, name=5), "Workload name 5 names a folder; use letters"),
        (lambda: Workload(model=linear, inputs=1, seed="x"), "Workload seed is 'x'; give a whole number."),
        (lambda: Evaluation(data=[], score=top1, higher_is_better="no"), "higher_is_better is 'no'; it can be True or False."),
        (lambda: Training(data=[1], optimizer="adam"), "Training optimizer is a str, which cannot be called"),  # type: ignore[arg-type]
        (lambda: Workload(model=linear, mode="train", training=Training(data=[1])), r"its training no optimizer=\.\.\."),
        (lambda: Training(data=[1], optimizer=len, settings={"a": 1}), "Training settings is a dict; give trimtab.Settings"),
    ],
)
def test_a_field_of_another_kind_is_refused_at_once(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(("inputs", "told"), [(3, "3"), ((), r"\(\)"), ({"x": None}, r"\{'x': None\}")])
def test_inputs_without_a_tensor_are_refused_when_a_workload_is_made(inputs: Any, told: str) -> None:
    with pytest.raises(UsageError, match=rf"inputs hold no tensor: they are {told}\. Give what the model is called"):
        Workload(model=nn.Linear(2, 2), inputs=inputs)


def test_a_file_of_a_package_that_imports_what_lies_beside_it_is_told_as_a_module(tmp_path: pathlib.Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").touch()
    (inner / "mine.py").write_text("from . import other\n")
    with pytest.raises(WorkloadError, match="attempted relative import") as raised:
        load_workload(str(inner / "mine.py"))
    assert f"a leading dot, write outer.inner.mine:NAME, in the folder {tmp_path}." in str(raised.value)
