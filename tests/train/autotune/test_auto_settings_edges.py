"""Settings that decide themselves, and adjustments: interrupted, beside other processes, over a loader of its own class."""

from __future__ import annotations

import copy
import functools
import gc
import pathlib
import re
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from trimtab import DataSettings, DistributedSettings, OptimizerSettings, PrecisionSettings, Settings, Trainer
from trimtab.core.measurement import Interval
from trimtab.errors import UsageError
from trimtab.train.autotune import auto_settings, shadow_run
from trimtab.train.autotune.online_tuning import _window
from trimtab.train.distributed.data_sharding import share
from trimtab.train.loss.loss_parity import GRADIENT, gradient_distance, rounding
from trimtab.train.runtime.torch_settings import running
from trimtab.train.runtime.world import World
from trimtab.train.telemetry.events import Event, Progressed, Remarked
from trimtab.train.telemetry.mfu import flops_share

DATA = TensorDataset(torch.zeros(12, 4), torch.zeros(12, dtype=torch.int64))


class Own(DataLoader[Any]):
    """A loader that gives something else than a DataLoader would."""

    def __iter__(self) -> Iterator[Any]:
        return ((inputs + 1, labels) for inputs, labels in super().__iter__())


class Two(World):
    """The first of two processes, the other of which finds 2 more than it does."""

    size = 2

    def average(self, value: float) -> float:
        return value + 1


def trainer(settings: Settings, *layers: nn.Module, **more: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), *layers, nn.Linear(4, 4))
    return Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.AdamW, settings=settings, **more)


class Keeping(nn.Module):
    """Keeps an activation, as for an auxiliary loss; by a hook that refers to the model, or in its forward pass."""

    def __init__(self, *, hooked: bool) -> None:
        super().__init__()
        self.features, self.head, self.side = nn.Conv2d(1, 4, 3), nn.Linear(4, 3), nn.Linear(4, 3)
        self.kept, self.hooked = torch.zeros(()), hooked
        if hooked:
            self.features.register_forward_hook(lambda module, given, output: setattr(self, "kept", output))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.features(images)
        if not self.hooked:
            self.kept = found
        logits: torch.Tensor = self.head(found.relu().mean((2, 3))) + self.side(self.kept.tanh().mean((2, 3)))
        return logits


@pytest.mark.parametrize("hooked", [False, True])
def test_models_that_keep_activations_are_measured(hooked: bool) -> None:
    images = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(images, (images.sum((1, 2, 3)) > 0).long()), 8)
    ended = []
    for settings in (Settings(), Settings(memory_format="auto", optimizer=OptimizerSettings(implementation="auto"))):
        torch.manual_seed(0)
        made = Trainer(Keeping(hooked=hooked), loss=nn.CrossEntropyLoss(), optimizer=torch.optim.AdamW, settings=settings)
        made.fit(data, epochs=2)
        ended.append(made.model.state_dict())
    assert any(note.startswith("memory_format='channels_last' is ") for note in made.notes), made.notes
    assert not any("cannot be" in note for note in made.notes), made.notes
    assert all(torch.allclose(value, ended[1][name], atol=1e-5) for name, value in ended[0].items())


def test_a_loader_of_a_class_of_its_own_is_not_shared_out() -> None:
    with pytest.raises(UsageError, match=r"train is an Own, and with 2 processes each would train on all of it\."):
        share(Own(DATA, 4), "train", 0, 2, 0)


def test_a_loader_that_is_shared_out_keeps_its_generator_and_its_order() -> None:
    generator = torch.Generator().manual_seed(3)
    made = share(DataLoader(DATA, 4, generator=generator, in_order=False), "train", 0, 2, 0)
    assert isinstance(made, DataLoader)
    assert made.generator is generator
    assert not made.in_order


def test_the_examples_of_a_window_are_those_of_one_process_and_agreed() -> None:
    event = Progressed(
        update=1, epoch=0, updates=2, loss=1.0, norm=1.0, rate=0.1, examples_per_s=1000.0, step_ms=64.0, skipped=0,
        shares={"data": 0.5, "forward": 0.25, "backward": 0.25},
    )  # fmt: skip
    assert _window(trainer(Settings(threads=1), world=Two()).context, event).examples == 64 / 2 + 1


