"""From a naive training script to a tuned one: the ratio of the times to the same loss, on the five examples of training.

The naive side is what a first script looks like: a stock DataLoader that fetches one example after the other, texts padded to
one length, ``loss.item()`` at every step, every setting at its default. The tuned side is ``examples/training/``: the Trainer
with the settings and the loader that the example states. Model, optimizer, learning rate, batch size, validation data and its
target are the same. Each run is a process of its own, the two sides take turns, and the clock runs from the first batch that is
asked for to the validation that finds the loss at its target; building the model and reading the data do not count.

    python benchmarks/training.py                                   # five repeats; half an hour on two quiet cores
    python benchmarks/training.py --models digits,tabular --repeats 9 --json benchmarks/results/training.json
    python benchmarks/training.py --quick                           # one repeat of the two small ones: does it run?
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import trimtab
from trimtab.measure.stats import median_interval
from trimtab.train.data.collate import Collate

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples" / "training"
MODELS, SMALL = ("digits", "tabular", "lstm", "gpt", "minilm"), ("digits", "tabular")
TARGET, WANTED = 2.0, 3
LENGTH = 128
"""Tokens to which the tokenizer of MiniLM pads as it is shipped."""
PATIENCE = 4
"""A side may take so many times the epochs that its example states."""


def naive(example: ModuleType) -> tuple[float, int, float]:
    """A hand-written loop; gives seconds, epochs and the loss that was reached."""
    model = example.build()
    optimizer = example.optimizer(model.parameters())
    loader, held_out = naive_loader(example), example.held_out()
    begun = time.perf_counter()
    for epoch in itertools.count(1):
        model.train()
        running = 0.0
        for batch in loader:
            optimizer.zero_grad()
            loss, _ = loss_of(example, model, batch)
            loss.backward()
            if example.SETTINGS.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), example.SETTINGS.clip_norm)
            optimizer.step()
            running += loss.item()
        reached = validated(example, model, held_out)
        if reached <= example.TARGET or not math.isfinite(running) or epoch == PATIENCE * example.EPOCHS:
            return time.perf_counter() - begun, epoch, reached
    raise AssertionError("unreachable")


def tuned(example: ModuleType) -> tuple[float, int, float]:
    """The example as it is; gives seconds, epochs and the loss that was reached."""
    trainer, loader, held_out = example.trainer(), example.loader(), example.held_out()
    begun = time.perf_counter()
    summary = trainer.fit(loader, held_out, epochs=PATIENCE * example.EPOCHS)
    return time.perf_counter() - begun, summary.epochs, summary.metrics["loss"]


SIDES = {"naive": naive, "tuned": tuned}


def naive_loader(example: ModuleType) -> DataLoader[Any]:
    """One example after the other out of a stock DataLoader, all of them padded alike."""
    if hasattr(example, "data"):
        inputs, targets = example.data()
        rows: Any = TensorDataset(inputs[: example.TRAIN], targets[: example.TRAIN])
    else:
        collate = Collate(mask="attention_mask", multiple=LENGTH) if hasattr(example, "JOIN") else Collate()
        found = example.examples()[example.HELD_OUT :]
        whole = collate(found)
        rows = [row(whole, i) for i in range(len(found))]
    return DataLoader(rows, batch_size=example.BATCH, shuffle=True)


def row(columns: Any, place: int) -> Any:
    """One example of what was joined."""
    return {key: row(value, place) for key, value in columns.items()} if isinstance(columns, Mapping) else columns[place]


def loss_of(example: ModuleType, model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
    """The loss of a batch and what it is a mean over."""
    if not isinstance(batch, Mapping):
        inputs, targets = batch
        return example.loss(model(inputs), targets), float(len(inputs))
    found = example.loss(model, batch)
    return (found[0], float(found[1])) if isinstance(found, tuple) else (found, 1.0)


@torch.no_grad()
def validated(example: ModuleType, model: torch.nn.Module, batches: list[Any]) -> float:
    """The mean loss over the held-out data."""
    model.eval()
    found = [loss_of(example, model, batch) for batch in batches]
    return sum(float(loss) * weight for loss, weight in found) / sum(weight for _, weight in found)


def run(side: str, model: str, seed: int) -> None:
    """Inside a process of its own: train once and print what came of it."""
    sys.path.insert(0, str(EXAMPLES))
    example = importlib.import_module(model)
    torch.manual_seed(seed)
    seconds, epochs, reached = SIDES[side](example)
    done = reached <= example.TARGET
    print(json.dumps({"side": side, "seed": seed, "seconds": seconds, "epochs": epochs, "loss": reached, "done": done}))


def start(side: str, model: str, seed: int, threads: int | None) -> dict[str, Any]:
    """What a process of its own found."""
    environment = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    command = [sys.executable, __file__, "--side", side, "--models", model, "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{side} {model} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def pairs(model: str, repeats: int, threads: int | None) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Naive and tuned from the same seed, in turns: A B, then B A."""
    for seed in range(repeats):
        order = ("naive", "tuned") if seed % 2 == 0 else ("tuned", "naive")
        found = {side: start(side, model, seed, threads) for side in order}
        yield found["naive"], found["tuned"]


def judged(model: str, repeats: int, threads: int | None) -> dict[str, Any]:
    """All repeats of one example, and a line about them."""
    found = list(pairs(model, repeats, threads))
    missed = [side["side"] for pair in found for side in pair if not side["done"]]
    ratio = median_interval([plain["seconds"] / fast["seconds"] for plain, fast in found])
    seconds = [median_interval([pair[i]["seconds"] for pair in found]).value for i in (0, 1)]
    epochs = [median_interval([pair[i]["epochs"] for pair in found]).value for i in (0, 1)]
    print(
        f"{model:<9} {seconds[0]:8.2f} s in {epochs[0]:g} epochs -> {seconds[1]:7.2f} s in {epochs[1]:g}: {ratio.value:5.2f}x "
        f"({ratio.low:.2f} to {ratio.high:.2f}), n {len(found)}"
        + (f"; {len(missed)} runs missed the target ({', '.join(sorted(set(missed)))}), which proves nothing" * bool(missed)),
        flush=True,
    )
    return {"model": model, "ratio": [ratio.value, ratio.low, ratio.high], "missed": len(missed), "runs": found}


def conditions(threads: int | None) -> dict[str, Any]:
    """Under what the figures hold."""
    found = trimtab.Environment.capture()
    return {
        "cpu": found.cpu,
        "cores": found.usable_cores,
        "threads": threads or "as each side sets them",
        "load": os.getloadavg()[0],
        "os": platform.platform(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def main() -> int:
    """Measure, print, and say whether the aim is reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of both sides; by default torch's own choice, and the example's")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        run(asked.side, asked.models, asked.seed)
        return 0
    models = SMALL if asked.quick else asked.models.split(",")
    before = conditions(asked.threads)
    print("; ".join(f"{name} {value}" for name, value in before.items()))
    found = [judged(model, 1 if asked.quick else asked.repeats, asked.threads) for model in models]
    if asked.json:
        asked.json.write_text(json.dumps({"conditions": before, "found": found}, indent=2) + "\n", encoding="utf-8")
    fast = [each["model"] for each in found if each["ratio"][1] >= TARGET and not each["missed"]]
    print(f"Surely {TARGET:g}x or more: {', '.join(fast) or 'none'} ({len(fast)} of {len(found)}; the aim is {WANTED} of 5).")
    return 0 if asked.quick or len(fast) >= WANTED else 1


if __name__ == "__main__":
    raise SystemExit(main())
