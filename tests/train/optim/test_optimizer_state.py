"""Optimizers of every kind: what they keep goes on to the bit, and what this loop cannot drive is said."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import ASGD, SGD, AdamW, Muon, NAdam, Optimizer

from _runs import EPOCH, loader, told, trainer
from trimtab import DataSettings, Settings, Trainer
from trimtab.errors import UsageError
from trimtab.train.autotune.batch_size import find_batch
from trimtab.train.early_stopping import EarlyStopping
from trimtab.train.optim.kernels import move_state
from trimtab.train.optim.optimizer_state import load
from trimtab.train.optim.schedules import cosine
from trimtab.train.runtime.snapshots import rolled_back
from trimtab.train.runtime.world import World
from trimtab.train.telemetry.events import Event, Progressed, Validated

pytestmark = pytest.mark.usefixtures("one_thread")


class Wide(Optimizer):
    """Averages in 32 bits whatever the parameters are, counts in whole numbers, and keeps masks, one of them in a list."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    masks = [torch.zeros_like(parameter, dtype=torch.bool)]
                    state |= {
                        "mean": torch.zeros_like(parameter, dtype=torch.float32),
                        "count": torch.tensor(0),
                        "masks": masks,
                    }
                state["count"] += 1
                state["masks"][0] |= parameter.grad != 0
                state["mean"].mul_(0.9).add_(parameter.grad.float())
                parameter.copy_(parameter.float() - group["lr"] * state["mean"] * state["masks"][0])


def kinds(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The types of numbers in its state, per parameter."""
    states = optimizer.state.values()
    return [{n: v.dtype for n, v in state.items() if isinstance(v, torch.Tensor)} for state in states]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", [Wide, NAdam, functools.partial(ASGD, t0=2)], ids=["wide", "nadam", "asgd"])
def test_what_an_optimizer_keeps_comes_back_in_the_precision_that_it_had(
    optimizer: Callable[..., Optimizer], dtype: torch.dtype, tmp_path: pathlib.Path
) -> None:
    data = [(torch.randn(8, 4).to(dtype), torch.randn(8, 1).to(dtype)) for _ in range(8)]

    def made(**options: Any) -> Trainer:
        return trainer(lambda: nn.Linear(4, 1).to(dtype), optimizer=optimizer, **options)

    want = told(whole := made(), "loss")
    whole.fit(data, epochs=2)
    got = told(cut := made(checkpoint=tmp_path), "loss")
    cut.fit(data, steps=5)
    rest = told(resumed := made(checkpoint=tmp_path).resume(), "loss")
    resumed.fit(data, epochs=2)
    assert got + rest == want
    assert kinds(resumed.optimizer) == kinds(whole.optimizer)
    assert torch.equal(resumed.model.weight, whole.model.weight)


def test_a_model_of_other_numbers_gets_the_state_in_its_own(tmp_path: pathlib.Path) -> None:
    data = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(4)]
    trainer(lambda: nn.Linear(4, 1), optimizer=AdamW, checkpoint=tmp_path).fit(data, steps=3)
    made = trainer(lambda: nn.Linear(4, 1).double(), optimizer=AdamW, checkpoint=tmp_path).resume()
    made.fit([(x.double(), y.double()) for x, y in data], steps=6)
    assert {state["exp_avg"] for state in kinds(made.optimizer)} == {torch.float64}


class Both(Optimizer):
    """Matrices by one optimizer, everything else by another."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    @classmethod
    def of(cls, parameters: Iterable[Any]) -> Both:
        given = list(parameters)
        rest = AdamW([p for p in given if p.dim() != 2], lr=0.01)
        return cls(Muon([p for p in given if p.dim() == 2], lr=0.02), rest)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


class Listing(Both):
    """Keeps a list."""

    def state_dict(self) -> Any:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, state: Any) -> None:
        for part, own in zip(self.parts, state, strict=True):
            part.load_state_dict(own)


class Named(Both):
    """Keeps its groups under torch's name, and what its parts keep under another."""

    def state_dict(self) -> Any:
        return {"parts": [part.state_dict() for part in self.parts], "param_groups": super().state_dict()["param_groups"]}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict({"state": {}, "param_groups": state["param_groups"]})
        for part, own in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(own)


def deep() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("kind", [Listing, Named])
def test_optimizers_that_are_made_of_others_go_on_with_their_schedule(kind: type[Both], tmp_path: pathlib.Path) -> None:
    def stop(made: Trainer, event: Event) -> None:
        if isinstance(event, Progressed) and event.update == 5:
            made.stop("enough")

    def made(**options: Any) -> Trainer:
        return trainer(deep, optimizer=kind.of, schedule=cosine(), **options)

    data = list(loader())
    want = told(whole := made(), "loss")
    whole.fit(data, epochs=2)
    got = told(cut := made(checkpoint=tmp_path, callbacks=[stop]), "loss")
    cut.fit(data, epochs=2)
    rest = told(resumed := made(checkpoint=tmp_path).resume(), "loss")
    resumed.fit(data, epochs=2)
    assert len(got) == 5
    assert got + rest == want
    assert all(torch.equal(*pair) for pair in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))


def test_an_optimizer_that_leaves_out_what_its_parts_keep_is_refused_before_a_checkpoint_is_written(
    tmp_path: pathlib.Path,
) -> None:
    assert trainer(deep, optimizer=Both.of).fit(loader(), epochs=1).updates == 8
    with pytest.raises(
        UsageError, match=r"Both is made of other optimizers \(Muon, AdamW\), and its state_dict\(\) leaves out"
    ):
        trainer(deep, optimizer=Both.of, checkpoint=tmp_path).fit(loader(), epochs=1)
    assert not list(tmp_path.glob("update-*"))
    plain = trainer(optimizer=lambda parameters: Both(SGD(parameters, lr=0.1)), checkpoint=tmp_path / "plain")
    assert plain.fit(loader(), epochs=1).updates == 8  # there is nothing that its part keeps


