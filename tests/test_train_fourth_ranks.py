"""Memory that runs out where nothing can be tried again, or in one process of several; layers split over processes; devices."""

from __future__ import annotations

import copy
import datetime as dt
import functools
import pathlib
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from _ranks import on_ranks, variables
from trimtab.candidate import Settings
from trimtab.errors import TrimtabError, UsageError, WorkloadError
from trimtab.train import auto, batch_size, budget, double, epoch, prepare, step, tuned_loader
from trimtab.train.batch_size import find_batch
from trimtab.train.distributed import processes, replicas
from trimtab.train.distributed.exchange import Exchange
from trimtab.train.distributed.group import Group, PeerError, lost
from trimtab.train.distributed.powersgd import PowerSgd
from trimtab.train.distributed.processes import join
from trimtab.train.distributed.tensor_parallel import mesh, split_layers
from trimtab.train.loader import Loader
from trimtab.train.trainer import Trainer

WEIGHTED = [nn.CrossEntropyLoss(torch.ones(4)), functools.partial(functional.cross_entropy, weight=torch.ones(4))]
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def batches(count: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 8, generator=random), torch.randint(0, 4, (8,), generator=random)) for _ in range(count)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.last):
            inputs = torch.tanh(layer(inputs))
        return inputs


class Net(nn.Module):
    """Runs out of memory with more than ``most`` examples, from so many calls in training on."""

    def __init__(self, most: int = 10**6, call: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList([nn.ModuleList(Block() for _ in range(2))]), nn.Linear(8, 4)
        self.most, self.call, self.calls = most, call, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        hidden = self.blocks[0][0](inputs)
        if self.training and self.calls >= self.call and len(inputs) > self.most:
            raise torch.OutOfMemoryError("injected")
        return self.head(self.blocks[0][1](hidden))


def on_second(value: int, other: int = 10**6) -> int:
    return value if dist.get_rank() == 1 else other


def full_at(call: int, function: Any) -> Any:
    """``function``, but for one call, in which memory runs out."""
    calls: list[None] = []

    def called(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == call:
            raise torch.OutOfMemoryError("injected")
        return function(*args, **kwargs)

    return called


def trainer(
    model: nn.Module | None = None, optimizer: Any = None, settings: Settings = Settings(), *, loss: Any = None, **more: Any
) -> Trainer:
    optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    return Trainer(model or Net(), loss=loss or nn.CrossEntropyLoss(), optimizer=optimizer, settings=settings, **more)


def failure(action: Any) -> list[str]:
    """What ``action`` fails with; nothing if it does not."""
    try:
        action()
    except (TrimtabError, RuntimeError) as error:
        return ["lost" if lost(error) else type(error).__name__, str(error)]
    return []


@pytest.mark.parametrize("autocast", [None, "float16"])
@pytest.mark.parametrize(
    ("kernels", "owner", "name"),
    [(False, torch.Tensor, "sqrt"), (True, torch, "_foreach_sqrt"), (None, torch, "zeros_like")],
)
def test_an_update_in_which_the_optimizer_ran_out_of_memory_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch, autocast: Any, kernels: bool | None, owner: Any, name: str
) -> None:
    made = trainer(None, lambda p: torch.optim.Adam(p, foreach=kernels), Settings(autocast=autocast))
    monkeypatch.setattr(owner, name, full_at(3, getattr(owner, name)))
    with pytest.raises(
        WorkloadError, match=r"The gradients fit into memory, but what the optimizer needs .* \(injected\)\. Sh"
    ):
        made.fit(batches(), epochs=1)


@pytest.mark.parametrize("kernels", ["loop", "foreach", "fused"])
def test_an_optimizer_made_for_fused_kernels_takes_float16_with_others(kernels: Any) -> None:
    made = trainer(None, lambda p: torch.optim.Adam(p, fused=True), Settings(autocast="float16", optimizer=kernels))
    assert made.fit(batches(), epochs=1).updates == 8


def test_a_model_of_complex_parameters_alone_is_trained() -> None:
    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return model(batch[0].to(torch.complex64)).abs().mean()

    assert trainer(nn.Linear(8, 4, dtype=torch.complex64), loss=loss).fit(batches(), epochs=1).updates == 8


def test_an_index_that_stops_the_gpu_is_told_in_a_sentence() -> None:
    def stopped(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(WorkloadError, match="out of range .* a label that the model has no output for"):
        trainer(loss=stopped).fit(batches(), epochs=1)


@pytest.mark.parametrize("loss", WEIGHTED)
def test_the_tensors_of_a_loss_come_to_the_device(loss: Any) -> None:
    placed = prepare.loss_on(copy.deepcopy(loss), torch.device("meta"))
    assert (placed.weight if isinstance(placed, nn.Module) else placed.keywords["weight"]).is_meta


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
    made = trainer(Picky())
    decisions = auto._Decisions(made, batches(), 8)
    decisions.candidate = double.candidate(made, made.settings, batches()[0])
    decisions.candidate.model.get_submodule("model").picky = True
    assert decisions._options_anew(["attention"]) == {}
    assert all(reason is not None for _, reason in decisions._options(["attention"])["attention"])
    made.settings = Settings(autocast="bfloat16")
    assert any(reason is None for _, reason in decisions._options_anew(["attention"])["attention"])
    assert double.candidate(made, made.settings, batches()[0]).settings.autocast == "bfloat16"


def test_a_step_that_was_only_asked_for_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[None] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(None))
    tuned_loader._Trial(Loader(torch.ones(64, 2), 4, pin=False), tuned_loader.Way(0), lambda batch: None).sample()
    assert len(waits) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs to have none")
def test_a_device_that_is_not_there_is_refused_before_the_processes_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables(0, 2, 1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="Settings device is 'cuda', which cannot be used here"):
        trainer(settings=Settings(device="cuda"))


def test_of_all_processes_each_goes_on_with_its_own_random_numbers() -> None:
    made: Any = types.SimpleNamespace(world=types.SimpleNamespace(rank=1, size=2, index=2, processes=4))
    assert epoch._own(made, ["a", "b", "c", "d"]) == "c"
    assert epoch._own(made, ["a", "b"]) == "b"  # of another number of processes, those with the same data have the same


# What two processes do; the tests below look at what they found.


def searches() -> dict[str, Any]:
    """Sizes that do not fit in rank 1 alone: by a look at one update, by what is expected, by a limit; and no room to look."""
    made = trainer(Net(on_second(5)), settings=Settings(batch="auto"))
    made.fit(batches(), epochs=1)
    found: dict[str, Any] = {"auto": made.decided["batch"]}
    found["find"] = find_batch(trainer(Net(on_second(5))), batches(2 + dist.get_rank()), seconds=0.5).size
    limit = on_second(1, 1000) / 1000  # in rank 1 less than some examples take
    found["limit"] = [bool(t.reason) for t in find_batch(trainer(), batches(1), seconds=0.5, limit_mb=limit).tried]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_size, "free_mb", lambda: on_second(0))
        found["beyond"] = [one.reason[:24] for one in find_batch(trainer(), batches(1), seconds=0.5).tried]
        if dist.get_rank() == 1:
            patch.setattr(budget, "trace", full_at(1, budget.trace))
        found["trace"] = failure(lambda: trainer(settings=Settings(activation_mb=100.0)).fit(batches(), epochs=1))
    return found


