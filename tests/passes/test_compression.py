"""Passes that make smaller networks, and the one that trains them."""

import copy
import dataclasses
import errno
import pathlib
import signal
import subprocess
import sys
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from trimtab._internal.files import out_of_space
from trimtab.core.backend import BACKENDS
from trimtab.core.candidate import Candidate
from trimtab.core.recipe import Recipe
from trimtab.core.training_examples import TrainingExamples
from trimtab.errors import CompileError, StorageError, UsageError
from trimtab.passes.common.structure import kept_width
from trimtab.passes.drop_layers import DropLayers
from trimtab.passes.low_rank import LowRank
from trimtab.passes.prune_channels import PruneChannels
from trimtab.passes.prune_units import PruneUnits
from trimtab.passes.recover import FOLDER, Recover
from trimtab.passes.sparsify import Sparsify
from trimtab.passes.student import Student
from trimtab.passes.swap_activations import SwapActivations
from trimtab.testing.models import convnet, encoder, recurrent
from trimtab.train.checkpoint import checkpoints

pytest.importorskip("torch_pruning")


class Cnn(nn.Module):
    """A residual block, a depthwise convolution and a flattened head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width)
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.depthwise = nn.Conv2d(width, width, 3, groups=width)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(36 * width, 24), nn.ReLU(), nn.Linear(24, 4))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(images)))
        x = torch.relu(x + self.second(torch.relu(self.first(x))))
        found: torch.Tensor = self.head(torch.relu(self.depthwise(x)))
        return found


class Lstm(nn.Module):
    def __init__(self, layers: int, *, both: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 24)
        self.lstm = nn.LSTM(24, 32, layers, batch_first=True, bidirectional=both)
        self.head = nn.Linear(64 if both else 32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.lstm(torch.relu(self.inner(x)))[0][:, -1])
        return found


class Constant(nn.Module):
    """The width of the first layer is a constant in ``view``; that of the second is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 32), nn.Linear(32, 32), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x)).view(-1, 4, 8).flatten(1)
        found: torch.Tensor = self.head(torch.relu(self.second(x)))
        return found


