"""Language of a surname: a GRU over characters, packed by length, validated after each epoch."""

import argparse

import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence


class NameGRU(nn.Module):
    def __init__(self, letters, hidden, languages):
        super().__init__()
        self.embed = nn.Embedding(letters, 64)
        self.gru = nn.GRU(64, hidden)
        self.out = nn.Linear(hidden, languages)

    def forward(self, packed):
        embedded = packed._replace(data=self.embed(packed.data))
        _, last = self.gru(embedded)
        return self.out(last[0])


def surnames(count, languages, seed):
    """Names whose letters follow the habits of their language."""
    g = torch.Generator().manual_seed(seed)
    habits = torch.rand(languages, 26, generator=torch.Generator().manual_seed(9)) ** 4
    labels = torch.randint(languages, (count,), generator=g)
    letters = torch.multinomial(habits[labels], 12, replacement=True, generator=g)
    lengths = torch.randint(8, 13, (count,), generator=g).tolist()
    return [row[:n] for row, n in zip(letters, lengths, strict=True)], labels


def batches(data, size, order):
    names, labels = data
    for places in order.split(size):
        yield pack_sequence([names[i] for i in places.tolist()], enforce_sorted=False), labels[places]


@torch.no_grad()
def validate(model, data):
    model.eval()
    right = sum((model(names).argmax(1) == labels).sum() for names, labels in batches(data, 512, torch.arange(len(data[0]))))
    model.train()
    return right.item() / len(data[0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--max-steps", type=int, default=600)
    args = parser.parse_args()
    torch.manual_seed(0)
    train, held_out = surnames(6_400, 8, 0), surnames(1024, 8, 1)
    model = NameGRU(26, args.hidden, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    step = 0
    while step < args.max_steps:
        for names, labels in batches(train, 128, torch.randperm(len(train[0]))):
            loss = nn.functional.cross_entropy(model(names), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == args.max_steps:
                break
        print(f"step {step}: loss {loss.item():.4f}, held-out accuracy {validate(model, held_out):.3f}")


if __name__ == "__main__":
    main()