class Sized(list[Any]):
    """A loader of this process's own batches, one of them smaller, which may give fewer than it says."""

    sharded = True

    def __init__(self, count: int, small: int | None = None) -> None:
        super().__init__((x[:1], y[:1]) if index == small else (x, y) for index, (x, y) in enumerate(batches(count)))

    def __len__(self) -> int:
        return 5


def updates() -> dict[str, Any]:
    """One example in rank 0 while rank 1 has no room; no room for buffers; a loader that ends where buckets are ordered."""
    made = trainer(Net(on_second(5), call=3))
    found: dict[str, Any] = {"small": made.fit(Sized(5, small=None if dist.get_rank() else 2), epochs=1).updates}
    with replicas._Thin():
        zeros = made.world.engine.reducer._get_zeros_like_grad_buckets()
    found["zeros"] = [bucket.buffer().untyped_storage().nbytes() for bucket in zeros]
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(step, "Kept", full_at(3, step.Kept))
        found["kept"] = trainer(settings=Settings(nonfinite="skip")).fit(Sized(5), epochs=1).updates
    found["short"] = failure(lambda: trainer().fit(Sized(on_second(2, 5)), epochs=1))
    exchange, done, on_gpu = Exchange(), Future(), types.SimpleNamespace(is_cuda=True)
    done.set_result(torch.zeros(1))
    exchange.add_up = lambda parameters, flat: done
    exchange.bucket(types.SimpleNamespace(buffer=lambda: on_gpu, parameters=list, is_last=lambda: True))
    exchange.landed()
    return found | {"hidden": exchange.meter.hidden}


