"""Sentence embeddings of a corpus with a BERT encoder; prints how alike neighbours are."""

import argparse
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertModel

MAX_LENGTH = 128


class Sentences(Dataset):
    """Token ids of sentences; most of them have between 6 and 30 words."""

    def __init__(self, count, vocabulary, seed):
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(2.6, 0.4, count), 6, 40).astype(int)
        self.sentences = [rng.integers(5, vocabulary, n).tolist() for n in lengths]

    def __len__(self):
        return len(self.sentences)

    def __getitem__(self, i):
        return self.sentences[i][:MAX_LENGTH]


def collate(sentences):
    ids = torch.zeros(len(sentences), MAX_LENGTH, dtype=torch.long)
    mask = torch.zeros(len(sentences), MAX_LENGTH, dtype=torch.long)
    for row, tokens in enumerate(sentences):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def mean_pool(hidden, mask):
    mask = mask[..., None].to(hidden.dtype)
    return (hidden * mask).sum(1) / mask.sum(1)


def main(args):
    torch.manual_seed(0)
    config = BertConfig(vocab_size=4000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512)
    model = BertModel(config, add_pooling_layer=False).eval()
    loader = DataLoader(Sentences(args.batches * args.batch_size, 4000, 0), args.batch_size, collate_fn=collate)
    embedded = []
    with torch.inference_mode():
        for number, batch in enumerate(loader):
            output = model(**batch)
            embedded.append(mean_pool(output.last_hidden_state, batch["attention_mask"]))
            if number % 20 == 0:
                print(f"batch {number} of {len(loader)}")
    vectors = torch.nn.functional.normalize(torch.cat(embedded), dim=1)
    print(f"{len(vectors)} sentences, mean cosine of neighbours {(vectors[1:] * vectors[:-1]).sum(1).mean():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--batches", type=int, default=400)
    main(parser.parse_args())
