"""Recording the calls of a module inside somebody's program, and finding what varies between them."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import trimtab
from trimtab.api.optimize import optimize
from trimtab.core.capture import Call, record
from trimtab.core.workload import Workload, as_call
from trimtab.errors import InputError, UsageError, WorkloadError
from trimtab.evaluation.prepared_workload import prepare


@dataclasses.dataclass
class Condition:
    embedding: torch.Tensor
    scale: float = 2.0


class Denoiser(nn.Module):
    """Mixed positional, keyword and nested inputs, as diffusion pipelines call their network."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.cond = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(
        self,
        sample: torch.Tensor,
        step: torch.Tensor,
        context: torch.Tensor | None = None,
        *,
        added: dict[str, Any] | None = None,
        condition: Condition | None = None,
        return_dict: bool = True,
    ) -> Any:
        y = self.inner(sample) * torch.cos(step)[:, None, None]
        if context is not None:
            y = y + self.cond(context).mean(1, keepdim=True)
        if added is not None:
            y = y + added["ids"][0][:, None, :] + added["pair"][1]
        if condition is not None:
            y = y * condition.scale + self.cond(condition.embedding)[:, None]
        return {"sample": y} if return_dict else (y,)


class Pipeline:
    """A program of several models; the denoiser is one of them."""

    def __init__(self) -> None:
        self.text = nn.Embedding(20, 4).eval()
        self.denoiser = Denoiser().eval()

    @torch.inference_mode()
    def __call__(self, batch: int, length: int, steps: int = 3) -> torch.Tensor:
        context = self.text(torch.arange(length).expand(batch, length))
        sample = torch.randn(batch, 5, 8)
        for step in range(steps):
            time = torch.full((batch,), float(step))
            added = {"ids": [torch.ones(batch, 8)], "pair": (None, torch.ones(1))}
            sample = self.denoiser(
                sample, time, context=context, added=added, condition=Condition(context[:, 0]), return_dict=False
            )[0]
            sample.add_(1)  # in place, after the call: what was recorded must not follow
        return sample


def test_a_pipeline_gives_the_workload_of_one_of_its_models() -> None:
    pipeline = Pipeline()

    def run() -> None:
        for batch, length in ((1, 3), (2, 3), (2, 6), (3, 4)):
            pipeline(batch, length)

    workload = Workload.capture(pipeline.denoiser, run, name="denoiser")
    assert workload.model is pipeline.denoiser
    assert len(workload.calibration) == 11
    assert not pipeline.denoiser._forward_pre_hooks
    args, kwargs = as_call(workload.inputs)
    assert [list(a.shape) for a in args] == [[1, 5, 8], [1]]
    assert list(kwargs) == ["context", "added", "condition", "return_dict"]
    assert kwargs["return_dict"] is False
    assert not args[0].is_inference()
    assert workload.notes[0] == "The inputs are recorded from 12 calls of the program."
    assert workload.notes[1] == (
        "Dynamic dimensions, as the calls show them: batch (axis 0 of sample, step, context, added.ids.0 and "
        "condition.embedding), context_1 (axis 1 of context)."
    )
    subject = prepare(workload)
    signature = subject.candidate.signature
    assert signature.batch == "batch"
    assert [spec.shape for spec in signature.inputs[:3]] == [("batch", 5, 8), ("batch",), ("batch", "context_1", 4)]
    assert signature.outputs[0].shape == ("batch", 5, 8)
    whole = {batch.rows for part in (subject.splits.calibration, subject.splits.selection) for batch in part}
    assert whole == {0}, "calls are never taken apart"
    assert "No labels were given" in subject.notes[-1]


def test_what_is_recorded_is_what_came_before_the_module_touched_it() -> None:
    class Greedy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(0)

    found = record(module := Greedy().eval(), lambda: module(torch.ones(2, 2).requires_grad_(False)))
    assert torch.equal(found.calls[0].args[0], torch.ones(2, 2))
    assert (found.seen, found.dims) == (1, {})


def test_calls_are_alike_whether_by_position_or_by_keyword() -> None:
    module = Denoiser().eval()
    x, t, c = torch.randn(1, 5, 8), torch.ones(1), torch.randn(1, 2, 4)

    def run() -> None:
        module(x, t, context=c)
        module(x, t, c)
        module(x, context=c, step=t)

    found = record(module, run)
    assert found.seen == 3
    assert all([len(call.args), list(call.kwargs)] == [2, ["context"]] for call in found.calls)


def test_memory_is_bounded_and_the_calls_that_are_kept_are_spread_evenly() -> None:
    module = nn.Identity().eval()

    def run() -> None:
        for i in range(1000):
            module(torch.full((1 + i % 7, 10), float(i)))

    found = record(module, run, most_calls=10)
    values = [int(call.args[0][0, 0]) for call in found.calls]
    assert values == list(range(0, 1000, 128))
    assert found.seen == 1000
    assert found.dims == {"input": {0: trimtab.Dim("batch")}}, "sizes count even of calls that are not kept"
    small = record(module, run, most_mb=0.001)
    assert 1 <= len(small.calls) <= 6
    assert int(small.calls[0].args[0][0, 0]) == 0
    workload = Workload.capture(module, run, most_calls=10)
    assert workload.notes[0] == "The inputs are recorded from 1000 calls of the program, of which 8 are kept."


