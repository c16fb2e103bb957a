"""A small GPT learns to spell: the next byte of sentences from 300 news articles (gensim's copy of Lee's corpus).

Sentences are of very different lengths, so batches are made of those of similar length, which saves the padding.

    python examples/training/gpt.py
    python -c "import trimtab; print(trimtab.tune('examples/training/gpt.py', budget='5m'))"
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from real import BYTES, sentences, stop_at
from torch import nn
from torch.nn import functional

import trimtab
from trimtab.train.data.collate import Collate
from trimtab.train.data.loader import Loader
from trimtab.train.loss.adapter import IGNORED

HELD_OUT, BATCH, EPOCHS, TARGET = 200, 32, 12, 2.5
SETTINGS = trimtab.Settings(optimizer=trimtab.OptimizerSettings(implementation="fused", clip_norm=1.0))
Batch = dict[str, Any]


class Block(nn.Module):
    """Causal attention and a wider layer, both on what is normalised and added to what there was."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(B, T, width)`` -> the same."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.wide(self.norms[1](x))


class Gpt(nn.Module):
    """``ids: int64 (B, T)``, T up to 512 -> ``logits: float32 (B, T, 256)`` of the byte that follows each."""

    def __init__(self, width: int = 128, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(BYTES, width), nn.Embedding(512, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, BYTES))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The logits."""
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.blocks(self.embedding(ids) + self.places(places)))


def build() -> nn.Module:
    """The model."""
    return Gpt()


def examples() -> list[Batch]:
    """``{"ids": (T,), "labels": (T,)}``, the labels one byte ahead."""
    return [{"ids": text[:-1], "labels": text[1:]} for text in sentences()]


def loader() -> Loader:
    """The sentences to learn from, in batches of similar length."""
    return Loader(examples()[HELD_OUT:], BATCH, lengths=lambda example: len(example["ids"]), collate=Collate())


def held_out() -> list[Batch]:
    """The sentences to validate on, the shortest first."""
    kept = sorted(examples()[:HELD_OUT], key=lambda example: len(example["ids"]))
    return [Collate()(kept[i : i + BATCH]) for i in range(0, len(kept), BATCH)]


def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean over the bytes that are no padding, and how many these are."""
    logits, labels = model(batch["ids"]), batch["labels"]
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED), (labels != IGNORED).sum()


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """What trains it."""
    return torch.optim.AdamW(parameters, lr=2e-3)


def trainer() -> trimtab.Trainer:
    """Everything put together."""
    return trimtab.Trainer(build(), loss=loss, optimizer=optimizer, settings=SETTINGS, callbacks=[stop_at(TARGET)])


def workload() -> trimtab.Workload:
    """For trimtab.tune: the same training with every setting at its default."""
    training = trimtab.Training(data=loader, optimizer=optimizer, loss=loss)
    return trimtab.Workload(name="train-gpt", mode="train", model=build, training=training)


if __name__ == "__main__":
    torch.manual_seed(0)
    print(trainer().fit(loader(), held_out(), epochs=EPOCHS))
