"""Memory in training: budgets of bytes that hold, batch sizes that are found, updates that survive running out of memory."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from trimtab.candidate import Settings
from trimtab.errors import UsageError, WorkloadError
from trimtab.train import memory
from trimtab.train.batch_size import find_batch
from trimtab.train.budget import Verified, choose
from trimtab.train.events import Event, Remarked
from trimtab.train.live import Live, peak_activations
from trimtab.train.recompute import Recomputed
from trimtab.train.trainer import Trainer

CPU = torch.device("cpu")


class Residual(nn.Module):
    """Two convolutions with BatchNorm around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.relu(self.norm1(self.first(x)))
        found: torch.Tensor = self.relu(self.norm2(self.second(inner)) + x)
        return found


class Recurrent(nn.Module):
    """An LSTM, then a chain of perceptrons with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.chain = nn.Sequential(*[perceptron(16) for _ in range(6)])
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.chain(self.lstm(x)[0]).mean(1))
        return found


def perceptron(width: int) -> nn.Module:
    """Linear, GELU, dropout, linear."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * width, width))


def convolutional() -> tuple[nn.Module, torch.Tensor]:
    """A residual net with BatchNorm."""
    blocks = [Residual(8) for _ in range(5)]
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    return net, torch.randn(16, 1, 16, 16)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Encoder layers with dropout."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(32 * 24, 10)), torch.randn(8, 24, 32)


def recurrent() -> tuple[nn.Module, torch.Tensor]:
    """Steps in time, then a chain."""
    return Recurrent(), torch.randn(32, 24, 16)


MODELS = [convolutional, transformer, recurrent]


