"""Budgets of bytes for activations: they hold, and what is computed again is what it was."""

from __future__ import annotations

import copy
import gc
import pathlib
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from _nets import CPU, MODELS, Residual, adam, convolutional, made, perceptron, transformer
from _peaks import write_peaks
from _ranks import on_ranks
from _runs import settings_of
from trimtab.core.settings import DataSettings, DistributedSettings, MemorySettings, Settings
from trimtab.errors import UsageError, WorkloadError
from trimtab.train.autotune.batch_size import backward
from trimtab.train.autotune.shadow_run import ShadowRun
from trimtab.train.memory.activation_budget import Verified, choose
from trimtab.train.memory.activation_checkpointing import Recomputed
from trimtab.train.memory.peak_activations import LiveStorages, peak_activations
from trimtab.train.runtime.torch_settings import allocate
from trimtab.train.telemetry.mfu import flops_share
from trimtab.train.trainer import Trainer


@pytest.fixture
def allocator() -> Iterator[Callable[[], str]]:
    """What torch's allocator for GPUs is told; it is put back afterwards."""
    torch_c: Any = torch._C
    before = torch_c._accelerator_getAllocatorSettings()
    torch_c._accelerator_setAllocatorSettings("max_split_size_mb:64")
    yield torch_c._accelerator_getAllocatorSettings
    torch_c._accelerator_setAllocatorSettings(before)


def gradients(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """Of one step that starts from the same random numbers each time."""
    torch.manual_seed(1)
    model.zero_grad()
    functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def allocated(model: nn.Module, run: Callable[[], object]) -> int:
    """The peak of ``run`` by the allocator's own account, which torch's profiler has, less the gradients as they come."""

    def ready(parameter: torch.Tensor) -> None:
        with torch.profiler.record_function(f"grad {parameter.numel() * 4}"):
            pass

    handles = [p.register_post_accumulate_grad_hook(ready) for p in model.parameters()]  # type: ignore[no-untyped-call]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    for handle in handles:
        handle.remove()
    level = peak = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            level += event.nbytes()
        elif event.name().startswith("grad "):
            level -= int(event.name().removeprefix("grad "))
        peak = max(peak, level)
    return peak


@pytest.mark.parametrize("make", MODELS)
def test_measured_peak_keeps_the_budget_and_gradients_stay(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> None:
    model, inputs, labels = made(make)
    expected = gradients(model, inputs, labels)
    keys = [sorted(vars(module)) for module in model.modules()]

    def loss() -> torch.Tensor:
        return functional.cross_entropy(model(inputs), labels)

    def step() -> None:
        loss().backward()  # type: ignore[no-untyped-call]

    with pytest.raises(
        UsageError, match=r"activation_mb=0.001 cannot be kept: .* still takes ([\d.]+) MB. Give at least"
    ) as why:
        choose(model, loss, 1e3, CPU)
    least = float(str(why.value).split("still takes ")[1].split(" MB")[0]) * 1e6
    full = peak_activations(step, model.parameters(), CPU)
    assert least < 0.8 * full
    peaks = []
    for share in (0.1, 0.25, 0.5, 0.75, 0.99):  # convolutions on a busy machine need a few percent more than the least seen
        budget = least + share * (full - least)
        before = torch.get_rng_state()
        found = choose(model, loss, budget, CPU)
        assert torch.equal(before, torch.get_rng_state())
        recomputed = found.apply()
        model.zero_grad()
        peaks.append(peak_activations(step, model.parameters(), CPU))
        assert peaks[-1] <= budget, (share, found.names)
        model.zero_grad()
        assert allocated(model, step) <= 1.02 * budget
        again = gradients(model, inputs, labels)
        recomputed.undo()
        assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True)), found.names
    assert len(set(peaks)) >= 3  # a larger budget is made use of
    assert [sorted(vars(module)) for module in model.modules()] == keys


