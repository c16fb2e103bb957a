"""Two real processes and what they keep: averages, buffers, the best parameters of shards, layers in layers or split."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from _nets import Nested
from _ranks import failure
from _runs import settings_of
from trimtab.core.settings import DataSettings, OptimizerSettings, Settings
from trimtab.train.data.loader import Loader
from trimtab.train.distributed.launch import join
from trimtab.train.distributed.tensor_parallel import mesh, split_layers
from trimtab.train.early_stopping import EarlyStopping
from trimtab.train.trainer import Trainer

CLASSES = 4
LEAST = torch.finfo(torch.float32).min
LARGE = 40000.0
SGD = functools.partial(torch.optim.SGD, lr=0.3, momentum=0.5)
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def batches(count: int = 8) -> Batches:
    random = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 8, generator=random), torch.randint(0, CLASSES, (6,), generator=random)) for _ in range(count)]


class Coder(nn.Module):
    """A model whose parts are called by name, with a part that no loss needs and state that is no tensor."""

    def __init__(self, *, idle: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Sequential(nn.Linear(8, 32), nn.Tanh()), nn.Linear(32, CLASSES)
        if idle:
            self.idle = nn.Linear(8, 8)

    def encode(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.encoder(inputs)
        return found

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(self.decoder(self.encode(batch[0])), batch[1])

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 1}


class Normed(nn.Module):
    """A network with statistics, unless it has no norm, and with buffers that never change."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 32), norm(32), nn.Tanh(), nn.Linear(32, CLASSES))
        self.register_buffer("least", torch.full((2,), LEAST))
        self.register_buffer("large", torch.full((2,), LARGE, dtype=torch.float16))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(inputs)
        return found


def flat(model: nn.Module) -> list[float]:
    values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    found: list[float] = torch.cat([value.detach().flatten() for value in values]).tolist()
    return found


def trainer(model: nn.Module, loss: Any = None, *, optimizer: Any = SGD, checkpoint: Any = None, **options: Any) -> Trainer:
    settings = settings_of(**{name: options.pop(name) for name in ("sharding", "accumulate") if name in options})
    return Trainer(
        model,
        loss=loss or nn.CrossEntropyLoss(),
        optimizer=optimizer,
        settings=settings,
        checkpoint=checkpoint,
        **options,
    )


def stepping(model: Any, batch: Any) -> torch.Tensor:
    found: torch.Tensor = model.training_step(batch)
    return found


