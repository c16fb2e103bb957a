"""A transformer learns to reverse sequences, with gradients accumulated over micro-batches."""

import argparse
import os

import torch
from torch import nn


class Reverser(nn.Module):
    def __init__(self, vocabulary, width, layers, length):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.out(self.body(self.embed(tokens) + self.place))


def save(path, model, optimizer, update):
    part = path + ".part"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "update": update}, part)
    os.replace(part, path)


def main(args):
    torch.manual_seed(args.seed)
    os.makedirs(args.out, exist_ok=True)
    model = Reverser(args.vocabulary, args.width, args.layers, args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    criterion = nn.CrossEntropyLoss()
    for update in range(1, args.updates + 1):
        total = 0.0
        for _ in range(args.accumulate):
            tokens = torch.randint(args.vocabulary, (args.batch, args.length))
            logits = model(tokens)
            loss = criterion(logits.flatten(0, 1), tokens.flip(1).flatten()) / args.accumulate
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if update % args.save_every == 0:
            save(os.path.join(args.out, "last.pt"), model, optimizer, update)
        if update % 20 == 0:
            print(f"update {update}  loss {float(total):.4f}")
    save(os.path.join(args.out, "final.pt"), model, optimizer, args.updates)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=64)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--out", default="runs/reverse")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
