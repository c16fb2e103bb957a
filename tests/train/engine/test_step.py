"""From the batch to the update: what counts in it, what leaves no trace, and what is told of it."""

from __future__ import annotations

import copy
import functools
import json
import math
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from _runs import loader, settings_of, told
from trimtab import DataSettings, OptimizerSettings, PrecisionSettings, Settings, Trainer
from trimtab.errors import NonFiniteError, UsageError, WorkloadError
from trimtab.tensors.precision import tf32_allowed
from trimtab.train.checkpoint.checkpoints import Checkpoints
from trimtab.train.engine.step import Step, Update
from trimtab.train.loss.adapter import LossAdapter
from trimtab.train.runtime.snapshots import rolled_back
from trimtab.train.runtime.step_clock import HostClock
from trimtab.train.runtime.torch_settings import random_state, running, set_random_state
from trimtab.train.runtime.world import World, weighted, wide
from trimtab.train.telemetry.events import Event, JsonLines, Progressed, TensorBoard

pytestmark = pytest.mark.usefixtures("one_thread")
Pair = tuple[torch.Tensor, torch.Tensor]


def pairs(count: int, size: int = 8) -> list[Pair]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(size, 4, generator=draw), torch.randint(0, 3, (size,), generator=draw)) for _ in range(count)]


def descent(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def trainer(model: nn.Module, **options: Any) -> Trainer:
    return Trainer(model, **{"loss": nn.CrossEntropyLoss(), "optimizer": descent, "progress": False, **options})


def step_of(model: nn.Module, **settings: Any) -> Step:
    """An update of ``model`` alone, as the loop makes it."""
    options = settings_of(**settings)
    return Step(model, LossAdapter(nn.CrossEntropyLoss()), descent(model.parameters()), options, World(), HostClock())


def test_parameters_that_join_the_optimizer_in_mid_run_get_the_gradient_of_their_update_only() -> None:
    batches, updates = pairs(4), 2

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))

    def thaw(run: Trainer, event: object) -> None:
        if run.position.update == updates and len(run.optimizer.param_groups) == 1:
            run.optimizer.add_param_group({"params": list(run.model[0].parameters())})  # type: ignore[index, arg-type]

    found, expected = model(), model()
    head = torch.optim.SGD(expected[1].parameters(), lr=0.1)  # type: ignore[index, arg-type]
    trainer(found, optimizer=torch.optim.SGD(found[1].parameters(), lr=0.1), callbacks=[thaw], log_every=1).fit(  # type: ignore[index, arg-type]
        batches, epochs=1
    )
    for index, (inputs, labels) in enumerate(batches):
        if index == updates:
            head.add_param_group({"params": list(expected[0].parameters())})  # type: ignore[index, arg-type]
        expected.zero_grad()
        nn.functional.cross_entropy(expected(inputs), labels).backward()
        head.step()
    for a, b in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b)
        assert a.grad is None


@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
def test_an_update_that_is_left_out_leaves_no_trace(nonfinite: str) -> None:
    def run(batches: list[Pair]) -> Trainer:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        made = trainer(model, settings=Settings(optimizer=OptimizerSettings(nonfinite=nonfinite)), ema=0.5)  # type: ignore[arg-type]
        made.fit(batches, epochs=1)
        return made

    whole = pairs(3)
    broken = [*whole, (torch.full((8, 4), torch.nan), whole[0][1])]
    a, b = run(broken), run(whole)
    assert a.position.skipped == 1
    for name, value in b.model.state_dict().items():
        torch.testing.assert_close(a.model.state_dict()[name], value, rtol=0, atol=0)


def test_an_update_that_stands_for_nothing_changes_nothing() -> None:
    ignored = (torch.rand(4, 1), torch.full((4,), -100))
    made = trainer(nn.Linear(1, 1), loss=nn.CrossEntropyLoss(), settings=Settings(data=DataSettings(accumulate=2)))
    before = made.model.weight.detach().clone()
    assert made.fit([ignored] * 2, epochs=1).loss == 0
    assert torch.equal(made.model.weight, before)


