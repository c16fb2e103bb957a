"""A convolution-free VAE for 48 x 48 textures, with a history of the reconstruction error for the plot in the paper."""

import argparse
import json
import pathlib

import torch
from torch import nn
from torch.nn import functional as F

SIDE = 48


class VAE(nn.Module):
    def __init__(self, hidden=64, latent=16):
        super().__init__()
        self.fc1 = nn.Linear(SIDE * SIDE, hidden)
        self.mu, self.logvar = nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.fc3 = nn.Linear(latent, hidden)
        self.fc4 = nn.Linear(hidden, SIDE * SIDE)

    def encode(self, x):
        h = F.relu(self.fc1(x))
        return self.mu(h), self.logvar(h)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.decode(z), mu, logvar


def textures(count):
    """Plane waves of random direction and phase, as values in 0..1."""
    y, x = torch.meshgrid(torch.linspace(0, 6, SIDE), torch.linspace(0, 6, SIDE), indexing="ij")
    k = torch.randn(count, 2, 1, 1)
    phase = 6.28 * torch.rand(count, 1, 1)
    return (0.5 + 0.5 * torch.sin(k[:, 0] * x + k[:, 1] * y + phase)).flatten(1)


class Experiment:
    def __init__(self, args):
        self.args = args
        self.data = textures(4096)
        self.model = VAE()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=True)
        self.history = []

    def step(self, x):
        recon, mu, logvar = self.model(x)
        kld = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
        loss = F.mse_loss(recon, x, reduction="sum") / len(x) + kld
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.history.append({"loss": loss, "error": (recon - x).abs()})

    def run(self):
        for step in range(self.args.steps):
            self.step(self.data[torch.randint(len(self.data), (self.args.batch,))])
            if (step + 1) % 50 == 0:
                last = self.history[-1]
                print(f"step {step + 1}: loss {last['loss'].item():.2f}, error {last['error'].mean().item():.4f}")
        if self.args.plot_data:
            curve = [(h["loss"].item(), h["error"].mean().item()) for h in self.history]
            pathlib.Path(self.args.plot_data).write_text(json.dumps(curve))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--plot-data")
    torch.manual_seed(0)
    Experiment(parser.parse_args()).run()
