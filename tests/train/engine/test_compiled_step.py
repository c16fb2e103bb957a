"""Compiled models: what is computed again within them is what it was, and what cannot be compiled runs as it is."""

from __future__ import annotations

import copy
import functools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from _backends import needs_compiler
from trimtab.core.settings import CompilerSettings, Settings
from trimtab.errors import UsageError, WorkloadError
from trimtab.train.memory.activation_checkpointing import Recomputed
from trimtab.train.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """What other tests compile is no limit for these, nor the other way round."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    """A linear layer and what a class adds to it, which may look at what the layers before have left in ``past``."""

    broken = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("seen", torch.ones(6))

    def forward(self, x: torch.Tensor, past: list[torch.Tensor]) -> torch.Tensor:
        if self.broken:
            print(end="")  # which is not compiled
        return torch.tanh(self.changed(self.inner(x), past))

    def changed(self, x: torch.Tensor, past: list[torch.Tensor]) -> torch.Tensor:
        return x.sin()


class Normalised(Layer):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=momentum)

    def changed(self, x: torch.Tensor, past: list[torch.Tensor]) -> torch.Tensor:
        return torch.as_tensor(self.norm(x))


class Averaged(Normalised):
    """BatchNorm reads its own count, at which the compiler lets go."""

    def __init__(self) -> None:
        super().__init__(momentum=None)


class Gathering(Layer):
    """A buffer is changed in place, and its value is that of the output: within a graph, too."""

    def changed(self, x: torch.Tensor, past: list[torch.Tensor]) -> torch.Tensor:
        seen = self.get_buffer("seen")
        seen.mul_(0.5).add_(x.detach().mean(0))
        return x * torch.exp(x * seen.clone())


class Replacing(Layer):
    """Another buffer is put in its place."""

    def changed(self, x: torch.Tensor, past: list[torch.Tensor]) -> torch.Tensor:
        self.seen = self.seen * 0.9 + x.detach().mean(0)
        return x * torch.exp(x * self.seen)


class Drawing(Layer):
    """Random numbers that are not torch's, one of which tells the way."""

    def changed(self, x: torch.Tensor, past: list[torch.Tensor]) -> torch.Tensor:
        x = x * random.random() * float(np.random.rand())
        return x.sin() if random.random() < 0.5 else x.square()


class Deciding(Layer):
    def changed(self, x: torch.Tensor, past: list[torch.Tensor]) -> torch.Tensor:
        return x.sin() if x.sum() > 0 else x.square()


class Remembering(Layer):
    def changed(self, x: torch.Tensor, past: list[torch.Tensor]) -> torch.Tensor:
        past.append(x)
        return torch.stack(past).mean(0).sin() * len(past)


