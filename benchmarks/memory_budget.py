"""Activation budgets in bytes: how well the measured peak keeps them, and what recomputing costs, on three kinds of model.

For every model the smallest budget that can be kept is found, and what a step takes without one; five budgets lie between. For
each, the peak is measured anew: as trimtab counts (every tensor that an operator makes, less gradients of parameters; on a GPU
its allocator's peak), and by the account of torch's CPU allocator (its profiler's memory events, which also see what an
operator allocates and frees within itself). Step times are taken in turns with those of the plain model, A B B A, and their
ratio has an interval. Gradients must be equal to the bit, for which a GPU's algorithms are kept to those that give the same
twice, and the peak may be at most 1.05 of the budget.

    python benchmarks/memory_budget.py                      # about ten minutes on two quiet cores
    python benchmarks/memory_budget.py --quick              # small models, one pass: does it run?
    python benchmarks/memory_budget.py --device cuda --json benchmarks/results/memory_budget.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function

from trimtab._internal.serialization import to_json
from trimtab.errors import UsageError
from trimtab.hardware.environment import Environment
from trimtab.measure.pairs import compare
from trimtab.measure.timer import LocalRunner, synchronizer
from trimtab.train.memory.activation_budget import Verified, choose
from trimtab.train.memory.peak_activations import peak_activations

ALLOWED = 1.05
SHARES = (0.0, 0.25, 0.5, 0.75, 0.95)
"""Where the budgets lie between the smallest possible and none."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One model under one budget; sizes in MB (10**6 bytes)."""

    model: str
    budget_mb: float
    peak_mb: float
    allocator_mb: float | None
    full_mb: float
    recomputed: int
    planning_s: float
    slower: tuple[float, float, float]
    """Step time relative to the plain model: value, low, high (95%)."""
    equal: bool
    """Whether all gradients are those of the plain model, bit for bit."""


class Residual(nn.Module):
    """Two convolutions with BatchNorm and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.relu(self.body(x) + x)
        return found


class Recurrent(nn.Module):
    """An LSTM of two layers, then perceptrons with dropout."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.lstm = nn.ModuleList([nn.LSTM(width, width, batch_first=True) for _ in range(2)])
        self.chain = nn.Sequential(*[perceptron(width) for _ in range(depth)])
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.lstm:
            x = layer(x)[0]
        found: torch.Tensor = self.head(self.chain(x).mean(1))
        return found