def test_what_counts_is_what_the_allocator_says() -> None:
    model, inputs, labels = made(transformer)

    def step() -> None:
        functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]

    ours = peak_activations(step, model.parameters(), CPU)
    model.zero_grad()
    assert ours == pytest.approx(allocated(model, step), rel=0.02)
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]):  # there is one profiler at a time
        assert peak_activations(step, model.parameters(), CPU) == pytest.approx(ours, rel=0.1)
    with LiveStorages() as live:
        kept = torch.ones(1000) + 1
        view = kept[:10] * 2
        assert live.bytes == 4000 + 40
        del kept
        assert live.bytes == 40
        assert live.peak == 8000
        live.exclude(view)
        assert live.bytes == 0


def all_of(model: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    """The modules of a kind."""
    return [module for module in model.modules() if isinstance(module, kind)]


def test_running_statistics_move_once_per_batch() -> None:
    model, inputs, labels = made(convolutional)
    plain = copy.deepcopy(model)
    recomputed = Recomputed(all_of(model, Residual))
    for _ in range(2):
        assert all(
            torch.equal(a, b) for a, b in zip(gradients(model, inputs, labels), gradients(plain, inputs, labels), strict=True)
        )
    recomputed.undo()
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))
    assert int(model.get_buffer("1.norm1.num_batches_tracked")) == 2


class Spectral(nn.Module):
    """Buffers that the forward pass both changes and computes with, and randomness that is not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        calls = self.get_buffer("calls")
        calls += 1
        found: torch.Tensor = torch.tanh(self.inner(x)) * calls * random.random() * float(np.random.rand())
        return found


def test_a_second_run_sees_buffers_and_randomness_of_the_first() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Spectral(), Spectral(), nn.Linear(8, 10))
    plain, inputs, labels = copy.deepcopy(model), torch.randn(4, 8), torch.randint(0, 10, (4,))
    recomputed = Recomputed(all_of(model, Spectral), model.buffers())
    for _ in range(3):
        found = []
        for each in (model, plain):
            random.seed(3)
            np.random.seed(3)
            found.append((gradients(each, inputs, labels), random.random(), np.random.rand()))
        assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
        assert found[0][1:] == found[1][1:]
    recomputed.undo()
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))


class Following(nn.Module):
    """Has a teacher that moves towards it in each forward pass, and whose answer it adds to its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.teacher, self.last = nn.Linear(32, 256), nn.Linear(32, 256).requires_grad_(False), nn.Linear(256, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for followed, follower in zip(self.own.parameters(), self.teacher.parameters(), strict=True):
                follower.lerp_(followed, 0.1)
            taught = functional.gelu(self.teacher(x))
        found: torch.Tensor = x + self.last(functional.gelu(self.own(x)) + taught)
        return found


def test_a_teacher_moves_once_per_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Following() for _ in range(4)), nn.Linear(32, 10))
    plain, data = copy.deepcopy(model), [(torch.randn(256, 32), torch.randint(0, 10, (256,))) for _ in range(3)]
    for each, budget in ((model, 2.5), (plain, None)):
        trainer = Trainer(
            each, loss=nn.CrossEntropyLoss(), optimizer=adam, settings=Settings(memory=MemorySettings(activation_mb=budget))
        )
        trainer.fit(data, epochs=1)
        assert budget is None or re.search(r"allowed: \d.* recomputed", trainer.notes[0])
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))


def test_autocast_and_keywords_reach_the_second_run() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = perceptron(16)

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor, use_reentrant: bool) -> torch.Tensor:
            assert use_reentrant
            assert torch.is_autocast_enabled("cpu")
            found: torch.Tensor = self.inner(x) * scale
            return found

    torch.manual_seed(0)
    model, x, scale = Named(), torch.randn(4, 16), torch.randn(16, requires_grad=True)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x, scale=scale, use_reentrant=True).float().square().mean()
        return list(torch.autograd.grad(loss, [scale, *model.parameters()]))

    expected = run()
    recomputed = Recomputed([model])
    assert all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True))
    copied = copy.deepcopy(model)
    recomputed.undo()
    assert copied.forward.forward.__self__ is copied  # a copy recomputes itself, not the model that it was copied from