class SelfAttention(nn.Module):
    """As in transformers' BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size, self.all_head_size = 4, 8, 32
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (
            layer(x).unflatten(-1, (self.num_attention_heads, 8)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)


class Bert(nn.Module):
    def __init__(self, layers: int = 1) -> None:
        super().__init__()

        def layer() -> nn.ModuleDict:
            attention = nn.ModuleDict({"self": SelfAttention(), "output": nn.Linear(32, 32)})
            return nn.ModuleDict({"attention": attention, "inner": nn.Linear(32, 64), "outer": nn.Linear(64, 32)})

        self.layer = nn.ModuleList([layer() for _ in range(layers)])
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            x = x + layer["attention"]["output"](layer["attention"]["self"](x))
            x = x + layer["outer"](torch.relu(layer["inner"](x)))
        found: torch.Tensor = self.head(x.mean(1))
        return found


def candidate(model: nn.Module, *shape: int) -> Candidate:
    return Candidate.of(model.eval(), (torch.randn(*shape),), calibration=[((torch.randn(*shape),), {}) for _ in range(2)])


def test_widths_are_multiples_of_eight() -> None:
    assert [kept_width(64, keep) for keep in (0.75, 0.5, 0.35, 0.25)] == [48, 32, 24, 16]
    assert kept_width(8, 0.25) == 8
    assert kept_width(12, 0.75, 1) == 9


def test_channels_that_depend_on_each_other_are_removed_together() -> None:
    given = candidate(Cnn(), 2, 1, 8, 8)
    given.model.head[3].weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in given.model.state_dict().items()}
    # apply() itself compares with the original in which the removed channels are masked
    model = PruneChannels(keep=0.5).apply(given).model
    assert model.stem.weight.shape == (16, 1, 3, 3)
    assert model.norm.num_features == model.depthwise.groups == 16
    assert model.first.weight.shape == model.second.weight.shape == (16, 16, 3, 3)
    assert (model.head[1].in_features, model.head[1].out_features, model.head[3].out_features) == (16 * 36, 16, 4)
    assert [parameter.requires_grad for parameter in model.head[3].parameters()] == [False, True]
    assert all(torch.equal(before[name], tensor) for name, tensor in given.model.state_dict().items())


@pytest.mark.parametrize(("layers", "both"), [(1, False), (2, False), (2, True)])
def test_hidden_units_of_an_lstm_are_removed_in_every_layer(layers: int, both: bool) -> None:
    model = PruneChannels(keep=0.5).apply(candidate(Lstm(layers, both=both), 3, 7, 6)).model
    assert (model.lstm.hidden_size, model.lstm.input_size) == (16, 16)
    assert model.lstm.weight_hh_l0.shape == (64, 16)
    assert model.head.in_features == (32 if both else 16)


def test_a_layer_whose_width_is_a_constant_in_the_code_stays_whole() -> None:
    model = PruneChannels(keep=0.5).apply(candidate(Constant(), 2, 6)).model
    assert (model.first.out_features, model.second.out_features) == (32, 16)


def test_what_cannot_be_pruned_is_refused_in_words() -> None:
    with pytest.raises(CompileError, match="prune_channels cannot prune this model: it fails on the example"):
        PruneChannels(keep=0.5).apply(recurrent())  # its state is an input
    with pytest.raises(CompileError, match="finds nothing to remove"):
        PruneChannels(keep=0.5).apply(convnet())  # 8 channels
    normed = nn.Sequential(nn.Conv2d(1, 32, 3), nn.GroupNorm(4, 32), nn.Conv2d(32, 4, 3))
    with pytest.raises(CompileError, match="finds nothing to remove"):
        PruneChannels(keep=0.5).apply(candidate(normed, 1, 1, 8, 8))
    with pytest.raises(UsageError, match="keep is 0"):
        PruneChannels(keep=0)
    assert "needs a convolution" in str(PruneChannels().why_not(candidate(nn.Linear(4, 32), 1, 4)))


def test_units_and_heads_of_a_transformer_are_removed() -> None:
    model: Any = PruneUnits(keep=0.5).apply(candidate(Bert(), 2, 5, 32)).model
    layer = model.layer[0]
    assert (layer["inner"].out_features, layer["outer"].in_features) == (32, 32)
    attention = layer["attention"]["self"]
    assert (attention.num_attention_heads, attention.all_head_size, attention.query.out_features) == (2, 16, 16)
    assert layer["attention"]["output"].in_features == 16
    torchs = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 64, batch_first=True), 2, enable_nested_tensor=False)
    pruned: Any = PruneUnits(keep=0.25).apply(candidate(torchs, 2, 5, 16)).model
    assert [(each.linear1.out_features, each.linear2.in_features) for each in pruned.layers] == [(16, 16)] * 2
    assert PruneUnits(keep=0.5).apply(encoder()).model.wide.out_features == 16


def test_layers_are_dropped_evenly_and_only_where_sizes_stay() -> None:
    given = candidate(Bert(layers=6), 2, 5, 32)
    model: Any = DropLayers(keep=0.5).apply(given).model
    wanted = [given.model.layer[i]["inner"].weight for i in (0, 2, 5)]  # type: ignore[index]
    assert [torch.equal(a["inner"].weight, b) for a, b in zip(model.layer, wanted, strict=True)] == [True] * 3
    widening = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 16), nn.Linear(16, 32), nn.Linear(32, 4)))
    words = "would drop 1 of the 4 layers of 0 at keep=0.75, but between the first and the last only 0 keep the shape"
    with pytest.raises(CompileError, match=words):
        DropLayers(keep=0.75).apply(candidate(widening, 2, 4))
    stages = nn.Sequential(nn.Sequential(*(nn.Linear(a, b) for a, b in ((4, 8), (8, 8), (8, 16), (16, 16), (16, 4)))))
    shorter: Any = DropLayers(keep=0.6).apply(candidate(stages, 2, 4)).model
    assert [(each.in_features, each.out_features) for each in shorter[0]] == [(4, 8), (8, 16), (16, 4)]


@pytest.fixture(scope="module")
def learnt() -> Candidate:
    """A small network that has learnt where the larger half of an image is, cut to half of its channels."""
    torch.manual_seed(0)
    images = torch.rand(640, 1, 8, 8)
    labels = torch.stack([images[:, 0, :4].sum((1, 2)), images[:, 0, 4:].sum((1, 2))], 1).argmax(1)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for part, wanted in list(zip(images.split(64), labels.split(64), strict=True)) * 5:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(part), wanted).backward()
        optimizer.step()
    model.eval()
    pairs = [((part,), wanted) for part, wanted in zip(images.split(64), labels.split(64), strict=True)]
    training = TrainingExamples(
        batches=tuple(pairs[1:]), held_out=tuple(pairs[:1]), loss=nn.CrossEntropyLoss(), examples=576,
        source="training data", digest="made here",
    )  # fmt: skip
    whole = Candidate.of(model, (images[:1],))
    whole = dataclasses.replace(whole, training=training, teacher=model)
    return PruneChannels(keep=0.5).apply(whole)


def off(found: Candidate) -> float:
    """Mean distance of the outputs from the teacher's."""
    assert found.teacher is not None
    assert found.training is not None
    images = found.training.held_out[0][0][0]
    with torch.no_grad():
        return float((found.model(images) - found.teacher(images)).abs().mean())


