"""Which plant does a leaf belong to? Leaves are outlines, drawn and blurred before the network sees them."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIDE = 32


def outlines(count, species, seed):
    """(radius of 48 points around the centre, species) of each leaf."""
    rng = np.random.default_rng(seed)
    angle = np.linspace(0, 2 * np.pi, 48, endpoint=False)
    label = rng.integers(species, size=count)
    lobes, depth = 2 + label, 0.15 + 0.02 * label
    radius = 0.7 + depth[:, None] * np.cos(lobes[:, None] * angle + rng.uniform(0, 6.28, (count, 1)))
    return (radius + rng.normal(0, 0.02, radius.shape)).astype(np.float32), label


def draw(radius):
    """Pixels inside the outline are 1."""
    picture = np.zeros((SIDE, SIDE), np.float32)
    for row in range(SIDE):
        for column in range(SIDE):
            y, x = (row - SIDE / 2) / (SIDE / 2), (column - SIDE / 2) / (SIDE / 2)
            point = int(np.arctan2(y, x) % (2 * np.pi) / (2 * np.pi) * len(radius)) % len(radius)
            if y * y + x * x <= radius[point] ** 2:
                picture[row, column] = 1.0
    return picture


def blur(picture):
    padded = np.pad(picture, 1)
    return sum(padded[i : i + SIDE, j : j + SIDE] for i in range(3) for j in range(3)) / 9


class Leaves(Dataset):
    def __init__(self, count, seed):
        self.radius, self.label = outlines(count, 6, seed)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, index):
        picture = blur(draw(self.radius[index]))
        return torch.from_numpy(picture)[None], int(self.label[index])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    torch.manual_seed(0)
    loader = DataLoader(Leaves(2000, seed=0), args.batch_size, shuffle=True, num_workers=1, persistent_workers=True)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, 6),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    done = 0
    while True:
        for pictures, labels in loader:
            loss = criterion(model(pictures), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            if done % 25 == 0:
                print(f"{done}/{args.steps} loss {loss.item():.3f}")
            if done == args.steps:
                return


if __name__ == "__main__":
    main()