class Labelled(nn.Linear):
    """Computes its own loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": nn.functional.cross_entropy(super().forward(x), labels)}


@pytest.mark.parametrize("own", [False, True], ids=["torch's", "the model's"])
def test_a_batch_of_which_all_labels_are_left_out_is_no_error_alone(own: bool) -> None:
    torch.manual_seed(0)
    x, some, none = torch.rand(4, 2), torch.tensor([0, 1, -100, 2]), torch.full((4,), -100)
    data: list[Any] = [{"x": x, "labels": y} if own else (x, y) for y in (some, none, some)]
    made = trainer(Labelled(2, 3) if own else nn.Linear(2, 3), loss=None if own else nn.CrossEntropyLoss())
    by_hand = torch.nn.Linear(2, 3)
    by_hand.load_state_dict(made.model.state_dict())
    optimizer = descent(by_hand.parameters())
    losses = told(made, "loss")
    made.fit(data, epochs=1)
    for labels in (some, some):
        optimizer.zero_grad()
        nn.functional.cross_entropy(by_hand(x), labels).backward()
        optimizer.step()
    assert losses[1] == 0
    assert torch.equal(made.model.weight, by_hand.weight)


@pytest.mark.parametrize(
    ("loss", "batch", "said"),
    [
        (
            lambda outputs, targets: nn.functional.cross_entropy(outputs, targets),
            (torch.rand(4, 1), torch.tensor([0, 0, -100, 0])),
            "Some targets are -100. If the loss leaves them out",
        ),
        (nn.CrossEntropyLoss(), (torch.rand(4, 1), torch.tensor([0, 0, -100, 0])), None),
        (
            lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
            {"x": torch.rand(4, 1), "y": torch.tensor([0, 0, -100, 0])},
            "Some targets are -100. If the loss leaves them out",
        ),
        (lambda model, batch: (model(batch[0]).mean(), 4), (torch.rand(4, 1), torch.tensor([0, 0, -100, 0])), None),
        (lambda model, batch: model(torch.rand(4, 1)).mean(), {"n": 4}, "Nothing tells how many examples a batch has"),
        (lambda model, batch: (model(torch.rand(4, 1)).mean(), 4), {"n": 4}, None),
        (
            lambda model, batch: model(batch["x"]).mean(),
            {"edges": torch.zeros(2, 37), "x": torch.rand(5, 1)},  # as a graph has
            "The tensors of a batch differ in their first axis ((2, 37), (5, 1)): it counts for as many examples as the first "
            "has, 2. If the loss is a mean over something else, return (mean, weight) from loss(model, batch).",
        ),
        (
            lambda model, batch: (model(batch["x"]).mean(), 5),
            {"edges": torch.zeros(2, 37), "x": torch.rand(5, 1)},
            None,
        ),
        (
            lambda model, batch: model(batch["pixels"].float()).mean(),
            {"pixels": torch.full((4, 1), 156, dtype=torch.uint8)},  # as many as -100 has bits
            None,
        ),
    ],
)
def test_what_losses_may_count_for_wrongly_is_said(loss: Any, batch: Any, said: str | None) -> None:
    assert trainer(nn.Linear(1, 1), loss=loss).fit([batch] * 2, epochs=1).notes == ()
    notes = (
        trainer(nn.Linear(1, 1), loss=loss, settings=Settings(data=DataSettings(accumulate=2))).fit([batch] * 4, epochs=2).notes
    )
    assert [note[: len(said or "")] for note in notes] == ([] if said is None else [said])


def test_parts_are_even_and_a_batch_of_one_is_explained() -> None:
    def normalised(**settings: Any) -> Trainer:
        model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        slow = functools.partial(torch.optim.SGD, lr=1e-6)
        return trainer(model, loss=nn.MSELoss(), settings=settings_of(**settings), optimizer=slow)

    assert normalised(micro_batch=10).fit(loader(batch_size=21), epochs=1).updates == 2
    with pytest.raises(WorkloadError, match=r"Expected more than 1 value .*One example has no statistics .* drop_last=True"):
        normalised().fit(loader(batch_size=31), epochs=1)


def test_an_overflow_of_float16_does_not_stop_a_healthy_run() -> None:
    data = [(torch.randn(8, 4), torch.full((8, 1), 1000.0))] * 5
    settings = Settings(precision=PrecisionSettings(autocast="float16"), optimizer=OptimizerSettings(nonfinite="stop"))
    slow = functools.partial(torch.optim.SGD, lr=1e-4)
    found = trainer(nn.Linear(4, 1), loss=nn.MSELoss(), optimizer=slow, settings=settings).fit(data, steps=5)
    assert found.updates == 5, found.ended


class Rooted(nn.Module):
    """Has a finite loss, whose gradient is never finite while ``broken``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.zero, self.broken = nn.Linear(4, 1), nn.Parameter(torch.zeros(1)), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x).float()
        return found + (self.zero * 0).sqrt() if self.broken else found + self.zero


