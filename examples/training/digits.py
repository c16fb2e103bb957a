"""A small residual network learns handwritten digits: scikit-learn's 1797 real images of 8 x 8.

python examples/training/digits.py
python -c "import trimtab; print(trimtab.tune('examples/training/digits.py', budget='5m'))"
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from real import stop_at
from sklearn.datasets import load_digits
from torch import nn

import trimtab
from trimtab.train.data.loader import Loader

TRAIN, BATCH, EPOCHS, TARGET = 1347, 64, 30, 0.10
SETTINGS = trimtab.Settings(
    threads=1, memory_format="channels_last", optimizer=trimtab.OptimizerSettings(implementation="fused")
)


class Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut; halves the size of the image."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, 2, padding=1, bias=False)
        self.second = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outside) for _ in range(3)])
        self.shortcut = nn.Conv2d(inside, outside, 1, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(B, inside, H, W)`` -> ``(B, outside, H / 2, W / 2)``."""
        inner = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(inner)) + self.norms[2](self.shortcut(x)))


def build() -> nn.Module:
    """``images: float32 (B, 1, 8, 8)`` in 0..1 -> ``logits: float32 (B, 10)``."""
    stem = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, Block(16, 32), Block(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """All images and their digits, in an order that is shuffled but always the same."""
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(bunch.images).float()[order, None] / 16, torch.from_numpy(bunch.target).long()[order]


def loader() -> Loader:
    """The images to learn from, a batch at a time out of memory."""
    images, digits = data()
    return Loader((images[:TRAIN], digits[:TRAIN]), BATCH)


def held_out() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The images to validate on."""
    images, digits = data()
    return [(images[TRAIN:], digits[TRAIN:])]


loss = nn.CrossEntropyLoss()


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """What trains it."""
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01)


def trainer() -> trimtab.Trainer:
    """Everything put together."""
    return trimtab.Trainer(build(), loss=loss, optimizer=optimizer, settings=SETTINGS, callbacks=[stop_at(TARGET)])


def workload() -> trimtab.Workload:
    """For trimtab.tune: the same training with every setting at its default."""
    training = trimtab.Training(data=loader, optimizer=optimizer, loss=loss)
    return trimtab.Workload(name="train-digits", mode="train", model=build, training=training)


if __name__ == "__main__":
    torch.manual_seed(0)
    print(trainer().fit(loader(), held_out(), epochs=EPOCHS))