class Momentum(torch.optim.SGD):
    """Knows whether the state that it took up was of shares."""

    def load_state_dict(self, state_dict: Any) -> None:
        self.shares = all(hasattr(values["momentum_buffer"], "to_local") for values in state_dict["state"].values())
        super().load_state_dict(state_dict)


def shards(folder: pathlib.Path) -> dict[str, Any]:
    """Lists of layers within layers, whose run is gone on with."""

    def run(steps: int, checkpoint: pathlib.Path | None) -> Trainer:
        made = trainer(None, lambda p: Momentum(p, lr=0.1, momentum=0.9), Settings(sharding="shard"), checkpoint=checkpoint)
        if checkpoint is not None:
            made.resume(missing_ok=True)
        made.fit(batches(), steps=steps)
        return made

    first, second, alone = run(2, folder), run(4, folder), run(4, None)
    part: Any = second.world.part(torch.ones(4, 8), second.model.head.weight)
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


def split() -> dict[str, Any]:
    """Both processes have a part of one layer, and so the same data, parameters and random numbers."""
    grid = mesh(2)
    torch.manual_seed(dist.get_rank())
    model = Split(nn.Linear(8, 8), nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8), nn.Linear(8, 4))
    model = split_layers(model, grid, columns=["1"], rows=["3"])
    made = trainer(model, world=join(Settings(), grid))
    found: dict[str, Any] = {"before": model[0].weight.flatten().tolist()}
    inputs, labels = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    elsewhere = DataLoader(data := TensorDataset(inputs, labels), 8, sampler=DistributedSampler(data))
    found["sampler"] = failure(lambda: made.fit(elsewhere, epochs=1))
    made.fit(Loader((inputs, labels), 8), epochs=1)
    return found | {"seen": model.seen, "after": model[4].weight.flatten().tolist(), "seed": torch.initial_seed()}


