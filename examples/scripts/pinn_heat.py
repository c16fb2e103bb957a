# Physics-informed network for the heat equation u_t = 0.1 u_xx on [0, 1] with u(x, 0) = sin(pi x).
import argparse
import math

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=800)
parser.add_argument("--points", type=int, default=256)
args = parser.parse_args()

torch.manual_seed(0)
torch.autograd.set_detect_anomaly(True)

layers = [torch.nn.Linear(2, 64), torch.nn.Tanh()]
for _ in range(4):
    layers += [torch.nn.Linear(64, 64), torch.nn.Tanh()]
net = torch.nn.Sequential(*layers, torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)


def residual(xt):
    xt.requires_grad_(True)
    u = net(xt)
    (first,) = torch.autograd.grad(u.sum(), xt, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), xt, create_graph=True)
    return first[:, 1] - 0.1 * second[:, 0]


for step in range(args.steps):
    inside = torch.rand(args.points, 2)
    x = torch.rand(args.points, 1)
    start = torch.cat([x, torch.zeros_like(x)], 1)
    edge = torch.cat([torch.randint(2, (args.points, 1)).float(), torch.rand(args.points, 1)], 1)

    physics = residual(inside).pow(2).mean()
    initial = (net(start) - torch.sin(math.pi * x)).pow(2).mean()
    boundary = net(edge).pow(2).mean()
    loss = physics + initial + boundary

    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"{step:6d} physics {physics.item():.2e} initial {initial.item():.2e} boundary {boundary.item():.2e}")

with torch.no_grad():
    at = torch.tensor([[0.5, 0.5]])
    print(f"u(0.5, 0.5) = {net(at).item():.4f}, exact {math.exp(-0.1 * math.pi**2 * 0.5):.4f}")
