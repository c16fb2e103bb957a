"""Compressed gradients between real processes over gloo: what crosses, what the loss becomes, and what an update takes.

Every kind of ``distributed.communication`` trains the same network on the digits for the same number of updates, in turns, from
several seeds. Printed are the share of the float32 gradients that is sent; the validation loss relative to that of float32,
median over the seeds with its 95% interval; and the time of an update. On one machine the network is its memory: times tell of
the cost of compressing, not of what a slow network would gain.

    python benchmarks/communication.py                       # some minutes on two quiet cores
    python benchmarks/communication.py --quick               # one seed, few updates: does it run?
    python benchmarks/communication.py --momentum 0.9 --json benchmarks/results/communication.json
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import socket
import tempfile
from typing import Any

import torch
import torch.multiprocessing
from sklearn.datasets import load_digits
from torch import nn

from trimtab._internal.serialization import to_json
from trimtab.core.settings import DistributedSettings, Settings
from trimtab.hardware.environment import Environment
from trimtab.measure.stats import median_interval
from trimtab.train.distributed.data_parallel import DataParallelGroup
from trimtab.train.trainer import Trainer

KINDS: list[Any] = [None, "float16", "bfloat16", "powersgd"]


def digits(seed: int) -> tuple[list[Any], list[Any]]:
    """Batches to learn from, and to validate on."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(found.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    batches = [(images[part], labels[part]) for part in torch.split(order, 32)]
    return batches[:-14], batches[-14:]


def train(kind: Any, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """One run."""
    torch.manual_seed(seed)
    width = options.width
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    trainer = Trainer(
        model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=options.rate, momentum=options.momentum),
        settings=Settings(distributed=DistributedSettings(communication=kind, bucket_mb=0.25)),
    )
    learn, held_out = digits(seed)
    summary = trainer.fit(learn, held_out, epochs=options.epochs)
    assert isinstance(trainer.world, DataParallelGroup)
    _, numbers, sent = trainer.world.exchange.power.compression_stats()
    return {
        "sent": sent / numbers if numbers else 0.5 if kind in ("float16", "bfloat16") else 1.0,
        "loss": summary.metrics["loss"],
        "ms": 1e3 * summary.seconds / summary.updates,
    }


def process(rank: int, port: int, out: str, options: argparse.Namespace) -> None:
    """One of the processes, started as torchrun would."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.processes, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in told.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    train(None, 0, argparse.Namespace(**{**vars(options), "epochs": 1}))  # whatever is slow only once
    found = [{str(kind): train(kind, seed, options) for kind in KINDS} for seed in range(options.seeds)]
    if rank == 0:
        pathlib.Path(out).write_text(json.dumps(found), encoding="utf-8")


def rows(found: list[dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """A row per kind, relative to float32 of the same seed."""
    made = []
    for kind in map(str, KINDS):

        def column(name: str, kind: str = kind) -> list[float]:
            return [each[kind][name] for each in found]

        loss = [each[kind]["loss"] / each["None"]["loss"] for each in found]
        made.append(
            {
                "kind": kind if kind != "None" else "float32",
                "sent": found[0][kind]["sent"],
                "loss": median_interval(loss),
                "ms": median_interval(column("ms")),
            }
        )
    return made


def main() -> None:
    """Run the processes and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.epochs = 1, 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = str(pathlib.Path(folder) / "found.json")
        torch.multiprocessing.spawn(process, (port, out, options), nprocs=options.processes)  # type: ignore[no-untyped-call]
        made = rows(json.loads(pathlib.Path(out).read_text(encoding="utf-8")))
    here = Environment.capture()
    print(f"{here.cpu}, {here.usable_cores} cores, torch {torch.__version__}")
    print(f"{options.processes} processes of one thread over gloo, {options.seeds} seeds,")
    print(f"{options.epochs} epochs, width {options.width}, SGD at {options.rate:g}, momentum {options.momentum:g}\n")
    for row in made:
        figures = ", ".join(f"{name} {row[name]}" for name in ("loss", "ms"))
        print(f"{row['kind']:10} sent {row['sent']:.3f}, {figures}")
    if options.json:
        options.json.write_text(json.dumps(to_json({"options": vars(options) | {"json": None}, "rows": made}), indent=1))


if __name__ == "__main__":
    main()
