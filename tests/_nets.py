"""Small nets: three kinds that take some memory to train, convolutional, transformer and recurrent; and one of nested lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

CPU = torch.device("cpu")


class Residual(nn.Module):
    """Two convolutions with BatchNorm around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.relu(self.norm1(self.first(x)))
        found: torch.Tensor = self.relu(self.norm2(self.second(inner)) + x)
        return found


class Recurrent(nn.Module):
    """An LSTM, then a chain of perceptrons with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.chain = nn.Sequential(*[perceptron(16) for _ in range(6)])
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.chain(self.lstm(x)[0]).mean(1))
        return found


def perceptron(width: int) -> nn.Module:
    """Linear, GELU, dropout, linear."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * width, width))


def convolutional() -> tuple[nn.Module, torch.Tensor]:
    """A residual net with BatchNorm."""
    blocks = [Residual(8) for _ in range(5)]
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    return net, torch.randn(16, 1, 16, 16)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Encoder layers with dropout."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(32 * 24, 10)), torch.randn(8, 24, 32)


def recurrent() -> tuple[nn.Module, torch.Tensor]:
    """Steps in time, then a chain."""
    return Recurrent(), torch.randn(32, 24, 16)


MODELS = [convolutional, transformer, recurrent]


def made(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A model, inputs and labels, always the same."""
    torch.manual_seed(0)
    model, inputs = make()
    return model.train(), inputs, torch.randint(0, 10, (len(inputs),))


def adam(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer with state."""
    return torch.optim.AdamW(parameters, lr=1e-3)


class Block(nn.Module):
    """Some of its layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.last):
            inputs = torch.tanh(layer(inputs))
        return inputs


class Nested(nn.Module):
    """Lists within lists; runs out of memory with more than ``most`` examples, from so many calls in training on."""

    def __init__(self, most: int = 10**6, call: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList([nn.ModuleList(Block() for _ in range(2))]), nn.Linear(8, 4)
        self.most, self.call, self.calls = most, call, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        hidden = self.blocks[0][0](inputs)
        if self.training and self.calls >= self.call and len(inputs) > self.most:
            raise torch.OutOfMemoryError("injected")
        found: torch.Tensor = self.head(self.blocks[0][1](hidden))
        return found
