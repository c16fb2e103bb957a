"""Fails before its first step."""

import torch

print(torch.ones(1))
raise ValueError("no data in ./data")
