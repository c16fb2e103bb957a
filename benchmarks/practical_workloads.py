"""Workloads of ``practical.py``: an EfficientNet, the digits, and two small networks whose data or weights take long to read.

``READINGS`` names a file that gets a line for each reading, and ``READING_S`` is how many seconds one takes. ``THREADS`` is the
number of threads that the file gives torch, and so every runtime.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]

import torch
from torch import nn

import trimtab

SECONDS = float(os.environ.get("READING_S", "20"))
if "THREADS" in os.environ:
    torch.set_num_threads(int(os.environ["THREADS"]))


def _read(what: str) -> None:
    """Take as long as reading ``what`` does, and write that it was read."""
    if (path := os.environ.get("READINGS")) is not None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{what}\n")
    time.sleep(SECONDS)


def _images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return images, (images.mean((1, 2, 3)) > 0).long()


def _network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2))


def _correct(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.argmax(-1) == target


def _slow_data() -> tuple[torch.Tensor, torch.Tensor]:
    _read("data")
    return _images(4000)


def _slow_weights() -> nn.Module:
    _read("weights")
    return _network()


class Classifier(nn.Module):
    """The logits of an EfficientNet of width and depth 1.0 (B0), with random weights.

    With the weights and batch statistics that transformers begins with, activations vanish into denormal numbers, with which a
    Xeon was 6 times as slow in float32. Weights scaled for their layers, and statistics of a batch, keep them normal numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        from transformers import EfficientNetConfig, EfficientNetForImageClassification

        torch.manual_seed(0)
        config = EfficientNetConfig(width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, num_labels=100)
        self.model = EfficientNetForImageClassification(config)
        for module in self.model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        norms = [module for module in self.model.modules() if isinstance(module, nn.BatchNorm2d)]
        before = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = 1.0
        with torch.no_grad():
            self.model.train()(torch.randn(8, 3, 224, 224))
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """``pixel_values: float32 (B, 3, 224, 224)`` -> ``(B, 100)``."""
        return self.model(pixel_values).logits


def efficientnet() -> trimtab.Workload:
    """EfficientNet B0, judged by its outputs."""
    images = torch.randn(48, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    return trimtab.Workload(model=Classifier, inputs=images[:1], name="efficientnet", calibration=list(images.split(8)))


def digits() -> trimtab.Workload:
    """The workload of ``examples/digits.py``."""
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))
    import digits

    return digits.workload()


def slow_data() -> trimtab.Workload:
    """A small network whose data takes long to read."""
    evaluation = trimtab.Evaluation(data=_slow_data, score=_correct)
    return trimtab.Workload(model=_network, inputs=_images(1)[0], name="slow-data", evaluation=evaluation)


def slow_weights() -> trimtab.Workload:
    """A small network whose weights take long to load."""
    evaluation = trimtab.Evaluation(data=_images(4000), score=_correct)
    return trimtab.Workload(model=_slow_weights, inputs=_images(1)[0], name="slow-weights", evaluation=evaluation)