def test_a_gradient_that_is_finite_at_no_scale_is_no_overflow_of_float16() -> None:
    """It comes more often than any scale has to be halved that is too large."""
    data = [(torch.randn(4, 4), torch.randn(4, 1))] * 60
    slow = functools.partial(torch.optim.SGD, lr=1e-4)

    def made(nonfinite: Any) -> Trainer:
        settings = Settings(precision=PrecisionSettings(autocast="float16"), optimizer=OptimizerSettings(nonfinite=nonfinite))
        return trainer(Rooted(), loss=nn.MSELoss(), optimizer=slow, settings=settings, ema=0.5)

    with pytest.raises(NonFiniteError, match=r"The loss was \d\S+ and the (sum|norm) of its gradient (nan|inf), which is not"):
        made("raise").fit(data, epochs=1)
    stopped = made("stop").fit(data, epochs=1)
    assert stopped.ended == "The loss was not finite."
    assert stopped.updates < 60
    skipping = made("skip")
    before = skipping.model.layer.weight.detach().clone()
    assert skipping.fit(data, epochs=1).skipped == 60
    assert torch.equal(skipping.model.layer.weight, before)
    skipping.model.broken = False
    assert skipping.fit(data, epochs=2).skipped == 60  # something is left of the scale
    assert not torch.equal(skipping.model.layer.weight, before)