def made(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A model, inputs and labels, always the same."""
    torch.manual_seed(0)
    model, inputs = make()
    return model.train(), inputs, torch.randint(0, 10, (len(inputs),))


def gradients(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    """Of one step that starts from the same random numbers each time."""
    torch.manual_seed(1)
    model.zero_grad()
    functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def allocated(model: nn.Module, run: Callable[[], object]) -> int:
    """The peak of ``run`` by the allocator's own account, which torch's profiler has, less the gradients as they come."""
    count = 0

    def ready(parameter: torch.Tensor) -> None:
        nonlocal count
        count += 1
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
    for share in (0.0, 0.25, 0.5, 0.75, 0.99):
        budget = least + share * (full - least)
        before = torch.get_rng_state()
        found = choose(model, loss, budget, CPU)
        assert torch.equal(before, torch.get_rng_state())
        recomputed = found.apply()
        model.zero_grad()
        peaks.append(peak_activations(step, model.parameters(), CPU))
        assert peaks[-1] <= budget, (share, found.names)
        model.zero_grad()
        assert allocated(model, step) <= 1.15 * budget  # with what operators allocate and free within themselves
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
    with Live() as live:
        kept = torch.ones(1000) + 1
        view = kept[:10] * 2
        assert live.bytes == 4000 + 40
        del kept
        assert live.bytes == 40
        assert live.peak == 8000
        live.leave_out(view)
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


def test_fixed_segments_of_a_chain() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), *[perceptron(16) for _ in range(8)], nn.BatchNorm1d(16), nn.Linear(16, 10))
    plain, data = copy.deepcopy(model), [(torch.randn(64, 16), torch.randint(0, 10, (64,))) for _ in range(2)]

    def step() -> None:
        functional.cross_entropy(model(data[0][0]), data[0][1]).backward()  # type: ignore[no-untyped-call]

    full = peak_activations(step, model.parameters(), CPU)
    recomputed = Recomputed([model], segments=3)
    assert peak_activations(step, model.parameters(), CPU) < 0.6 * full
    recomputed.undo()
    model.load_state_dict(plain.state_dict())
    model.zero_grad()
    for each, segments in ((model, 3), (plain, None)):
        torch.manual_seed(1)
        trainer = Trainer(each, loss=nn.CrossEntropyLoss(), optimizer=adam, settings=Settings(segments=segments))
        trainer.fit(data, epochs=2)
        assert not any("forward" in vars(module) for module in each.modules())
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))
    trainer = Trainer(nn.Linear(16, 10), loss=nn.CrossEntropyLoss(), optimizer=adam, settings=Settings(segments=2))
    with pytest.raises(UsageError, match=r"segments needs an nn.Sequential of at least two modules, and Linear has none"):
        trainer.fit(data, epochs=1)
    with pytest.raises(UsageError, match="segments and activation_mb both say"):
        Settings(segments=2, activation_mb=1.0)


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
    with pytest.raises(WorkloadError, match="differentiates within its own forward pass"):
        choose(model, lambda: model(x), 1e3, CPU)


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
        settings = Settings(accumulate=accumulate, activation_mb=budget)
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


def adam(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer with state."""
    return torch.optim.AdamW(parameters, lr=1e-3)


class Greedy(nn.Module):
    """Runs out of memory for more than ``most`` examples while it is trained, after it has drawn and noted something."""

    def __init__(self, most: int, *, norm: bool = False) -> None:
        super().__init__()
        self.most, self.fits = most, 10**9
        self.norm = nn.BatchNorm1d(8, affine=False) if norm else nn.Identity()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.failed = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        x = x + 0 * torch.rand(())
        if self.training and len(x) > self.most:
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        found: torch.Tensor = self.body(x)
        return found


def unequal() -> list[Any]:
    """Batches with labels of which some are ignored."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for size in (16, 13, 16, 3, 16, 16):
        labels = torch.randint(0, 4, (size,), generator=draw)
        labels[torch.rand(size, generator=draw) < 0.3] = -100
        found.append((torch.randn(size, 8, generator=draw), labels))
    return found


def trained(model: nn.Module, events: list[Event] | None = None, **settings: Any) -> Trainer:
    """A trainer that has gone through :func:`unequal` once."""
    torch.manual_seed(4)
    callbacks = [] if events is None else [lambda trainer, event: events.append(event)]
    trainer = Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=adam,
        settings=Settings(**{"clip_norm": 0.5, "accumulate": 2, **settings}),
        callbacks=callbacks,
    )
    assert trainer.fit(unequal(), epochs=1).updates == len(unequal()) // trainer.settings.accumulate
    return trainer


@pytest.mark.parametrize("most", [15, 5, 1])
def test_an_update_that_does_not_fit_is_not_lost(most: int) -> None:
    torch.manual_seed(0)
    roomy, greedy = Greedy(100), Greedy(most)
    greedy.load_state_dict(roomy.state_dict())
    events: list[Event] = []
    trained(roomy)
    trainer = trained(greedy, events)
    for a, b in zip(greedy.parameters(), roomy.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    size = {15: 8, 5: 4, 1: 1}[most]
    assert greedy.failed == {15: 1, 5: 2, 1: 4}[most]  # in the first update only: the size is remembered
    texts = [event.text for event in events if isinstance(event, Remarked)]
    assert texts == [
        f"A batch of 16 did not fit into memory: such batches now run in parts of at most {size}, with the same updates, "
        "except that BatchNorm sees smaller batches."
    ]
    assert trainer.notes == texts


def test_a_failed_try_leaves_no_trace_in_buffers_and_random_numbers() -> None:
    class Once(Greedy):
        """Fails the first time only, in the second micro-batch, for a reason that passes."""

        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.most = 0 if self.calls == 2 else 100
            return super().forward(functional.dropout(x, 0.5, self.training))

    class Never(Once):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 2
            return super().forward(x)

    models = []
    for kind, batch in ((Once, None), (Never, 8)):
        torch.manual_seed(0)
        models.append(kind(100, norm=True))
        trained(models[-1], accumulate=2, batch=batch)
    counts = [int(model.get_buffer("norm.num_batches_tracked")) for model in models]
    assert counts == [4 + 3 + 4] * 2  # of 16 and 13, 16 and 3, 16 and 16 in parts of 8, the failed try not counted
    for a, b in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_whole_batches_are_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "AGAIN_AFTER", 2)
    torch.manual_seed(0)
    greedy = Greedy(8)
    trainer = Trainer(greedy, loss=nn.CrossEntropyLoss(), optimizer=adam)
    batch = (torch.randn(16, 8), torch.randint(0, 4, (16,)))
    failed: list[int] = []

    def watch(trainer: Trainer, event: Event) -> None:
        if event.update >= 12:
            greedy.most = 100

    trainer.callbacks.append(watch)
    trainer.callbacks.append(lambda trainer, event: failed.append(greedy.failed))
    trainer.log_every = 1
    trainer.fit([batch], epochs=20)
    assert greedy.failed == 3  # at first, after 2 more updates, after 4 more; when it is tried again, there is room
    assert trainer.room.fitting.limit is None


def test_a_single_example_that_does_not_fit_is_said() -> None:
    with pytest.raises(WorkloadError, match=r"A single example does not fit into memory \(CUDA out of memory.*activation_mb"):
        trained(Greedy(0))
    with pytest.raises(
        WorkloadError, match=r"An update of 29 examples does not fit .* with exact_batchnorm it cannot be taken"
    ):
        trained(Greedy(20, norm=True), exact_batchnorm=True)


LIMITED = """
import copy, json, resource
import torch
from torch import nn
from trimtab.train.trainer import Trainer

torch.set_num_threads(1)
torch.manual_seed(0)
first = nn.Sequential(nn.Linear(16, 20000), nn.ReLU(), nn.Linear(20000, 4))
batches = [(torch.randn(1024, 16), torch.randint(0, 4, (1024,))) for _ in range(2)]
found = []
for room in (None, 150_000_000):
    model = copy.deepcopy(first)
    trainer = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    if room is not None:
        now = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmSize"))) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (now + room, now + room))
    summary = trainer.fit(batches, epochs=1)
    moved = [float((p.detach() - q.detach()).norm()) for p, q in zip(model.parameters(), first.parameters())]
    found.append({"updates": summary.updates, "notes": list(summary.notes), "loss": summary.loss, "moved": moved})
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are enforced by Linux")
def test_an_update_survives_a_real_limit_of_memory() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    free, limited = json.loads(done.stdout)
    assert "did not fit into memory" in limited["notes"][0]
    assert not free["notes"]
    assert limited["updates"] == free["updates"] == 2
    assert limited["loss"] == pytest.approx(free["loss"], rel=1e-5)
    assert limited["moved"] == pytest.approx(free["moved"], rel=1e-4)


def test_batches_that_cannot_be_taken_apart_are_named() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch["x"]).mean()

    trainer = Trainer(Greedy(3), loss=loss, optimizer=adam)
    odd = {"x": torch.randn(8, 8), "edges": torch.randn(5, 2)}
    with pytest.raises(WorkloadError, match=r"cannot be taken apart into micro-batches of 4: .*\(8, 8\), \(5, 2\)"):
        trainer.fit([odd], epochs=1)
    with pytest.raises(WorkloadError, match="cannot be taken apart"):
        find_batch(trainer, [odd])


