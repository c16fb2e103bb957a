"""Handwritten digits: a small residual network with batch normalisation on scikit-learn's 1797 real images of 8 x 8.

It is trained on 800 images in about ten seconds the first time; the weights are kept in the user's cache. The other 997 images
judge: 500 select, 497 test the winner, which is enough to decide a limit of two points.

    trimtab optimize examples/digits.py --max-drop 2% --budget 3m --out runs/digits
    trimtab optimize examples/digits.py --max-drop 2% --compress prune --budget 3m --out runs/digits
"""

from __future__ import annotations

import torch
from material import fit, trained
from torch import nn

import trimtab

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "This example takes its images from scikit-learn. Install it: pip install scikit-learn"
    ) from error

TRAIN, SELECT = 800, 500


class Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut, which is projected where the shape changes."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        project = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        self.shortcut = nn.Identity() if stride == 1 and inside == outside else project

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(B, inside, H, W)`` -> ``(B, outside, H / stride, W / stride)``."""
        inner = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(inner)) + self.shortcut(x))


class Digits(nn.Module):
    """``images: float32 (B, 1, 8, 8)`` in 0..1 -> ``logits: float32 (B, 10)``; 77,754 parameters at width 16."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(
            Block(width, width, 1),
            Block(width, 2 * width, 2),
            Block(2 * width, 4 * width, 2),
        )
        self.head = nn.Linear(4 * width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of the ten digits."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """All images, float32 ``(1797, 1, 8, 8)``, and their digits, in an order that is shuffled but always the same."""
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(bunch.images).float()[:, None] / 16
    return images[order], torch.from_numpy(bunch.target).long()[order]


def build() -> nn.Module:
    """The trained network; the first call trains it."""
    images, digits = data()
    loss = nn.CrossEntropyLoss(label_smoothing=0.05)
    return trained("digits-16", Digits, lambda m: fit(m, images[:TRAIN], digits[:TRAIN], loss, epochs=20, rate=5e-3))


def top1(logits: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
    """For each image whether its digit was recognised."""
    return logits.argmax(1) == digits


def training_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of the images that the network was trained on, for smaller networks to follow it on."""
    images, digits = data()
    return list(zip(images[:TRAIN].split(64), digits[:TRAIN].split(64), strict=True))


def workload() -> trimtab.Workload:
    """One image at a time must be fast; any batch must work."""
    images, digits = data()
    select, test = slice(TRAIN, TRAIN + SELECT), slice(TRAIN + SELECT, None)
    return trimtab.Workload(
        name="digits",
        model=build,
        inputs=(images[:1],),
        evaluation=trimtab.Evaluation(data=(images[select], digits[select]), test=(images[test], digits[test]), score=top1),
        calibration=images[:256],
        training=trimtab.Training(data=training_data, loss=nn.CrossEntropyLoss()),  # read with --compress only
        dynamic={"images": {0: "batch"}},
    )
