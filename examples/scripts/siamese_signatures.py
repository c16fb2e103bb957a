"""Signature verification with a siamese network and a contrastive loss."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    """Strokes of a signature, (B, 2, 64), to a unit vector."""

    def __init__(self, out=64):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(2, 32, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv1d(32, 64, 5, stride=2, padding=2),
            nn.ReLU(),
        )
        self.out = nn.Linear(64 * 16, out)

    def forward(self, x):
        return F.normalize(self.out(self.features(x).flatten(1)), dim=1)


def contrastive_loss(first, second, same, margin=1.0):
    """Pairs of the same writer are drawn together, others are pushed apart up to the margin."""
    total = 0.0
    for a, b, s in zip(first, second, same, strict=True):
        distance = torch.sqrt(((a - b) ** 2).sum() + 1e-8)
        pushed = torch.clamp(margin - distance, min=0.0)
        total = total + (distance**2 if s == 1 else pushed**2)
    return total / len(first)


def writers(count, samples):
    base = torch.randn(count, 1, 2, 64).cumsum(-1) / 4
    return base + 0.2 * torch.randn(count, samples, 2, 64)


def pairs(signatures, size):
    writer = torch.randint(len(signatures), (size,))
    same = torch.randint(2, (size,))
    other = torch.where(same == 1, writer, (writer + 1 + torch.randint(len(signatures) - 1, (size,))) % len(signatures))
    sample = torch.randint(signatures.shape[1], (2, size))
    return signatures[writer, sample[0]], signatures[other, sample[1]], same


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=600)
    ap.add_argument("--pairs", type=int, default=48, help="pairs in a batch")
    args = ap.parse_args()

    torch.manual_seed(0)
    signatures = writers(60, 12)
    net = Encoder()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(args.steps):
        a, b, same = pairs(signatures, args.pairs)
        loss = contrastive_loss(net(a), net(b), same)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"{step:5d} {loss.item():.4f}")


if __name__ == "__main__":
    main()
