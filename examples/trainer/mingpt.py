"""A small GPT of characters: weight decay on matrices only, warm-up and cosine, clipped gradients."""

from __future__ import annotations

from typing import Any

import torch
from material import gensim_file
from torch import nn
from torch.nn import functional

import trimtab
from trimtab.train import Loader, cosine

LENGTH, WIDTH, BYTES = 32, 64, 128


class Block(nn.Module):
    """Attention to what came before, and a network per place."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(B, T, 64)`` -> the same shape."""
        parts = self.mix(self.norms[0](x)).unflatten(2, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.inner(self.norms[1](x))


class Gpt(nn.Module):
    """``int64 (B, T)`` -> logits ``(B, T, 128)``."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(BYTES, WIDTH), nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The next character at each place."""
        return self.head(self.norm(self.blocks(self.token(ids) + self.place[: ids.shape[1]])))


def loader() -> Loader:
    """Pieces of news articles, and the same a character later."""
    text = torch.tensor(list(gensim_file("lee_background.cor").encode("ascii", "replace")))
    rows = text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    return Loader((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()), batch=16)


def loss(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The cross entropy of the next characters."""
    return functional.cross_entropy(found.flatten(0, 1), wanted.flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, with weight decay on what has two axes."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95))


def trainer(**options: Any) -> trimtab.Trainer:
    """With the Trainer."""
    model = Gpt()
    return trimtab.Trainer(
        model,
        loss=loss,
        optimizer=optimizer_of(model),
        schedule=cosine(warmup=0.1),
        settings=trimtab.Settings(optimizer=trimtab.OptimizerSettings(clip_norm=1.0)),
        **options,
    )


def by_hand(updates: int) -> nn.Module:
    """The same as a loop."""
    model = Gpt()
    optimizer = optimizer_of(model)
    schedule = cosine(warmup=0.1)(optimizer, updates)
    batches = loader()
    made = 0
    while made < updates:
        for ids, wanted in batches:
            optimizer.zero_grad()
            loss(model(ids), wanted).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            made += 1
            if made == updates:
                break
    return model


if __name__ == "__main__":
    torch.manual_seed(0)
    print(trainer().fit(loader(), epochs=1))
