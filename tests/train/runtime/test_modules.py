"""Models of other kinds: partly frozen, on another device, of lazy modules, with sparse buffers."""

from __future__ import annotations

import functools
import pathlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from _runs import EPOCH, loader, trainer
from trimtab import OptimizerSettings, Settings, Trainer
from trimtab.errors import UsageError
from trimtab.train.checkpoint.checkpoints import Checkpoints
from trimtab.train.distributed.process_group import Group
from trimtab.train.engine.setup import check_place, optimizer_for
from trimtab.train.telemetry.events import Event, Progressed

pytestmark = pytest.mark.usefixtures("one_thread")


def test_frozen_modules_stay_frozen_and_a_model_in_evaluation_mode_is_trained() -> None:
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].eval()
    made = trainer(model, optimizer=functools.partial(torch.optim.SGD, lr=1e-6))
    for epochs in (2, 3):
        made.fit(loader(), loader(), epochs=epochs)
        assert model[1].num_batches_tracked == 0
    other = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).eval()
    trainer(other).fit(loader(), epochs=1)
    assert other[1].num_batches_tracked == 8


def test_frozen_modules_stay_frozen_under_another_trainer() -> None:
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))
    model[1].eval()
    slow = functools.partial(torch.optim.SGD, lr=1e-6)
    for _ in range(2):
        trainer(model, optimizer=slow).fit(loader(), epochs=1)
        assert model[1].num_batches_tracked == 0
        assert not model.training
    modes: list[bool] = []
    model[2].register_forward_hook(lambda module, *_: modes.append(module.training))
    model[1] = nn.BatchNorm1d(4)
    trainer(model, optimizer=slow).fit(loader(), epochs=1)
    assert model[1].num_batches_tracked == EPOCH
    assert all(modes)
    model.train()[1].eval()  # chosen anew
    trainer(model, optimizer=slow).fit(loader(), epochs=1)
    model.train()
    trainer(model, optimizer=slow).fit(loader(), epochs=1)
    assert model[1].num_batches_tracked == 2 * EPOCH


def test_a_part_that_is_in_evaluation_mode_is_told_of_and_can_be_thawed() -> None:
    def network() -> nn.Sequential:
        body = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Identity())
        return nn.Sequential(body, nn.Linear(4, 1), nn.Identity())

    model, slow = network(), functools.partial(torch.optim.SGD, lr=1e-6)
    model[0].eval()  # as it comes from a hub
    model[2].eval()  # to which it makes no difference
    made = trainer(model, optimizer=slow)
    said = "In evaluation mode, and so it stays: 0. model.train() before fit() has all modules train."
    assert made.fit(loader(), epochs=1).notes == (said,)
    assert made.fit(loader(), epochs=2).notes == (said,)
    model[0].train()  # the run has left the whole model in evaluation mode
    assert trainer(model, optimizer=slow).fit(loader(), epochs=1).notes == ()
    assert model[0][1].num_batches_tracked == EPOCH
    other = nn.Sequential(nn.Linear(1, 1), nn.Dropout(), *(nn.BatchNorm1d(1) for _ in range(3)), nn.Linear(1, 1).eval())
    for index in range(1, 5):
        other[index].eval()
    (note,) = trainer(other, optimizer=slow).fit(loader(), epochs=1).notes
    assert note.startswith("In evaluation mode, and so it stays: 1, 2, 3 and 2 more. ")


def test_what_a_callback_puts_in_another_mode_stays_so_and_is_so_in_the_run_that_goes_on(tmp_path: pathlib.Path) -> None:
    def made(name: str) -> tuple[Trainer, list[tuple[bool, bool]]]:
        modes: list[tuple[bool, bool]] = []

        def freeze(run: Trainer, event: Event) -> None:
            if isinstance(event, Progressed) and event.update == 3:
                run.model[1].eval()
                run.model[2].train()
            modes.append((run.model[1].training, run.model[2].training))

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))
        model[2].eval()
        slow = functools.partial(torch.optim.SGD, lr=1e-6)
        one = trainer(model, optimizer=slow, callbacks=[freeze], log_every=1, checkpoint=tmp_path / name)
        model[1].register_forward_pre_hook(lambda module, _: modes.append((module.training, model[2].training)))
        return one, modes

    whole, modes = made("whole")
    whole.fit(loader(), loader(), epochs=3)
    assert modes[0] == (True, False)
    assert modes[-1] == (False, False)  # as every run leaves a model
    made("cut")[0].fit(loader(), loader(), steps=EPOCH + 2)
    resumed, _ = made("cut")
    notes = resumed.resume().fit(loader(), loader(), epochs=3).notes
    assert "In evaluation mode, as the run before left it: 1." in notes
    assert "In training mode, as the run before left it: 2." in notes
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    other, _ = made("cut")
    other.model[2].train()
    other.model[1].eval()  # chosen anew
    assert not [note for note in other.resume().fit(loader(), epochs=4).notes if "left it" in note]


class Placed(nn.Linear):
    """Says that its parameters are on a GPU."""

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield types.SimpleNamespace(device=torch.device("cuda", 1))


def test_a_model_is_not_taken_off_its_gpu() -> None:
    said = r"The model is on cuda, and Settings device is 'cpu', where it would be trained\. Give Settings\(device='cuda'\), or"
    with pytest.raises(UsageError, match=said):
        trainer(Placed(1, 1))
    check_place(Placed(1, 1), torch.device("cuda", 0))
    check_place(nn.Linear(1, 1, device="meta"), torch.device("cuda"))
    check_place(nn.Linear(1, 1), torch.device("cuda"))