class Costly(nn.Module):
    """Takes a fixed time per call and a time per example that grows once there are more than ``ideal`` at a time."""

    def __init__(self, ideal: int) -> None:
        super().__init__()
        self.ideal, self.sizes = ideal, set[int]()
        self.body = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.add(len(x))
        work = torch.ones(192, 192)
        for _ in range(20 + len(x) + 6 * max(len(x) - self.ideal, 0)):
            work = work @ work * 0.001
        found: torch.Tensor = self.body(functional.dropout(x, 0.5, self.training)) + 0 * work.sum()
        return found


def test_the_fastest_batch_is_found_not_the_largest() -> None:
    torch.manual_seed(0)
    model = Costly(8)
    trainer = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=adam)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = torch.get_rng_state()
    data = [(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(16)]
    before = torch.get_rng_state()
    found = find_batch(trainer, data, seconds=1.0)
    assert found.size in (4, 8, 16), str(found)
    assert max(model.sizes) < 256  # it stopped once larger ones were slower
    assert [one.size for one in found.tried] == sorted(one.size for one in found.tried)
    assert all(one.rate is not None and one.rate.low <= one.rate.value <= one.rate.high for one in found.tried)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not trainer.optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert trainer.optimizer.param_groups[0]["lr"] == 1e-3
    assert f"{found.size} examples at once." in str(found)


def test_a_limit_of_memory_bounds_the_search() -> None:
    model, inputs, labels = made(transformer)
    trainer = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=adam)
    one = peak_activations(lambda: gradients(model, inputs[:2], labels[:2]), model.parameters(), CPU) / 1e6
    model.zero_grad()
    found = find_batch(trainer, [(inputs, labels)], limit_mb=one * 1.3, seconds=0.2)
    assert found.size <= 2
    assert "MB of" in found.tried[-1].reason
    assert found.tried[-1].rate is None
    with pytest.raises(UsageError, match=r"No batch size can be used. 1: it takes .* MB of 0.001 allowed"):
        find_batch(trainer, [(inputs, labels)], limit_mb=0.001)
    roomy = Greedy(4)
    trainer = Trainer(roomy, loss=nn.CrossEntropyLoss(), optimizer=adam)
    found = find_batch(trainer, [(torch.randn(16, 8), torch.randint(0, 4, (16,)))], seconds=0.2)
    assert found.tried[-1].reason == "it does not fit into memory"
    assert found.tried[-1].size == 8


