# GAN on a ring of eight Gaussians, with an optimizer each for the generator and the discriminator
import argparse
import math

import torch
import torch.nn as nn


def ring(n):
    angle = 2 * math.pi * torch.randint(8, (n,)) / 8
    return torch.stack([angle.cos(), angle.sin()], 1) * 2 + 0.05 * torch.randn(n, 2)


def mlp(inside, hidden, outside):
    return nn.Sequential(
        nn.Linear(inside, hidden),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Linear(hidden, hidden),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Linear(hidden, outside),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=256)
    args = parser.parse_args()

    torch.manual_seed(0)
    generator, discriminator = mlp(16, args.hidden, 2), mlp(2, args.hidden, 1)
    g_optim = torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.5, 0.999), fused=True)
    d_optim = torch.optim.Adam(discriminator.parameters(), lr=4e-4, betas=(0.5, 0.999), fused=True)
    criterion = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(args.batch, 1), torch.zeros(args.batch, 1)

    for i in range(args.iterations):
        fake = generator(torch.randn(args.batch, 16))

        d_optim.zero_grad()
        d_loss = criterion(discriminator(ring(args.batch)), ones) + criterion(discriminator(fake.detach()), zeros)
        d_loss.backward()
        d_optim.step()

        g_optim.zero_grad()
        g_loss = criterion(discriminator(fake), ones)
        g_loss.backward()
        g_optim.step()

        if i % 100 == 0:
            print(f"{i:6d}  D {d_loss.item():.3f}  G {g_loss.item():.3f}")


if __name__ == "__main__":
    main()
