"""The workloads of ``compress.py``, with one thread and one example a call, trained on real data at the first use.

The digits are those of scikit-learn, 800 to train, 500 to select and 497 to test; larger networks get them at 32 x 32. The
tumours are scikit-learn's, MiniLM's texts and word pairs gensim's. Nothing is drawn at random but the first weights.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import sys
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))

import digits as handwritten
import material
import tabular as tumours
import torch
from torch import nn

import trimtab

torch.set_num_threads(1)
SIDE = 32
"""Pixels of the larger images."""


class Recurrent(nn.Module):
    """``rows: float32 (B, 16, 16)`` -> ``logits (B, 10)``: two LSTM layers of 128 units over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 128, 2, batch_first=True), nn.Linear(128, 10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits of the ten digits, from the state after the last row."""
        return self.head(self.lstm(rows)[0][:, -1])


class ResNet(nn.Module):
    """``images: float32 (B, 1, 32, 32)`` -> ``logits (B, 10)``: a residual network of eight blocks of two convolutions."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, 2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        widths = [width, width, 2 * width, 2 * width, 4 * width, 4 * width, 4 * width, 4 * width]
        pairs = zip([width, *widths], widths, strict=False)
        self.blocks = nn.Sequential(*(handwritten.Block(a, b, 1 if a == b else 2) for a, b in pairs))
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of the ten digits."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class Inverted(nn.Module):
    """An inverted residual: 1 x 1 up, 3 x 3 depthwise, 1 x 1 down, and a shortcut where the shape stays."""

    def __init__(self, inside: int, outside: int, stride: int, wider: int) -> None:
        super().__init__()
        inner = inside * wider
        self.same = stride == 1 and inside == outside
        self.layers = nn.Sequential(
            *(nn.Conv2d(inside, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6()),
            *(nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.ReLU6()),
            *(nn.Conv2d(inner, outside, 1, bias=False), nn.BatchNorm2d(outside)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(B, inside, H, W)`` -> ``(B, outside, H / stride, W / stride)``."""
        return x + self.layers(x) if self.same else self.layers(x)


class MobileNetV2(nn.Module):
    """``images: float32 (B, 1, 32, 32)`` -> ``logits (B, 10)``: seven inverted residuals (Sandler et al. 2018, reduced)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, 2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
        shapes = [(16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 80, 2), (80, 80, 1)]
        self.blocks = nn.Sequential(*(Inverted(inside, outside, stride, 6) for inside, outside, stride in shapes))
        self.head = nn.Linear(80, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of the ten digits."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def _rows() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = handwritten.data()
    return nn.functional.interpolate(images, size=16, mode="bilinear")[:, 0], labels


def _large() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = handwritten.data()
    return nn.functional.interpolate(images, size=SIDE, mode="bilinear"), labels


def _digits_workload(
    name: str, make: Callable[[], nn.Module], read: Callable[[], tuple[torch.Tensor, torch.Tensor]], axis: str, epochs: int
) -> trimtab.Workload:
    """A network for the digits as ``read`` gives them."""
    train, both = handwritten.TRAIN, handwritten.TRAIN + handwritten.SELECT
    inputs, labels = read()

    def fit(model: nn.Module) -> None:
        material.fit(model, inputs[:train], labels[:train], nn.CrossEntropyLoss(), epochs=epochs, rate=5e-3)

    def build() -> nn.Module:
        return material.trained(f"compress-{name}", make, fit)

    return trimtab.Workload(
        name=name,
        model=build,
        inputs=(inputs[:1],),
        evaluation=trimtab.Evaluation(
            data=(inputs[train:both], labels[train:both]), test=(inputs[both:], labels[both:]), score=handwritten.top1
        ),
        calibration=inputs[:256],
        training=trimtab.Training(
            data=list(zip(inputs[:train].split(64), labels[:train].split(64), strict=True)), loss=nn.CrossEntropyLoss()
        ),
        dynamic={axis: {0: "batch"}},
    )


def digits() -> trimtab.Workload:
    """The residual network of the example, width 16, on 8 x 8 images."""
    return handwritten.workload()


def recurrent() -> trimtab.Workload:
    """Two LSTM layers over the rows of 16 x 16 images."""
    return _digits_workload("recurrent", Recurrent, _rows, "rows", epochs=20)


def resnet() -> trimtab.Workload:
    """A reduced ResNet on 32 x 32 images."""
    return _digits_workload("resnet", ResNet, _large, "images", epochs=12)


def mobilenet() -> trimtab.Workload:
    """A reduced MobileNetV2 on 32 x 32 images."""
    return _digits_workload("mobilenet", MobileNetV2, _large, "images", epochs=20)


def tabular() -> trimtab.Workload:
    """The network of the example on tumours, with the patients that it was trained on."""
    features, benign = (part[: tumours.TRAIN] for part in tumours.data())
    training = trimtab.Training(data=list(zip(features.split(64), benign.split(64), strict=True)), loss=nn.BCEWithLogitsLoss())
    return dataclasses.replace(tumours.workload(), training=training)


def minilm() -> trimtab.Workload:
    """MiniLM, judged on the 1,352 word pairs of WordSim353 and SimLex999. It follows itself on unlabelled sentences of the
    corpus beside Lee's, and on words of the corpus that stand in no pair."""
    import minilm as embedder

    pairs = [item for name in embedder.PAIRS for item in embedder.pairs(name)]
    judged = {word.lower() for name in embedder.PAIRS for pair in embedder.rows(name) for word in pair[:2]}
    sentences = [part.strip() for line in embedder.corpus("lee_background.cor") for part in line.split(". ") if part.strip()]
    words = sorted({*re.findall(r"[a-z]{3,}", " ".join(sentences).lower())} - judged)[: len(sentences)]
    texts = [text for pair in zip(sentences, words, strict=False) for text in pair]
    batches = [embedder.tokenize(texts[i : i + 32]) for i in range(0, len(texts), 32)]
    evaluation = trimtab.Evaluation(data=pairs, metric=embedder.spearman, run=embedder.cosines)
    return dataclasses.replace(embedder.workload(), evaluation=evaluation, training=trimtab.Training(data=batches))


SPLIT = "TRIMTAB_BENCHMARK_SPLIT"
"""Environment variable with the seed by which :func:`split` divides the images."""
SELECTED, TESTED = 400, 300
"""Images that select and that test in :func:`split`; the others are in no split."""


def _order(seed: int) -> torch.Tensor:
    """The images that the network was not trained on, in an order of their own for each seed."""
    count = len(handwritten.data()[1]) - handwritten.TRAIN
    return handwritten.TRAIN + torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def split() -> trimtab.Workload:
    """The digits with other images to select and to test by, and images that are in no split (:func:`unseen`)."""
    images, labels = handwritten.data()
    order = _order(int(os.environ.get(SPLIT, "0")))
    select, test = order[:SELECTED], order[SELECTED : SELECTED + TESTED]
    evaluation = trimtab.Evaluation(
        data=(images[select], labels[select]), test=(images[test], labels[test]), score=handwritten.top1
    )
    return dataclasses.replace(handwritten.workload(), evaluation=evaluation)


def unseen(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels that stand in no split of :func:`split`."""
    images, labels = handwritten.data()
    rest = _order(seed)[SELECTED + TESTED :]
    return images[rest], labels[rest]