def _twice(first: dict[str, Any], second: dict[str, Any]) -> Any:
    module = Denoiser().eval()
    base = {"sample": torch.randn(1, 5, 8), "step": torch.ones(1)}
    return module, lambda: (module(**base, **first), module(**base, **second))


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"return_dict": True}, {"return_dict": False}, "return_dict is True in call 1 and False in call 2"),
        ({}, {"context": torch.randn(1, 2, 4)}, "context is given in call 2 and missing in call 1"),
        ({"context": None}, {"context": torch.randn(1, 2, 4)}, "context is None in call 1 and a tensor in call 2"),
        (
            {"condition": Condition(torch.ones(1, 4), 1.0)},
            {"condition": Condition(torch.ones(1, 4), 0.5)},
            "condition.scale is 1.0 in call 1 and 0.5 in call 2",
        ),
    ],
)
def test_calls_of_different_forms_are_refused_with_the_difference(first: Any, second: Any, words: str) -> None:
    module, run = _twice(first, second)
    with pytest.raises(UsageError) as raised:
        Workload.capture(module, run)
    assert str(raised.value) == (
        f"The Denoiser was called in 2 different forms: {words}. One form can be optimised at a time: choose the calls with "
        "keep=lambda call: ..., or pass numbers that change as tensors."
    )


def test_keep_chooses_the_calls_that_count() -> None:
    module, run = _twice({}, {"context": torch.randn(1, 2, 4)})
    workload = Workload.capture(module, run, keep=lambda call: "context" in call.kwargs)
    assert "context" in as_call(workload.inputs)[1]
    with pytest.raises(UsageError, match="keep refused all 2 calls of the Denoiser. Let at least one through."):
        Workload.capture(module, run, keep=lambda call: False)


def test_a_module_that_is_never_called_is_said_so() -> None:
    module = nn.Linear(2, 2).eval()
    with pytest.raises(UsageError) as raised:
        Workload.capture(module, lambda: module.forward(torch.ones(1, 2)))
    assert str(raised.value) == (
        "The Linear was never called while run() ran. Check that it is the very object that the program calls (not a copy), "
        "that it is called as module(...) and not as module.forward(...), and that neither it nor what calls it was compiled "
        "or scripted before."
    )


def test_training_mode_is_refused_even_where_the_program_swallows_errors() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
    module[1].train()

    def run() -> None:
        with contextlib.suppress(Exception):
            module(torch.ones(1, 2))

    with pytest.raises(UsageError, match=r"The Sequential was in training mode when it was called \(call 1\).*Call .eval\(\)"):
        Workload.capture(module, run)


def test_a_program_that_works_as_it_is_asked_is_asked() -> None:
    module = nn.Linear(2, 2).eval()
    inputs = [torch.ones(rows, 2) for rows in (1, 2, 3)]
    assert record(module, lambda: (module(x) for x in inputs)).seen == 3
    assert record(module, lambda: map(module, inputs)).seen == 3


def test_what_keep_raises_is_not_for_the_program_to_swallow() -> None:
    module = nn.Linear(2, 2).eval()

    def run() -> None:
        for call in (lambda: module(input=torch.ones(1, 2)), lambda: module(torch.ones(1, 2))):
            with contextlib.suppress(Exception):
                call()

    with pytest.raises(WorkloadError, match="keep raised when it was asked about call 1: IndexError: tuple index out of range"):
        Workload.capture(module, run, keep=lambda call: call.args[0].shape[1] == 2)


def test_the_hook_goes_when_the_program_raises() -> None:
    module = nn.Linear(2, 2).eval()

    def run() -> None:
        module(torch.ones(1, 2))
        raise ZeroDivisionError("no data")

    with pytest.raises(WorkloadError, match="The program to capture raised: ZeroDivisionError: no data"):
        Workload.capture(module, run)
    assert not module._forward_pre_hooks


def test_what_cannot_be_captured_is_said() -> None:
    class Cached(nn.Module):
        def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
            return x

    module = Cached().eval()
    with pytest.raises(UsageError, match=r"Call 1 of the Cached\[0\]\[1\] is a builtins.object, which cannot cross"):
        Workload.capture(module, lambda: module(torch.ones(1), object()))
    with pytest.raises(UsageError, match="TorchScript modules take no hooks"):
        Workload.capture(torch.jit.script(nn.Linear(2, 2)), lambda: None)
    with pytest.raises(UsageError, match=r"capture records the calls of an nn.Module, but was given a function."):
        Workload.capture(lambda x: x, lambda: None)  # type: ignore[arg-type]


