"""House prices with a residual MLP; validates often, keeps the best weights."""

import argparse
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.outer(F.gelu(self.inner(self.norm(x)))))


def houses(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=g)
    price = 2 * x[:, 0] + x[:, 1] * x[:, 2] - torch.relu(x[:, 3]) + 0.1 * torch.randn(n, generator=g)
    return x, price


def evaluate(model, x, y, size):
    model.eval()
    total = 0
    for i in range(0, len(x), size):
        total += F.mse_loss(model(x[i : i + size])[:, 0], y[i : i + size], reduction="sum")
    model.train()
    return total / len(x)


def train(args):
    torch.manual_seed(0)
    x, y = houses(16_384, 0)
    val_x, val_y = houses(16_384, 1)
    model = nn.Sequential(nn.Linear(12, 64), *[Residual(64) for _ in range(4)], nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    best, kept = float("inf"), None
    for step in range(1, args.steps + 1):
        rows = torch.randint(len(x), (args.batch,))
        loss = F.mse_loss(model(x[rows])[:, 0], y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.validate_every == 0:
            error = evaluate(model, val_x, val_y, 4096).item()
            if error < best:
                best, kept = error, copy.deepcopy(model.state_dict())
            if step % (5 * args.validate_every) == 0:
                print(f"step {step}: validation error {error:.4f}, best {best:.4f}")
    model.load_state_dict(kept or model.state_dict())
    return model


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=800)
    cli.add_argument("--batch", type=int, default=256)
    cli.add_argument("--validate-every", type=int, default=10)
    train(cli.parse_args())
