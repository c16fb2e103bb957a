"""An LSTM learns to spell: the next byte of sentences from 300 news articles (gensim's copy of Lee's corpus).

Sentences are of very different lengths, so batches are made of those of similar length, which saves the padding.

    python examples/training/lstm.py
    python -c "import trimtab; print(trimtab.tune('examples/training/lstm.py', budget='5m'))"
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

HELD_OUT, BATCH, EPOCHS, TARGET = 200, 32, 12, 1.9
SETTINGS = trimtab.Settings(optimizer=trimtab.OptimizerSettings(implementation="fused", clip_norm=1.0))
Batch = dict[str, Any]


class Speller(nn.Module):
    """``ids: int64 (B, T)`` -> ``logits: float32 (B, T, 256)`` of the byte that follows each."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, BYTES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The logits."""
        return self.head(self.lstm(self.embedding(ids))[0])


def build() -> nn.Module:
    """The model."""
    return Speller()


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
    return torch.optim.AdamW(parameters, lr=4e-3)


def trainer() -> trimtab.Trainer:
    """Everything put together."""
    return trimtab.Trainer(build(), loss=loss, optimizer=optimizer, settings=SETTINGS, callbacks=[stop_at(TARGET)])


def workload() -> trimtab.Workload:
    """For trimtab.tune: the same training with every setting at its default."""
    training = trimtab.Training(data=loader, optimizer=optimizer, loss=loss)
    return trimtab.Workload(name="train-lstm", mode="train", model=build, training=training)


if __name__ == "__main__":
    torch.manual_seed(0)
    print(trainer().fit(loader(), held_out(), epochs=EPOCHS))
