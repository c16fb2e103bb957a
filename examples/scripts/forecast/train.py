"""python -m forecast.train"""

import argparse

import torch
from torch.nn.functional import mse_loss

from forecast.data import load_curve, windows
from forecast.model import Forecaster


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--past", type=int, default=48)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--num-threads", type=int, default=16)
    args = parser.parse_args()

    torch.set_num_threads(args.num_threads)
    torch.manual_seed(0)
    curve = load_curve(20_000)
    model = Forecaster(args.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    for step in range(1, args.steps + 1):
        past, target = windows(curve, args.past, args.batch)
        loss = mse_loss(model(past), target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} mse {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
