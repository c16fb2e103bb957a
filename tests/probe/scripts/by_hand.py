"""No optimizer, no loader: parameters are updated by hand."""

import torch
from torch import nn

torch.set_num_threads(1)
model = nn.LSTM(8, 16)
for _ in range(10_000):
    model.zero_grad()
    output, _ = model(torch.randn(5, 2, 8))
    output.square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