def all_checks(folder: pathlib.Path) -> dict[str, Any]:
    processes.TIMEOUT = dt.timedelta(seconds=90)
    trainer()  # which meets the other process
    return {"searches": searches(), "updates": updates(), "shards": shards(folder / "shards"), "split": split()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(all_checks, tmp_path_factory.mktemp("ranks"))


def test_a_size_that_does_not_fit_in_one_process_is_left_out_by_all(found: list[dict[str, Any]]) -> None:
    first, second = (each["searches"] for each in found)
    assert first["auto"] == second["auto"] <= 5
    assert first["find"] == second["find"] <= 5
    assert first["beyond"] == ["", "it does not fit into the"]
    assert second["beyond"] == ["", "it would take about 0 MB"]
    assert first["limit"] == second["limit"]
    assert first["limit"][-1]
    for each in (first, second):
        assert each["trace"][0] == "UsageError"
        assert "even with all that recomputing saves" in each["trace"][1]


def test_what_fails_in_one_process_leaves_nobody_waiting(found: list[dict[str, Any]]) -> None:
    for each in (rank["updates"] for rank in found):
        assert each["small"] == each["kept"] == 5
        assert set(each["zeros"]) == {4}  # bytes, before they are sent
        assert each["hidden"] is None
    assert found[0]["updates"]["short"][0] == PeerError.__name__
    assert found[1]["updates"]["short"][1].startswith("The loader gave the batches of 2 updates in this epoch, but its len()")


def test_layers_within_layers_are_units_and_go_on_from_shares(found: list[dict[str, Any]]) -> None:
    for each in (rank["shards"] for rank in found):
        assert each["units"] == 7  # the model, two blocks, and two layers in each of them
        assert each["shares"]
        assert each["weights"][0] == each["weights"][1]
        assert each["kept"] == 64  # bytes: half of it


def test_processes_that_split_a_layer_have_the_same_data_parameters_and_seed(found: list[dict[str, Any]]) -> None:
    first, second = (each["split"] for each in found)
    assert {name: first[name] for name in ("before", "after", "seed", "seen")}.items() <= second.items()
    assert len(first["seen"]) == 8
    assert first["sampler"][0] == "UsageError"
    assert "for process 0 of 2, but the data is shared out to 1, of which this is 0" in first["sampler"][1]


def full(name: str, folder: pathlib.Path) -> list[str]:
    """Rank 1 has no room in its optimizer, in shares, for the zeros that rank 0 waits for, or to send a bucket."""
    processes.TIMEOUT = dt.timedelta(seconds=60)
    join(Settings())
    second, call = dist.get_rank() == 1, {"shares": 2, "zeros": 3}.get(name, 100)
    kinds = {"shares": Settings(sharding="shard"), "bucket": Settings(communication="powersgd")}
    made = trainer(Net(on_second(5), call), settings=kinds.get(name, Settings()))
    if name == "optimizer" and second:
        made.optimizer.step = full_at(3, made.optimizer.step)
    if name == "zeros" and second:
        replicas._Thin.__enter__ = full_at(1, replicas._Thin.__enter__)
    if name == "bucket" and second:
        made.world.exchange.add_up = full_at(3, made.world.exchange.add_up)
    return failure(lambda: made.fit(batches(), epochs=1))


@pytest.mark.parametrize("name", ["optimizer", "shares", "zeros", "bucket"])
def test_memory_that_runs_out_where_nobody_can_be_told_ends_the_run(name: str, tmp_path: pathlib.Path) -> None:
    first, second = on_ranks(functools.partial(full, name), tmp_path)
    assert first[0] == "lost"
    said = (
        "what the optimizer needs beside them does not" if name == "optimizer" else "several processes cannot make this update"
    )
    assert second[0] == "WorkloadError"
    assert said in second[1]


def over_nccl(folder: pathlib.Path) -> dict[str, Any]:
    processes.start("cuda")
    metric, _ = Group(Settings(device="cuda")).mean([torch.ones(())], [1.0], summed=False)
    exchange, parameter = PowerSgd(), nn.Parameter(torch.zeros(512, 512, device="cuda"))
    given = torch.outer(torch.arange(512.0), torch.ones(512)).cuda()
    got = [exchange.add_up([parameter], given.flatten().clone()) for _ in range(20)]
    apart = max(float((future.wait().view(512, 512) - given).abs().max()) for future in got)
    return {"metric": metric.device.type, "apart": apart}


@NO_GPU
@pytest.mark.gpu
def test_over_nccl_metrics_of_the_host_count_and_thin_matrices_are_whole(tmp_path: pathlib.Path) -> None:
    (found,) = on_ranks(over_nccl, tmp_path, size=1)
    assert found["metric"] == "cuda"
    assert found["apart"] < 1.0  # of 511


@NO_GPU
@pytest.mark.gpu
@pytest.mark.parametrize("loss", WEIGHTED)
def test_a_loss_with_weights_of_classes_runs_on_a_gpu(loss: Any) -> None:
    made = trainer(loss=copy.deepcopy(loss), settings=Settings(device="cuda", accumulate=2))
    assert made.fit(batches(), epochs=1).updates == 4
