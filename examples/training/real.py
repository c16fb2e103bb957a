"""What the examples of training share: real texts out of installed packages, and the end of a run at its target."""

from __future__ import annotations

import importlib.util
import pathlib
import re
from collections.abc import Callable

import torch

from trimtab.train.telemetry.events import Event, Validated
from trimtab.train.trainer import Trainer

BYTES = 256
START = 0
"""The byte that every text begins with, and that its last one is followed by."""


def package_folder(name: str, requirement: str) -> pathlib.Path:
    """The folder of package ``name``, found without importing it; ``requirement`` is what to install where it is missing."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"This example reads data from the package {name}: pip install --no-deps {requirement}")
    return pathlib.Path(spec.submodule_search_locations[0])


def corpus(name: str) -> list[str]:
    """The lines of one of gensim's test files."""
    folder = package_folder("gensim", "gensim==4.4.0")
    return (folder / "test" / "test_data" / name).read_text(encoding="latin-1").splitlines()


def sentences() -> list[torch.Tensor]:
    """The sentences of 300 news articles as bytes, int64, each of 20 to 400 and between two zeros: some 1,900."""
    found = [s.strip() for line in corpus("lee_background.cor") for s in re.split(r"(?<=[.!?]) ", line)]
    kept = [s for s in found if 20 <= len(s) <= 400]
    order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(0))
    return [torch.tensor([START, *kept[i].encode("ascii", "replace"), START]) for i in order.tolist()]


def stop_at(target: float) -> Callable[[Trainer, Event], None]:
    """A callback that ends the run as soon as the loss of the validation is at ``target``."""

    def callback(trainer: Trainer, event: Event) -> None:
        if isinstance(event, Validated) and event.metrics["loss"] <= target:
            trainer.stop(f"The validation's loss is at its target of {target:g}.")

    return callback