class Cache:
    """The layers of a model add to it, as to a cache of keys and values."""

    def __init__(self) -> None:
        self.layers: list[dict[str, torch.Tensor]] = []
        self.seen = 0


class Remembering(nn.Module):
    """Adds its output to the cache, and gives a function of all that the cache has by then."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor, *, past: Cache, told: list[int]) -> torch.Tensor:
        x = self.inner(x)
        past.layers.append({"x": x})
        past.seen += 1
        told.append(past.seen)
        found: torch.Tensor = (torch.stack([layer["x"] for layer in past.layers]).mean(0) * past.seen * sum(told)).sin()
        return found


class Reading(nn.Module):
    """Reads the cache, to which the layers after it add."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: torch.Tensor, *, past: Cache, told: list[int]) -> torch.Tensor:
        found: torch.Tensor = self.inner(x) * (1 + past.seen)
        return found


class Caching(nn.Module):
    """Hands a cache on from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((Reading(), Remembering(), Remembering(), nn.Linear(16, 10)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        past, told = Cache(), list[int]()
        for block in list(self.blocks)[:-1]:
            x = block(x, past=past, told=told)
        assert told == [1, 2]
        found: torch.Tensor = self.blocks[-1](x)
        return found


def test_modules_that_are_given_objects_are_not_recomputed_and_an_error_names_them() -> None:
    torch.manual_seed(0)
    model = Caching()
    plain, data = copy.deepcopy(model), [(torch.randn(256, 16), torch.randint(0, 10, (256,))) for _ in range(3)]
    for each, budget in ((model, 0.4), (plain, None)):
        settings = Settings(memory=MemorySettings(activation_mb=budget))
        trainer = Trainer(each, loss=nn.CrossEntropyLoss(), optimizer=adam, settings=settings)
        trainer.fit(data, epochs=1)
        assert budget is None or re.search(r"allowed: blocks\.\d\.inner.* recomputed", trainer.notes[0]), trainer.notes
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))
    settings = Settings(memory=MemorySettings(activation_mb=1e-3))
    trainer = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=adam, settings=settings)
    told = "cannot be kept: .* because of a list or an object among the arguments: blocks.0, blocks.1, blocks.2."
    with pytest.raises(UsageError, match=told):
        trainer.fit(data, epochs=1)


@pytest.mark.parametrize("kind", [Reading, Remembering])
def test_a_module_that_is_given_an_object_is_not_recomputed(kind: type[nn.Module]) -> None:
    model = Caching()
    recomputed = Recomputed(all_of(model, kind))
    with pytest.raises(WorkloadError, match=f"The forward pass of {kind.__name__} cannot be .* again: it was given a Cache,"):
        model(torch.randn(4, 16))
    recomputed.undo()


def test_tuples_are_given_to_a_second_run_unless_a_tensor_in_them_has_changed() -> None:
    class Shifted(nn.Linear):
        def forward(self, x: torch.Tensor, by: tuple[float, Any]) -> torch.Tensor:  # type: ignore[override]
            found: torch.Tensor = super().forward(x) * by[0] + by[1][0]
            return found

    model, shift = Shifted(4, 4), torch.ones(4, requires_grad=True)
    given = (2.0, (shift, "shift"))
    recomputed = Recomputed([model])
    loss = model(torch.randn(2, 4), given).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert shift.grad is not None
    assert torch.equal(shift.grad, torch.full((4,), 4.0))
    loss = model(torch.randn(2, 4), given).sum()
    with torch.no_grad():
        shift += 1
    with pytest.raises(WorkloadError, match="Shifted cannot be .* again: a tensor that it was given in a tuple has changed"):
        loss.backward()
    recomputed.undo()


def test_inputs_that_are_changed_later_are_left_alone() -> None:
    class Shifted(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = super().forward(x + 1)  # so that autograd does not keep x, and does not mind
            return found

    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), Shifted(perceptron(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            inner = self.second(x)
            found: torch.Tensor = inner + functional.elu(x, inplace=True)
            return found

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.ELU(inplace=True), perceptron(16)) for _ in range(6)]
    model = nn.Sequential(nn.Linear(16, 16), Overwriting(), *blocks, nn.Linear(16, 10))
    inputs, labels = torch.randn(64, 16), torch.randint(0, 10, (64,))
    expected = gradients(model, inputs, labels)
    with pytest.raises(UsageError) as why:
        choose(model, lambda: functional.cross_entropy(model(inputs), labels), 1.0, CPU)
    least = float(str(why.value).split("still takes ")[1].split(" MB")[0]) * 1e6
    found = choose(model, lambda: functional.cross_entropy(model(inputs), labels), least, CPU)
    assert found.names
    assert not set(found.names) & {"1.second", *(str(i) for i in range(2, 8))}
    found.apply()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, inputs, labels), expected, strict=True))


def test_a_model_that_differentiates_within_is_refused() -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            (grad,) = torch.autograd.grad(self.inner(x).square().sum(), x, create_graph=True)
            return grad.square().sum()

    model, x = Penalised(), torch.randn(4, 8)
    with pytest.raises(WorkloadError, match="the model or the loss differentiates within the forward pass"):
        choose(model, lambda: model(x), 1e3, CPU)


class Recalling(nn.Module):
    """Scales what it gives by a mean of what it gave before."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        if registered:
            self.register_buffer("before", torch.zeros(64))
        else:
            self.before = torch.zeros(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 64) to (B, 64)."""
        found: torch.Tensor = self.down(self.up(x).tanh()) * (1 + self.before)
        self.before = (0.5 * self.before + 0.5 * found.mean(0)).detach()
        return found


def test_a_state_that_would_be_moved_twice_is_refused_where_nothing_exchanges_it() -> None:
    def trained(registered: bool, settings: Settings) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Recalling(registered), Recalling(registered), Recalling(registered), nn.Linear(64, 1))
        batches = [(torch.randn(128, 64), torch.randn(128, 1)) for _ in range(4)]
        Trainer(model, loss=nn.MSELoss(), optimizer=adam, settings=settings).fit(batches, epochs=1)
        return list(model.parameters())

    budget = Settings(threads=1, memory=MemorySettings(activation_mb=0.5))
    expected = trained(True, Settings(threads=1))
    assert all(torch.equal(a, b) for a, b in zip(trained(True, budget), expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(trained(False, Settings(threads=1)), expected, strict=True))
    told = r"would compute 0, 1 again\. Its gradient differs by 0\.\d+ of what it was.*with register_buffer"
    with pytest.raises(WorkloadError, match=told):
        trained(False, budget)


def test_what_torch_func_cannot_differentiate_is_no_fault_of_the_model() -> None:
    def loss(model: nn.Module, points: torch.Tensor) -> torch.Tensor:
        slopes = torch.func.vmap(torch.func.jacrev(lambda point: model(point).squeeze()))(points)
        found: torch.Tensor = slopes.square().mean()
        return found

    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    trainer = Trainer(model, loss=loss, optimizer=adam, settings=Settings(memory=MemorySettings(activation_mb=1e-3)))
    with pytest.raises(WorkloadError, match="differentiates within the forward pass, as a gradient penalty does. Leave it out"):
        trainer.fit([torch.randn(4, 2)], epochs=1)
    trainer.context.settings = Settings()
    trainer.fit([torch.randn(4, 2)], epochs=1)


def batches_of(make: Callable[[], tuple[nn.Module, torch.Tensor]], count: int = 4) -> list[Any]:
    """Batches for a model, each other than the last."""
    _, inputs, labels = made(make)
    return [(inputs + i / 10, labels.roll(i)) for i in range(count)]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_budget_changes_nothing_in_a_run(make: Callable[[], tuple[nn.Module, torch.Tensor]], accumulate: int) -> None:
    ended, notes = [], []
    for budget in (None, 0.6 * PEAKS[make.__name__]):
        model, *_ = made(make)
        torch.manual_seed(5)
        settings = Settings(data=DataSettings(accumulate=accumulate), memory=MemorySettings(activation_mb=budget))
        trainer = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=adam, settings=settings)
        summary = trainer.fit(batches_of(make), epochs=2)
        ended.append([value.clone() for value in model.state_dict().values()])
        notes = trainer.notes
        assert summary.peak_mb is not None
        assert summary.peak_mb >= 0
        assert not any("forward" in vars(module) for module in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(*ended, strict=True))
    assert any("recomputed" in note and "nothing" not in note for note in notes), notes


PEAKS = {"convolutional": 3.5, "transformer": 3.0, "recurrent": 4.0}
"""About what a step of each takes, in MB."""


def test_a_budget_that_cannot_be_kept_is_said_before_anything_is_learnt() -> None:
    model, inputs, labels = made(transformer)
    before = [p.detach().clone() for p in model.parameters()]
    trainer = Trainer(
        model, loss=nn.CrossEntropyLoss(), optimizer=adam, settings=Settings(memory=MemorySettings(activation_mb=0.01))
    )
    with pytest.raises(
        UsageError, match=r"activation_mb=0.01 cannot be kept: with all that recomputing saves, .* smaller micro"
    ):
        trainer.fit([(inputs, labels)], epochs=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert not any("forward" in vars(module) for module in model.modules())
    with pytest.raises(UsageError, match="Settings memory.activation_mb is 0; it must be above zero"):
        Settings(memory=MemorySettings(activation_mb=0))


def test_larger_batches_get_a_plan_of_their_own() -> None:
    model, inputs, labels = made(transformer)
    settings = Settings(memory=MemorySettings(activation_mb=1.2))
    trainer = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=adam, settings=settings)
    trainer.fit([(inputs[:2], labels[:2]), (inputs, labels), (inputs[:4], labels[:4])], epochs=1)
    assert sum(note.startswith("Activations take") for note in trainer.notes) == 2
    assert "nothing is recomputed" in trainer.notes[0]
    assert "nothing" not in trainer.notes[1]


class Hidden:
    """Holds tensors where nobody sees them."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y


