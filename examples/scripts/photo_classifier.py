"""Train a small CNN on photos that are stored compressed, as a camera trap archive would be."""

import argparse
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIZE, CLASSES = 128, 8


def make_archive(count, seed):
    """Blobs of one colour per class on a noisy background; each photo is a (label, compressed bytes) pair."""
    rng = np.random.default_rng(seed)
    ys, xs = np.mgrid[:SIZE, :SIZE]
    colours = np.random.default_rng(7).integers(60, 255, (CLASSES, 3))
    photos = []
    for i in range(count):
        label = i % CLASSES
        cy, cx = rng.integers(30, SIZE - 30, 2)
        blob = (ys - cy) ** 2 + (xs - cx) ** 2 < rng.integers(12, 30) ** 2
        photo = rng.integers(0, 48, (SIZE, SIZE, 3), dtype=np.uint8)
        photo[blob] = colours[label]
        photos.append((label, zlib.compress(photo.tobytes(), 1)))
    return photos


class Photos(Dataset):
    def __init__(self, photos):
        self.photos = photos
        self.mean = np.float32([0.2, 0.2, 0.2])[:, None, None]
        self.std = np.float32([0.25, 0.25, 0.25])[:, None, None]

    def __len__(self):
        return len(self.photos)

    def __getitem__(self, i):
        label, data = self.photos[i]
        photo = np.frombuffer(zlib.decompress(data), np.uint8).reshape(SIZE, SIZE, 3)
        small = photo.reshape(SIZE // 2, 2, SIZE // 2, 2, 3).mean((1, 3), dtype=np.float32)
        return torch.from_numpy((small.transpose(2, 0, 1) / 255 - self.mean) / self.std), label


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 5, stride=4, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.conv3 = nn.Conv2d(32, 64, 3, padding=1)
        self.fc = nn.Linear(64 * 2 * 2, CLASSES)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.max_pool2d(F.relu(self.conv3(x)), 4)
        return self.fc(x.flatten(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--steps", type=int, default=700)
    args = parser.parse_args()
    torch.manual_seed(0)

    loader = DataLoader(Photos(make_archive(768, seed=1)), batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    step = epoch = 0
    while step < args.steps:
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == args.steps:
                break
        epoch += 1
        print(f"epoch {epoch}  step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