def twice(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Two passes through one part of the model, by a method, and one through another."""
    hidden = model.encode(batch[0]) + 0.1 * model.encode(-batch[0]).detach()
    return functional.cross_entropy(model.decoder(hidden), batch[1]), torch.tensor(len(batch[1]))


METHODS: Mapping[str, tuple[Any, bool]] = {"step": (stepping, False), "twice": (twice, False), "idle": (twice, True)}


def method(name: str, accumulate: int, **options: Any) -> list[float]:
    loss, idle = METHODS[name]
    model = Coder(idle=idle)
    trainer(model, loss, accumulate=accumulate, **options).fit(batches(), batches(3), epochs=3)
    model.idle = nn.Identity()
    return flat(model)


def averaged(accumulate: int, **options: Any) -> dict[str, Any]:
    """Validated twice with the average in the model, and trained on without it."""
    made = trainer(Normed(nn.Identity), ema=0.5, accumulate=accumulate, **options)
    summary = made.fit(batches(), batches(2), epochs=2)
    return {"updates": summary.updates, "parameters": flat(made.model), "validation": made.results["loss"]}


# What the two processes do, in a row; the tests below look at what they found.


def averaged_shards(folder: pathlib.Path) -> dict[str, Any]:
    return averaged(2, sharding="shard")


def averaged_replicas(folder: pathlib.Path) -> dict[str, Any]:
    model = Normed()
    made = trainer(model, ema=0.5)
    made.fit(batches(), batches(2), epochs=2)
    return {"buffers": {name: buffer.tolist() for name, buffer in model.named_buffers()}, "loss": made.results["loss"]}


def best_shards(folder: pathlib.Path) -> dict[str, Any]:
    """A run of shards that is gone on with, and gets no better."""
    options = {"sharding": "shard", "checkpoint": folder / "best", "early_stopping": EarlyStopping(min_delta=1e9)}
    first = Normed()
    trainer(first, **options).fit(batches(), batches(2), epochs=1)
    best = flat(first)
    made = trainer(Normed(), **options).resume()
    made.fit(batches(), batches(2), epochs=2)
    return {"best": best, "parameters": flat(made.model), "update": made.position.update}


def settled(folder: pathlib.Path) -> dict[str, Any]:
    """What becomes of buffers that are alike, and of one that is not."""
    world = trainer(nn.Linear(2, 2)).world
    rank = dist.get_rank()
    given = [
        torch.tensor([LEAST, 0.1]),
        torch.tensor(LARGE, dtype=torch.float16),
        torch.zeros(1).expand(3),
        torch.tensor([LARGE, LARGE + 64 * rank], dtype=torch.float16),
        torch.tensor([rank, 7]),
        torch.zeros(0),
    ]
    world.average_buffers(given)
    return {"found": [tensor.tolist() for tensor in given]}


class Momentum(torch.optim.SGD):
    """Knows whether the state that it took up was of shares."""

    def load_state_dict(self, state_dict: Any) -> None:
        self.shares = all(hasattr(values["momentum_buffer"], "to_local") for values in state_dict["state"].values())
        super().load_state_dict(state_dict)


def nested_shards(folder: pathlib.Path) -> dict[str, Any]:
    """Lists of layers within layers, whose run is gone on with."""

    def run(steps: int, checkpoint: pathlib.Path | None) -> Trainer:
        optimizer = functools.partial(Momentum, lr=0.1, momentum=0.9)
        made = trainer(Nested(), sharding="shard", optimizer=optimizer, checkpoint=checkpoint)
        if checkpoint is not None:
            made.resume(missing_ok=True)
        made.fit(batches(), steps=steps)
        return made

    first, second, alone = run(2, folder / "nested"), run(4, folder / "nested"), run(4, None)
    part: Any = second.world.shard(torch.ones(4, 8), second.model.head.weight)
    return {
        "units": sum(hasattr(module, "reshard") for module in first.model.modules()),
        "shares": second.optimizer.shares,
        "weights": [one.model.head.weight.full_tensor().flatten().tolist() for one in (second, alone)],
        "kept": part.to_local().untyped_storage().nbytes(),
    }


class Split(nn.Sequential):
    """Two layers to be split, between two that are not; it tells what it has seen."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.seen = [*vars(self).get("seen", []), float(input.sum())]
        return super().forward(input)


def split(folder: pathlib.Path) -> dict[str, Any]:
    """Both processes have a part of one layer, and so the same data, parameters and random numbers."""
    grid = mesh(2)
    torch.manual_seed(dist.get_rank())
    model = Split(nn.Linear(8, 8), nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8), nn.Linear(8, CLASSES))
    model = split_layers(model, grid, columns=["1"], rows=["3"])
    made = trainer(model, world=join(Settings(), grid))
    found: dict[str, Any] = {"before": model[0].weight.flatten().tolist()}
    inputs, labels = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    elsewhere = DataLoader(data := TensorDataset(inputs, labels), 6, sampler=DistributedSampler(data))
    found["sampler"] = failure(lambda: made.fit(elsewhere, epochs=1))
    made.fit(Loader((inputs, labels), 6), epochs=1)
    return found | {"seen": model.seen, "after": model[4].weight.flatten().tolist(), "seed": torch.initial_seed()}