def hidden_loss(model: nn.Module, batch: Hidden) -> torch.Tensor:
    return functional.cross_entropy(model(batch.x), batch.y)


def test_batches_whose_tensors_nobody_sees_are_planned_for_once_and_told_of() -> None:
    model, inputs, labels = made(transformer)
    data = [Hidden(inputs, labels)] * 3

    def fitted(**settings: Any) -> Trainer:
        trainer = Trainer(model, loss=hidden_loss, optimizer=adam, settings=settings_of(**settings), progress=False)
        trainer.fit(data, epochs=1)
        return trainer

    assert sum(note.startswith("Activations take") for note in fitted(activation_mb=5.0).notes) == 1
    told = "batches are not taken apart of which nothing tells how many examples they have. Make the loader's smaller."
    assert fitted(micro_batch=2).notes == [f"data.micro_batch=2: {told}"]
    auto = fitted(micro_batch="auto")
    assert auto.notes == [f"data.micro_batch=None: {told}"]
    assert (auto.settings.data.micro_batch, auto.decided) == (None, {"data.micro_batch": None})


def test_a_batch_whose_examples_nobody_can_count_and_that_does_not_fit_is_no_single_example() -> None:
    def full(model: nn.Module, batch: Hidden) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model, inputs, labels = made(transformer)
    trainer = Trainer(model, loss=full, optimizer=adam)
    with pytest.raises(
        WorkloadError,
        match=r"A batch does not fit into memory \(CUDA .*\), and nothing tells how many examples it has, so it cannot be "
        r"taken apart\. Make the loader's batches smaller",
    ):
        trainer.fit([Hidden(inputs, labels)], epochs=1)


