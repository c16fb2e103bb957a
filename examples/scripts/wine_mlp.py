"""Wide MLP on synthetic spectra of wine, five cultivars; batches are rows of tensors in memory."""

import argparse

import torch
from torch import nn


def spectra(n, generator):
    """(n, 256) absorbances and the cultivar of each."""
    label = torch.randint(5, (n,), generator=generator)
    centre = torch.linspace(40, 200, 5)[label]
    band = torch.exp(-((torch.arange(256) - centre[:, None]) ** 2) / 800)
    return band + 0.3 * torch.randn(n, 256, generator=generator), label


@torch.inference_mode()
def accuracy(model, x, y):
    model.eval()
    right = sum((model(a).argmax(1) == b).sum() for a, b in zip(x.split(1024), y.split(1024), strict=True))
    model.train()
    return right.item() / len(y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=0, help="stop after as many steps; 0 for all epochs")
    args = parser.parse_args()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    x, y = spectra(32_768, g)
    test_x, test_y = spectra(4096, g)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, fused=True)
    criterion = nn.CrossEntropyLoss()
    steps = 0
    for epoch in range(args.epochs):
        for rows in torch.randperm(len(x)).split(256):
            loss = criterion(model(x[rows]), y[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            steps += 1
            if steps == args.steps:
                return
        print(f"epoch {epoch}: loss {loss.item():.4f}, test accuracy {accuracy(model, test_x, test_y):.4f}")


if __name__ == "__main__":
    main()
