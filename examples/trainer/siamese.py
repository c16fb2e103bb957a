"""A siamese network learns whether two handwritten digits are the same (Hadsell et al. 2006): one model, called twice."""

from __future__ import annotations

from typing import Any

import torch
from material import digits
from torch import nn

import trimtab
from trimtab.train import Loader


def build() -> nn.Module:
    """``(B, 64)`` -> a place in the plane ``(B, 2)``."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def loader() -> Loader:
    """Pairs of images, half of them of the same digit, and whether they are."""
    images, labels = digits()
    made = torch.Generator().manual_seed(0)
    order = labels.argsort(stable=True)  # neighbours show the same digit
    first = torch.cat([order[:-1], torch.randperm(len(order), generator=made)[:-1]])
    second = torch.cat([order[1:], torch.randperm(len(order), generator=made)[1:]])
    return Loader((images[first], images[second], (labels[first] == labels[second]).float()), batch=64)


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Equal digits are drawn together, others pushed apart up to a distance of 1."""
    first, second, same = batch
    distance = nn.functional.pairwise_distance(model(first), model(second))
    return (same * distance.square() + (1 - same) * (1 - distance).clamp(min=0).square()).mean()


def near(outputs: list[torch.Tensor], batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Whether pairs nearer than 0.5 are those of equal digits."""
    return (nn.functional.pairwise_distance(*outputs) < 0.5) == batch[2].bool()


def trainer(**options: Any) -> trimtab.Trainer:
    """With the Trainer; the metric gets the outputs of both calls."""
    return trimtab.Trainer(build(), loss=loss, optimizer=torch.optim.Adam, metrics={"near": near}, **options)


def by_hand(updates: int) -> nn.Module:
    """The same as a loop, without the metric."""
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    batches = loader()
    made = 0
    while made < updates:
        for batch in batches:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
            made += 1
            if made == updates:
                break
    return model


if __name__ == "__main__":
    torch.manual_seed(0)
    print(trainer().fit(loader(), loader(), epochs=5))
