"""A language model of words whose state is carried from batch to batch, and never across the begin of the text."""

from __future__ import annotations

from typing import Any

import torch
from material import words
from torch import nn
from torch.nn import functional

import trimtab

ROWS, STEPS, MOST = 16, 20, 500


class WordModel(nn.Module):
    """``ids: int64 (16, T)`` -> logits ``(16, T, 501)``. The state is a buffer, so that checkpoints hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = (
            nn.Embedding(MOST + 1, 32),
            nn.LSTM(32, 64, batch_first=True),
            nn.Linear(64, MOST + 1),
        )
        self.register_buffer("state", torch.zeros(2, 1, ROWS, 64))

    def forward(self, ids: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """The next words; ``first`` of the text begins with an empty state."""
        before = self.state * (1 - first)
        found, state = self.cell(self.embed(ids), (before[0].contiguous(), before[1].contiguous()))
        self.state = torch.stack(state).detach()
        return self.head(found)


def loader() -> list[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]]:
    """Sixteen stretches of the text side by side, 20 words at a time and in order."""
    text, _ = words(MOST)
    rows = text[: len(text) // ROWS * ROWS].view(ROWS, -1)
    starts = range(0, rows.shape[1] - STEPS - 1, STEPS)
    return [
        ((rows[:, at : at + STEPS], torch.tensor(float(at == 0))), rows[:, at + 1 : at + STEPS + 1].contiguous())
        for at in starts
    ]


def loss(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The cross entropy of the next words."""
    return functional.cross_entropy(found.flatten(0, 1), wanted.flatten())


def trainer(**options: Any) -> trimtab.Trainer:
    """With the Trainer."""
    clipped = trimtab.Settings(optimizer=trimtab.OptimizerSettings(clip_norm=0.25))
    return trimtab.Trainer(WordModel(), loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=5.0), settings=clipped, **options)


def by_hand(updates: int) -> nn.Module:
    """The same as a loop."""
    model = WordModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    batches = loader()
    for update in range(updates):
        inputs, wanted = batches[update % len(batches)]
        optimizer.zero_grad()
        loss(model(*inputs), wanted).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
    return model


if __name__ == "__main__":
    torch.manual_seed(0)
    print(trainer().fit(loader(), epochs=3))
