"""A pipeline of two models, of which one is optimized: one network cleans noisy scans of digits, another reads them.

The cleaner takes most of the time. It is recorded as the pipeline calls it, and judged by what the whole pipeline reads. Both
networks are trained the first time, in about half a minute; the weights are kept in the user's cache.

    trimtab optimize examples/pipeline.py --max-drop 2% --budget 3m --out runs/pipeline
    python examples/pipeline.py runs/pipeline/artifact
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
from digits import SELECT, TRAIN, data, top1
from digits import build as build_reader
from material import fit, trained
from torch import nn

import trimtab

NOISE = 0.25
"""Standard deviation of the noise in a scan, whose values without it are 0 to 1."""


class Cleaner(nn.Module):
    """``scans: float32 (B, 1, 8, 8)`` -> the images without noise, in the same shape; 75,329 parameters at width 64."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, 1, 3, padding=1),
        )  # fmt: skip

    def forward(self, scans: torch.Tensor) -> torch.Tensor:
        """The scans less the noise that the layers find in them."""
        return scans - self.layers(scans)


class Pipeline:
    """Reads the digits of scans. ``cleaner`` is a module, or anything that is called like one."""

    def __init__(self, cleaner: Callable[[torch.Tensor], torch.Tensor], reader: nn.Module) -> None:
        self.cleaner, self.reader = cleaner, reader

    def __call__(self, scans: torch.Tensor) -> torch.Tensor:
        """Logits ``(B, 10)`` of scans ``(B, 1, 8, 8)``."""
        with torch.no_grad():
            return self.reader(self.cleaner(scans))


def scanned() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scans, the images in them, and their digits; always the same."""
    images, digits = data()
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
    return images + NOISE * noise, images, digits


@functools.cache
def reader() -> nn.Module:
    """The trained network that reads."""
    return build_reader()


def build() -> nn.Module:
    """The trained network that cleans; the first call trains it."""
    scans, images, _ = scanned()
    return trained("cleaner-64", Cleaner, lambda m: fit(m, scans[:TRAIN], images[:TRAIN], nn.MSELoss(), epochs=15, rate=5e-3))


def read(cleaner: Callable[[torch.Tensor], torch.Tensor], scans: torch.Tensor) -> torch.Tensor:
    """What the pipeline reads with another form of the cleaner."""
    return Pipeline(cleaner, reader())(scans)


def workload() -> trimtab.Workload:
    """The cleaner as the pipeline calls it, for one scan or several, judged by the digits that the pipeline reads."""
    scans, _, digits = scanned()
    pipeline = Pipeline(build(), reader())
    select, test = (
        [(scans[i : i + 1], digits[i : i + 1]) for i in range(*part)]
        for part in ((TRAIN, TRAIN + SELECT), (TRAIN + SELECT, len(digits)))
    )
    assert isinstance(pipeline.cleaner, nn.Module)
    return trimtab.Workload.capture(
        pipeline.cleaner,
        lambda: [pipeline(scans[:size]) for size in (1, 4, 32)],
        name="pipeline",
        evaluation=trimtab.Evaluation(data=select, test=test, run=read, score=top1),
    )


def main(artifact: str) -> None:
    """Put the optimized cleaner back, and read the scans that no search has seen."""
    scans, _, digits = scanned()
    pipeline = Pipeline(trimtab.load(artifact, as_module=True), reader())
    right = top1(pipeline(scans[TRAIN + SELECT :]), digits[TRAIN + SELECT :])
    print(f"{int(right.sum())} of {len(right)} digits are read.")


if __name__ == "__main__":
    main(sys.argv[1])
