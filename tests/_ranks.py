"""Real processes that train together over gloo, started as torchrun starts them."""

from __future__ import annotations

import json
import multiprocessing
import os
import pathlib
import socket
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.multiprocessing

from trimtab.errors import TrimtabError
from trimtab.train.distributed.process_group import connection_lost

Checks = Callable[[pathlib.Path], Mapping[str, Any]]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def variables(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun tells a process."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {name: str(value) for name, value in told.items()} | {"MASTER_ADDR": "127.0.0.1"}


def on_ranks(checks: Checks, folder: pathlib.Path, size: int = 2) -> list[dict[str, Any]]:
    """What ``checks(folder)`` found in each of ``size`` processes; it must be a function of a module, and give JSON."""
    # forked from a process that has only imported what all of them need, for importing torch takes two seconds of each
    multiprocessing.set_forkserver_preload(["trimtab.train.trainer", "torch.distributed.fsdp"])
    arguments = (checks, folder, size, free_port(), dict(os.environ))
    torch.multiprocessing.start_processes(_rank, arguments, nprocs=size, start_method="forkserver")  # type: ignore[no-untyped-call]
    return [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]


def _rank(rank: int, checks: Checks, folder: pathlib.Path, size: int, port: int, environment: Mapping[str, str]) -> None:
    os.environ |= {**environment, **variables(rank, size, port)}
    torch.set_num_threads(1)
    found = checks(folder)
    (folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def failure(action: Callable[[], object]) -> list[str]:
    """What ``action`` fails with, which may be that others were lost; nothing if it does not fail."""
    try:
        action()
    except (TrimtabError, RuntimeError) as error:
        return ["lost" if connection_lost(error) else type(error).__name__, str(error)]
    return []
