"""A U-Net marks the strokes of handwritten digits; pixels whose grey may be either are void and count for nothing.

Two batches make an update. They have different numbers of pixels that count, and the gradient is that of all of them together.
"""

from __future__ import annotations

from typing import Any

import torch
from material import digits
from torch import nn
from torch.nn import functional

import trimtab
from trimtab.train import Loader

VOID = 255


class UNet(nn.Module):
    """``(B, 1, 8, 8)`` -> logits ``(B, 2, 8, 8)``."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, 2, padding=1)])
        self.up, self.head = nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(32, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Down, up, and what was before beside it."""
        fine = torch.relu(self.down[0](x))
        return self.head(torch.cat([fine, torch.relu(self.up(torch.relu(self.down[1](fine))))], 1))


def loader() -> Loader:
    """Images with noise, and which of their pixels are ink."""
    grey = digits()[0].view(-1, 1, 8, 8)
    marks = (grey[:, 0] > 0.5).long().masked_fill((grey[:, 0] > 0.35) & (grey[:, 0] < 0.65), VOID)
    noise = 0.3 * torch.randn(grey.shape, generator=torch.Generator().manual_seed(0))
    return Loader((grey + noise, marks), batch=32)


loss = nn.CrossEntropyLoss(ignore_index=VOID)


def trainer(**options: Any) -> trimtab.Trainer:
    """With the Trainer."""
    twice = trimtab.Settings(data=trimtab.DataSettings(accumulate=2))
    return trimtab.Trainer(UNet(), loss=loss, optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3), settings=twice, **options)


def by_hand(updates: int) -> nn.Module:
    """The same as a loop: each batch counts by its pixels that are not void."""
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = loader()
    pair: list[tuple[torch.Tensor, torch.Tensor]] = []
    made = 0
    while made < updates:
        for place, batch in enumerate(batches, 1):
            pair.append(batch)
            if len(pair) < 2 and place < len(batches):
                continue
            counted = sum(int((marks != VOID).sum()) for _, marks in pair)
            optimizer.zero_grad()
            for images, marks in pair:
                (functional.cross_entropy(model(images), marks, ignore_index=VOID, reduction="sum") / counted).backward()
            optimizer.step()
            pair = []
            made += 1
            if made == updates:
                break
    return model


def workload() -> trimtab.Workload:
    """For trimtab.tune, which finds how the two batches of an update are best computed."""
    training = trimtab.Training(
        data=loader, optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3), loss=loss, settings=trainer().settings
    )
    return trimtab.Workload(name="train-unet", mode="train", model=UNet, training=training)


if __name__ == "__main__":
    torch.manual_seed(0)
    print(trainer().fit(loader(), epochs=5))
