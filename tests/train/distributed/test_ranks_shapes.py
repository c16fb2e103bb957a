"""Two real processes with models of odd shapes and types: complex, tied, empty, of few bits, not to be split evenly."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from _ranks import failure
from _runs import settings_of
from trimtab.train.autotune.batch_size import find_batch
from trimtab.train.distributed.tensor_parallel import mesh, split_layers
from trimtab.train.telemetry.events import Progressed
from trimtab.train.trainer import Trainer

KINDS = (None, "bfloat16", "float16", "powersgd")
CLASSES = 4
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def batches(count: int = 8) -> Batches:
    random = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 8, generator=random), torch.randint(0, CLASSES, (6,), generator=random)) for _ in range(count)]


def trainer(model: nn.Module, *, lr: float = 0.1, **settings: Any) -> Trainer:
    return Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD([p for p in parameters if p.requires_grad], lr=lr, momentum=0.5),
        settings=settings_of(**settings),
    )


def flat(model: nn.Module) -> list[float]:
    values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    values = [torch.view_as_real(value) if value.is_complex() else value for value in values]
    found: list[float] = torch.cat([value.detach().float().flatten() for value in values]).tolist()
    return found


class Waves(nn.Module):
    """Weights of frequencies, as Fourier operators have, beside plain ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64) / 5)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        waves = torch.fft.rfft(inputs) @ self.weights
        found: torch.Tensor = self.head(inputs + torch.fft.irfft(waves, n=8))
        return found


class Tied(nn.Module):
    """Layers of a list with a weight in common: with each other, or with what is in no list."""

    def __init__(self, *, outside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.other, self.head = nn.Linear(8, 8), nn.Linear(8, CLASSES)
        (self.other if outside else self.layers[2]).weight = self.layers[0].weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.other):
            inputs = torch.tanh(layer(inputs))
        found: torch.Tensor = self.head(inputs)
        return found


