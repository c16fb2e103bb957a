"""A small workload in a file of its own, with whatever is to be wrong about it."""

from __future__ import annotations

import pathlib
import textwrap

import trimtab

HEAD = """
import ctypes, os, time, torch, trimtab
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
    def forward(self, x):
        return self.layer(x)

def data(n=240):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 8, generator=g)
    return x, (x.sum(1) > 0).long()

def top1(output, target):
    return output.argmax(1) == target

def workload(model=None, score=top1, **more):
    evaluation = trimtab.Evaluation(data=data(), score=score)
    return trimtab.Workload(name="faulty", model=model or Model, inputs=torch.randn(2, 8), evaluation=evaluation, **more)

torch.manual_seed(0)
"""


def write(folder: pathlib.Path, body: str) -> str:
    """A workload file with ``body`` below the common head; its reference."""
    folder.mkdir(exist_ok=True)
    path = folder / "faulty.py"
    path.write_text(HEAD + textwrap.dedent(body))
    return f"{path}:made"


def run(folder: pathlib.Path, body: str, **options):
    options = {"trials": 1, "out": folder / "run", "limits": trimtab.Limits(max_drop=0.1), "timing_seconds": 0.5} | options
    return trimtab.optimize(write(folder, body), **options)
