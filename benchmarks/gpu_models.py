"""What :mod:`gpu` trains: ResNet-50 on photographs of noise, GPT-2 (124M) on random tokens, and tiny ones of both kinds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

Batch = tuple[torch.Tensor, torch.Tensor]


class Photos(Dataset[Any]):
    """Noise as photographs come, ``uint8 (3, side, side)``: an example is a part of one, mirrored by chance, and its class."""

    def __init__(self, count: int, side: int, part: int) -> None:
        self.photos = torch.randint(256, (count, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        self.part = part

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        return normalised(self._cut(place)), place % 10

    def __getitems__(self, places: list[int]) -> Any:
        """A whole batch, still as bytes: a GPU normalises faster."""
        return Whole((torch.stack([self._cut(place) for place in places]), torch.tensor(places) % 10))

    def _cut(self, place: int) -> torch.Tensor:
        room = self.photos.shape[-1] - self.part + 1
        y, x, mirrored = (int(torch.randint(most, ())) for most in (room, room, 2))
        cut = self.photos[place, :, y : y + self.part, x : x + self.part]
        return cut.flip(-1) if mirrored else cut


class OneByOne(Dataset[Any]):
    """A dataset without the way to read a batch at once."""

    def __init__(self, whole: Dataset[Any]) -> None:
        self.whole = whole

    def __len__(self) -> int:
        return len(self.whole)  # type: ignore[arg-type]

    def __getitem__(self, place: int) -> Any:
        return self.whole[place]


class Whole(tuple[torch.Tensor, ...]):
    """A batch as it is to be, not a list of examples."""


class Logits(nn.Module):
    """The logits of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``(B, 3, H, W)`` -> ``(B, classes)``; ``(B, T)`` -> ``(B, T, words)``."""
        logits: torch.Tensor = self.model(inputs).logits
        return logits


def normalised(photos: torch.Tensor) -> torch.Tensor:
    """Bytes as floats about 0."""
    return (photos.float() - 127.5) / 73.6


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and what it learns from."""

    build: Callable[[], nn.Module]
    data: Callable[[], Dataset[Any]]
    batch: int
    workers: int

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Of classes, or of the next token."""
        inputs, targets = batch
        if inputs.dim() == 2:
            return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        return functional.cross_entropy(model(normalised(inputs) if inputs.dtype == torch.uint8 else inputs), targets)


class Texts(Dataset[Any]):
    """Random tokens, and those that follow them."""

    def __init__(self, count: int, length: int, words: int) -> None:
        self.tokens = torch.randint(words, (count, length + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: int) -> Batch:
        return self.tokens[place, :-1], self.tokens[place, 1:]

    def __getitems__(self, places: list[int]) -> Any:
        """A whole batch."""
        found = self.tokens[places]
        return Whole((found[:, :-1].contiguous(), found[:, 1:].contiguous()))


def resnet(**sizes: Any) -> nn.Module:
    """ResNet-50 as transformers configures it, unless told otherwise."""
    return Logits(transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000, **sizes)))


def gpt(**sizes: Any) -> nn.Module:
    """GPT-2 with 124M parameters, unless told otherwise."""
    return Logits(transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **sizes)))


def light() -> nn.Module:
    """Few convolutions on large images: an update takes a few times as long as the copy of its batch."""
    layers = [nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.Conv2d(64, 64, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 1000))


def cases(quick: bool) -> dict[str, Case]:
    """By name; tiny ones if ``quick``."""
    if quick:
        small = functools.partial(resnet, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
        short = functools.partial(gpt, n_layer=1, n_embd=32, n_head=2, vocab_size=100)
        return {
            "ResNet-50": Case(small, functools.partial(Photos, 64, 40, 32), 8, 1),
            "GPT-2": Case(short, functools.partial(Texts, 64, 16, 100), 8, 0),
        }
    return {
        "ResNet-50": Case(resnet, functools.partial(Photos, 2048, 256, 224), 128, 12),
        "GPT-2": Case(gpt, functools.partial(Texts, 4096, 512, 50257), 16, 2),
    }


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The same on both sides."""
    return torch.optim.AdamW(parameters, lr=1e-4)
