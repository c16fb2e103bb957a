"""Finds broken sensors: a denoising autoencoder learns 64 channels, the reconstruction error is the alarm."""

import argparse

import numpy as np
import torch
import torch.nn as nn


def get_args():
    ap = argparse.ArgumentParser()
    ap.add_argument("--n-iter", type=int, default=1000)
    ap.add_argument("--batch-size", type=int, default=256)
    ap.add_argument("--hidden", type=int, default=384)
    return ap.parse_args()


def simulate(n, channels=64, seed=0):
    rng = np.random.default_rng(seed)
    sources = np.cumsum(rng.normal(size=(n, 6)), axis=0)
    mixing = rng.normal(size=(6, channels))
    readings = np.tanh(sources @ mixing / 20) + 0.05 * rng.normal(size=(n, channels))
    return (readings - readings.mean(0)) / readings.std(0)


def build(channels, hidden):
    return nn.Sequential(
        nn.Linear(channels, hidden),
        nn.ELU(),
        nn.Linear(hidden, hidden),
        nn.ELU(),
        nn.Linear(hidden, 16),
        nn.Linear(16, hidden),
        nn.ELU(),
        nn.Linear(hidden, hidden),
        nn.ELU(),
        nn.Linear(hidden, channels),
    )


def train(model, readings, args):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    model.train()
    for it in range(1, args.n_iter + 1):
        rows = torch.randint(len(readings), (args.batch_size,))
        clean = readings[rows]
        noisy = clean + 0.1 * torch.randn_like(clean)
        loss = nn.functional.mse_loss(model(noisy), clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if it % 50 == 0:
            print(f"iteration {it}, loss {loss.item():.5f}")


def main():
    args = get_args()
    torch.manual_seed(42)
    readings = torch.from_numpy(simulate(20_000))
    model = build(readings.shape[1], args.hidden).double()
    train(model, readings, args)
    model.eval()
    with torch.no_grad():
        errors = (model(readings[:2000]) - readings[:2000]).pow(2).mean(1)
    print(f"alarm threshold (99%): {errors.quantile(0.99).item():.4f}")


if __name__ == "__main__":
    main()
