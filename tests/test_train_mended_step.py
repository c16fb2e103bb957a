"""From the batch to the update: what used to go wrong quietly."""

from __future__ import annotations

import copy
import json
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from trimtab.candidate import Settings
from trimtab.errors import NonFiniteError, WorkloadError
from trimtab.train.clock import HostClock
from trimtab.train.events import Event, JsonLines, Progressed, TensorBoard
from trimtab.train.feed import Feed, join, mover, split
from trimtab.train.objective import Objective
from trimtab.train.recompute import Recomputed
from trimtab.train.rehearsal import rehearsal
from trimtab.train.runtime import running
from trimtab.train.trainer import Trainer

CPU = torch.device("cpu")
Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pairs(count: int, size: int = 8) -> list[Pair]:
    draw = torch.Generator().manual_seed(0)
    return [(torch.randn(size, 4, generator=draw), torch.randint(0, 3, (size,), generator=draw)) for _ in range(count)]


def descent(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def trainer(model: nn.Module, **options: Any) -> Trainer:
    return Trainer(model, **{"loss": nn.CrossEntropyLoss(), "optimizer": descent, "progress": False, **options})


def test_a_module_that_stands_twice_in_a_chain_runs_twice_in_segments() -> None:
    torch.manual_seed(0)
    tanh, shared = nn.Tanh(), nn.Linear(4, 4)
    chain = nn.Sequential(shared, tanh, shared, tanh, nn.Linear(4, 3))
    inputs = torch.randn(5, 4)
    plain = chain(inputs)
    recomputed = Recomputed([chain], segments=2)
    torch.testing.assert_close(chain(inputs), plain, rtol=0, atol=0)
    recomputed.undo()


def test_a_forward_that_somebody_put_into_a_module_is_there_after_recomputing() -> None:
    module, inputs = nn.Linear(4, 4), torch.randn(2, 4)
    own = module.forward
    module.forward = lambda x: own(x) + 1  # type: ignore[method-assign]
    hooked, expected = module.forward, module(inputs)
    recomputed = Recomputed([module])
    torch.testing.assert_close(module(inputs), expected)
    recomputed.undo()
    assert module.forward is hooked


@pytest.mark.parametrize(("kind", "weight"), [("GPT2ForSequenceClassification", 2), ("GPT2LMHeadModel", 12)])
def test_the_class_of_a_model_says_what_its_loss_is_a_mean_over(kind: str, weight: int) -> None:
    """A classifier that was read from a language model's checkpoint still has that one's name in its config."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, num_labels=3, pad_token_id=0)
    model = getattr(transformers, kind)(config)
    model.config.architectures = ["GPT2LMHeadModel"]
    tokens = torch.randint(1, 20, (2, 7))
    labels = torch.tensor([0, 2]) if weight == 2 else tokens
    assert int(Objective(None)(model, {"input_ids": tokens, "labels": labels})[1]) == weight


def test_a_class_of_its_own_goes_by_what_the_config_says() -> None:
    class Wrapped(nn.Linear):
        config = type("Config", (), {"architectures": ["GPT2LMHeadModel"]})

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"loss": super().forward(x).mean()}

    batch = {"x": torch.randn(2, 4), "labels": torch.ones(2, 7, dtype=torch.long)}
    assert int(Objective(None)(Wrapped(4, 3), batch)[1]) == 12


@pytest.mark.parametrize("ignored", [255, -1])
def test_class_weights_go_with_any_label_that_is_left_out(ignored: int) -> None:
    weight, (inputs, labels) = torch.tensor([1.0, 2.0, 4.0]), pairs(1)[0]
    labels[::2] = ignored
    loss = nn.CrossEntropyLoss(weight=weight, ignore_index=ignored)
    found, total = Objective(loss)(nn.Linear(4, 3), (inputs, labels))
    assert float(total) == float(weight[labels[1::2]].sum())
    assert torch.isfinite(found)
    labels[1] = 7
    with pytest.raises(WorkloadError, match="A label is 7, but the model has 3 outputs"):
        Objective(loss)(nn.Linear(4, 3), (inputs, labels))


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
        made = trainer(model, settings=Settings(nonfinite=nonfinite), ema=0.5)  # type: ignore[arg-type]
        made.fit(batches, epochs=1)
        return made

    whole = pairs(3)
    broken = [*whole, (torch.full((8, 4), torch.nan), whole[0][1])]
    a, b = run(broken), run(whole)
    assert a.position.skipped == 1
    for name, value in b.model.state_dict().items():
        torch.testing.assert_close(a.model.state_dict()[name], value, rtol=0, atol=0)


class Named(NamedTuple):
    """A batch within a batch."""

    inputs: torch.Tensor
    name: tuple[str, ...]


def test_what_is_no_tensor_stays_with_its_example() -> None:
    inputs, names = torch.arange(8.0)[:, None].expand(8, 4), [f"{i}" for i in range(8)]
    whole = {
        "inputs": inputs,
        "names": names,
        "pair": Named(inputs, tuple(names)),
        "ids": np.arange(8),
        "kind": ["a", "b"],
        "n": 3,
    }
    parts = split(whole, 3)
    assert [part["names"] for part in parts] == [names[:3], names[3:6], names[6:]]
    assert [part["pair"].name for part in parts] == [tuple(names[:3]), tuple(names[3:6]), tuple(names[6:])]
    assert [part["ids"].tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert all(part["kind"] == ["a", "b"] and part["n"] == 3 for part in parts)
    again = join(parts)
    assert again["names"] == names
    assert again["pair"].name == tuple(names)
    assert again["ids"].tolist() == list(range(8))
    assert again["kind"] == ["a", "b"]
    assert torch.equal(again["inputs"], inputs)
    assert join([["x", "y"], ["z"]]) == ["x", "y", "z"]  # no tensor at all


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


def test_options_of_the_optimizer_are_as_before_after_a_rehearsal() -> None:
    model = nn.Linear(4, 3)
    optimizer = without_rate(model)
    optimizer.param_groups[0]["scale"] = scale = torch.ones(2)
    before = copy.deepcopy({k: v for k, v in optimizer.param_groups[0].items() if k not in ("params", "scale")})
    with rehearsal(model, optimizer):
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
        with running(Settings(tf32=True)):
            assert precisions()[:2] == ("tf32", "tf32")
        assert precisions() == before
    finally:
        backend.fp32_precision = "none"
    assert (torch.get_float32_matmul_precision(), precisions()) == (older, untouched)


class Shuffled(Sampler[int]):
    """An order per epoch, as DistributedSampler has."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch."""
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        """In order."""
        return iter(range(4))


@pytest.mark.parametrize("own", [True, False])
def test_the_sampler_within_a_batch_sampler_hears_of_epochs_once(own: bool) -> None:
    sampler, data = Shuffled(), list(range(4))
    loader: DataLoader[int]
    loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 2, False)) if own else DataLoader(data, 2, sampler=sampler)  # type: ignore[arg-type]
    feed = Feed(loader, 1, HostClock(), lambda batch: batch)
    feed.begin(0)
    feed.begin(1)
    assert sampler.epochs == [0, 1]
    Feed(
        DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 2, False)), 1, HostClock(), lambda batch: batch
    ).begin(1)  # type: ignore[arg-type]


class Graph:
    """Moves in place, as some libraries' batches do."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes

    def to(self, device: torch.device) -> Graph:
        """Itself, there."""
        self.nodes = self.nodes.to(device)
        return self


def test_objects_that_can_move_themselves_do() -> None:
    move, graph = mover(torch.device("meta")), Graph(torch.ones(2))
    packed, moved = move([pack_sequence([torch.ones(3), torch.ones(2)]), graph])
    assert isinstance(packed, PackedSequence)
    assert packed.data.is_meta
    assert packed.batch_sizes.device == CPU
    assert moved.nodes.is_meta
    assert not graph.nodes.is_meta
    encoding = pytest.importorskip("transformers").BatchEncoding({"input_ids": torch.ones(2, 3)}, n_sequences=1)
    there = move(encoding)
    assert there.input_ids.is_meta
    assert there.n_sequences == 1
    assert not encoding.input_ids.is_meta


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
        settings=Settings(clip_norm=clip),
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
