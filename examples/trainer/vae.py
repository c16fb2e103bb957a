"""A variational autoencoder of handwritten digits (Kingma & Welling 2014, https://arxiv.org/abs/1312.6114)."""

from __future__ import annotations

from typing import Any

import torch
from material import digits
from torch import nn
from torch.nn import functional

import trimtab
from trimtab.train import Loader


class Autoencoder(nn.Module):
    """``(B, 64)`` -> reconstruction ``(B, 64)`` as logits, mean and log variance ``(B, 8)``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.code = nn.Linear(64, 128), nn.Linear(128, 16)
        self.outer = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw a code, and decode it."""
        mean, log_variance = self.code(self.inner(x).relu()).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.outer(code), mean, log_variance


def loader() -> Loader:
    """The images, a batch at a time."""
    return Loader(digits()[0], batch=128)


def loss(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """The negative evidence lower bound, a mean over the images."""
    found, mean, log_variance = model(images)
    rebuilt = functional.binary_cross_entropy_with_logits(found, images, reduction="none").sum(1)
    return (rebuilt - 0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)).mean()


def trainer(**options: Any) -> trimtab.Trainer:
    """With the Trainer."""
    return trimtab.Trainer(Autoencoder(), loss=loss, optimizer=lambda p: torch.optim.Adam(p, lr=2e-3), **options)


def by_hand(updates: int) -> nn.Module:
    """The same as a loop."""
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = loader()
    made = 0
    while made < updates:
        for images in batches:
            optimizer.zero_grad()
            loss(model, images).backward()
            optimizer.step()
            made += 1
            if made == updates:
                break
    return model


if __name__ == "__main__":
    torch.manual_seed(0)
    print(trainer().fit(loader(), epochs=20))