def test_infinite_masks_are_no_mistake_inside_a_program() -> None:
    class Masked(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x + mask, -1)

    module = Masked().eval()
    mask = torch.tensor([0.0, -torch.inf, 0.0])
    workload = Workload.capture(module, lambda: [module(torch.randn(2, 3), mask) for _ in range(9)])
    assert len(prepare(workload).splits.selection) > 1
    values = (1.0, torch.nan)
    bad = Workload.capture(module, lambda: [module(torch.full((2, 3), value), mask) for value in values])
    with pytest.raises(UsageError, match="holds NaN: 6 of "):
        prepare(bad)


@pytest.mark.slow
def test_a_captured_workload_is_optimised(tmp_path: Any) -> None:
    pipeline = Pipeline()
    workload = Workload.capture(pipeline.denoiser, lambda: [pipeline(batch, 4) for batch in (2, 1, 3)], name="denoiser")
    result = optimize(workload, trials=1, timing_seconds=0.2, out=tmp_path / "run")
    assert result.best is not None
    assert result.best.artifact is not None
    fast = trimtab.load(result.best.artifact.path)
    args, kwargs = as_call(workload.inputs)
    with torch.no_grad():
        for size in (1, 5):  # beyond what was seen: nothing bounds it
            grown = [torch.cat([a[:1]] * size) for a in args]
            more = dict(kwargs, context=torch.cat([kwargs["context"][:1]] * size))
            more["added"] = {"ids": [torch.ones(size, 8)], "pair": (None, torch.ones(1))}
            more["condition"] = Condition(torch.cat([kwargs["condition"].embedding[:1]] * size))
            want = pipeline.denoiser(*grown, **more)[0]
            assert torch.allclose(fast(*grown, **more)[0], want, atol=1e-5)


class Lengths(nn.Module):
    """Token means; at most 12 tokens, as a table of positions allows."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(30, 6), nn.Embedding(12, 6)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return (x * mask[..., None]).sum(1)


def _tokens(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(batch, length, dtype=torch.int64), torch.ones(batch, length)


def test_examples_of_other_sizes_show_what_is_dynamic() -> None:
    workload = Workload(model=Lengths, inputs=_tokens(1, 4), examples=[_tokens(3, 4), _tokens(3, 7), _tokens(1, 1)])
    subject = prepare(workload)
    signature = subject.candidate.signature
    assert [spec.shape for spec in signature.inputs] == [("batch", "ids_1")] * 2
    assert signature.outputs[0].shape == ("batch", 6)
    assert "Dynamic dimensions, as the data shows them: batch (axis 0 of ids and mask), ids_1 (axis 1 of ids and mask)." in (
        subject.notes
    )
    signature.check(_tokens(1, 1))
    with pytest.raises(InputError, match="Dimension 'ids_1' is 5 in one input and 6 in 'mask'"):
        signature.check((_tokens(2, 5)[0], _tokens(2, 6)[1]))


def test_stated_bounds_hold_at_the_edges() -> None:
    axes = {0: "batch", 1: trimtab.Dim("length", min=1, max=12)}
    workload = Workload(model=Lengths, inputs=_tokens(2, 4), dynamic={"ids": axes, "mask": axes})
    signature = prepare(workload).candidate.signature
    for length in (1, 12):
        signature.check(_tokens(1, length))
    with pytest.raises(InputError, match=r"Dimension 'length' of 'ids' is 13; this was built for 1 to 12."):
        signature.check(_tokens(1, 13))


def test_a_size_that_the_model_does_not_take_stays_fixed_and_the_others_do_not() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
            return self.linear(x.flatten(1)) + extra.sum()

    inputs = (torch.randn(2, 4, 2), torch.randn(3))
    workload = Workload(model=Fixed, inputs=inputs, examples=[(torch.randn(3, 1, 2), torch.randn(5))])
    subject = prepare(workload)
    assert subject.candidate.signature.batch == "batch"
    assert "the model takes only the example's: x_1" in " ".join(subject.notes)


def test_examples_of_another_form_are_refused() -> None:
    workload = Workload(model=Lengths, inputs=_tokens(1, 4), examples=[(torch.ones(1, 4, dtype=torch.int64), None)])
    with pytest.raises(UsageError) as raised:
        prepare(workload)
    assert str(raised.value) == (
        "The data's inputs are structured differently from the example inputs: with the example as call 1, argument 1 is a "
        "tensor in call 1 and None in call 2. Make them alike."
    )


def test_a_call_mixes_positional_and_keyword_arguments() -> None:
    x, t, c = torch.randn(1, 5, 8), torch.ones(1), torch.randn(1, 2, 4)
    subject = prepare(Workload(model=Denoiser, inputs=Call((x, t), {"context": c})))
    assert len(subject.splits.selection) > 1, "stand-ins keep the form of the call"
    assert [spec.name for spec in subject.candidate.signature.inputs] == ["sample", "step", "context"]


def test_a_module_of_frozen_torchscript_has_no_mode() -> None:
    inner = torch.jit.freeze(torch.jit.script(nn.Linear(8, 8).eval()))
    module = nn.Sequential(nn.Linear(8, 8), inner)
    for part in (module, module[0]):
        part.training = False
    assert record(module, lambda: module(torch.ones(3, 8))).seen == 1
