"""Each remedy on and off in one process. ``test_remedies.py`` runs this file in an interpreter of its own, because the remedies
replace functions of torch."""

from __future__ import annotations

import builtins
import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torch.utils.data._utils.collate import default_collate

from trimtab.probe.inside import roots
from trimtab.probe.inside.remedies import apply
from trimtab.probe.inside.remedies.loaders import BatchReader, changed
from trimtab.probe.inside.remedies.modules import around


@pytest.fixture(autouse=True)
def off_again() -> Iterator[None]:
    yield
    apply({})


def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A call of an outermost module."""
    return around(module, module._call_impl, args, kwargs)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = call(model, torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize("kernel", ["fused", "foreach"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_optimizer_kernels_keep_losses_and_checkpoints(kernel: str, kind: Any) -> None:
    model, other = net(), net()
    plain, optimizer = kind(model.parameters(), lr=0.1), kind(other.parameters(), lr=0.1)
    want = train(model, plain) + train(model, plain)
    apply({"optimizer": kernel})
    got = train(other, optimizer)
    assert optimizer.param_groups[0][kernel] is True
    assert optimizer.state_dict()["param_groups"][0][kernel] == plain.param_groups[0][kernel]
    apply({})
    assert optimizer.param_groups[0][kernel] == plain.param_groups[0][kernel]
    assert got + train(other, optimizer) == pytest.approx(want, rel=1e-5)


def test_a_loaded_checkpoint_gets_the_kernels_again() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    apply({"optimizer": "fused"})
    train(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not optimizer.param_groups[0]["fused"]
    train(model, optimizer, 1)
    assert optimizer.param_groups[0]["fused"]


def test_gradients_are_freed() -> None:
    model = net()
    call(model, torch.randn(2, 4)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apply({"set_to_none": True})
    optimizer.zero_grad(set_to_none=False)
    assert model[0].weight.grad is None
    call(model, torch.randn(2, 4)).sum().backward()
    apply({})
    model.zero_grad(set_to_none=False)
    assert model[0].weight.grad is not None


def test_no_graph_in_evaluation_mode_unless_inputs_learn() -> None:
    model, x = net(), torch.randn(2, 4)
    apply({"no_grad": True})
    assert call(model, x).requires_grad
    model.eval()
    assert not call(model, x).requires_grad
    assert call(model, x.requires_grad_()).requires_grad
    assert torch.is_grad_enabled()


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8, padding_idx=0)
        self.widths: list[int] = []

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self.widths.append(ids.shape[1])
        mask = (ids != 0) if attention_mask is None else attention_mask
        hidden = self.embedding(ids)
        return {"hidden": hidden, "pooled": (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)}


@pytest.mark.parametrize("masked", [True, False])
def test_padding_is_cut_and_put_back(masked: bool) -> None:
    model, ids = Pooled(), torch.zeros(3, 20, dtype=torch.int64)
    ids[0, :5], ids[1, :7] = 3, 4
    ids[2, 0] = 9
    mask = {"attention_mask": (ids != 0).long()} if masked else {}
    want = model(ids, **mask)
    apply({"trim_padding": True})
    got = call(model, ids, **mask)
    assert model.widths == [20, 7]
    assert got["hidden"].shape == want["hidden"].shape
    assert torch.allclose(got["pooled"], want["pooled"], rtol=1e-5)  # sums in another order
    assert torch.equal(got["hidden"][ids != 0], want["hidden"][ids != 0])
    apply({})
    call(model, ids, **mask)
    assert model.widths[-1] == 20


def test_channels_last_and_back_with_the_state_of_the_optimizer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    other, x = copy.deepcopy(model), torch.randn(2, 3, 10, 10)
    optimizer, plain = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, other))

    def step(net: nn.Module, by: torch.optim.Optimizer) -> float:
        by.zero_grad()
        loss = call(net, x).square().mean()
        loss.backward()
        by.step()
        return float(loss.detach())

    want = [step(other, plain) for _ in range(4)]
    got = [step(model, optimizer)]
    apply({"channels_last": True})
    got.append(step(model, optimizer))
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    momentum = optimizer.state[model[0].weight]["momentum_buffer"]
    assert momentum.is_contiguous(memory_format=torch.channels_last)
    apply({})
    assert model[0].weight.is_contiguous()
    got += [step(model, optimizer) for _ in range(2)]
    assert got == pytest.approx(want, rel=1e-4)


def test_float64_becomes_float32_and_outputs_stay_float64() -> None:
    model, x = net().double(), torch.randn(8, 4, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters())
    call(model, x).sum().backward()
    optimizer.step()
    want = model(x)
    apply({"float32": True})
    got = call(model, x)
    assert model[0].weight.dtype == torch.float32
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.float32
    assert got.dtype == torch.float64
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)
    got.sum().backward()
    optimizer.step()
    apply({})
    assert model[0].weight.dtype == torch.float64
    call(model, x).sum().backward()
    optimizer.step()


def test_autocast_gives_float32_outputs() -> None:
    model, x = net(), torch.randn(8, 4)
    apply({"autocast": "bfloat16"})
    got = call(model, x)
    assert got.dtype == torch.float32
    assert not torch.equal(got, model(x))
    assert torch.allclose(got, model(x), atol=0.05)


def test_anomaly_mode_stays_off_and_comes_back() -> None:
    torch.autograd.set_detect_anomaly(True)
    apply({"debug_off": True})
    assert not torch.is_anomaly_enabled()
    torch.autograd.set_detect_anomaly(True)
    assert not torch.is_anomaly_enabled()
    torch.set_anomaly_enabled(True, check_nan=False)
    apply({})
    assert torch.is_anomaly_enabled()
    assert not torch.is_anomaly_check_nan_enabled()
    torch.autograd.set_detect_anomaly(False)
    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize(("settings", "frames"), [({"compile_dynamic": True}, 1), ({}, 3)])
@pytest.mark.parametrize("decorated", [True, False])
def test_the_script_compiles_for_dynamic_sizes(settings: dict[str, Any], frames: int, decorated: bool) -> None:
    apply(settings)
    counter = CompileCounter()

    def double(x: torch.Tensor) -> torch.Tensor:
        return x + x

    made = (
        torch.compile(backend=counter, dynamic=False)(double)
        if decorated
        else torch.compile(double, backend=counter, dynamic=False)
    )
    for rows in (3, 5, 7):
        assert torch.equal(made(torch.ones(rows, 2)), torch.full((rows, 2), 2.0))
    assert counter.frame_count == frames


def test_threads_hold_against_the_script() -> None:
    before = torch.get_num_threads()
    apply({"threads": 1})
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 1
    apply({})
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


class Table(Dataset[Any]):
    """Takes one place, or a tensor of places; ``kind`` makes it unfit for the latter."""

    def __init__(self, kind: str = "plain") -> None:
        self.x, self.kind, self.asked = torch.randn(64, 4), kind, list[Any]()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: Any) -> Any:
        self.asked.append(place)
        x = self.x[place]
        if self.kind == "mean":
            x = x - x.mean()
        if self.kind == "draws":
            x = x * random.random()
        if self.kind == "branches" and place > 3:
            x = x + 1
        return x, np.float32(2.0) if self.kind == "constant" else x[..., 0]


@pytest.mark.parametrize(
    ("kind", "trusted"), [("plain", True), ("mean", False), ("draws", False), ("branches", False), ("constant", False)]
)
def test_a_data_set_is_read_in_batches_only_if_that_is_proven(kind: str, trusted: bool) -> None:
    data = Table(kind)
    reader = BatchReader(data)
    for i in range(6):
        places = list(range(i * 8, i * 8 + 8))
        random.seed(i)
        want = default_collate([data[place] for place in places])
        random.seed(i)
        got = reader.read(places, lambda places=places: default_collate([data[place] for place in places]))
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert reader.trusted is trusted


def test_places_of_a_subset_may_be_of_any_type() -> None:
    data = Subset({"a": 1.0, "b": 2.0}, ["b", "a"])  # type: ignore[arg-type]
    reader = BatchReader(data)
    assert reader.read([0, 1], lambda: default_collate([data[place] for place in (0, 1)])).tolist() == [2.0, 1.0]


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_read_tables_at_once(workers: int) -> None:
    data = Subset(TensorDataset(torch.arange(40.0).reshape(20, 2), torch.arange(20)), range(3, 17))
    want = list(DataLoader(data, batch_size=4))
    line = roots.loaders.site(roots.loaders.caller(__import__("sys")._getframe())).rpartition(":")
    site = f"{line[0]}:{int(line[2]) + 3}"
    apply({"loaders": {site: {"batch_fetch": True, "workers": workers}}})
    loader = DataLoader(data, batch_size=4)
    assert loader.num_workers == workers
    got = list(loader)
    assert [type(batch) for batch in got] == [type(batch) for batch in want]
    assert all(torch.equal(a, b) for one, two in zip(want, got, strict=True) for a, b in zip(one, two, strict=True))
    apply({})
    assert DataLoader(data, batch_size=4).num_workers == 0


def test_workers_that_stay_keep_the_shuffled_order_of_every_epoch() -> None:
    data = TensorDataset(torch.arange(20))
    torch.manual_seed(0)
    plain = DataLoader(data, batch_size=5, shuffle=True)
    want = [[batch[0].tolist() for batch in plain] for _ in range(3)]
    line = roots.loaders.site(roots.loaders.caller(__import__("sys")._getframe())).rpartition(":")
    apply({"loaders": {f"{line[0]}:{int(line[2]) + 3}": {"workers": 1, "persistent": True}}})
    torch.manual_seed(0)
    loader = DataLoader(data, batch_size=5, shuffle=True)
    assert loader.persistent_workers
    assert [[batch[0].tolist() for batch in loader] for _ in range(3)] == want
    apply({})


def test_arguments_that_need_workers_go_with_them() -> None:
    given = {"dataset": [1], "num_workers": 2, "prefetch_factor": 4, "persistent_workers": True, "timeout": 3}
    assert changed(given, {"workers": 0}) == {"dataset": [1], "num_workers": 0}
    assert changed({"dataset": [1]}, {"workers": 2, "persistent": True, "prefetch": 3}) == {
        "dataset": [1],
        "num_workers": 2,
        "persistent_workers": True,
        "prefetch_factor": 3,
    }


def test_a_line_that_is_left_out_has_the_value_that_it_had_first() -> None:
    apply({"lines": ["train.py:7"]})
    value_of = builtins.__trimtab_reuse__  # type: ignore[attr-defined]
    ran: list[int] = []

    def compute(value: Any) -> Any:
        ran.append(1)
        return value

    assert [value_of("train.py:7", lambda n=n: compute(n)) for n in range(2)] == [0, 1]
    for _ in range(2):  # it keeps its value while the setting is switched off, for lines that run in few steps
        apply({"without": "lines", "lines": ["train.py:7"]})
        found = value_of("train.py:7", lambda: compute({"x": [1]}))
        assert found.pop("x") == [1], "the script may change what it gets"
        assert value_of("train.py:9", lambda: compute(5)) == 5
        apply({"lines": ["train.py:7"]})
    assert len(ran) == 2 + 1 + 2
    apply({"without": "lines", "lines": ["train.py:1", "train.py:2"]})
    weight = torch.ones(2, requires_grad=True)
    for _ in range(2):
        (weight.sum() + value_of("train.py:1", lambda: (weight * weight).sum())).backward()
        assert list(value_of("train.py:2", lambda: iter([1, 2]))) == [1, 2]
    apply({})


def test_ceilings_leave_phases_out(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    data = Table()
    loader = DataLoader(data, batch_size=8)
    iterator = iter(loader)
    next(iterator)
    apply({"without": "data"})
    next(iterator)
    read = len(data.asked)
    assert sum(1 for _ in iterator) == 6, "the epoch is as long as before"
    assert len(data.asked) == read
    apply({"without": "logging"})
    print("lost")
    apply({"without": "synchronization"})
    values = [torch.tensor(float(i)).item() for i in range(3)]
    assert values == [0.0, 0.0, 0.0]
    apply({"without": "saving"})
    torch.save({"a": torch.ones(9)}, tmp_path / "model.pt")
    assert (tmp_path / "model.pt").stat().st_size == 0
    apply({})
    print("kept")
    torch.save({"a": torch.ones(9)}, tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt")["a"].sum() == 9
    assert [torch.tensor(float(i)).item() for i in range(2)] == [0.0, 1.0]
    assert capsys.readouterr().out == "kept\n"
    assert len(list(DataLoader(data, batch_size=8))) == 8
