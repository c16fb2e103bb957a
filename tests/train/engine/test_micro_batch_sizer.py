"""Batch sizes that are found, and updates that survive running out of memory."""

from __future__ import annotations

import copy
import functools
import json
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from _nets import CPU, Nested, adam, convolutional, made, transformer
from _runs import full_at, settings_of
from trimtab.core.settings import DataSettings, MemorySettings, PrecisionSettings, Settings
from trimtab.errors import UsageError, WorkloadError
from trimtab.train.autotune.batch_size import find_batch
from trimtab.train.engine import micro_batch_sizer
from trimtab.train.memory.peak_activations import peak_activations
from trimtab.train.telemetry.events import Event, Progressed, Remarked
from trimtab.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("peaks_known")


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
        settings=settings_of(**{"clip_norm": 0.5, "accumulate": 2, **settings}),
        callbacks=callbacks,
    )
    assert trainer.fit(unequal(), epochs=1).updates == len(unequal()) // trainer.settings.data.accumulate
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
        trained(models[-1], accumulate=2, micro_batch=batch)
    counts = [int(model.get_buffer("norm.num_batches_tracked")) for model in models]
    assert counts == [4 + 3 + 4] * 2  # of 16 and 13, 16 and 3, 16 and 16 in parts of 8, the failed try not counted
    for a, b in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_whole_batches_are_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batch_sizer, "RETRY_AFTER", 2)
    torch.manual_seed(0)
    greedy = Greedy(8)
    trainer = Trainer(greedy, loss=nn.CrossEntropyLoss(), optimizer=adam)
    batch = (torch.randn(16, 8), torch.randint(0, 4, (16,)))
    failed: list[int] = []

    def watch(trainer: Trainer, event: Event) -> None:
        if event.update >= 12:
            greedy.most = 100

    trainer.context.callbacks.append(watch)
    trainer.context.callbacks.append(lambda trainer, event: failed.append(greedy.failed))
    trainer.context.log_every = 1
    trainer.fit([batch], epochs=20)
    assert greedy.failed == 3  # at first, after 2 more updates, after 4 more; when it is tried again, there is room
    assert trainer.context.fit.memory_plan.sizer.limit is None


def test_a_single_example_that_does_not_fit_is_said() -> None:
    with pytest.raises(WorkloadError, match=r"A single example does not fit into memory \(CUDA out of memory.*activation_mb"):
        trained(Greedy(0))
    with pytest.raises(
        WorkloadError, match=r"An update of 29 examples does not fit .* with exact_batchnorm it cannot be taken"
    ):
        trained(Greedy(20, norm=True), exact_batchnorm=True)


def test_a_forward_pass_that_does_not_fit_keeps_no_budget() -> None:
    trainer = Trainer(
        Greedy(4), loss=nn.CrossEntropyLoss(), optimizer=adam, settings=Settings(memory=MemorySettings(activation_mb=5.0))
    )
    with pytest.raises(UsageError, match=r"activation_mb=5 cannot be kept: even with all .* does not fit into memory. Make it"):
        trainer.fit(unequal(), epochs=1)
    # One thread: where other processes have the cores, threads that wait for each other make larger batches truly slower.
    settings = Settings(threads=1, data=DataSettings(micro_batch="auto"), memory=MemorySettings(activation_mb=5.0))
    trainer = Trainer(Greedy(4), loss=nn.CrossEntropyLoss(), optimizer=adam, settings=settings)
    assert trainer.fit(unequal(), epochs=1).settings.data.micro_batch == 4


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
    with pytest.raises(WorkloadError, match=r"cannot be joined with others: .*\(8, 8\), \(5, 2\)"):
        find_batch(trainer, [odd])
    unequal = [{"x": torch.randn(8, size)} for size in (8, 9)]
    with pytest.raises(WorkloadError, match=r"^Tensors can be joined .* these are \(8, 8\) of torch.float32, \(8, 9\) of"):
        find_batch(trainer, unequal)


class Costly(nn.Module):
    """Takes a fixed time per call and a time per example that grows once there are more than ``ideal`` at a time."""

    def __init__(self, ideal: int) -> None:
        super().__init__()
        self.ideal, self.sizes, self.frozen = ideal, set[int](), nn.Dropout().eval()
        self.body = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sizes.add(len(x))
        assert self.training
        assert not self.frozen.training
        work = torch.ones(96, 96)
        for _ in range(20 + len(x) + max(len(x) - self.ideal, 0) ** 2):
            work = work @ work * 0.001
        found: torch.Tensor = self.body(functional.dropout(x, 0.5, self.training)) + 0 * work.sum()
        return found