class Odd(nn.Module):
    """Buffers of types that few know of, a parameter without elements and one that is a number."""

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.scale = nn.Linear(8, CLASSES), nn.Parameter(torch.ones(()))
        self.empty = nn.Embedding(0, 8)
        self.register_buffer("short", torch.arange(start, start + 3, dtype=torch.int16))
        self.register_buffer("unsigned", torch.tensor(start + 7, dtype=torch.uint16))
        self.register_buffer("waves", torch.full((2,), start + 1j, dtype=torch.complex64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(inputs) * self.scale + self.empty.weight.sum()
        return found


TIES = {"layers": False, "outside": True}


def run(model: nn.Module, **settings: Any) -> list[float]:
    trainer(model, **settings).fit(batches(), epochs=2)
    return flat(model)


# What the two processes do, in a row; the tests below look at what they found.


def different(folder: pathlib.Path) -> dict[str, Any]:
    """A rate of its own in each process, and layers that only one trains."""
    rank, frozen = dist.get_rank(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, CLASSES))
    frozen[0].requires_grad_(rank == 0)
    rates = trainer(nn.Linear(8, CLASSES), lr=0.1 * (1 + rank))
    return {
        "rate": failure(lambda: rates.fit(batches(), epochs=1)),
        "frozen": failure(lambda: trainer(frozen).fit(batches(), epochs=1)),
    }


def waves(folder: pathlib.Path) -> dict[str, Any]:
    return {str(kind): run(Waves(), communication=kind) for kind in KINDS}


def tied(folder: pathlib.Path) -> dict[str, Any]:
    found = {}
    for name, outside in TIES.items():
        parameters = run(model := Tied(outside=outside), sharding="shard")
        found[name] = {"parameters": parameters, "units": [hasattr(layer, "reshard") for layer in model.layers]}
    return found


def mixed(folder: pathlib.Path) -> list[str]:
    """A head of another type than the rest, which only replicas take."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, CLASSES, dtype=torch.bfloat16))
    return failure(lambda: trainer(model, sharding="shard"))


def odd(folder: pathlib.Path) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        model = Odd(start=10 * dist.get_rank())
        run(model, communication=kind)
        found[str(kind)] = [model.short.tolist(), int(model.unsigned), str(model.waves.tolist())]
    return found


def uneven(folder: pathlib.Path) -> list[list[str]]:
    grid, model = mesh(2), nn.Sequential(nn.Linear(8, 7), nn.Linear(7, 8), nn.Embedding(9, 8))
    split_layers(model, grid, rows=["2"])  # of the words, some have one more
    columns, rows = (functools.partial(split_layers, model, grid, **named) for named in ({"columns": ["0"]}, {"rows": ["1"]}))
    return [failure(columns), failure(rows)]


def searched(folder: pathlib.Path) -> dict[str, Any]:
    """A batch size for a model that takes no single example."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    found = find_batch(trainer(model), batches(), seconds=0.1)
    return {"size": found.size, "first": found.tried[0].reason, "rest": [one.reason for one in found.tried[1:]]}


def masked(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean over what has a label, written out: over nothing it is 0/0, and so is every gradient of it."""
    inputs, labels = batch
    mask = (labels != -100).float()
    values = nn.functional.cross_entropy(model(inputs), labels.clamp(min=0), reduction="none")
    return (values * mask).sum() / mask.sum(), mask.sum()


NOTHING: dict[str, tuple[Any, dict[str, Any]]] = {
    "torch's": (nn.CrossEntropyLoss(), {}),
    "own": (masked, {}),
    "in shards": (nn.CrossEntropyLoss(), {"sharding": "shard"}),
}


def unlabelled(name: str, **settings: Any) -> list[Any]:
    """Of four updates of two batches the second has labels in one of them, and the third has none."""
    torch.manual_seed(0)
    loss = NOTHING[name][0]
    model, data = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, CLASSES)), batches()
    for _, labels in data[3:6]:
        labels.fill_(-100)
    made = Trainer(model, loss=loss, optimizer=functools.partial(torch.optim.SGD, lr=0.1), settings=settings_of(**settings))
    losses: list[float] = []
    made.context.callbacks.append(lambda _, event: losses.append(event.loss) if isinstance(event, Progressed) else None)
    made.context.log_every = 1
    made.fit(data, epochs=1)
    return [losses, flat(model)]


def nothing(folder: pathlib.Path) -> dict[str, Any]:
    return {name: unlabelled(name, **options) for name, (_, options) in NOTHING.items()}


CHECKS = (different, waves, tied, mixed, odd, uneven, searched, nothing)


def all_checks(folder: pathlib.Path) -> dict[str, Any]:
    trainer(nn.Linear(8, CLASSES))  # which meets the other process
    return {check.__name__: check(folder) for check in CHECKS}


def alone(model: nn.Module) -> list[float]:
    """One process on all the data."""
    return run(model, accumulate=2)


def test_optimizers_that_would_have_the_models_drift_apart_are_refused(ranks: list[dict[str, Any]]) -> None:
    for each in (rank["different"] for rank in ranks):
        assert each["rate"][0] == each["frozen"][0] == "UsageError"
        assert "lr of the optimizer's group 0 is 0.1 for that of rank 0, and 0.2 for that of rank 1." in each["rate"][1]
        assert "requires_grad of 0.weight is True for that of rank 0, and False for that of rank 1." in each["frozen"][1]


@pytest.mark.parametrize("kind", KINDS)
def test_complex_gradients_cross_whole(ranks: list[dict[str, Any]], kind: str | None) -> None:
    wanted = torch.tensor(alone(Waves()))
    count = 2 * 25  # of the complex parameters, which come first
    tolerance = 1e-5 if kind is None else 0.02
    for each in ranks:
        found = torch.tensor(each["waves"][str(kind)])
        torch.testing.assert_close(found, torch.tensor(ranks[0]["waves"][str(kind)]))
        torch.testing.assert_close(found[:count], wanted[:count], rtol=tolerance, atol=tolerance)
    imaginary = wanted[1:count:2] - torch.tensor(flat(Waves()))[1:count:2]
    assert float(imaginary.abs().max()) > 0.02  # or they would have been as well left out


@pytest.mark.parametrize("name", TIES)
def test_layers_with_a_weight_in_common_keep_it(ranks: list[dict[str, Any]], name: str) -> None:
    for each in (rank["tied"][name] for rank in ranks):
        torch.testing.assert_close(torch.tensor(each["parameters"]), torch.tensor(alone(Tied(outside=TIES[name]))))
        assert each["units"] == [False, True, name == "outside"]


def test_shards_of_several_types_are_refused_before_anything_is_shared_out(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        assert each["mixed"][0] == "UsageError"
        assert each["mixed"][1].startswith(
            "0.weight is of torch.float32 and 1.weight of torch.bfloat16, but parameters that are"
        )


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_odd_shapes_and_types_are_trained(ranks: list[dict[str, Any]], kind: str | None) -> None:
    for each in ranks:
        assert each["odd"][str(kind)] == [[0, 1, 2], 7, str([1j, 1j])]


def test_layers_that_do_not_split_evenly_are_refused(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        columns, rows = each["uneven"]
        assert columns[1].startswith("0 cannot be split in 2 equal parts: its out_features is 7. Make that a multiple of it")
        assert rows[1].startswith("1 cannot be split in 2 equal parts: its in_features is 7.")


def test_a_search_leaves_out_the_one_example_that_has_no_statistics(ranks: list[dict[str, Any]]) -> None:
    for each in (rank["searched"] for rank in ranks):
        assert each["first"] == "BatchNorm cannot be trained on one example"
        assert each["size"] > 1
        assert not any(each["rest"])


@pytest.mark.parametrize("name", NOTHING)
def test_batches_that_stand_for_nothing_count_for_nothing(ranks: list[dict[str, Any]], name: str) -> None:
    losses, wanted = unlabelled(name, accumulate=2)
    assert losses[2] == 0
    for each in (rank["nothing"][name] for rank in ranks):
        torch.testing.assert_close(torch.tensor(each[1]), torch.tensor(wanted))
    assert ranks[0]["nothing"][name][0] == pytest.approx(losses, rel=1e-5)
