"""Copies of models whose hooks and functions refer to the model itself."""

from __future__ import annotations

import functools
import pathlib
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from _backends import needs_compiler, reloaded
from trimtab.backends.aoti import Aoti
from trimtab.backends.eager import Eager
from trimtab.backends.torchscript import TorchScript
from trimtab.core.backend import Backend
from trimtab.core.candidate import Candidate
from trimtab.core.signature import Dim
from trimtab.passes.channels_last import ChannelsLast
from trimtab.tensors.deepcopy import copied


class Watched(nn.Module):
    """Gives what a hook saw of an inner layer; ``keep`` makes the hook."""

    def __init__(self, keep: Callable[[Watched], Callable[..., Any]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
        self.seen: dict[str, torch.Tensor] = {}
        self.body[0].register_forward_hook(keep(self))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.body(rows)
        return self.seen["first"] * 2


def by_closure(model: Watched) -> Callable[..., Any]:
    def hook(module: nn.Module, given: Any, output: torch.Tensor) -> None:
        model.seen["first"] = output

    return hook


def by_inner_function(model: Watched) -> Callable[..., Any]:
    def fill(output: torch.Tensor) -> None:
        model.seen.update(first=output)

    return lambda module, given, output: fill(output)


def by_default(model: Watched) -> Callable[..., Any]:
    def hook(module: nn.Module, given: Any, output: torch.Tensor, kept: dict[str, torch.Tensor] = model.seen) -> None:
        kept["first"] = output

    return hook


def by_partial(model: Watched) -> Callable[..., Any]:
    return functools.partial(lambda seen, module, given, output: seen.update(first=output), model.seen)


class Patched(nn.Module):
    """A layer whose ``forward`` was exchanged for a function of the model around it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(rows: torch.Tensor) -> torch.Tensor:
            found = nn.functional.linear(rows, self.layer.weight)
            self.mean = found.mean(1, keepdim=True)
            return found

        self.layer.forward = forward  # type: ignore[method-assign]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.layer(rows)) + self.mean
        return found


MAKERS: list[Callable[[], nn.Module]] = [
    *(functools.partial(Watched, keep) for keep in (by_closure, by_inner_function, by_default, by_partial)),
    Patched,
]
NAMES = ["closure", "inner function", "default", "partial", "patched"]


@pytest.mark.parametrize("make", MAKERS, ids=NAMES)
def test_a_copy_answers_for_its_own_inputs_and_leaves_the_original_alone(make: Callable[[], nn.Module]) -> None:
    model, rows = make().eval(), torch.randn(3, 6)
    with torch.no_grad():
        want = model(rows)
        other = copied(model)
        assert torch.equal(other(-rows), model(-rows))
        for parameter in other.parameters():
            parameter.zero_()
        assert not other(rows).any()
        assert torch.equal(model(rows), want)


@pytest.mark.parametrize("make", MAKERS, ids=NAMES)
def test_a_model_that_keeps_what_it_computed_is_copied_and_trained(make: Callable[[], nn.Module]) -> None:
    model, rows = make(), torch.randn(3, 6)
    model(rows)  # what it keeps now has gradients flowing through it
    other, optimizer = copied((model, torch.optim.SGD(model.parameters(), lr=0.1)))
    found, want = other(-rows), model(-rows)
    assert torch.equal(found, want)
    found.sum().backward()
    optimizer.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.equal(other(-rows), want)
    assert torch.equal(model(-rows), want)


@pytest.mark.parametrize("make", MAKERS, ids=NAMES)
@pytest.mark.parametrize("backend", [Eager(), TorchScript(), pytest.param(Aoti(mode="default"), marks=needs_compiler)], ids=str)
def test_what_ships_of_such_a_model_answers_for_its_own_inputs(
    backend: Backend, make: Callable[[], nn.Module], tmp_path: pathlib.Path
) -> None:
    if backend.name == "aoti" and make is not MAKERS[0]:
        pytest.skip("one of them is enough where each is compiled for seconds")
    candidate = Candidate.of(make().eval(), (torch.randn(3, 6),), dynamic={"rows": {0: Dim("batch")}})
    loaded = reloaded(backend, backend.compile(candidate), tmp_path)
    assert [dim.name for dim in loaded.signature.dims] == ["batch"]
    rows = torch.randn(5, 6)
    with torch.no_grad():
        torch.testing.assert_close(loaded(rows), candidate.model(rows))


def test_functions_that_do_not_refer_to_the_model_stay_the_same() -> None:
    class Plain(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.layer, self.activation = nn.Linear(2, 2), nn.functional.relu
            self.scaled = lambda x: x * scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.scaled(self.activation(self.layer(x)))
            return found

    model = Plain(2.0)
    other = copied(model)
    assert other.activation is model.activation
    assert other.scaled is model.scaled
    assert other.layer.weight is not model.layer.weight


def test_functions_share_what_they_shared() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = torch.zeros(())
            count = 0

            def add(module: nn.Module, given: Any) -> None:
                nonlocal count
                count += 1
                self.calls = self.calls + 1
                if count < 0:
                    add(module, given)  # it refers to itself

            self.register_forward_pre_hook(add)
            self.count = lambda: (count, self.calls)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = Counting()
    model(torch.zeros(1))
    other = copied(model)
    other(torch.zeros(1))
    assert (model.count()[0], float(model.count()[1])) == (1, 1.0)
    assert (other.count()[0], float(other.count()[1])) == (2, 2.0)


def test_a_pass_rewrites_what_a_function_of_the_model_uses() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 4, 3)
            self.run = lambda x: self.layer(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.run(x)
            return found

    candidate = Candidate.of(Held().eval(), (torch.randn(1, 3, 8, 8),))
    rewritten = ChannelsLast().apply(candidate)
    with torch.no_grad():
        rewritten.model.layer.weight.zero_()
        assert torch.equal(rewritten.model(*rewritten.args), rewritten.model.layer.bias.view(1, 4, 1, 1).expand(1, 4, 6, 6))
        assert candidate.model(*candidate.args).std() > 0


class Keeping(nn.Module):
    """Keeps what it computes on the way: in an attribute, in a list, and in an object of the owner's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.seen: list[torch.Tensor] = []
        self.notes = types.SimpleNamespace(hidden=None)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.hidden = self.first(rows).relu()
        self.seen[:], self.notes.hidden = [self.hidden], self.hidden
        found: torch.Tensor = self.last(self.hidden)
        return found


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.Linear(4, 8), nn.utils.weight_norm(nn.Linear(8, 2)))


def old_spectral_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.Linear(4, 8), nn.utils.spectral_norm(nn.Linear(8, 2)))


@pytest.mark.parametrize("made", [Keeping, old_weight_norm, old_spectral_norm])
def test_what_keeps_tensors_that_it_has_computed_is_copied_after_a_call_too(made: Callable[[], nn.Module]) -> None:
    model, rows = made(), torch.randn(3, 4)
    model(rows)
    model.eval()
    for other in (copied(model), Candidate.of(model, (rows,)).own_model()):
        torch.testing.assert_close(other(rows), model(rows), rtol=0, atol=0)
        other(rows).sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        with torch.no_grad():
            next(other.parameters()).zero_()
        assert next(model.parameters()).abs().sum() > 0


def test_what_belongs_together_is_one_in_the_copy_too() -> None:
    model = Keeping()
    model(torch.randn(3, 4))
    other, optimizer = copied((model, torch.optim.SGD(model.parameters(), lr=1.0)))
    assert other.hidden is other.seen[0] is other.notes.hidden
    assert other.hidden is not model.hidden
    assert torch.equal(other.hidden, model.hidden)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in other.parameters()]
