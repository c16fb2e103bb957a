"""Training on two real processes: what it computes equals one process on all the data, whatever happens on the way."""

from __future__ import annotations

import concurrent.futures
import functools
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from _ranks import failure, on_ranks
from _runs import settings_of
from trimtab.errors import PeerError, TrimtabError, UsageError
from trimtab.train.distributed.data_parallel import DataParallelGroup
from trimtab.train.distributed.data_sharding import Share, share
from trimtab.train.distributed.devices import local_device
from trimtab.train.distributed.launch import _attempt_name
from trimtab.train.distributed.process_group import Group
from trimtab.train.telemetry.stragglers import Pace, slow_process
from trimtab.train.telemetry.summary import Summary
from trimtab.train.trainer import Trainer

CLASSES = 4
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def batches(count: int = 7) -> Batches:
    """Batches of unequal size, some of whose labels are to be ignored."""
    random = torch.Generator().manual_seed(1)
    made = []
    for index in range(count):
        inputs = torch.randn(4 + index, 8, generator=random)
        labels = torch.randint(0, CLASSES, (4 + index,), generator=random)
        labels[torch.rand(4 + index, generator=random) < 0.4 * (index % 2)] = -100
        made.append((inputs, labels))
    return made


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, CLASSES))


class Faulty(nn.Module):
    """A network that fails in its ``call``-th forward pass where a batch has more than ``most`` examples.

    Args:
        backward: whether it fails in the middle of the backward pass instead.
    """

    def __init__(
        self, call: int, most: int, error: type[Exception] = torch.OutOfMemoryError, *, backward: bool = False
    ) -> None:
        super().__init__()
        self.network, self.call, self.most, self.error, self.backward = network(), call, most, error, backward
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        hidden: torch.Tensor = self.network[:2](inputs)
        if self.calls >= self.call and len(inputs) > self.most and self.training:
            if not self.backward:
                self.fail()
            hidden.register_hook(lambda grad: self.fail())
        result: torch.Tensor = self.network[2:](hidden)
        return result

    def fail(self) -> None:
        raise self.error("injected")


class Idle(nn.Module):
    """A network with parameters that take part in nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.idle = network(), nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.network(inputs)
        return result


class Reentrant(nn.Module):
    """A layer that is called twice, each time within a checkpoint whose backward pass is one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.head = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for _ in range(2):
            hidden = checkpoint(self.layer, hidden, use_reentrant=True)
        found: torch.Tensor = self.head(hidden)
        return found


class Branched(nn.Module):
    """A network with a layer that only batches which are not marked go through."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.branch = network(), nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.network(inputs if float(inputs[0, 0]) == MARK else inputs + self.branch(inputs))
        return result


MARK = 7.0


def marked(*places: int) -> Batches:
    """Fourteen batches, some of which are marked."""
    made = batches(14)
    for place in places:
        made[place][0][0, 0] = MARK
    return made


class Linked(nn.Module):
    """A network with a sparse matrix, which changes by itself."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.network = network()
        self.register_buffer("links", (scale * torch.eye(8)).to_sparse_coo())
        self.register_buffer("rows", (scale * torch.eye(8)).to_sparse_csr(), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.network(torch.sparse.mm(self.links, inputs.T).T)
        return result


def trainer(model: nn.Module, *, rate: float = 0.3, **settings: Any) -> Trainer:
    return Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.5),
        settings=settings_of(**settings),
    )


def flat(model: nn.Module) -> list[float]:
    values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    found: list[float] = torch.cat([value.detach().flatten() for value in values]).tolist()
    return found


def run(model: nn.Module, accumulate: int, **settings: Any) -> dict[str, Any]:
    """Three epochs, as JSON."""
    made = trainer(model, accumulate=accumulate, clip_norm=1.0, **settings)
    summary = made.fit(batches(), batches(3), epochs=3)
    return {"parameters": flat(model), **figures(summary)}


def figures(summary: Summary) -> dict[str, Any]:
    return {
        "loss": summary.loss,
        "validation": summary.metrics["loss"] if summary.metrics else None,
        "updates": summary.updates,
        "notes": list(summary.notes),
        "ended": summary.ended,
        "communication": summary.shares["communication"],
    }