class Net(nn.Module):
    def __init__(self, layer: Callable[[], Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        past: Any = [] if isinstance(self.layers[0], Remembering) else ()  # a layer that is given a list is refused
        for layer in self.layers:
            x = layer(x, past=past)
        return x


def trained(model: nn.Module, *, again: bool) -> tuple[list[torch.Tensor], tuple[float, float]]:
    """The gradients of three batches, then the buffers; and what the generators of Python and numpy give next."""
    random.seed(3)
    np.random.seed(3)
    recomputed = Recomputed(list(model.layers) if isinstance(model, Net) else [model], model.buffers()) if again else None
    call: Any = torch.compile(model, backend="aot_eager") if again else model
    draw, found = torch.Generator().manual_seed(0), list[torch.Tensor]()
    for _ in range(3):
        x = torch.randn(8, 6, generator=draw, dtype=torch.float64)
        found += torch.autograd.grad(call(x).square().sum(), [*model.parameters()])
    if recomputed is not None:
        recomputed.undo()
    return [*found, *model.buffers()], (random.random(), float(np.random.rand()))


@pytest.mark.parametrize("broken", [False, True], ids=["whole", "broken"])
@pytest.mark.parametrize("layer", [Layer, Normalised, Averaged, Gathering, Replacing, Drawing, Deciding])
def test_a_second_run_within_what_is_compiled_sees_what_the_first_saw(layer: type[Layer], broken: bool) -> None:
    torch.manual_seed(0)
    model = Net(type(layer.__name__, (layer,), {"broken": broken})).double()
    (wanted, after), (found, next_) = trained(copy.deepcopy(model), again=False), trained(model, again=True)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert next_ == after


@pytest.mark.parametrize("broken", [False, True], ids=["whole", "broken"])
def test_a_second_run_of_what_is_compiled_whose_arguments_have_changed_is_refused(broken: bool) -> None:
    model = Net(type("Remembering", (Remembering,), {"broken": broken})).double()
    with pytest.raises(WorkloadError, match="The forward pass of Remembering cannot be computed again"):
        trained(model, again=True)


@needs_compiler
@pytest.mark.parametrize("kind", ["dropout", "broken", "bernoulli", "randperm"])
def test_a_second_run_within_what_is_compiled_draws_what_the_first_drew(kind: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if kind == "broken":
                print(end="")
            if kind == "bernoulli":
                return x * self.weight * torch.bernoulli(torch.full_like(x, 0.5))
            if kind == "randperm":
                return x * self.weight * torch.randperm(64)
            return self.weight * functional.dropout(x, 0.5)

    model = Scaled()
    recomputed = Recomputed([model])
    call: Any = torch.compile(model)
    for _ in range(2):
        loss = call(torch.rand(4, 64)).sum()
        (gradient,) = torch.autograd.grad(loss, model.weight)
        torch.testing.assert_close((model.weight * gradient).sum(), loss)  # it is linear in the weight
    recomputed.undo()


def test_what_is_computed_again_stays_within_the_graph_where_that_is_right() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 6))
    recomputed = Recomputed([model], model.buffers())
    call: Any = torch.compile(model, backend="aot_eager", fullgraph=True)  # which does not let go
    call(torch.randn(4, 6)).sum().backward()
    recomputed.undo()
    assert model.get_buffer("1.num_batches_tracked") == 1


@pytest.mark.parametrize("every", [1, 3], ids=["always", "later"])
def test_a_loss_of_gradients_is_trained_through_the_model_as_it_is(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    draw = torch.Generator().manual_seed(0)
    batches = [(torch.randn(8, 6, generator=draw),) for _ in range(4)]

    def fit(settings: Settings) -> tuple[nn.Module, tuple[str, ...]]:
        calls = 0

        def penalised(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
            nonlocal calls
            calls += 1
            x = batch[0].clone().requires_grad_()
            found = model(x).square().mean()
            if calls % every:
                return found
            (gradient,) = torch.autograd.grad(found, x, create_graph=True)
            return found + gradient.square().sum()

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        trainer = Trainer(model, loss=penalised, optimizer=functools.partial(torch.optim.SGD, lr=0.1), settings=settings)
        return model, trainer.fit(batches, epochs=1).notes

    (compiled, (note,)), (plain, _) = fit(Settings(compile=True)), fit(Settings())
    assert note.startswith("compile is off: the model cannot be compiled. The loss takes gradients of gradients")
    if every == 1:
        assert all(torch.equal(a, b) for a, b in zip(compiled.state_dict().values(), plain.state_dict().values(), strict=True))
    else:
        assert "BatchNorm's statistics, went on both times" in note


@needs_compiler
def test_code_for_all_sizes_is_compiled_once() -> None:
    made: dict[bool, int] = {}
    batches = [(torch.randn(size, 6), torch.randn(size, 6)) for size in (3, 5, 7)]
    for dynamic in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.clear_compilation_metrics()  # of which the last 64 are kept
        settings = Settings(compile=True, compiler=CompilerSettings(dynamic=dynamic))
        Trainer(nn.Linear(6, 6), loss=nn.MSELoss(), optimizer=torch.optim.SGD, settings=settings).fit(batches, epochs=1)
        made[dynamic] = len(torch._dynamo.utils.get_compilation_metrics())
    assert made[True] == 1 < 3 <= made[False], "torch counts a compilation that it begins anew, too"
    with pytest.raises(UsageError, match=r"compiler.options is 3; it can be a dict of plain values or None|None or a dict"):
        CompilerSettings(options=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"compiler.mode and compiler.options both say"):
        CompilerSettings(options={"max_autotune": True}, mode="default")


def test_options_that_the_compiler_does_not_have_are_named() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"no_such_option": 1}, "Unexpected optimization option no_such_option"),
        ({"max_autotune": "yes"}, "Unexpected type of attr max_autotune, got str should be bool"),
    ]
    for options, why in cases:
        made = Trainer(
            nn.Linear(6, 6),
            loss=nn.MSELoss(),
            optimizer=torch.optim.SGD,
            settings=Settings(compile=True, compiler=CompilerSettings(options=options)),
        )
        said = re.escape(f"torch.compile does not take Settings compiler.options={options}: {why}.")
        with pytest.raises(UsageError, match=said):
            made.fit([(torch.randn(3, 6), torch.randn(3, 6))], epochs=1)
