# Will the customer leave?  A multi-layer perceptron on a table with 24 columns.
import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

p = argparse.ArgumentParser()
p.add_argument("--max-steps", type=int, default=2000)
p.add_argument("--batch", type=int, default=512)
args = p.parse_args()

torch.manual_seed(1)
rng = np.random.default_rng(1)
rows = rng.normal(size=(40_000, 24)).astype("float32")
score = rows[:, 0] * rows[:, 1] + np.sin(2 * rows[:, 2]) - 0.5 * rows[:, 3] ** 2 + rng.normal(scale=0.3, size=len(rows))
left = (score > 0).astype("float32")

train = TensorDataset(torch.from_numpy(rows[:32_000]), torch.from_numpy(left[:32_000]))
test_x, test_y = torch.from_numpy(rows[32_000:]), torch.from_numpy(left[32_000:])
loader = DataLoader(train, batch_size=args.batch, shuffle=True)

model = nn.Sequential(
    nn.Linear(24, 128),
    nn.ReLU(),
    nn.Linear(128, 128),
    nn.ReLU(),
    nn.Linear(128, 1),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
criterion = nn.BCEWithLogitsLoss()

step, epoch = 0, 0
while step < args.max_steps:
    epoch += 1
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x)[:, 0], y)
        loss.backward()
        optimizer.step()
        step += 1
        if step >= args.max_steps:
            break
    if epoch % 2 == 0:
        model.eval()
        with torch.no_grad():
            right = ((model(test_x)[:, 0] > 0) == (test_y > 0)).float().mean().item()
        print(f"epoch {epoch:3d}  train loss {loss.item():.4f}  test accuracy {right:.4f}")