def test_a_gradient_alone_that_is_not_finite_is_met_without_its_norm() -> None:
    """The loss is finite all the while; of the third update no norm is taken, because nobody asked for it."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad / 0

    model = nn.Linear(4, 1)
    before: list[torch.Tensor] = []
    loss = lambda o, t: (Broken.apply(o) if float(t[0]) else o).square().mean()  # type: ignore[no-untyped-call]  # noqa: E731
    made = trainer(model, loss=loss)
    made.optimizer.register_step_post_hook(lambda *_: before.append(model.weight.detach().clone()))
    batches = [(torch.ones(2, 4), torch.full((2,), float(index == 2))) for index in range(4)]
    with pytest.raises(
        NonFiniteError, match=r"The loss was \d\S+ and the sum of its gradient (inf|nan|-inf), which is not finite"
    ):
        made.fit(batches, epochs=1)
    assert len(before) == 2
    torch.testing.assert_close(model.weight.detach(), before[-1], rtol=0, atol=0)


@pytest.mark.parametrize(("every", "clip"), [(1, None), (3, None), (3, 0.1)])
def test_the_norm_that_is_told_is_that_of_an_update(every: int, clip: float | None) -> None:
    """Of the first of a window, or where gradients are clipped, and all are known, of the last."""
    told: list[float] = []

    def hear(trainer: Trainer, event: Event) -> None:
        if isinstance(event, Progressed):
            told.append(event.norm)

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    by_hand = copy.deepcopy(model)
    batches = [(torch.randn(2, 4), torch.randn(2, 1)) for _ in range(6)]
    made = Trainer(
        model,
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        settings=Settings(optimizer=OptimizerSettings(clip_norm=clip)),
        log_every=every,
        callbacks=[hear],
    )
    made.fit(batches, epochs=1)
    optimizer = torch.optim.SGD(by_hand.parameters(), 0.1)
    norms = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(by_hand(inputs), targets).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(by_hand.parameters(), clip or float("inf"))))
        optimizer.step()
    first, last = norms[::every], norms[every - 1 :: every]
    assert told == pytest.approx(first if clip is None else last, rel=1e-5)


@pytest.mark.parametrize("kernels", ["loop", "foreach", "fused"])
def test_an_optimizer_made_for_fused_kernels_takes_float16_with_others(kernels: Any) -> None:
    model, settings = (
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)),
        Settings(precision=PrecisionSettings(autocast="float16"), optimizer=OptimizerSettings(implementation=kernels)),
    )
    made = trainer(model, optimizer=lambda parameters: torch.optim.Adam(parameters, fused=True), settings=settings)
    assert made.fit(pairs(8), epochs=1).updates == 8


@pytest.mark.parametrize("kernels", [{"fused": True}, {"foreach": True}])
def test_an_update_that_overflows_leaves_no_momentum(kernels: Any) -> None:
    model, (x, y) = nn.Linear(64, 64), (torch.randn(8, 64), 3000 * torch.randn(8, 64))
    optimizer = torch.optim.SGD(model.parameters(), 1e-9, momentum=0.9, **kernels)
    step = Step(
        model,
        LossAdapter(nn.MSELoss()),
        optimizer,
        Settings(precision=PrecisionSettings(autocast="float16")),
        World(),
        HostClock(),
    )
    updates = [step([(x, y)])]
    assert updates[0].overflowed
    assert not optimizer.state
    while not updates[-1].applied:
        updates.append(step([(x, y)]))
        assert len(updates) < 30
    buffer = optimizer.state[model.weight]["momentum_buffer"]
    with torch.no_grad():
        assert 0 < float(buffer.abs().max()) < 1e5


def test_a_model_of_complex_parameters_alone_is_trained() -> None:
    def loss(model: nn.Module, batch: Pair) -> torch.Tensor:
        return model(batch[0].to(torch.complex64)).abs().mean()

    assert trainer(nn.Linear(4, 3, dtype=torch.complex64), loss=loss).fit(pairs(8), epochs=1).updates == 8


def test_an_index_that_stops_the_gpu_is_told_in_a_sentence() -> None:
    def stopped(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(WorkloadError, match="out of range .* a label that the model has no output for"):
        trainer(nn.Linear(4, 3), loss=stopped).fit(pairs(8), epochs=1)


def test_nothing_is_saved_from_a_gpu_that_stopped_while_somebody_else_looked(tmp_path: Path) -> None:
    def looking(run: Trainer, event: Event) -> None:
        if isinstance(event, Progressed):  # which reads losses, and so hears of it first
            raise RuntimeError("CUDA error: device-side assert triggered")

    made = trainer(nn.Linear(4, 3), callbacks=[looking], log_every=2, checkpoint=tmp_path)
    with pytest.raises(WorkloadError, match="^The GPU stopped at an index that is out of range"):
        made.fit(pairs(8), epochs=1)
    assert Checkpoints(tmp_path).update() is None


class Adaptive(torch.optim.SGD):
    """Counts in its groups, and has no learning rate to tell of, as transformers' Adafactor may."""

    def step(self, closure: Any = None) -> Any:
        """Update, and count."""
        for group in self.param_groups:
            group["lr"] = 0.1
            super().step(closure)
            group["lr"], group["k"] = None, group.get("k", 0) + 1


