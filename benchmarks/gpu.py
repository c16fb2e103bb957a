"""The Trainer on an NVIDIA GPU: a naive script against a tuned run, how much of the copying is waited for, half precision.

``naive``: ResNet-50 on photographs of noise that are cut and mirrored, GPT-2 (124M) on random tokens. The naive side is what a
first script looks like: float32, a stock DataLoader without workers that fetches one example after the other, ``loss.item()``
at every update. The tuned side is the Trainer with everything at ``"auto"`` and batches that workers cut out whole, from the
same model, optimizer and batch size. Each side is a process of its own; they take turns, A B B A, and the ratio is of examples
per second. What the workers of the tuned side have read ahead is used up before a block of updates begins.

``prefetch``: updates from batches in page-locked memory take turns with updates from the same batches on the GPU. What the
first take longer, relative to what the copy of a batch takes alone, is the part of the copying that is waited for.

``parity``: two examples of ``examples/training`` in float32, bfloat16 and float16, from the same parameters and the same data
in the same order: how much higher the loss is at the end, as ``trimtab.tune`` judges it.

    python benchmarks/gpu.py --json benchmarks/results/gpu.json
    python benchmarks/gpu.py --parts prefetch,parity
    python benchmarks/gpu.py --device cpu --quick              # tiny models, no GPU: does it run?
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import pathlib
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from gpu_models import Batch, Case, OneByOne, cases, light, optimizer, resnet
from torch import nn
from torch.utils.data import DataLoader

import trimtab
from trimtab._internal.serialization import to_json
from trimtab.core.measurement import Comparison, Interval
from trimtab.errors import MeasurementError
from trimtab.evaluation.training.timer import Updates
from trimtab.evaluation.training.workload import prepared
from trimtab.execution.parent_death import end_with_parent
from trimtab.measure.pairs import compare
from trimtab.measure.remote import RemoteRunner, serve
from trimtab.measure.stats import median_interval
from trimtab.measure.timer import LocalRunner, Runner, synchronizer
from trimtab.tensors.structure import tensors_of
from trimtab.train.data.loader import Loader
from trimtab.train.engine.step import Update
from trimtab.train.loss.loss_parity import BaselineLosses, final, increase

FASTER, HIDDEN, HIGHER = 5.0, 0.9, 0.02
"""Targets: times as many examples per second; share of the copying; how much higher the loss may be, relative to it."""
EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples" / "training"
SEEDS, ENDLESS = (0, 1, 2), 10**9
KEY = "TRIMTAB_BENCHMARK_KEY"
AUTO = trimtab.Settings(
    memory_format="auto",
    compile="auto",
    attention="auto",
    precision=trimtab.PrecisionSettings(autocast="auto", tf32="auto"),
    optimizer=trimtab.OptimizerSettings(implementation="auto"),
)


def naive(case: Case, device: str) -> Runner:
    """A hand-written loop."""
    model = case.build().to(device)
    made, loader = optimizer(model.parameters()), DataLoader(OneByOne(case.data()), case.batch, shuffle=True, drop_last=True)

    def run() -> Iterator[float]:
        while True:
            for inputs, targets in loader:
                made.zero_grad()
                loss = case.loss(model, (inputs.to(device), targets.to(device)))
                loss.backward()  # type: ignore[no-untyped-call]
                made.step()
                yield loss.item()

    running = run()
    return LocalRunner(lambda: next(running), synchronizer(device))


def tuned(case: Case, device: str) -> Runner:
    """The Trainer, which decides everything by itself, and a loader that reads whole batches in workers."""
    settings = AUTO.replaced({"device": device})
    training = trimtab.Training(
        data=lambda: Loader(case.data(), case.batch, workers=case.workers, drop_last=True), optimizer=optimizer, loss=case.loss
    )
    workload = trimtab.Workload(name="tuned", mode="train", model=case.build, training=training)
    runner = Updates(prepared(workload, 1), settings, seed=0)
    print("\n".join(runner.notes), file=sys.stderr, flush=True)
    return runner


SIDES = {"naive": naive, "tuned": tuned}


def side(args: argparse.Namespace) -> None:
    """Inside a process of its own: make updates whenever they are asked for, as long as whoever asks lives."""
    end_with_parent(os.getppid())
    torch.manual_seed(0)
    runner = SIDES[args.side](cases(args.quick)[args.case], args.device)
    serve(runner, args.address, bytes.fromhex(os.environ[KEY]))


def from_naive(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each model, from a naive script."""
    for name in args.models.split(","):
        yield faster(name, args)