def perceptron(width: int) -> nn.Module:
    """Linear, GELU, dropout, linear."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))


def models(quick: bool) -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """By name, a model and a batch of its inputs."""
    width, depth, batch = (8, 4, 8) if quick else (32, 8, 32)
    blocks = [Residual(width) for _ in range(depth)]
    layer = nn.TransformerEncoderLayer(8 * width, 4, 16 * width, batch_first=True, activation="gelu")
    return {
        "residual CNN with BatchNorm": (
            nn.Sequential(
                nn.Conv2d(3, width, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
            ),
            torch.randn(batch, 3, 32, 32),
        ),
        "transformer": (
            nn.Sequential(
                nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), nn.Flatten(), nn.Linear(8 * width * 64, 10)
            ),
            torch.randn(batch, 64, 8 * width),
        ),
        "LSTM and perceptrons": (Recurrent(4 * width, depth), torch.randn(batch, 64, 4 * width)),
    }


def measured(name: str, model: nn.Module, inputs: torch.Tensor, args: argparse.Namespace) -> Iterator[Row]:
    """The rows of one model."""
    device = torch.device(args.device)
    model, inputs = model.to(device).train(), inputs.to(device)
    labels = torch.randint(0, 10, (len(inputs),), device=device)

    def loss() -> torch.Tensor:
        return functional.cross_entropy(model(inputs), labels)

    def step() -> None:
        loss().backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    def grads() -> list[torch.Tensor]:
        torch.manual_seed(1)
        loss().backward()  # type: ignore[no-untyped-call]
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return found

    step()  # libraries take their workspaces
    expected, full = grads(), peak_activations(lambda: loss().backward(), model.parameters(), device)  # type: ignore[no-untyped-call]
    model.zero_grad()
    least = smallest(model, loss, device)
    plain = LocalRunner(step, synchronizer(device))
    for share in SHARES:
        budget = least + share * (full - least)
        begun = time.perf_counter()
        found = choose(model, loss, budget, device)
        planning = time.perf_counter() - begun
        recomputed = found.apply()
        peak = peak_activations(lambda: loss().backward(), model.parameters(), device)  # type: ignore[no-untyped-call]
        model.zero_grad()
        account = allocated(model, lambda: loss().backward()) if device.type == "cpu" else None  # type: ignore[no-untyped-call]
        model.zero_grad()
        equal = all(torch.equal(a, b) for a, b in zip(grads(), expected, strict=True))
        recomputed.undo()

        def under_budget(found: Verified = found) -> None:
            applied = found.apply()
            step()
            applied.undo()

        ratio = compare(plain, LocalRunner(under_budget, synchronizer(device)), seconds=args.seconds).ratio
        yield Row(
            model=name,
            budget_mb=budget / 1e6,
            peak_mb=peak / 1e6,
            allocator_mb=None if account is None else account / 1e6,
            full_mb=full / 1e6,
            recomputed=len(found.names),
            planning_s=planning,
            slower=(ratio.value, ratio.low, ratio.high),
            equal=equal,
        )


def smallest(model: nn.Module, loss: Callable[[], torch.Tensor], device: torch.device) -> float:
    """The smallest budget that can be kept, in bytes, from the sentence that refuses an impossible one."""
    try:
        choose(model, loss, 1.0, device)
    except UsageError as error:
        return float(str(error).split("still takes ")[1].split(" MB")[0]) * 1e6
    raise AssertionError("a budget of one byte was kept")


def allocated(model: nn.Module, run: Callable[[], object]) -> int:
    """The peak by torch's CPU allocator's own account, less gradients as they come, in bytes."""

    def ready(parameter: torch.Tensor) -> None:
        with record_function(f"grad {parameter.numel() * parameter.element_size()}"):
            pass

    handles = [p.register_post_accumulate_grad_hook(ready) for p in model.parameters()]  # type: ignore[no-untyped-call]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    for handle in handles:
        handle.remove()
    level = peak = 0
    assert seen.profiler is not None
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            level += event.nbytes()
        elif event.name().startswith("grad "):
            level -= int(event.name().removeprefix("grad "))
        peak = max(peak, level)
    return peak


def main() -> int:
    """Print the table; the exit code tells whether every budget was kept and every gradient equal."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="small models, short timings: does it run?")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=None, help="for each ratio of step times")
    parser.add_argument("--json", type=pathlib.Path, default=None)
    args = parser.parse_args()
    args.seconds = args.seconds or (0.5 if args.quick else 15.0)
    torch.set_num_threads(args.threads)
    if torch.device(args.device).type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    here = Environment.capture()
    print(f"{here}\n{args.device}, {args.threads} threads, torch {torch.__version__}; ratios from A B B A, 95% intervals\n")
    print(f"{'model':30}{'budget':>9}{'peak':>9}{'share':>7}{'allocator':>11}{'none':>9}{'modules':>9}{'plan':>8}  step time")
    rows: list[Row] = []
    for name, (model, inputs) in models(args.quick).items():
        for row in measured(name, model, inputs, args):
            rows.append(row)
            account = "" if row.allocator_mb is None else f"{row.allocator_mb:.2f}"
            value, low, high = row.slower
            print(
                f"{row.model:30}{row.budget_mb:9.2f}{row.peak_mb:9.2f}{row.peak_mb / row.budget_mb:7.0%}{account:>11}"
                f"{row.full_mb:9.2f}{row.recomputed:9}{row.planning_s:7.1f}s  {value:.3f}x ({low:.3f} to {high:.3f})"
                + ("" if row.equal else "  GRADIENTS DIFFER"),
                flush=True,
            )
    if args.json is not None:
        facts: dict[str, Any] = {"environment": to_json(here), "threads": args.threads, "rows": to_json(rows)}
        args.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    kept = all(row.equal and row.peak_mb <= ALLOWED * row.budget_mb for row in rows)
    print(
        "\nEvery budget was kept, and every gradient is equal." if kept else "\nA budget was not kept, or a gradient differs."
    )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