def test_a_model_without_values_is_refused() -> None:
    said = (
        r"Linear has a tensor of shape \(1, 2\) on the meta device, which holds no values\. Make the model on the CPU; or call"
    )
    with pytest.raises(UsageError, match=said):
        trainer(nn.Linear(2, 1, device="meta"))


def lazy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 1))


def random_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 2, generator=made), torch.randn(4, 1, generator=made)) for _ in range(5)]


def test_lazy_modules_are_made_by_the_first_update() -> None:
    found = []
    for options in ({}, {"settings": Settings(optimizer=OptimizerSettings(nonfinite="skip"))}):
        made = trainer(lazy(), **options)
        made.fit(random_batches(), epochs=1)
        assert made.model[1].num_batches_tracked == 5
        found.append(made.model.state_dict())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_run_of_lazy_modules_can_be_gone_on_with(ema: float | None, tmp_path: pathlib.Path) -> None:
    data = random_batches()
    whole = trainer(lazy(), ema=ema)
    whole.fit(data, data, epochs=2)
    trainer(lazy(), ema=ema, checkpoint=tmp_path).fit(data, data, epochs=1)
    resumed = trainer(lazy(), ema=ema, checkpoint=tmp_path).resume()
    assert resumed.fit(data, data, epochs=2).updates == 5
    torch.testing.assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)


def test_what_lazy_modules_cannot_have_is_said() -> None:
    model = nn.Sequential(nn.LazyConv2d(2, 1), nn.Flatten(), nn.LazyLinear(1))
    with pytest.raises(UsageError, match="Lazy modules have no memory_format before a forward pass: call the model once"):
        trainer(model, settings=Settings(memory_format="channels_last")).fit(random_batches(), epochs=1)
    with pytest.raises(UsageError, match=r"0\.weight has no shape before a forward pass, and all processes must begin with"):
        Group.__new__(Group).place(model, Settings())


@pytest.mark.filterwarnings("ignore:Sparse (CSR|BSR|invariant)")
def test_sparse_buffers_are_kept(tmp_path: pathlib.Path) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.register_buffer("near", torch.eye(4).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.near, self.layer(x))

    trainer(Graph(), checkpoint=tmp_path, ema=0.9).fit(loader(), epochs=1)
    assert trainer(Graph(), checkpoint=tmp_path, ema=0.9).resume().fit(loader(), epochs=2).updates == EPOCH
    dense = torch.eye(4)
    made = [dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsr((2, 2))]
    Checkpoints(tmp_path / "all").save(1, {"all": made})
    for one, other in zip(Checkpoints(tmp_path / "all").load()["all"], made, strict=True):
        assert one.layout == other.layout
        assert torch.equal(one.to_dense(), dense)
    with pytest.raises(
        UsageError, match="A tensor with the layout torch._mkldnn cannot be kept in a checkpoint. Make it dense"
    ):
        Checkpoints(tmp_path / "none").save(1, {"x": dense.to_mkldnn()})


class Video(nn.Module):
    """Convolutions over three axes, then over two."""

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.image = nn.Conv3d(1, 2, 3, padding=1), nn.Conv2d(8, 2, 3)

    def forward(self, clip: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.image(self.frames(clip).flatten(1, 2)).mean((2, 3))
        return found


def test_only_weights_of_convolutions_over_two_axes_are_laid_out_channels_last() -> None:
    model = Video()
    data = [(torch.randn(2, 1, 4, 6, 6), torch.tensor([0, 1]))]
    made = trainer(model, loss=nn.CrossEntropyLoss(), settings=Settings(memory_format="channels_last"))
    assert made.fit(data, epochs=1).updates == 1
    assert model.image.weight.is_contiguous(memory_format=torch.channels_last)
    assert not model.image.weight.is_contiguous()
    assert model.frames.weight.is_contiguous()


@pytest.mark.parametrize("fused", [False, True])
def test_the_state_of_an_optimizer_follows_its_parameters(fused: bool) -> None:
    here, model = nn.Linear(2, 1), nn.Linear(2, 1, device="meta")  # a model that comes to a GPU keeps its parameters
    used, optimizer = (torch.optim.AdamW(each.parameters(), fused=fused) for each in (here, model))
    here(torch.ones(1, 2)).sum().backward()
    used.step()
    for parameter, other in zip(model.parameters(), here.parameters(), strict=True):
        optimizer.state[parameter] = {**used.state[other], "nested": [{"x": torch.ones(1)}]}
    assert optimizer_for(model, optimizer) is optimizer
    for state in optimizer.state.values():
        assert {name: value.is_meta for name, value in state.items() if name != "nested"} == {
            "step": fused, "exp_avg": True, "exp_avg_sq": True,
        }  # fmt: skip
    assert optimizer.state[model.bias]["nested"][0]["x"].is_meta


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_an_optimizer_that_has_state_goes_on_when_the_model_comes_to_a_gpu() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    trainer(model, optimizer=optimizer).fit(loader(), steps=2)
    trainer(model, optimizer=optimizer, settings=Settings(device="cuda")).fit(loader(), steps=2)
    assert int(optimizer.state[model.weight]["step"]) == 4
    assert optimizer.state[model.weight]["exp_avg"].is_cuda