KILLED = """
import os, pathlib, signal, sys, cloudpickle, torch
from trimtab.passes.common.trained_weights import LossCurve
from trimtab.passes.recover import Recover
given, threads = cloudpickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
torch.set_num_threads(threads)
kept = LossCurve.__call__
def killing(self, trainer, event):
    kept(self, trainer, event)
    if event.update >= 25:
        os.kill(os.getpid(), signal.SIGKILL)
LossCurve.__call__ = killing
Recover(updates=40).apply(given)
"""


def killed_in_training(given: Candidate, folder: pathlib.Path) -> None:
    """Train ``given`` in a process that is killed after 25 of 40 updates."""
    path = folder / "given.pickle"
    path.write_bytes(cloudpickle.dumps((given, torch.get_num_threads())))
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL


@pytest.mark.parametrize("labelled", [True, False])
def test_a_network_recovers_to_the_bit_and_is_trained_once(learnt, tmp_path, monkeypatch, labelled: bool) -> None:
    training = learnt.training if labelled else dataclasses.replace(learnt.training, loss=None)
    given = dataclasses.replace(learnt, scratch=tmp_path, training=training)
    weights = [parameter.clone() for parameter in given.teacher.parameters()]
    recovered = Recover(updates=40).apply(given)
    assert off(recovered) < 0.7 * off(given)
    assert all(torch.equal(a, b) for a, b in zip(weights, given.teacher.parameters(), strict=True))
    assert not recovered.model.training
    assert (
        f"Trained on 576 examples of the training data, {'with' if labelled else 'without'} labels: 40 updates"
        in recovered.notes[0]
    )
    elsewhere = dataclasses.replace(given, scratch=tmp_path / "elsewhere")
    if labelled:
        killed_in_training(elsewhere, tmp_path)
    again = Recover(updates=40).apply(elsewhere)
    updates = [at for at, _ in again.trained[0]["losses"]]
    assert updates == sorted(updates)
    assert (updates[0], updates[-1]) == (2, 40), "the curve goes on too"
    assert [path.suffix for path in (tmp_path / "elsewhere" / FOLDER).iterdir()] == [".safetensors"]
    monkeypatch.setattr(Recover, "_train", lambda *_: pytest.fail("it was trained before"))
    loaded = Recover(updates=40).apply(dataclasses.replace(given, training=dataclasses.replace(training, cached_only=True)))
    for other in (again, loaded):
        for a, b in zip(recovered.model.state_dict().values(), other.model.state_dict().values(), strict=True):
            assert torch.equal(a, b)
    assert loaded.notes == recovered.notes
    assert [path.suffix for path in (tmp_path / FOLDER).iterdir()] == [".safetensors"]


