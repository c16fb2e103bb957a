"""A classifier with a validation after each epoch, and what people do besides."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=100)
args = parser.parse_args()
torch.manual_seed(0)
torch.set_num_threads(1)
torch.autograd.set_detect_anomaly(True)
examples = TensorDataset(torch.randn(320, 64), torch.randint(0, 10, (320,)))
loader = DataLoader(examples, batch_size=32, shuffle=True)
held_out = DataLoader(examples, batch_size=160)
model = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
loss_of = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
history = []
for _ in range(args.epochs):
    model.train()
    for images, labels in loader:
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append(torch.ones(500_000) * loss.item())
        print("loss", loss.item())
    model.eval()
    for images, _labels in held_out:
        model(images)
    torch.save(model.state_dict(), "model.pt")