def thawed(folder: pathlib.Path) -> dict[str, Any]:
    """A layer that is trained from the third update on, in both processes."""
    model = Normed(nn.Identity)
    model.layers[0].requires_grad_(False)
    for count, _ in enumerate(trainer(model, optimizer=SGD(model.parameters())).updates(batches(), epochs=2)):
        model.layers[0].requires_grad_(count > 0)
    return {"parameters": flat(model)}


class Gaps(nn.Module):
    """Buffers, and unless it is sharded a parameter, that do not lie in a row in memory; each process draws its own."""

    def __init__(self, sharding: str) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(dist.get_rank())
        table = torch.randn(8, 8, generator=drawn)[:4, :4]
        self.table = nn.Parameter(table.contiguous() if sharding == "shard" else table)
        self.register_buffer("sliced", torch.randn(8, 8, generator=drawn)[:4, :4])
        self.register_buffer("expanded", torch.randn(4, 1, generator=drawn).expand(4, 3))


def begun_alike(folder: pathlib.Path) -> dict[str, Any]:
    found = {}
    for sharding in ("replicate", "shard"):
        model = Gaps(sharding)
        trainer(model, sharding=sharding).world.wrap(model, Settings(), fresh=False)
        found[sharding] = [flat(model), *(buffer.flatten().tolist() for buffer in model.buffers())]
    return found


class Own:
    """Batches of this process."""

    sharded = True

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Any:
        return iter([(torch.full((6, 8), value), torch.zeros(6, dtype=torch.int64)) for value in self.values])


def keeping_step(folder: pathlib.Path) -> dict[str, Any]:
    """Rank 1 has one batch, of no numbers or of large ones, and then keeps step with rank 0."""
    found = {}
    for sharding in ("replicate", "shard"):
        leads, model = dist.get_rank() == 0, nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
        trainer(model, sharding=sharding).fit(Own([0.0] * 20 if leads else [10.0]), epochs=1)
        found[sharding] = float(model[0].running_mean.mean())
    made = Trainer(
        nn.Linear(8, CLASSES),
        loss=nn.CrossEntropyLoss(),
        optimizer=SGD,
        settings=Settings(data=DataSettings(accumulate=2), optimizer=OptimizerSettings(nonfinite="skip")),
    )
    summary = made.fit(Own([0.0] * 12 if leads else [float("nan")]), epochs=1)
    return found | {"updates": summary.updates, "skipped": summary.skipped}


def unequal_shards(folder: pathlib.Path) -> dict[str, Any]:
    """Three batches here and two there, two of which make an update."""
    made = trainer(Normed(nn.Identity), accumulate=2, sharding="shard")
    return {"updates": made.fit(batches(5), epochs=1).updates, "parameters": flat(made.model)}


CHECKS = [
    thawed,
    begun_alike,
    keeping_step,
    unequal_shards,
    averaged_shards,
    averaged_replicas,
    best_shards,
    settled,
    nested_shards,
    split,
]


def all_checks(folder: pathlib.Path) -> dict[str, Any]:
    made = trainer(Normed())  # which meets the other process
    assert made.world.size == 2
    methods = {name: method(name, 1) for name in METHODS}
    methods |= {f"{name}, shards": method(name, 1, sharding="shard") for name in METHODS}
    return {"methods": methods, **{check.__name__: check(folder) for check in CHECKS}}


@pytest.mark.parametrize("name", METHODS)
def test_a_loss_that_calls_methods_learns_what_one_process_learns(ranks: list[dict[str, Any]], name: str) -> None:
    alone = torch.tensor(method(name, 2))
    for each in ranks:
        for found in (each["methods"][name], each["methods"][f"{name}, shards"]):
            torch.testing.assert_close(torch.tensor(found), alone, rtol=1e-5, atol=1e-5)