def test_a_rollback_puts_back_what_the_parts_of_an_optimizer_keep() -> None:
    model = deep()
    both = Both.of(model.parameters())

    def step() -> None:
        model(torch.ones(4, 1)).sum().backward()
        both.step()

    step()
    before = [part.state_dict() for part in both.parts]
    kept = [{place: {n: v.clone() for n, v in state.items()} for place, state in each["state"].items()} for each in before]
    with rolled_back(model, both):
        step()
    now = [part.state_dict()["state"] for part in both.parts]
    for was, found in zip(kept, now, strict=True):
        assert was.keys() == found.keys()
        assert all(torch.equal(was[place][n], found[place][n]) for place in was for n in was[place])
    run = trainer(deep, optimizer=Listing.of, settings=Settings(data=DataSettings(micro_batch="auto")))
    run.fit(loader(), steps=1)
    assert {float(state["step"]) for state in run.optimizer.parts[1].state.values()} == {1.0}  # type: ignore[attr-defined]


class Twice(SGD):
    """Cannot do without a closure."""

    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


def test_an_optimizer_that_needs_a_closure_gets_one() -> None:
    run = trainer(optimizer=functools.partial(Twice, lr=0.1))
    assert run.fit(loader(), epochs=1).loss is not None


@pytest.mark.parametrize("name", ["SGDScheduleFree", "AdamWScheduleFree"])
def test_an_optimizer_with_an_average_of_its_own_shows_that_and_trains_on_without_it(name: str, tmp_path: pathlib.Path) -> None:
    """Written out beside the Trainer, as the package that this comes from asks for it."""
    free = functools.partial(getattr(pytest.importorskip("schedulefree"), name), lr=0.01)
    data = [(x / 32, y / 32) for x, y in loader(shuffle=False)]

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(1, 1)

    model, want = network(), list[float]()
    optimizer = free(model.parameters())
    for _ in range(3):
        model.train()
        optimizer.train()
        for x, y in data:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        optimizer.eval()
        with torch.no_grad():
            want.append(float(torch.stack([nn.functional.mse_loss(model(x), y) for x, y in data]).mean()))

    def made(folder: pathlib.Path) -> tuple[Trainer, list[float]]:
        losses: list[float] = []

        def watch(_: Trainer, event: Event) -> None:
            if isinstance(event, Validated):
                losses.append(event.metrics["loss"])

        return trainer(network, optimizer=free, checkpoint=folder, callbacks=[watch]), losses

    whole, losses = made(tmp_path / "whole")
    whole.fit(data, data, epochs=3)
    assert losses == pytest.approx(want, rel=1e-4)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(whole.model.state_dict()[name], value)
    cut, first = made(tmp_path / "cut")
    cut.fit(data, data, steps=EPOCH + 3)
    resumed, rest = made(tmp_path / "cut")
    resumed.resume().fit(data, data, epochs=3)
    cut.fit(data, data, epochs=3)
    assert first == losses == first[:1] + rest
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value)
        assert torch.equal(cut.model.state_dict()[name], value)
    before = {name: value.clone() for name, value in whole.model.state_dict().items()}
    assert find_batch(whole, data, seconds=0.1).size > 0
    for name, value in before.items():
        assert torch.equal(whole.model.state_dict()[name], value)
    cut.resume()  # in a trainer that shows its average
    assert cut.fit(data, data, epochs=4).updates == EPOCH
    whole.fit(data, data, epochs=4)
    assert torch.equal(cut.model.weight, whole.model.weight)
    with pytest.raises(UsageError, match=r"ema is 0\.9, and the optimizer keeps an average of its own, .* Leave out ema"):
        trainer(network, optimizer=free, ema=0.9)


def test_the_best_of_an_optimizer_with_an_average_is_an_average() -> None:
    free = pytest.importorskip("schedulefree").SGDScheduleFree
    data, seen = [(x / 32, y / 32) for x, y in loader(shuffle=False)], list[float]()

    def watch(run: Trainer, event: Event) -> None:
        if isinstance(event, Validated):
            seen.append(run.model.weight.item())

    made = trainer(
        nn.Linear(1, 1), optimizer=functools.partial(free, lr=0.1), callbacks=[watch], early_stopping=EarlyStopping(patience=9)
    )
    made.fit(data, data, epochs=2)
    assert made.model.weight.item() == seen[-1]
    made.fit(data, data, epochs=3)
    assert len(set(seen)) == 3


@pytest.mark.parametrize("capturable", [False, True])
def test_what_an_optimizer_counts_on_the_host_comes_back_there(capturable: bool) -> None:
    made = NAdam([nn.Parameter(torch.ones(3))])
    made.param_groups[0]["params"][0].grad = torch.ones(3)
    made.step()
    (kept,) = made.state.values()
    other = NAdam([nn.Parameter(torch.ones(3, device="meta"))], capturable=capturable)  # as on a GPU
    state = made.state_dict()
    state["param_groups"][0]["capturable"] = capturable
    load(other, state, World(), {})
    (now,) = other.state.values()
    assert {name: value.device.type for name, value in now.items()} == {
        name: "cpu" if name in ("step", "mu_product") and not capturable else "meta" for name in kept
    }
    assert capturable or now["mu_product"] == kept["mu_product"]
    move_state(other)
    assert now["mu_product"].device.type == ("meta" if capturable else "cpu")