def test_only_the_job_of_a_study_trains_and_a_damaged_file_is_no_training(learnt, tmp_path) -> None:
    given = dataclasses.replace(learnt, scratch=tmp_path, training=dataclasses.replace(learnt.training, cached_only=True))
    with pytest.raises(CompileError, match="Only the job of a study trains"):
        Recover(updates=5).apply(given)
    path = tmp_path / FOLDER / f"{Recover(updates=5)._key(given, given.training)}.safetensors"
    path.parent.mkdir()
    path.write_bytes(b"cut off")
    with pytest.raises(CompileError, match="Only the job of a study trains"):
        Recover(updates=5).apply(given)


def test_other_updates_data_or_weights_are_another_training(learnt) -> None:
    def key(found: Candidate, **fields: Any) -> str:
        assert found.training is not None
        return Recover(**fields)._key(found, found.training)

    other = dataclasses.replace(learnt.training, digest="other")
    keys = {key(learnt), key(learnt, updates=800), key(dataclasses.replace(learnt, training=other))}
    assert len(keys | {key(learnt.with_model(learnt.teacher))}) == 4
    assert key(learnt) == key(learnt)


@pytest.mark.parametrize("loss", ["features", "relations", "task"])
def test_other_losses_recover_too(learnt, loss: Any) -> None:
    assert off(Recover(updates=20, loss=loss).apply(learnt)) < off(learnt)


def test_a_student_takes_the_models_place_and_learns_from_it(learnt) -> None:
    assert "give the workload student=..." in str(Student().blocked(learnt))
    torch.manual_seed(1)
    own = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    given = dataclasses.replace(learnt, student=own)
    found = Recover(updates=40).apply(Student().apply(given))
    assert off(found) < off(Student().apply(given))
    assert sum(parameter.numel() for parameter in found.model.parameters()) == 130
    other = dataclasses.replace(learnt, student=nn.Sequential(nn.Flatten(), nn.Linear(64, 3)))
    with pytest.raises(CompileError, match="student cannot stand where the model stands: its outputs have other shapes"):
        Student().apply(other)


def test_recover_says_what_it_needs(learnt) -> None:
    assert "needs data to train on" in str(Recover().blocked(dataclasses.replace(learnt, training=None)))
    unlabelled = dataclasses.replace(learnt, training=dataclasses.replace(learnt.training, loss=None))
    assert Recover().blocked(unlabelled) is None
    assert "needs labels" in str(Recover(loss="task").blocked(unlabelled))
    with pytest.raises(UsageError, match="updates is 0"):
        Recover(updates=0)


def test_labels_of_another_kind_and_a_full_disk_are_sentences(learnt, tmp_path, monkeypatch) -> None:
    batches = tuple((inputs, torch.rand(64, 3)) for inputs, _ in learnt.training.batches)
    other = dataclasses.replace(learnt, training=dataclasses.replace(learnt.training, batches=batches))
    with pytest.raises(CompileError, match="does not take the model's outputs with the labels of its data: .* without labels"):
        Recover(updates=5).apply(other)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "_write", full)
    with pytest.raises(StorageError, match="No space left on device. No checkpoint is there yet. Make room") as raised:
        Recover(updates=40).apply(dataclasses.replace(learnt, scratch=tmp_path))
    assert out_of_space(raised.value), "the study ends, and the same command goes on"
    monkeypatch.undo()
    Recover(updates=40).apply(dataclasses.replace(learnt, scratch=tmp_path))
    assert [path.suffix for path in (tmp_path / FOLDER).iterdir()] == [".safetensors"]


def test_a_training_that_lowers_no_loss_is_refused(learnt) -> None:
    assert learnt.teacher is not None
    with pytest.raises(CompileError, match="did not lower the loss"):
        Recover(updates=2).apply(learnt.with_model(learnt.teacher))