def sums(folder: pathlib.Path) -> dict[str, Any]:
    """On one of several processes: the losses of runs with and without a budget, for whole and for sharded parameters."""
    found = {}
    for name, settings in {
        "plain": Settings(),
        "budget": Settings(memory=MemorySettings(activation_mb=1.7)),
        "budget, sharded": Settings(
            memory=MemorySettings(activation_mb=1.7), distributed=DistributedSettings(sharding="shard")
        ),
    }.items():
        model, *_ = made(transformer)
        loader = torch.utils.data.DataLoader(Pairs(), batch_size=8)
        trainer = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=adam, settings=settings)
        found[name] = {"loss": trainer.fit(loader, epochs=2).loss, "notes": trainer.notes}
    model, inputs, labels = made(transformer)
    growing = [(inputs[:count], labels[:count]) for count in (2, 2, 8, 8)]
    trainer = Trainer(
        model, loss=nn.CrossEntropyLoss(), optimizer=adam, settings=Settings(memory=MemorySettings(activation_mb=1.7))
    )
    trainer.fit(growing, epochs=1)
    return found | {"growing": {"loss": None, "notes": trainer.notes}}


class Pairs(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Inputs and labels of four batches."""

    def __init__(self) -> None:
        batches = batches_of(transformer)
        self.inputs, self.labels = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.labels[index]


def test_several_processes_keep_a_budget_and_learn_the_same(tmp_path: pathlib.Path) -> None:
    found = on_ranks(sums, tmp_path)[0]
    assert "recomputed" in found["budget"]["notes"][0]
    growing = found.pop("growing")["notes"]
    assert sum("larger than those of the first update" in note for note in growing) == 1
    assert not any("larger than those of the first update" in note for note in found["budget"]["notes"])
    for name, run in found.items():
        assert run["loss"] == pytest.approx(found["plain"]["loss"], rel=1e-5), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("make", MODELS)
def test_a_gpu_keeps_the_budget(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> None:
    device = torch.device("cuda")
    model, inputs, labels = made(make)
    model, inputs, labels = (
        model.to(device),
        inputs.repeat(16, *[1] * (inputs.dim() - 1)).to(device),
        labels.repeat(16).to(device),
    )

    def loss() -> torch.Tensor:
        return functional.cross_entropy(model(inputs), labels)

    def peak(found: Verified | None) -> int:
        recomputed = found.apply() if found else None
        measured = peak_activations(lambda: loss().backward(), model.parameters(), device)  # type: ignore[no-untyped-call]
        if recomputed is not None:
            recomputed.undo()
        model.zero_grad()
        return measured

    peak(None)  # libraries take their workspaces
    full = peak(None)
    for share in (0.7, 0.9):
        assert peak(choose(model, loss, share * full, device)) <= 1.05 * share * full


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_libraries_keep_for_all_calls_counts_for_none() -> None:
    device = torch.device("cuda")
    model, inputs = nn.Linear(256, 256).to(device), torch.randn(64, 256, device=device)

    def peak() -> int:
        return peak_activations(lambda: model(inputs).sum().backward(), model.parameters(), device)

    warm = [peak(), peak()][1]
    torch._C._cuda_clearCublasWorkspaces()
    assert peak() == warm


def test_options_of_the_allocator_for_gpus_join_those_that_it_has(allocator: Callable[[], str]) -> None:
    allocate(Settings(memory=MemorySettings(cuda_allocator="expandable_segments:True")))  # on a CPU there is no such allocator
    assert allocator() == "max_split_size_mb:64"
    for _ in range(2):
        allocate(Settings(device="cuda", memory=MemorySettings(cuda_allocator="expandable_segments:True")))
    assert allocator() == "max_split_size_mb:64,expandable_segments:True"
    with pytest.raises(UsageError, match=r"cuda_allocator is 'expandable_segments:maybe', which torch does not take: .*maybe"):
        allocate(Settings(device="cuda:0", memory=MemorySettings(cuda_allocator="expandable_segments:maybe")))
    assert allocator() == "max_split_size_mb:64,expandable_segments:True"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_segments_of_a_gpu_expand_where_that_is_asked_for(allocator: Callable[[], str]) -> None:
    Trainer(
        perceptron(16), loss=nn.CrossEntropyLoss(), optimizer=adam,
        settings=Settings(device="cuda", memory=MemorySettings(cuda_allocator="expandable_segments:True")),
    )  # fmt: skip
    kept = torch.empty(64 * 2**20, device="cuda")
    assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
    assert kept.is_cuda


def test_a_forward_that_somebody_put_into_a_module_is_there_after_recomputing() -> None:
    module, inputs = nn.Linear(4, 4), torch.randn(2, 4)
    own = module.forward
    module.forward = lambda x: own(x) + 1  # type: ignore[method-assign]
    hooked, expected = module.forward, module(inputs)
    recomputed = Recomputed([module])
    torch.testing.assert_close(module(inputs), expected)
    recomputed.undo()
    assert module.forward is hooked


def test_garbage_of_an_earlier_count_does_not_lower_a_later_one() -> None:
    model = nn.Linear(32, 32)
    x = torch.randn(512, 32)

    def step() -> None:
        loss = model(x).square().mean()
        if gc.isenabled():  # it has its turn now, which no test can wait for
            gc.collect()
        loss.backward()  # type: ignore[no-untyped-call]

    def littered() -> None:
        step()
        ring: list[Any] = [torch.zeros(1 << 20)]
        ring.append(ring)

    often = gc.get_threshold()
    gc.set_threshold(0)  # no other turn
    try:
        first = peak_activations(step, model.parameters(), torch.device("cpu"))
        peak_activations(littered, model.parameters(), torch.device("cpu"))
        assert peak_activations(step, model.parameters(), torch.device("cpu")) == first
    finally:
        gc.set_threshold(*often)


def test_a_double_of_a_run_keeps_its_budget() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(12)))
    x = torch.randn(512, 32)

    def peak(settings: Settings) -> float:
        trainer = Trainer(model, loss=nn.MSELoss(), optimizer=torch.optim.SGD, settings=settings)
        run = ShadowRun(trainer.context, settings, [(x, x)])

        def step() -> None:
            backward(run.step, (x, x))

        return peak_activations(step, run.model.parameters(), CPU) / 1e6

    whole = peak(Settings(threads=1))
    assert peak(Settings(threads=1, memory=MemorySettings(activation_mb=0.7 * whole))) <= 0.7 * whole


class Counting(nn.Linear):
    """Remembers how many examples it met at once, and fails where ``fails``."""

    met: list[int]
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.met.append(len(x))
        if self.fails:
            raise ArithmeticError("no")
        return super().forward(x)


def test_operations_are_counted_by_a_few_examples_and_cost_no_run(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    write_peaks(tmp_path, 10.0)
    Counting.met = met = []
    batch = (torch.randn(64, 4), torch.randn(64, 4))

    def share(group: list[Any], **settings: Any) -> tuple[float | None, str | None]:
        made = settings_of(threads=1, **settings)
        trainer = Trainer(Counting(4, 4), loss=nn.MSELoss(), optimizer=torch.optim.SGD, settings=made)
        return flops_share(trainer.context, group, 1e6)

    assert share([batch]) == (pytest.approx((2 * 16 + 2 * 16) * 1e6 / 10e9), None)
    assert share([batch], activation_mb=1.0)[0] is not None
    assert met == [2, 2]
    told = "The share of the peak is not known. "
    found, note = share([(batch[0][:20], batch[1][:20])], activation_mb=1.0)
    assert (found, note) == (None, told + "To count operations nothing is recomputed, for which the settings leave no memory.")
    Counting.fails = True
    found, note = share([batch])
    assert found is None
    assert note is not None
    assert note.startswith(told + "Counting the operations failed: ArithmeticError: no")