def test_shards_are_averaged_beside_buffers_that_are_whole(ranks: list[dict[str, Any]]) -> None:
    alone = averaged(4)
    for each in (rank["averaged_shards"] for rank in ranks):
        assert each["updates"] == alone["updates"] == 4
        assert each["validation"] == pytest.approx(alone["validation"], rel=1e-5)
        torch.testing.assert_close(torch.tensor(each["parameters"]), torch.tensor(alone["parameters"]), rtol=1e-5, atol=1e-5)


def test_all_processes_end_with_one_average(ranks: list[dict[str, Any]]) -> None:
    first, second = (each["averaged_replicas"] for each in ranks)
    assert first == second
    assert first["buffers"]["least"] == [LEAST] * 2
    assert first["buffers"]["large"] == [LARGE] * 2
    assert any(value != 0 for value in first["buffers"]["layers.1.running_mean"])


def test_the_best_parameters_of_shards_come_back_after_a_resumption(ranks: list[dict[str, Any]]) -> None:
    for each in (rank["best_shards"] for rank in ranks):
        assert each["update"] == 8
        torch.testing.assert_close(torch.tensor(each["parameters"]), torch.tensor(each["best"]))


def test_only_buffers_that_differ_are_settled(ranks: list[dict[str, Any]]) -> None:
    tenth = float(torch.tensor(0.1))
    wanted = [[LEAST, tenth], LARGE, [0.0] * 3, [LARGE, LARGE + 32], [0, 7], []]
    assert [each["settled"]["found"] for each in ranks] == [wanted] * 2


def test_layers_within_layers_are_units_and_go_on_from_shares(ranks: list[dict[str, Any]]) -> None:
    for each in (rank["nested_shards"] for rank in ranks):
        assert each["units"] == 6  # beside the whole, two blocks, and two layers in each of them
        assert each["shares"]
        assert each["weights"][0] == each["weights"][1]
        assert each["kept"] == 64  # bytes: half of it


def test_processes_that_split_a_layer_have_the_same_data_parameters_and_seed(ranks: list[dict[str, Any]]) -> None:
    first, second = (each["split"] for each in ranks)
    assert {name: first[name] for name in ("before", "after", "seed", "seen")}.items() <= second.items()
    assert len(first["seen"]) == 8
    assert first["sampler"][0] == "UsageError"
    assert "for process 0 of 2, but the data is shared out to 1, of which this is 0" in first["sampler"][1]


def test_layers_that_thaw_learn_the_same_in_all_processes(ranks: list[dict[str, Any]]) -> None:
    model = Normed(nn.Identity)
    model.layers[0].requires_grad_(False)
    for count, _ in enumerate(trainer(model, optimizer=SGD(model.parameters()), accumulate=2).updates(batches(), epochs=2)):
        model.layers[0].requires_grad_(count > 0)
    for each in ranks:
        torch.testing.assert_close(torch.tensor(each["thawed"]["parameters"]), torch.tensor(flat(model)), rtol=1e-5, atol=1e-5)


def test_tensors_with_gaps_in_memory_begin_alike(ranks: list[dict[str, Any]]) -> None:
    first, second = (each["begun_alike"] for each in ranks)
    assert first == second
    assert len(set(first["replicate"][0])) == 16


def test_what_keeps_step_counts_for_nothing(ranks: list[dict[str, Any]]) -> None:
    for each in (rank["keeping_step"] for rank in ranks):
        assert each["replicate"] == each["shard"] == pytest.approx(0.5, abs=0.01)  # one batch of 10, by a tenth, in one of two
        assert (each["updates"], each["skipped"]) == (6, 1)


def test_shards_may_have_unequal_numbers_of_batches_in_an_update(ranks: list[dict[str, Any]]) -> None:
    alone = trainer(Normed(nn.Identity), accumulate=4)
    alone.fit(batches(5), epochs=1)
    for each in (rank["unequal_shards"] for rank in ranks):
        assert each["updates"] == 2
        torch.testing.assert_close(torch.tensor(each["parameters"]), torch.tensor(flat(alone.model)), rtol=1e-5, atol=1e-5)