def test_zeros_have_the_share_and_pattern_asked_for_and_stay_zero_in_training(learnt) -> None:
    whole = learnt.with_model(learnt.teacher)

    def zeros(found: Candidate) -> list[torch.Tensor]:
        return [module.weight == 0 for module in found.model.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]

    for fields in ({"scope": "layer"}, {"scope": "global"}, {"scope": "threshold", "bound": 0.05}, {"scope": "n:m"}):
        made = Sparsify(**fields).apply(whole)  # type: ignore[arg-type]
        found = zeros(made)
        total = sum(int(each.sum()) for each in found) / sum(each.numel() for each in found)
        assert f"Zeros: {total:.0%} of the weights; by layer: 0 {found[0].float().mean():.0%}, " in made.notes[0]
        assert "No runtime here is faster" in made.notes[0]
        for kept_weight, mask, before in zip(made.model.parameters(), found, whole.model.parameters(), strict=False):
            if kept_weight.dim() > 1:
                assert torch.equal(kept_weight, before.masked_fill(mask, 0))
        if fields["scope"] == "global":
            assert abs(total - 0.8) < 0.01
        if fields["scope"] == "n:m":
            assert torch.equal(found[1].view(2, -1, 4).sum(2), torch.full((2, 256), 2))
    made = Sparsify(zeros=0.9).apply(whole)
    trained = Recover(updates=10).apply(made)
    assert off(trained) < off(made)
    assert all((after >= before).all() for before, after in zip(zeros(made), zeros(trained), strict=True))
    for fields, said in (({"zeros": 1.0}, "zeros is 1.0"), ({"bound": 0}, "bound is 0"), ({"pattern": "4:2"}, "is '4:2'")):
        with pytest.raises(UsageError, match=said):
            Sparsify(**fields)  # type: ignore[arg-type]


def test_linear_layers_get_the_rank_that_their_inputs_need(learnt) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    inputs = torch.randn(256, 8) @ torch.randn(8, 64)  # of rank 8, unlike the weight
    given = Candidate.of(model.eval(), (inputs[:4],), calibration=[((inputs,), {})])
    made: Any = LowRank(share=0.25).apply(given).model
    assert [tuple(layer.weight.shape) for layer in made[0]] == [(8, 64), (64, 8)]
    torch.testing.assert_close(made(inputs), model(inputs), rtol=1e-2, atol=1e-2)
    blind = LowRank(share=0.25).apply(dataclasses.replace(given, calibration=())).model
    assert (blind(inputs) - model(inputs)).abs().mean() > 10 * (made(inputs) - model(inputs)).abs().mean()
    torchs = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 128, batch_first=True), 1, enable_nested_tensor=False)
    assert LowRank().apply(candidate(torchs, 2, 5, 32)).model.layers[0].linear1[0].out_features == 16  # type: ignore[union-attr, index]
    assert "low_rank needs a linear layer" in str(LowRank().why_not(learnt))
    with pytest.raises(UsageError, match="share is 0"):
        LowRank(share=0)


def test_smooth_activations_become_relu_and_only_with_a_training_after_it(learnt) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True)
    given = candidate(nn.Sequential(nn.Linear(16, 16), nn.SiLU(), layer), 2, 5, 16)
    made: Any = SwapActivations().apply(given).model
    assert isinstance(made[1], nn.ReLU)
    wanted = nn.Sequential(given.model[0], nn.ReLU(), copy.deepcopy(layer))  # type: ignore[index]
    wanted[2].activation, wanted[2].activation_relu_or_gelu = nn.functional.relu, 1
    torch.testing.assert_close(made(*given.args), wanted.eval()(*given.args))
    whole = dataclasses.replace(given, training=learnt.training, teacher=given.model)
    backend = BACKENDS["eager"]()
    said = Recipe(passes=(SwapActivations(),), backend=backend).why_not(whole)
    assert said == "What swap_activations makes answers wrong until it is trained: put recover after it."
    assert Recipe(passes=(SwapActivations(), Recover()), backend=backend).why_not(whole) is None
    assert "needs a module that ReLU can replace" in str(SwapActivations().why_not(learnt))