def test_the_fastest_batch_is_found_not_the_largest() -> None:
    torch.manual_seed(0)
    model = Costly(8)
    trainer = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=adam, settings=Settings(threads=1))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = torch.get_rng_state()
    data = [(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(16)]
    before = torch.get_rng_state()
    found = find_batch(trainer, data, seconds=5.0)
    assert found.size in (4, 8, 16), str(found)
    assert max(model.sizes) < 256  # it stopped once larger ones were slower
    assert [one.size for one in found.tried] == sorted(one.size for one in found.tried)
    assert all(one.rate is not None and one.rate.low <= one.rate.value <= one.rate.high for one in found.tried)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not trainer.optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert trainer.optimizer.param_groups[0]["lr"] == 1e-3
    assert model.training
    assert not model.frozen.training
    assert f"{found.size} examples at once." in str(found)


def test_a_limit_of_memory_bounds_the_search() -> None:
    model, inputs, labels = made(transformer)
    trainer = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=adam)

    def step() -> None:
        functional.cross_entropy(model(inputs[:2]), labels[:2]).backward()  # type: ignore[no-untyped-call]

    two = peak_activations(step, model.parameters(), CPU) / 1e6
    model.zero_grad()
    found = find_batch(trainer, [(inputs, labels)], limit_mb=two * 1.3, seconds=0.2)
    assert found.size <= 2
    assert "MB of" in found.tried[-1].reason
    assert found.tried[-1].rate is None
    with pytest.raises(UsageError, match=r"No batch size can be used. 1: it takes .* MB of 0.001 allowed"):
        find_batch(trainer, [(inputs, labels)], limit_mb=0.001)
    roomy = Greedy(4)
    roomy.register_forward_pre_hook(lambda *_: time.sleep(0.005))  # so that twice the examples take no longer on a busy machine
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
    settings = Settings(threads=1, data=DataSettings(micro_batch="auto"))
    for model in models:
        torch.manual_seed(7)
        end = [lambda trainer, event: trainer.stop("Enough.") if isinstance(event, Progressed) else None]  # of what seems long
        trainer = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=adam, settings=settings, callbacks=end, log_every=3)
        trainer.fit(data, steps=100_000)
        settings = trainer.settings
    assert isinstance(settings.data.micro_batch, int)
    assert settings.data.micro_batch < 64
    for a, b in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_auto_leaves_batchnorm_its_batches() -> None:
    model, inputs, labels = made(convolutional)
    trainer = Trainer(
        model, loss=nn.CrossEntropyLoss(), optimizer=adam, settings=Settings(data=DataSettings(micro_batch="auto"))
    )
    trainer.fit([(inputs, labels)], epochs=1)
    assert trainer.settings.data.micro_batch == len(inputs)
    assert "because of BatchNorm" in trainer.notes[0]
    assert trainer.decided["data.micro_batch"] == len(inputs)


class Banked(Costly):
    """Costly, and remembers in training what it was given last."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("bank", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.bank = x[0].detach().clone()
        found: torch.Tensor = super().forward(x + 0.1 * self.bank)
        return found


class Carrying(nn.Module):
    """Begins where the batch before has ended."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Linear(width, 4)
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begin = 0.0 if self.state is None else self.state
        self.state = x.mean(0).detach()
        found: torch.Tensor = self.body(x + begin)
        return found


BANK = "because of what the forward pass changes, such as buffers."


@pytest.mark.parametrize(("kind", "batch", "told"), [(Banked, 64, BANK), (Carrying, None, "would change what is learnt.")])
def test_auto_leaves_batches_whole_whose_parts_would_move_a_state(kind: type[nn.Module], batch: int | None, told: str) -> None:
    torch.manual_seed(0)
    end = [lambda trainer, event: trainer.stop("Enough.") if isinstance(event, Progressed) else None]  # of what seems long
    settings = Settings(threads=1, data=DataSettings(micro_batch="auto"))
    trainer = Trainer(kind(8), loss=nn.CrossEntropyLoss(), optimizer=adam, settings=settings, callbacks=end, log_every=3)
    trainer.fit([(torch.randn(64, 8), torch.randint(0, 4, (64,))) for _ in range(3)], steps=100_000)
    assert trainer.settings.data.micro_batch == batch
    assert any(told in note for note in trainer.notes)


def test_auto_keeps_a_budget_of_activations_at_each_size() -> None:
    model, inputs, labels = made(transformer)
    settings = Settings(data=DataSettings(micro_batch="auto"), memory=MemorySettings(activation_mb=1.0))
    trainer = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=adam, settings=settings)
    trainer.fit([(inputs, labels)], epochs=2)
    assert any("Activations take" in note and "of 1 MB allowed" in note for note in trainer.notes), trainer.notes


@pytest.mark.parametrize("autocast", [None, "float16"])
@pytest.mark.parametrize(
    ("kernels", "owner", "name"),
    [(False, torch.Tensor, "sqrt"), (True, torch, "_foreach_sqrt"), (None, torch, "zeros_like")],
)
def test_an_update_in_which_the_optimizer_ran_out_of_memory_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch, autocast: Any, kernels: bool | None, owner: Any, name: str
) -> None:
    data = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(8)]
    optimizer = functools.partial(torch.optim.Adam, foreach=kernels)
    trainer = Trainer(
        Nested(),
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        settings=Settings(precision=PrecisionSettings(autocast=autocast)),
    )
    monkeypatch.setattr(owner, name, full_at(3, getattr(owner, name)))
    with pytest.raises(
        WorkloadError, match=r"The gradients fit into memory, but what the optimizer needs .* \(injected\)\. Sh"
    ):
        trainer.fit(data, epochs=1)


class Relative(torch.optim.SGD):
    """Finds its own learning rate, as Adafactor does: there is none in its groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.param_groups[0]["lr"] = None

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] = 0.01
        try:
            return super().step(closure)
        finally:
            self.param_groups[0]["lr"] = None


def test_micro_batches_are_found_for_an_optimizer_without_a_learning_rate() -> None:
    data = [(torch.randn(16, 8), torch.randn(16, 1)) for _ in range(3)]
    found = []
    for batch in ("auto", None):
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        made = Trainer(
            model,
            loss=nn.MSELoss(),
            optimizer=Relative,
            settings=Settings(data=DataSettings(micro_batch=batch)),
            progress=False,
        )  # type: ignore[arg-type]
        assert made.fit(data, epochs=1).updates == 3
        assert made.optimizer.param_groups[0]["lr"] is None
        found.append(model.weight.detach().clone())
    assert torch.allclose(*found, atol=1e-6)  # of the search nothing is left
