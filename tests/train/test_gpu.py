"""What a run on a GPU must be beside one on the CPU. Bodies that need no GPU run without one, too."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from _runs import settings_of
from trimtab import PrecisionSettings, Settings, Trainer
from trimtab.train.data.loader import Loader
from trimtab.train.engine.step import Update
from trimtab.train.loss.loss_parity import BaselineLosses, final, increase

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CUDA = pytest.param("cuda", marks=gpu)
HIGHER = 0.05
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def network() -> nn.Module:
    """Convolutions with BatchNorm, attention over the rows, a classifier."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True)
    stem = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(2)]
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    return nn.Sequential(*stem, encoder, nn.Flatten(), nn.Linear(512, 10))


def images() -> Loader:
    """scikit-learn's digits."""
    bunch = load_digits()
    return Loader((torch.from_numpy(bunch.images).float()[:, None] / 16, torch.from_numpy(bunch.target).long()), 64)


def learnt(settings: Settings, steps: int) -> list[float]:
    """The loss of each update."""
    run = Trainer(network(), loss=nn.CrossEntropyLoss(), optimizer=SGD, settings=settings)
    made: list[Update] = list(run.updates(images(), steps=steps))
    return [float(update.loss) for update in made]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_learns_what_float32_does(device: str, precision: Any) -> None:
    exact = learnt(Settings(device=device), 80)
    half = learnt(Settings(device=device, precision=PrecisionSettings(autocast=precision)), 80)
    assert exact != half
    found = increase(BaselineLosses.of(exact, []), half, HIGHER * final(exact))
    assert found.upper <= HIGHER * exact[0], found  # of what there was to learn
    assert final(half) < 0.5 * half[0]


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize(
    "settings",
    [
        {"compile": True},
        {"memory_format": "channels_last"},
        {"cudnn_benchmark": True},
        {"implementation": "fused"},
        {"tf32": False},
    ],
)
def test_what_is_exact_learns_the_same_on_a_gpu(device: str, settings: dict[str, Any]) -> None:
    plain, other = learnt(Settings(device=device), 20), learnt(settings_of(device=device, **settings), 20)
    assert other == pytest.approx(plain, rel=2e-2)


@pytest.mark.parametrize("device", [CUDA])
def test_the_first_losses_on_a_gpu_are_those_of_the_cpu(device: str) -> None:
    assert learnt(Settings(device=device, precision=PrecisionSettings(tf32=False)), 3) == pytest.approx(
        learnt(Settings(), 3), rel=1e-3
    )


def deep() -> nn.Module:
    """Whose activations take 64 KiB an example."""
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())], nn.Linear(1024, 1))


@pytest.mark.parametrize("device", [CUDA])
def test_an_update_without_room_on_a_gpu_is_made_from_parts(device: str) -> None:
    rows = torch.randn(1 << 16, 1024)
    batches = [(rows, rows.mean(1, keepdim=True))] * 2

    def run() -> Trainer:
        made = Trainer(
            deep(), loss=nn.MSELoss(), optimizer=SGD, settings=Settings(device=device, precision=PrecisionSettings(tf32=False))
        )
        assert made.fit(batches, epochs=1).updates == 2
        return made

    whole = run()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2.5e9) / total)
    try:
        parts = run()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert any("did not fit into memory" in note for note in parts.notes), parts.notes
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