def same(found: Mapping[str, Any], wanted: Mapping[str, Any], tolerance: float = 1e-5) -> None:
    """Parameters and losses are those of ``wanted``."""
    torch.testing.assert_close(
        torch.tensor(found["parameters"]), torch.tensor(wanted["parameters"]), rtol=tolerance, atol=tolerance
    )
    assert found["loss"] == pytest.approx(wanted["loss"], rel=tolerance)
    if wanted.get("validation") is not None:
        assert found["validation"] == pytest.approx(wanted["validation"], rel=tolerance)


# What the two processes do, in a row; the tests below look at what they found.


def rank() -> int:
    return torch.distributed.get_rank()


def accumulated(folder: pathlib.Path) -> dict[str, Any]:
    return run(network(), 2, bucket_mb=0.002)


def buckets(folder: pathlib.Path) -> dict[str, Any]:
    """Bytes per update and buckets, for one and for eight batches per update."""
    found = []
    for accumulate in (1, 8):
        made = trainer(network(), accumulate=accumulate, bucket_mb=0.002)
        calls: list[int] = []
        world = made.world
        assert isinstance(world, DataParallelGroup)
        begin = world.exchange.begin
        world.exchange.begin = lambda b, calls=calls, begin=begin: (calls.append(b.flat.nbytes), begin(b))[1]  # type: ignore
        updates = made.fit(batches(16 * accumulate), epochs=1).updates
        found.append([updates, len(calls), sum(calls)])
    return {"found": found}


def idle(folder: pathlib.Path) -> dict[str, Any]:
    model = Idle()
    found = run(model, 2)
    return {**found, "parameters": flat(model.network)}


def decayed(folder: pathlib.Path) -> bool:
    """Whether weights that take part in nothing change by an optimizer that makes all smaller."""
    model = Idle()
    before = model.idle.weight.detach().clone()
    made = Trainer(model, loss=nn.CrossEntropyLoss(), optimizer=functools.partial(torch.optim.AdamW, weight_decay=0.5))
    made.fit(batches(), epochs=1)
    return not torch.equal(before, model.idle.weight)


def twice(folder: pathlib.Path) -> list[str]:
    return failure(lambda: trainer(Reentrant(), bucket_mb=0.001).fit(batches(), epochs=1))


def out_of_memory(folder: pathlib.Path) -> dict[str, Any]:
    """Rank 1 runs out of memory in its first, or a later, forward or backward pass."""
    began = time.monotonic()
    found: dict[str, Any] = {}
    for name, call, backward in (("first", 1, False), ("forward", 4, False), ("backward", 4, True)):
        most = 5 if rank() == 1 else 1000
        model = Faulty(call, most, backward=backward)
        found[name] = {**run(model, 2, bucket_mb=0.002), "parameters": flat(model)}
    found["seconds"] = time.monotonic() - began
    return found


def failing(folder: pathlib.Path) -> dict[str, Any]:
    """Rank 1 fails in an ordinary way: in the model, and in its data."""

    def broken() -> Iterable[Any]:
        yield from batches(3)
        if rank() == 1:
            raise ValueError("the file is gone")
        yield from batches(3)

    class Stream:
        sharded = True

        def __iter__(self) -> Any:
            return iter(broken())

    class Sized(Stream):
        def __len__(self) -> int:
            return 6

    found: dict[str, Any] = {}
    data: list[tuple[str, nn.Module, Any]] = [
        ("forward", Faulty(4, 0 if rank() == 1 else 1000, ValueError), batches()),
        ("backward", Faulty(4, 0 if rank() == 1 else 1000, ValueError, backward=True), batches()),
        ("stream", network(), Stream()),
        ("sized", network(), Sized()),
    ]
    for name, model, given in data:
        try:
            trainer(model).fit(given, epochs=2)
        except (TrimtabError, ValueError) as error:
            found[name] = [type(error).__name__, str(error)]
    return found


def stopped(folder: pathlib.Path) -> dict[str, Any]:
    """Rank 1 is asked to stop, as by a signal."""
    made = trainer(network())
    updates = made.updates(batches(), epochs=50)
    for count, _ in enumerate(updates, 1):
        if count == 6 and rank() == 1:
            made.stop("It was asked to.")
    return {"update": made.position.update}


def shared_out(folder: pathlib.Path) -> dict[str, Any]:
    """Which examples of a stock loader this process trains on in two epochs."""
    seen: list[int] = []

    class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
        def __len__(self) -> int:
            return 13

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append(index)
            return torch.full((8,), float(index)), torch.tensor(index % CLASSES)

    trainer(network(), rate=0.01).fit(DataLoader(Numbers(), batch_size=2, shuffle=True), epochs=2)
    return {"seen": seen}


