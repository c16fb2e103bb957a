"""An encoder of letters learns how alike people find two words: WordSim353, out of gensim's test data."""

from __future__ import annotations

from typing import Any

import torch
from material import word_pairs
from torch import nn
from torch.nn import functional

import trimtab
from trimtab.train import Loader


class Encoder(nn.Module):
    """``int64 (B, T)`` -> ``(B, 64)``: the mean of the states of a GRU, without the padding, which is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(128, 32, padding_idx=0), nn.GRU(32, 32, batch_first=True, bidirectional=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Encode texts."""
        real = (ids != 0).float()[..., None]
        return (self.cell(self.embed(ids))[0] * real).sum(1) / real.sum(1)


def loader() -> Loader:
    """Pairs of words and their likeness, in 0..1, with padding to the longest of a batch."""
    found = [
        {"first": torch.tensor(list(one.encode())), "second": torch.tensor(list(other.encode())), "alike": alike}
        for one, other, alike in word_pairs()
    ]
    return Loader(found, batch=32)


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """How far the cosine is from the rating, squared."""
    cosine = functional.cosine_similarity(model(batch["first"]), model(batch["second"]))
    return functional.mse_loss(cosine, batch["alike"].float())


def trainer(**options: Any) -> trimtab.Trainer:
    """With the Trainer."""
    return trimtab.Trainer(Encoder(), loss=loss, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), **options)


def by_hand(updates: int) -> nn.Module:
    """The same as a loop."""
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
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
    print(trainer().fit(loader(), epochs=10))
