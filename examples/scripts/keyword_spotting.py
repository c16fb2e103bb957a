"""Spots ten keywords in one-second clips. Every clip is a file, as in the speech commands data set."""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

WORDS = ["yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go"]


def write_clips(folder, per_word):
    """Chirps with a pitch of their own for each word, as arrays of 2000 samples."""
    rng = np.random.default_rng(0)
    t = np.linspace(0, 1, 2000, dtype=np.float32)
    for number, word in enumerate(WORDS):
        (folder / word).mkdir(parents=True, exist_ok=True)
        for clip in range(per_word):
            pitch = 20 + 12 * number + rng.normal(0, 2)
            wave = np.sin(6.28 * pitch * t * (1 + 0.2 * t)) + rng.normal(0, 0.5, t.shape)
            np.savez(folder / word / f"{clip:04d}.npz", wave=wave.astype(np.float32))


class Clips(Dataset):
    def __init__(self, folder):
        self.files = sorted(folder.glob("*/*.npz"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        with np.load(self.files[i]) as clip:
            return torch.from_numpy(clip["wave"]), WORDS.index(self.files[i].parent.name)


class M3(nn.Module):
    """Raw wave to word, with one-dimensional convolutions."""

    def __init__(self, width=32):
        super().__init__()
        self.conv1 = nn.Conv1d(1, width, 80, stride=8)
        self.conv2 = nn.Conv1d(width, width, 3)
        self.bn1, self.bn2 = nn.BatchNorm1d(width), nn.BatchNorm1d(width)
        self.fc = nn.Linear(width, len(WORDS))

    def forward(self, x):
        x = F.max_pool1d(F.relu(self.bn1(self.conv1(x[:, None]))), 4)
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean(2))


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path("runs/clips"))
    parser.add_argument("--per-word", type=int, default=100)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch-size", type=int, default=32)
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(0)
    if not args.data.exists():
        write_clips(args.data, args.per_word)
    loader = DataLoader(Clips(args.data), batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = M3()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = 0
    while step < args.steps:
        for waves, words in loader:
            logits = model(waves)
            loss = F.cross_entropy(logits, words)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 50 == 0:
                print(f"step {step} loss {loss.item():.3f}")
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