def faster(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """How many times as many examples per second the tuned side learns from."""
    key = secrets.token_bytes(16)
    with tempfile.TemporaryDirectory(prefix="trimtab-gpu-") as folder:
        sides = {which: Side(name, which, pathlib.Path(folder), key, args) for which in SIDES}
        try:
            found = compare(sides["tuned"].reached(), sides["naive"].reached(), seconds=args.seconds, width=0.05)
        except MeasurementError as error:
            raise SystemExit("\n".join([str(error), *(each.said() for each in sides.values())])) from error
        finally:
            for each in sides.values():
                each.end()
        told = sides["tuned"].log.read_text(encoding="utf-8")
    notes = [line for line in told.splitlines() if re.search(r" (is|are) (on|off)", line)]
    print(f"{name:12}{found.ratio}  target {FASTER:g}: {verdict(found.ratio.low >= FASTER, found.ratio.high < FASTER)}")
    print("".join(f"    {note}\n" for note in notes), end="", flush=True)
    return {"part": "naive", "model": name, "notes": notes, **to_json(found)}


class Side:
    """The process of one side, which says on stderr what it decides."""

    def __init__(self, case: str, which: str, folder: pathlib.Path, key: bytes, args: argparse.Namespace) -> None:
        self.which, self.key, self.patience = which, key, args.patience
        self.address, self.log = folder / which, folder / f"{which}.log"
        command = [sys.executable, __file__, "--side", which, "--case", case, "--address", str(self.address)]
        command += ["--device", args.device, *(["--quick"] if args.quick else [])]
        with self.log.open("w", encoding="utf-8") as log:  # its group ends with it, workers and all, and when the pipe closes
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stderr=log, env=os.environ | {KEY: key.hex()}, start_new_session=True
            )

    def reached(self) -> RemoteRunner:
        """Its updates, once it has decided and compiled what it wants."""
        until = time.monotonic() + self.patience
        while not self.address.exists():
            if self.process.poll() is not None or time.monotonic() > until:
                ended = "takes too long" if self.process.poll() is None else "failed"
                raise MeasurementError(f"The {self.which} side {ended}.")
            time.sleep(0.1)
        return RemoteRunner(self.address, self.key)

    def said(self) -> str:
        """The last that it wrote on stderr, which goes when it ends."""
        return f"The {self.which} side wrote:\n{self.log.read_text(encoding='utf-8', errors='replace')[-3000:]}"

    def end(self) -> None:
        """End it, and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def verdict(met: bool, missed: bool) -> str:
    """In a word or two."""
    return "met" if met else "NOT met" if missed else "not decided"


class Ready:
    """The same batches again and again, which cost nothing to read."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def seek(self, epoch: int, batch: int) -> None:
        """It begins anywhere: no batch is like another, and none is missed."""


