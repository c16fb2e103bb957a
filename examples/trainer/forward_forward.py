"""The Forward-Forward algorithm on handwritten digits (Hinton 2022, https://arxiv.org/abs/2212.13345): no backward pass
crosses a layer. Each layer has an optimizer of its own, and learns to be active for true labels and quiet for false ones.
"""

from __future__ import annotations

from typing import Any

import torch
from material import digits
from torch import nn
from torch.nn import functional

import trimtab
from trimtab.train import Loader, ManualRun

Batch = tuple[torch.Tensor, torch.Tensor]
LAYERS = ("first", "second")


class Layers(nn.Module):
    """Two layers; the first sees an image and a label ``(B, 74)``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(74, 128), nn.Linear(128, 128)


def loader() -> Loader:
    """Images and digits."""
    return Loader(digits(), batch=64)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """What trains a layer."""
    return torch.optim.Adam(parameters, lr=3e-3)


def pair(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The images with their labels, and with others."""
    images, labels = batch
    false = (labels + torch.randint(1, 10, labels.shape)) % 10
    one, other = (torch.cat([images, functional.one_hot(each, 10).float()], 1) for each in (labels, false))
    return one, other


def layer_loss(layer: nn.Module, true: torch.Tensor, false: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of one layer, and what the next one sees: normalised, so that it cannot read off how active this one is."""
    true, false = (torch.relu(layer(functional.normalize(each))) for each in (true, false))
    loss = functional.softplus(2 - true.square().sum(1)).mean() + functional.softplus(false.square().sum(1) - 2).mean()
    return loss, true.detach(), false.detach()


def step(run: ManualRun, batch: Batch) -> None:
    """Each layer learns by itself; the sum of their losses is reported."""
    true, false = pair(batch)
    for name in LAYERS:
        loss, true, false = layer_loss(getattr(run.model, name), true, false)
        run.backward(loss, name)
        run.step(name)


def trainer(**options: Any) -> trimtab.Trainer:
    """With the Trainer."""
    return trimtab.Trainer(Layers(), loss=step, optimizer=dict.fromkeys(LAYERS, adam), **options)


def by_hand(updates: int) -> nn.Module:
    """The same as a loop."""
    model = Layers()
    optimizers = {name: adam(getattr(model, name).parameters()) for name in LAYERS}
    batches = loader()
    made = 0
    while made < updates:
        for batch in batches:
            true, false = pair(batch)
            for name, optimizer in optimizers.items():
                loss, true, false = layer_loss(getattr(model, name), true, false)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            made += 1
            if made == updates:
                break
    return model


if __name__ == "__main__":
    torch.manual_seed(0)
    print(trainer().fit(loader(), epochs=10))