@pytest.mark.parametrize(("name", "value"), [("largest", 0), ("limit_mb", -1.0), ("seconds", 0.0)])
def test_find_batch_refuses_limits_that_are_none(name: str, value: Any) -> None:
    trainer = Trainer(Greedy(4), loss=nn.CrossEntropyLoss(), optimizer=adam)
    with pytest.raises(UsageError, match=f"find_batch {name} is {value}; it must be above zero"):
        find_batch(trainer, unequal(), **{name: value})
    with pytest.raises(WorkloadError, match="The loader gave no batch"):
        find_batch(trainer, [])


def test_auto_finds_a_micro_batch_and_the_run_is_that_of_the_size_stated() -> None:
    data = [(torch.randn(64, 8), torch.randint(0, 4, (64,))) for _ in range(3)]
    torch.manual_seed(0)
    first = Costly(8)
    models = [first, copy.deepcopy(first)]
    settings = Settings(batch="auto")
    for model in models:
        torch.manual_seed(7)
        trainer = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=adam, settings=settings)
        trainer.fit(data, epochs=1)
        settings = trainer.settings
    assert isinstance(settings.batch, int)
    assert settings.batch < 64
    for a, b in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_auto_leaves_batchnorm_its_batches() -> None:
    model, inputs, labels = made(convolutional)
    trainer = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=adam, settings=Settings(batch="auto"))
    trainer.fit([(inputs, labels)], epochs=1)
    assert trainer.settings.batch == len(inputs)
    assert "because of BatchNorm" in trainer.notes[0]
    assert trainer.decided["batch"] == len(inputs)


def test_auto_keeps_a_budget_of_activations_at_each_size() -> None:
    model, inputs, labels = made(transformer)
    settings = Settings(batch="auto", activation_mb=1.0)
    trainer = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=adam, settings=settings)
    trainer.fit([(inputs, labels)], epochs=2)
    assert any("Activations take" in note and "of 1 MB allowed" in note for note in trainer.notes), trainer.notes


def test_a_budget_that_cannot_be_kept_is_said_before_anything_is_learnt() -> None:
    model, inputs, labels = made(transformer)
    before = [p.detach().clone() for p in model.parameters()]
    trainer = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=adam, settings=Settings(activation_mb=0.01))
    with pytest.raises(
        UsageError, match=r"activation_mb=0.01 cannot be kept: with all that recomputing saves, .* smaller micro"
    ):
        trainer.fit([(inputs, labels)], epochs=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert not any("forward" in vars(module) for module in model.modules())
    with pytest.raises(UsageError, match="Settings activation_mb is 0; it must be above zero"):
        Settings(activation_mb=0)


def test_larger_batches_get_a_plan_of_their_own() -> None:
    model, inputs, labels = made(transformer)
    settings = Settings(activation_mb=1.2)
    trainer = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=adam, settings=settings)
    trainer.fit([(inputs[:2], labels[:2]), (inputs, labels), (inputs[:4], labels[:4])], epochs=1)
    assert len(trainer.notes) == 2
    assert "nothing is recomputed" in trainer.notes[0]
    assert "nothing" not in trainer.notes[1]


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