def test_a_model_that_would_wait_for_others_is_not_tried_out_alone() -> None:
    made = trainer(
        Settings(threads=1, precision=PrecisionSettings(autocast="auto"), optimizer=OptimizerSettings(implementation="auto")),
        nn.SyncBatchNorm(4),
        world=Two(),
    )
    batches = [(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))] * 2
    assert auto_settings.decide(made.context, batches, 1000) is batches
    assert made.notes == [
        "precision.autocast, optimizer.implementation stay off: a copy of a model with SyncBatchNorm would wait for the other "
        "processes."
    ]
    assert (made.settings.precision.autocast, made.settings.optimizer.implementation) == (None, None)
    assert flops_share(made.context, batches, 10.0) == (None, None)
    assert shadow_run.why_no_copy(trainer(Settings(threads=1), nn.SyncBatchNorm(4)).context) is None
    assert shadow_run.why_no_copy(trainer(Settings(threads=1), world=Two()).context) is None


def test_float16_is_not_tried_where_communication_keeps_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(
        Settings(
            threads=1, precision=PrecisionSettings(autocast="auto"), distributed=DistributedSettings(communication="powersgd")
        ),
        world=Two(),
    )
    made.context.device = torch.device("cuda")  # where float16 would be tried
    decisions = auto_settings._Decisions(made.context, [], 1000)
    decisions.candidate = shadow_run.candidate(
        trainer(Settings(threads=1)).context, Settings(threads=1), (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    )
    reasons = [decisions._why_not_timed(technique) for technique in auto_settings._techniques("precision.autocast")]
    assert "what communication leaves out for later updates would be in units of a scale that changes." in reasons


def test_what_an_interruption_left_open_is_decided_by_the_run_that_goes_on(tmp_path: pathlib.Path) -> None:
    def stop(trainer: Trainer, event: Event) -> None:
        if isinstance(event, Remarked) and event.text.startswith("precision.autocast"):
            trainer.stop("Ctrl-C.")

    def enough(trainer: Trainer, event: Event) -> None:
        trainer.stop("Enough.")

    settings = Settings(
        threads=1, precision=PrecisionSettings(autocast="auto"), optimizer=OptimizerSettings(implementation="auto")
    )
    batches = [(torch.randn(8, 4), torch.randint(4, (8,))) for _ in range(4)]
    first = trainer(settings, checkpoint=tmp_path, callbacks=[stop])
    first.fit(batches, steps=200)
    assert any("optimizer" in note and "interrupted before it was measured" in note for note in first.notes)
    assert first.decided.keys() == {"precision.autocast"}
    again = trainer(settings, checkpoint=tmp_path, callbacks=[enough]).resume()
    assert again.settings.optimizer.implementation == "auto"
    again.fit(batches, steps=200)
    assert again.decided.keys() == {"precision.autocast", "optimizer.implementation"}
    assert again.settings.optimizer.implementation != "auto"


class Picky(nn.Module):
    """Attention that takes 16 bits only, once it is ``picky``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.picky = nn.Linear(8, 4), False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.picky and not torch.is_autocast_enabled("cpu"):
            raise RuntimeError("Expected a 16-bit type.")
        rows = self.linear(inputs)[None, None]
        return functional.scaled_dot_product_attention(rows, rows, rows)[0, 0]


def test_kernels_of_attention_are_tried_in_the_precision_that_will_run() -> None:
    batches = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(8)]
    made = Trainer(Picky(), loss=nn.CrossEntropyLoss(), optimizer=functools.partial(torch.optim.SGD, lr=0.1))
    decisions = auto_settings._Decisions(made.context, batches, 8)
    decisions.candidate = shadow_run.candidate(made.context, made.settings, batches[0])
    decisions.candidate.model.get_submodule("model").picky = True
    assert all(reason is not None for _, reason in decisions._options(["attention"])["attention"])
    made.context.settings = Settings(precision=PrecisionSettings(autocast="bfloat16"))
    assert any(reason is None for _, reason in decisions._options(["attention"])["attention"])
    assert shadow_run.candidate(made.context, made.settings, batches[0]).settings.precision.autocast == "bfloat16"


class Masked(nn.Module):
    """Attention with a mask that is learnt, in those batches that ask for it: what no kernel but plain products takes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mask = nn.Linear(8, 8), nn.Parameter(torch.zeros(1, 1, 6, 6))

    def forward(self, inputs: torch.Tensor, masked: bool) -> torch.Tensor:
        rows = self.linear(inputs)[:, None]
        mask = self.mask if masked else None
        return functional.scaled_dot_product_attention(rows, rows, rows, attn_mask=mask).mean((1, 2, 3))


def test_a_batch_that_a_kernel_of_attention_does_not_take_runs_with_another() -> None:
    data = [((torch.randn(4, 6, 8), index >= 6), torch.randn(4)) for index in range(8)]
    made = Trainer(
        Masked(), loss=nn.MSELoss(), optimizer=functools.partial(torch.optim.SGD, lr=0.1), settings=Settings(attention="flash")
    )
    assert made.fit(data, epochs=1).updates == 8
    rows, used = torch.randn(1, 1, 6, 8, requires_grad=True), dict[str, bool]()
    for kernel in ("flash", "math"):
        with running(Settings(attention=kernel)):  # type: ignore[arg-type]
            used[kernel] = "Flash" in str(functional.scaled_dot_product_attention(rows, rows, rows).grad_fn)
    assert used == {"flash": True, "math": False}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_kernel_that_was_chosen_comes_first_on_a_gpu() -> None:
    rows = torch.randn(2, 2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = torch.zeros(2, 1, 64, 64, device="cuda", dtype=torch.bfloat16)
    for kernel, name in (("efficient", "Efficient"), ("flash", "Flash"), ("efficient", "Efficient")):
        with running(Settings(device="cuda", attention=kernel)):  # type: ignore[arg-type]
            assert name in str(functional.scaled_dot_product_attention(rows, rows, rows).grad_fn)
            assert functional.scaled_dot_product_attention(rows, rows, rows, attn_mask=mask).isfinite().all()


def test_float16_is_timed_once_its_scale_has_come_down() -> None:
    torch.manual_seed(0)
    made = Trainer(
        nn.Linear(4, 1),
        loss=lambda outputs, targets: 1e4 * functional.mse_loss(outputs, targets),
        optimizer=functools.partial(torch.optim.SGD, lr=1e-9),
    )
    rows = torch.randn(8, 4)
    tried = shadow_run.ShadowRun(
        made.context, Settings(precision=PrecisionSettings(autocast="float16")), [(rows, rows.sum(1, keepdim=True))]
    )
    (first,) = copy.deepcopy(tried).round()
    assert first.overflowed
    shadow_run.seconds_of(tried)
    (update,) = tried.round()
    assert update.applied


def test_copies_that_lose_are_given_back_and_the_last_when_all_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[nn.Module]] = []
    most = 0
    plain = shadow_run.ShadowRun.__init__

    def noted(self: shadow_run.ShadowRun, *args: Any) -> None:
        nonlocal most
        plain(self, *args)
        made.append(weakref.ref(self.model))
        most = max(most, sum(each() is not None for each in made))

    monkeypatch.setattr(shadow_run.ShadowRun, "__init__", noted)
    left: list[int] = []

    def look(run: Trainer, event: Event) -> None:
        left.append(sum(each() is not None for each in made))

    settings = Settings(
        threads=1, precision=PrecisionSettings(autocast="auto"), optimizer=OptimizerSettings(implementation="auto")
    )
    gc.disable()  # nobody may have to look for them
    try:
        trainer(settings, callbacks=[look], log_every=1).fit([(torch.randn(8, 4), torch.randint(4, (8,)))] * 4, steps=4000)
    finally:
        gc.enable()
    assert len(made) >= 3
    assert most == 2
    assert left[-1] == 0


def test_an_optimizer_that_finds_its_own_rate_leaves_everything_off() -> None:
    made = trainer(Settings(threads=1, precision=PrecisionSettings(autocast="auto")))
    made.optimizer.param_groups[0]["lr"] = None
    batches = [(torch.randn(8, 4), torch.randint(4, (8,)))]
    assert auto_settings.decide(made.context, batches, 100) is batches
    wanted = "precision.autocast cannot be measured and stay off. The optimizer finds its own learning rate"
    assert made.notes[-1].startswith(wanted)


def test_what_a_short_run_cannot_pay_back_is_hardly_looked_at() -> None:
    calls = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return functional.cross_entropy(model(batch[0]), batch[1])

    torch.manual_seed(0)
    batches = [(torch.randn(n, 4), torch.randint(4, (n,))) for n in (8, 6, 4, 2)]
    made = Trainer(
        nn.Linear(4, 4),
        loss=loss,
        optimizer=torch.optim.SGD,
        settings=Settings(threads=1, optimizer=OptimizerSettings(implementation="auto")),
    )
    auto_settings.decide(made.context, batches, 4)
    assert calls <= 4  # three updates, and the look that techniques take
    assert "too much for a run of" in made.notes[-1]
    whole = Trainer(
        nn.Linear(4, 4),
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        settings=Settings(threads=1, data=DataSettings(micro_batch="auto")),
    )
    summary = whole.fit([(torch.randn(64, 4), torch.randn(64, 4))], steps=4)
    assert summary.settings.data.micro_batch == 64
    assert summary.notes[-1].endswith("Smaller ones are not tried, because the run is short.")


class Sleeping(nn.Linear):
    """So slow that a round has a single update."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.04)
        return super().forward(x)


def test_code_is_judged_by_batches_of_all_sizes_and_by_what_compiling_costs() -> None:
    torch.manual_seed(0)
    made = Trainer(Sleeping(4, 4), loss=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, settings=Settings(threads=1))
    data = [(torch.randn(n, 4), torch.randint(4, (n,))) for n in (8, 6, 4, 2)]

    def options(decisions: auto_settings._Decisions) -> list[str]:
        return [decisions._option(technique) for technique, _ in decisions._options(["compile"])["compile"]]

    short, decisions = (auto_settings._Decisions(made.context, data, updates) for updates in (600, 10_000))
    for each in (short, decisions):
        each.make([])
        assert len(each.batches) == 1
        assert options(each) == ["compile=True"]
        each._use_all_sizes()
    assert (len(short.batches), len(decisions.batches)) == (1, 4)
    assert options(decisions) == ["compile=True", "compile=True with compiler.dynamic=True"]
    made.context.settings = made.settings.replaced({"compiler.dynamic": False})
    assert options(decisions) == ["compile=True"], "what the settings ask for stays"

    decisions.step_s, decisions.compile_s = 0.1, 20.0
    slow_to_compile = decisions._pays_back(Interval(1.02, 1.01, 1.03), "it ran at 1.02x", 60.0)
    assert slow_to_compile == "off: it ran at 1.02x, and compiling takes 60.0 s instead of 20.0 s."
    assert decisions._pays_back(Interval(1.0, 0.99, 1.01), "it ran at 1.00x", 5.0).startswith("on: ")
    decisions.compile_s = 0.0
    assert decisions._pays_back(Interval(1.02, 1.01, 1.03), "it ran at 1.02x", 8.0).startswith("on: ")
    assert "compiling takes 20.0 s and saves 9.9 s" in decisions._pays_back(Interval(1.02, 1.01, 1.03), "it ran", 20.0)


def test_a_precision_that_cannot_tell_the_targets_apart_is_off() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    for mean, off in ((300.0, True), (0.0, False)):
        made = Trainer(nn.Linear(4, 1), loss=nn.MSELoss(), optimizer=torch.optim.SGD, settings=Settings(threads=1))
        decisions = auto_settings._Decisions(made.context, [(x, mean + x[:, :1])], None)
        decisions.make([])
        other = shadow_run.ShadowRun(
            made.context, Settings(threads=1, precision=PrecisionSettings(autocast="bfloat16")), decisions.batches
        )
        found = decisions._difference(other, exact=False)
        assert (found is not None and found.startswith("Its outputs are in steps of bfloat16")) is off


def test_a_layout_in_which_dropout_falls_differently_is_judged_by_the_same_statistics() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.Dropout(0.2), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 4)]
    made = Trainer(nn.Sequential(*layers), loss=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, settings=Settings(threads=1))
    decisions = auto_settings._Decisions(made.context, [(torch.randn(16, 3, 4, 4), torch.randint(4, (16,)))], None)
    decisions.make([])
    other = shadow_run.ShadowRun(made.context, Settings(threads=1, memory_format="channels_last"), decisions.batches)
    assert [float(each.loss) for each in other.round()] != [float(each.loss) for each in decisions.best.round()]  # type: ignore[union-attr]
    assert decisions._difference(other, exact=True) is None
    assert float(functional.dropout(torch.ones(100), 0.5).min()) == 0  # random numbers are drawn as before
    assert all(module.training for module in other.model.modules())


class Contiguous(torch.autograd.Function):
    """Passes on what it gets, and takes gradients for contiguous: kernels that people write do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        shape = gradients[0].shape
        return gradients[0].as_strided(shape, torch.empty(shape).stride()).clone()


class Careless(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Contiguous.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class Decaying(nn.Module):
    """Changes a buffer in place before it is used, for which torch compiles a backward pass that sees it as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(0.9)  # type: ignore[operator]
        return (self.layer(x) * self.scale).square()  # type: ignore[no-any-return, operator]


def decided(model: nn.Module, settings: Settings, inputs: torch.Tensor) -> str | None:
    """What speaks against ``settings`` for ``model`` beside how long they take."""
    classes = torch.randint(4, (len(inputs),))
    made = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD, settings=Settings(threads=1))
    decisions = auto_settings._Decisions(made.context, [(inputs, classes)], None)
    decisions.make([])
    return decisions._difference(shadow_run.ShadowRun(made.context, settings, decisions.batches), exact=True)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_layout_with_the_same_loss_and_another_gradient_is_off(dropout: float) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), Careless(), nn.Conv2d(8, 8, 3, padding=1), nn.Dropout(dropout), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(8 * 16, 4))
    found = decided(model, Settings(threads=1, memory_format="channels_last"), torch.randn(16, 3, 4, 4))
    assert found is not None
    assert re.fullmatch(r"Its gradient differs by [0-9.]+ of what it was, and 0\.02 is allowed\.", found)
    model[1] = nn.Identity()
    assert decided(model, Settings(threads=1, memory_format="channels_last"), torch.randn(16, 3, 4, 4)) is None


@pytest.mark.long
def test_a_backward_pass_that_torch_compiles_wrongly_is_off() -> None:
    torch.manual_seed(0)
    compiled = Settings(threads=1, compile=True)
    found = decided(Decaying(), compiled, torch.randn(8, 4))
    assert found is not None
    assert found.startswith("Its gradient differs by ")
    assert decided(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), compiled, torch.randn(8, 4)) is None


def test_gradients_of_a_model_that_amplifies_rounding_are_not_held_to_what_others_keep() -> None:
    class Steep(nn.Module):
        """Its loss says nothing of an angle whose gradient is as large as its frequency."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1 + 1e-5 * torch.sin(1e6 * self.layer(x))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    made = Trainer(Steep(), loss=nn.MSELoss(), optimizer=torch.optim.SGD, settings=Settings(threads=1))
    decisions = auto_settings._Decisions(made.context, [(torch.randn(16, 64), torch.zeros(16, 1))], None)
    decisions.make([])
    other = shadow_run.ShadowRun(made.context, Settings(threads=1), decisions.batches)
    with other.with_noise(1e-7):  # as another order of its sums would
        assert gradient_distance(decisions.best.reset_round().gradient, other.reset_round().gradient) > GRADIENT  # type: ignore[union-attr]
        assert decisions._difference(other, exact=True) is None
    assert gradient_distance(decisions.best.reset_round().gradient, other.reset_round().gradient) == 0  # type: ignore[union-attr]


def test_what_rounds_coarsest_says_how_far_gradients_may_be_apart() -> None:
    model, plain = nn.Linear(4, 4), Settings(threads=1)
    assert rounding(model, plain) == 2.0**-23
    assert rounding(model, Settings(precision=PrecisionSettings(autocast="bfloat16"))) == 2.0**-7
    assert (
        rounding(model, Settings(precision=PrecisionSettings(tf32=True)))
        == rounding(model, Settings(device="cuda"))
        == 2.0**-10
    )
    assert rounding(nn.Sequential(model, nn.Linear(4, 4).bfloat16()), plain) == 2.0**-7
    assert rounding(nn.Linear(4, 4).double(), plain) == 2.0**-23  # what does not matter to what is shaken by more


class Sure(nn.Module):
    """A loss so large that it shows nothing of what its gradients are made of."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs.float(), targets) + 100


def test_gradients_of_a_model_in_16_bits_are_held_to_its_rounding() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16, 4)).to(torch.bfloat16)
    made = Trainer(model, loss=Sure(), optimizer=torch.optim.SGD, settings=Settings(threads=1))
    decisions = auto_settings._Decisions(made.context, [(torch.randn(16, 8, 4, 4).bfloat16(), torch.randint(4, (16,)))], None)
    decisions.make([])
    best, other = decisions.best, shadow_run.ShadowRun(made.context, Settings(threads=1), decisions.batches)
    assert best is not None
    with other.with_noise(2.0**-9):  # as sums in another order are off
        assert gradient_distance(best.reset_round().gradient, other.reset_round().gradient) > GRADIENT
        assert decisions._difference(other, exact=True) is None


def test_how_far_two_gradients_are_apart() -> None:
    one, other = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert gradient_distance([one], [other]) == pytest.approx(0.1)
    assert gradient_distance([one, None], [one, torch.zeros(2)]) == 0  # compiled code makes zeros of what is not there
    assert gradient_distance([one, None], [one, one]) == pytest.approx(100)
    assert gradient_distance([one, one * 1e-9], [one, -one * 1e-9]) < 1e-6  # of rounding alone
    assert gradient_distance([one.to_sparse()], [other.to_sparse()]) == pytest.approx(0.1)
    assert gradient_distance([one.to_sparse()], [other]) == pytest.approx(0.1)
    assert gradient_distance([], [one]) == 0  # an update was left out
    assert gradient_distance([torch.zeros(2)], [torch.zeros(2)]) == 0