def test_a_run_without_a_learning_rate_is_logged(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    made = trainer(
        model := nn.Linear(4, 3),
        optimizer=without_rate(model),
        callbacks=[JsonLines(log), TensorBoard(tmp_path / "board")],
        log_every=1,
    )
    made.fit(pairs(2), epochs=1)
    events = map(json.loads, log.read_text().splitlines())
    assert [event["rate"] for event in events if event["event"] == "progressed"] == [None, None]


def without_rate(model: nn.Module) -> Adaptive:
    optimizer = Adaptive(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    return optimizer


def test_a_generator_of_the_model_is_as_before_after_a_rollback() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].random = torch.Generator().manual_seed(1)
    before = model[0].random.get_state()
    with rolled_back(model):
        torch.rand(1, generator=model[0].random)
    assert torch.equal(model[0].random.get_state(), before)


class Counting(nn.Module):
    """Counts its forward passes in a buffer, and puts another in the place of the last each time."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes, self.last = self.passes + 1, x.detach().mean()
        return torch.tanh(self.layer(torch.tanh(x * self.passes)))


def test_a_buffer_that_a_forward_pass_replaces_is_as_before_after_a_rollback() -> None:
    model, loss = Counting(), Counting()
    before = [model.passes, loss.passes]
    with rolled_back(model, loss=loss) as kept:
        loss(model(torch.ones(2, 4)))
        assert list(map(id, kept.changed())) == list(map(id, before))
    assert [id(model.passes), id(loss.passes)] == list(map(id, before))
    assert (model.passes.item(), loss.passes.item(), model.last, loss.last) == (0.0, 0.0, None, None)


@pytest.mark.parametrize("settings", [{"micro_batch": "auto"}, {"activation_mb": 0.24}], ids=str)
def test_what_is_tried_before_a_run_leaves_such_buffers_alone(settings: dict[str, Any]) -> None:
    def state(**settings: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 64), *(Counting(64) for _ in range(3)), nn.Linear(64, 3))
        summary = trainer(model, settings=settings_of(**settings)).fit(pairs(3, 128), epochs=1)
        recomputed.append(any("recomputed" in note and "nothing is" not in note for note in summary.notes))
        return model.state_dict()

    recomputed: list[bool] = []
    want, got = state(), state(**settings)
    assert recomputed == [False, "activation_mb" in settings]
    assert got["1.passes"].item() == 3
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_options_of_the_optimizer_are_as_before_after_a_rollback() -> None:
    model = nn.Linear(4, 3)
    optimizer = without_rate(model)
    optimizer.param_groups[0]["scale"] = scale = torch.ones(2)
    before = copy.deepcopy({k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "scale")})
    with rolled_back(model, optimizer):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        scale.mul_(3)
        assert optimizer.param_groups[0]["k"] == 1
    assert {k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "scale")} == before
    assert optimizer.param_groups[0]["scale"] is scale
    assert scale.tolist() == [1, 1]


def precisions() -> tuple[str, ...]:
    backends: Any = torch.backends
    return tuple(
        place.fp32_precision for place in (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends)
    )


@pytest.mark.parametrize(
    ("place", "name"), [("cuda.matmul", "tf32"), ("cuda.matmul", "ieee"), ("", "tf32"), ("mkldnn.matmul", "bf16")]
)
def test_either_interface_for_precision_may_be_in_use(place: str, name: str) -> None:
    older, untouched = torch.get_float32_matmul_precision(), precisions()
    backend = operator.attrgetter(f"backends.{place}".rstrip("."))(torch)
    backend.fp32_precision = name
    try:
        before = precisions()
        with running(Settings()):
            assert precisions() == before
        with running(Settings(precision=PrecisionSettings(tf32=True))):
            assert precisions()[:2] == ("tf32", "tf32")
        with running(Settings(precision=PrecisionSettings(tf32=False))):  # whatever torch, or the script, would have
            assert "tf32" not in precisions()[:2]
            assert not tf32_allowed()
        assert precisions() == before
    finally:
        backend.fp32_precision = "none"
    assert (torch.get_float32_matmul_precision(), precisions()) == (older, untouched)


class Called(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operators of a block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_what_is_read_an_update_later_was_made_in_its_own_update() -> None:
    made = step_of(nn.Linear(4, 3))
    loss = torch.tensor(1.0)
    made._check_later(Update(loss, torch.tensor(math.inf), None, True))
    with Called() as called, pytest.raises(NonFiniteError, match="the sum of its gradient inf"):
        made.check()
    assert called.names[0] == "_local_scalar_dense.default"  # nothing was computed for it, which would stand behind other work
    made._check_later(Update(loss, loss, None, True))
    made.check()
    with Called() as called:
        made.check()
    assert called.names == []


def test_numbers_and_tensors_weigh_losses_alike() -> None:
    losses, weights = [torch.tensor(1.0), torch.tensor(4.0), torch.tensor(math.nan)], [3.0, torch.tensor(1), torch.tensor(0)]
    count, value = weighted(losses, weights)
    assert (float(count), float(value)) == (4.0, 7.0)
    with Called() as called:
        weighted(losses[:1], weights[:1])
    assert "_to_copy.default" not in called.names[2:]  # a number is not copied to the device of the losses, but made there


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_host_waits_for_no_update_of_a_gpu(clip_norm: float | None) -> None:
    device = torch.device("cuda")
    made = step_of(nn.Linear(4, 3).to(device), device="cuda", accumulate=2, clip_norm=clip_norm)
    groups = [[(inputs.to(device), labels.to(device)) for inputs, labels in pairs(2)] for _ in range(6)]
    for group in groups[:2]:
        made(group)
    torch.cuda.set_sync_debug_mode("error")
    try:
        updates = [made(group) for group in groups[2:]]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    made.check()
    assert all(update.finite and update.norm is not None for update in updates)
    bad = [(torch.full((8, 4), math.inf, device=device), torch.zeros(8, dtype=torch.int64, device=device))]
    made(bad)  # which is told with the next update
    with pytest.raises(NonFiniteError):
        made(groups[0])


class Narrow:
    """A tensor on a device without 64 bits."""

    device = torch.device("mps")

    def cpu(self) -> torch.Tensor:
        """The same where there are such numbers."""
        return torch.ones(2)

    def double(self) -> torch.Tensor:
        """What the device says of it."""
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")


def test_what_is_summed_up_in_64_bits_leaves_a_device_that_has_none() -> None:
    for tensor in (Narrow(), torch.ones(2), torch.ones(2).half()):
        found = wide(tensor)  # type: ignore[arg-type]
        assert (found.dtype, found.tolist()) == (torch.float64, [1, 1])


def test_gpus_that_nobody_has_used_are_not_woken_for_their_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.random, "device_count", lambda: 2)  # asked for their states, torch would look for a driver
    before, torch_drew = random_state(), torch.rand(3)
    set_random_state(before)
    assert torch.equal(torch.rand(3), torch_drew)


def test_the_generator_of_an_apple_gpu_is_kept_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [torch.tensor([1, 2], dtype=torch.uint8)]
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: there[0].clone())
    monkeypatch.setattr(torch.mps, "set_rng_state", lambda state: there.__setitem__(0, state))
    before = random_state()
    there[0] = torch.tensor([3, 4], dtype=torch.uint8)
    set_random_state(before)
    assert there[0].tolist() == [1, 2]
    set_random_state({name: state for name, state in before.items() if name != "mps"})  # of a checkpoint that has none


def test_a_run_within_autocast_is_refused_where_no_update_would_be_seen() -> None:
    rows = torch.randn(8, 4)

    def losses() -> list[float]:
        made = Trainer(nn.Linear(4, 1), loss=nn.MSELoss(), optimizer=functools.partial(torch.optim.SGD, lr=0.1))
        return [float(update.loss) for update in made.updates([(rows, rows.sum(1, keepdim=True))], epochs=3)]

    refused = pytest.raises(UsageError, match=r"Call it outside, with PrecisionSettings\(autocast='bfloat16'\)")
    with torch.autocast("cpu", dtype=torch.bfloat16), refused:
        losses()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        first, *_, last = losses()
    assert last < first


class NoKernel(nn.Module):
    """Has no kernel in 16 bits, as torch's LSTM on some CPUs; ``broken`` fails in any precision."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.layer, self.broken = nn.Linear(4, 2), broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layer(x)
        if self.broken or found.dtype != torch.float32:
            raise RuntimeError("could not create a primitive")
        return found


@pytest.mark.parametrize("broken", [False, True])
def test_a_failure_of_autocast_is_not_blamed_on_the_model(broken: bool) -> None:
    rows = [(torch.randn(8, 4), torch.randint(2, (8,)))]
    settings = Settings(precision=PrecisionSettings(autocast="bfloat16"))
    run = Trainer(NoKernel(broken), loss=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, settings=settings)
    with pytest.raises(WorkloadError) as raised:
        run.fit(rows, epochs=1)
    blamed = "fails under precision.autocast='bfloat16': could not create a primitive. Without autocast it runs. Leave that"
    assert (blamed in str(raised.value)) is not broken
    assert "could not create a primitive" in str(raised.value)


class NoBackwardKernel(torch.autograd.Function):
    """Has a forward kernel in 16 bits, and none for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if grad.dtype != torch.float32:
            raise RuntimeError("could not create a primitive")
        return 2 * grad


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return NoBackwardKernel.apply(self.layer(x))


def test_a_failure_of_autocast_in_the_backward_pass_names_it() -> None:
    rows = [(torch.randn(8, 4), torch.randint(2, (8,)))]
    settings = Settings(precision=PrecisionSettings(autocast="bfloat16"))
    run = Trainer(Doubled(), loss=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, settings=settings)
    with pytest.raises(WorkloadError, match=r"fails under precision\.autocast='bfloat16': could not create a primitive\."):
        run.fit(rows, epochs=1)