def statistics(folder: pathlib.Path) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))
    trainer(model).fit(batches(), batches(2), epochs=1)
    return {"buffers": [buffer.tolist() for buffer in model.buffers()]}


def slow(folder: pathlib.Path) -> dict[str, Any]:
    class Sleepy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02 * rank())
            result: torch.Tensor = self.network(inputs)
            return result

    made = trainer(Sleepy())
    made.context.log_every = 3
    return {"notes": list(made.fit(batches(12), epochs=2).notes)}


def branched(folder: pathlib.Path) -> dict[str, Any]:
    """A layer gets no gradient in the fifth update of each epoch: in both processes, or in that of rank 1."""
    return {name: branches(places, 1) for name, places in BRANCHES.items()}


BRANCHES = {"both": (8, 9), "second": (9,)}


def branches(places: tuple[int, ...], accumulate: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Branched()
    summary = trainer(model, accumulate=accumulate).fit(marked(*places), epochs=2)
    return {"parameters": flat(model), **figures(summary)}


def linked(folder: pathlib.Path) -> dict[str, Any]:
    """Sparse buffers that differ between the processes."""
    found = {}
    for sharding in ("replicate", "shard"):
        model = Linked(1.0 + rank())
        run(model, 2, sharding=sharding)
        buffers = dict(model.named_buffers())
        found[sharding] = {"parameters": flat(model), **{name: value.to_dense().tolist() for name, value in buffers.items()}}
    model = Linked()
    model.links = torch.ones(8, 8).to_sparse_coo() if rank() else model.links
    try:
        trainer(model)
    except TrimtabError as error:
        found["other"] = {"error": str(error)}
    return found


CHECKS: list[Callable[[pathlib.Path], Any]] = [
    *(accumulated, buckets, idle, decayed, twice, out_of_memory, failing, stopped, shared_out, statistics, slow),
    *(branched, linked),
]


def all_checks(folder: pathlib.Path) -> dict[str, Any]:
    return {check.__name__: check(folder) for check in CHECKS}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(all_checks, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """One process on all the data."""
    return run(network(), 4)


@pytest.mark.parametrize("check", ["accumulated", "idle"])
def test_two_processes_equal_one_on_all_the_data(found: list[dict[str, Any]], alone: dict[str, Any], check: str) -> None:
    for each in found:
        same(each[check], alone)
        assert each[check]["updates"] == alone["updates"] == 6


def test_gradients_cross_once_per_update(found: list[dict[str, Any]]) -> None:
    for each in found:
        (updates, buckets, size), (again, buckets_of_8, size_of_8) = each["buckets"]["found"]
        assert updates == again == 8
        assert buckets > updates, "there are several buckets"
        assert (buckets, size) == (buckets_of_8, size_of_8)


def test_what_gets_a_gradient_in_no_process_stays_as_it_is(found: list[dict[str, Any]]) -> None:
    assert [each["decayed"] for each in found] == [False, False]


def test_a_second_gradient_in_one_backward_pass_is_refused_where_the_first_has_crossed(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["twice"][0] == "UsageError"
        assert " got a second gradient in one backward pass, after the first had been sent" in each["twice"][1]


@pytest.mark.parametrize("where", ["first", "forward", "backward"])
def test_memory_that_runs_out_in_one_process_costs_no_update(
    found: list[dict[str, Any]], alone: dict[str, Any], where: str
) -> None:
    for each in found:
        same(each["out_of_memory"][where], alone)
        assert each["out_of_memory"][where]["updates"] == 6
        assert each["out_of_memory"]["seconds"] < 30
    assert "did not fit into memory" in "".join(found[0]["out_of_memory"][where]["notes"])


@pytest.mark.parametrize("where", ["forward", "backward", "stream", "sized"])
def test_a_process_that_fails_leaves_no_other_waiting(found: list[dict[str, Any]], where: str) -> None:
    peer, own = found[0]["failing"][where], found[1]["failing"][where]
    assert peer == [PeerError.__name__, "The process of rank 1 failed; its own message says why."]
    assert "injected" in own[1] or "the file is gone" in own[1]


@pytest.mark.parametrize("name", BRANCHES)
def test_parameters_that_get_no_gradient_in_a_later_update_cost_no_update(found: list[dict[str, Any]], name: str) -> None:
    wanted = branches(BRANCHES[name], 2)
    for each in found:
        same(each["branched"][name], wanted)
        assert each["branched"][name]["updates"] == 14


@pytest.mark.filterwarnings("ignore:Sparse .* support is in beta state")
@pytest.mark.parametrize("sharding", ["replicate", "shard"])
def test_sparse_buffers_are_those_of_the_first_process(found: list[dict[str, Any]], sharding: str) -> None:
    model = Linked()
    run(model, 4)
    for each in found:
        torch.testing.assert_close(torch.tensor(each["linked"][sharding]["parameters"]), torch.tensor(flat(model)))
        assert each["linked"][sharding]["links"] == each["linked"][sharding]["rows"] == torch.eye(8).tolist()
        assert each["linked"]["other"]["error"].startswith("The processes have different models")


def test_all_processes_stop_at_the_same_update(found: list[dict[str, Any]]) -> None:
    assert [each["stopped"]["update"] for each in found] == [7, 7]


def test_a_stock_loader_is_shared_out_without_repeating_anything(found: list[dict[str, Any]]) -> None:
    seen = [each["shared_out"]["seen"] for each in found]
    assert [len(each) for each in seen] == [14, 12]
    assert sorted(seen[0][:7] + seen[1][:6]) == sorted(seen[0][7:] + seen[1][6:]) == list(range(13))
    assert seen[0][:7] != seen[0][7:]


def test_statistics_are_those_of_all(found: list[dict[str, Any]]) -> None:
    assert found[0]["statistics"] == found[1]["statistics"]


def test_a_slow_process_is_named(found: list[dict[str, Any]]) -> None:
    (note,) = [note for note in found[0]["slow"]["notes"] if "times as long" in note]
    assert note.startswith("The process of rank 1 on ")
    assert "most of it in 'forward'" in note


def test_the_summary_has_the_share_of_communication(found: list[dict[str, Any]]) -> None:
    assert found[0]["accumulated"]["communication"] > 0


def test_shares_of_an_order() -> None:
    parts = [list(Share(10, rank, 3, seed=None)) for rank in range(3)]
    assert parts == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert [len(Share(10, rank, 3, seed=4)) for rank in range(3)] == [4, 3, 3]
    assert share([1, 2, 3, 4, 5], "train", 1, 2, 0) == [2, 4]


def test_what_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(UsageError, match=r"train is a generator, and with 2 processes each would train on all of it\. Give a"):
        share((batch for batch in batches()), "train", 0, 2, 0)
    data = TensorDataset(torch.zeros(8, 1))
    drawn = DataLoader(data, sampler=torch.utils.data.RandomSampler(data, replacement=True))
    with pytest.raises(UsageError, match="draws with replacement"):
        share(drawn, "train", 0, 2, 0)


def test_only_a_slow_process_is_a_slow_process() -> None:
    def pace(seconds: float) -> Pace:
        return Pace(8, {"forward": seconds, "data": 0.1, "communication": 9.0 - seconds}, host=f"host{seconds:g}")

    assert slow_process([pace(1.0)]) is None
    assert slow_process([pace(1.0), pace(1.1), pace(1.2)]) is None
    assert slow_process([pace(1.0), pace(3.1), pace(1.0)]) == (
        1,
        "The process of rank 1 on host3.1 takes 2.9 times as long per update as the others, most of it in 'forward', and all "
        "wait for it.",
    )


def test_processes_that_meet_agree_on_a_name_whatever_others_left_in_the_store() -> None:
    store = torch.distributed.HashStore()
    names = []
    for size in (3, 3, 2, 4):  # a host may have been lost, or come, between two attempts
        with concurrent.futures.ThreadPoolExecutor(size) as pool:
            found = set(pool.map(lambda rank, size=size: _attempt_name(store, rank, size), range(size)))
        assert len(found) == 1
        names += found
    assert len(set(names)) == 4


def test_a_process_takes_the_gpu_that_its_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("SLURM_LOCALID", raising=False)
    assert local_device("cuda") == torch.device("cuda")  # whichever is the current one
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "6")
    assert local_device("cuda").index == 2
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert local_device("cuda").index == 1
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_device("cuda").index == 3
    assert local_device("cuda:2").index == 2
    assert local_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # each process is shown its own only
    assert local_device("cuda").index == 0


def test_the_world_of_several_is_not_made_for_one() -> None:
    assert not isinstance(trainer(network()).world, Group)
