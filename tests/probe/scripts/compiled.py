"""A compiled model whose batches have many sizes, so that each size is compiled."""

import torch
from torch import nn

torch.manual_seed(0)
torch._dynamo.config.recompile_limit = 64
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
compiled = torch.compile(model, backend="aot_eager", dynamic=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(60):
    optimizer.zero_grad()
    loss = compiled(torch.randn(2 + step, 8)).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item())
