"""Segmentation of synthetic road images with a small convolutional network."""

import argparse
from pathlib import Path

import torch
from torch import nn


def conv(inside, outside, stride=1):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
    )


class SegNet(nn.Module):
    """Road or not, for each pixel; computed at half the resolution and enlarged at the end."""

    def __init__(self, width=16):
        super().__init__()
        self.body = nn.Sequential(
            conv(3, width),
            conv(width, width),
            conv(width, 2 * width, stride=2),
            conv(2 * width, 2 * width),
        )
        self.out = nn.Conv2d(2 * width, 2, 1)
        self.grow = nn.Upsample(scale_factor=2, mode="nearest")

    def forward(self, x):
        return self.grow(self.out(self.body(x)))


def scenes(count, size, generator):
    """Images with a bright stripe as the road, and the mask of the stripe."""
    x = torch.linspace(-1, 1, size)
    slope = torch.rand(count, 1, 1, generator=generator) - 0.5
    middle = torch.rand(count, 1, 1, generator=generator) - 0.5
    mask = (x[None, None, :] - middle - slope * x[None, :, None]).abs() < 0.25
    noise = torch.randn(count, 3, size, size, generator=generator)
    return noise * 0.5 + mask[:, None].float(), mask.long()


class Trainer:
    def __init__(self, args):
        self.args = args
        generator = torch.Generator().manual_seed(0)
        self.images, self.masks = scenes(256, args.size, generator)
        self.model = SegNet()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9)
        self.criterion = nn.CrossEntropyLoss()

    def train_step(self, images, masks):
        loss = self.criterion(self.model(images), masks)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def fit(self):
        self.model.train()
        for step in range(self.args.steps):
            batch = torch.randint(len(self.images), (self.args.batch,))
            loss = self.train_step(self.images[batch], self.masks[batch])
            if (step + 1) % 50 == 0:
                print(f"[{step + 1}/{self.args.steps}] loss={loss.item():.4f}")
        if self.args.save:
            torch.save(self.model.state_dict(), self.args.save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--save", type=Path)
    torch.manual_seed(0)
    Trainer(parser.parse_args()).fit()
