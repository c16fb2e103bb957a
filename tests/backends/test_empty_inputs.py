"""Inputs of size 0, such as the cache of a decoder's first step: every form takes them, in any order of calls."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import nn

from trimtab.core.backend import BACKENDS
from trimtab.core.candidate import Candidate
from trimtab.core.signature import Dim

HEADS, WIDTH = 2, 8


class Step(nn.Module):
    """One step of a decoder: ``token (B, 1)``, ``keys`` and ``values (B, 2, T, 4)`` -> logits and the longer cache."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 16)

    def forward(self, token: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.embed(token)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        seen = (q @ keys.transpose(-1, -2) / 2).softmax(-1) @ values
        return self.head((x + seen.transpose(1, 2).flatten(2))[:, -1]), keys, values


def call(length: int) -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(length)
    keys, values = (torch.randn(2, HEADS, length, WIDTH // HEADS, generator=made) for _ in range(2))
    return torch.randint(0, 16, (2, 1), generator=made), keys, values


@pytest.mark.parametrize("name", ["eager", "torchscript", "onnxruntime", "openvino"])
def test_sizes_of_0_in_any_order_of_calls(name: str, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    past = {0: Dim("batch"), 2: Dim("past", min=0)}
    candidate = Candidate.of(Step().eval(), call(5), dynamic={"token": {0: Dim("batch")}, "keys": past, "values": past})
    backend = BACKENDS[name]()
    executable = backend.compile(candidate)
    assert {dim.name: dim.min for dim in executable.signature.dims}["past"] == 0
    executable.save(tmp_path)
    script: dict[str, Any] = {}
    exec(backend.script(), script)  # noqa: S102 - as run.py of an artifact holds it
    for order in ([0, 12, 3], [5, 0, 9]):
        loaded = backend.load(tmp_path, executable.signature, executable.settings)
        alone = script["load"](str(tmp_path), 0)
        for length in order:
            arguments = call(length)
            with torch.no_grad():
                wanted = candidate.model(*arguments)
            arrays = [leaf.numpy() for leaf in arguments]
            for found in (loaded(*arguments), [torch.as_tensor(array) for array in alone(arrays)]):
                for a, b in zip(found, wanted, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