def prefetch(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """How much of the copying nobody waits for, for a heavy and a light model."""
    if torch.device(args.device).type != "cuda":
        print("prefetch    left out: nothing is copied on a CPU.")
        return
    batches = [(torch.randn(128, 3, 224, 224).pin_memory(), torch.randint(1000, (128,)).pin_memory()) for _ in range(4)]
    for name, build in (("ResNet-50", resnet), ("light", light)):
        sides = []
        for data in (batches, [tuple(tensor.to(args.device) for tensor in batch) for batch in batches]):
            torch.manual_seed(0)
            settings = trimtab.Settings(
                device=args.device, memory_format="channels_last", precision=trimtab.PrecisionSettings(autocast="bfloat16")
            )
            run = trimtab.Trainer(build(), loss=nn.CrossEntropyLoss(), optimizer=optimizer, settings=settings, progress=False)
            updates = run.updates(Ready(data), steps=ENDLESS)
            sides.append(LocalRunner(functools.partial(next, updates), synchronizer(args.device)))
        found = compare(*sides, seconds=args.seconds, width=0.002, process_noise=0.0)
        alone = copying(batches[0], args.device)
        hidden = share_hidden(found, alone)
        told = f"{hidden.value:.0%} ({hidden.low:.0%} to {hidden.high:.0%}) of {alone.value:.2f} ms"
        print(f"{name:12}{told}  target {HIDDEN:.0%}: {verdict(hidden.low >= HIDDEN, hidden.high < HIDDEN)}", flush=True)
        yield {"part": "prefetch", "model": name, "hidden": to_json(hidden), "copy_ms": to_json(alone), **to_json(found)}


def share_hidden(found: Comparison, alone: Interval) -> Interval:
    """How much of a copy that takes so many milliseconds ``alone`` nobody waits for.

    ``found`` compares updates that copy with such as do not, so that the slower the first, the less of it is hidden.
    """
    assert found.rival.unit == "ms"  # as of ``alone``
    ratio, update = found.ratio, found.rival.median
    return Interval(*(1 - update * (1 / each - 1) / alone.value for each in (ratio.value, ratio.low, ratio.high)))


def copying(batch: Batch, device: str) -> Interval:
    """Milliseconds that the copy of ``batch`` takes while the GPU does nothing else."""
    found, stream = [], torch.cuda.current_stream(device)
    for _ in range(50):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        start.record(stream)
        copies = [tensor.to(device, non_blocking=True) for tensor in tensors_of(batch)]
        end.record(stream)
        torch.cuda.synchronize(device)
        found.append(start.elapsed_time(end))
        del copies
    return median_interval(found)


def parity(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """How much higher the loss is at the end in 16 bits."""
    sys.path.insert(0, str(EXAMPLES))
    steps = 8 if args.quick else 400
    for name in ("digits", "gpt"):
        example = importlib.import_module(name)
        for precision in ("bfloat16", "float16"):
            apart = []
            for seed in SEEDS[:1] if args.quick else SEEDS:
                exact = learnt(example, seed, steps, args.device, None)
                found = increase(
                    BaselineLosses.of(exact, []), learnt(example, seed, steps, args.device, precision), HIGHER * final(exact)
                )
                apart.append([each / final(exact) for each in (found.value, found.low, found.upper)])
            worst = max(apart, key=lambda each: each[2])
            told = f"{worst[0]:+.2%} ({worst[1]:+.2%} to {worst[2]:+.2%}), the worst of {len(apart)} seeds"
            print(
                f"{name:12}{precision:10}{told}  at most {HIGHER:.0%}: {verdict(worst[2] <= HIGHER, worst[1] > HIGHER)}",
                flush=True,
            )
            yield {"part": "parity", "model": name, "precision": precision, "updates": steps, "apart": apart}


def learnt(example: Any, seed: int, steps: int, device: str, precision: Any) -> list[float]:
    """The loss of each update."""
    torch.manual_seed(seed)
    settings = example.SETTINGS.replaced({"device": device, "precision.autocast": precision})
    run = trimtab.Trainer(example.build(), loss=example.loss, optimizer=example.optimizer, settings=settings, progress=False)
    made: list[Update] = list(run.updates(example.loader(), steps=steps))
    return [float(update.loss) for update in made]


PARTS = {"naive": from_naive, "prefetch": prefetch, "parity": parity}


def main() -> None:
    """Measure what is asked for, print it, and write it where told."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default="naive,prefetch,parity")
    parser.add_argument("--models", default="ResNet-50,GPT-2", help="of the first part")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each comparison")
    parser.add_argument("--patience", type=float, default=420.0, help="seconds that a side may take to decide and to compile")
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, a second each: shows that it runs, and proves nothing"
    )
    parser.add_argument("--json", type=pathlib.Path)
    for hidden in ("--side", "--case", "--address"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        side(args)
        return
    if unknown := [*{*args.parts.split(",")} - {*PARTS}, *{*args.models.split(",")} - {*cases(args.quick)}]:
        raise SystemExit(f"There is no {unknown[0]}. Parts are {', '.join(PARTS)}; models are {', '.join(cases(args.quick))}.")
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("This needs an NVIDIA GPU, and PyTorch finds none here. --device cpu --quick shows that it runs.")
    args.seconds = 1.0 if args.quick else args.seconds
    here, rows = trimtab.Environment.capture(), list[dict[str, Any]]()
    print(f"{here}\n{args.device}, torch {torch.__version__}; 95% intervals")
    for part in args.parts.split(","):
        for row in PARTS[part](args):
            rows.append(row)
            if args.json:  # each at once: what follows may fail
                found = {"environment": to_json(here), "rows": rows}
                args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
