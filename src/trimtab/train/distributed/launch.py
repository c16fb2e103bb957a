"""Join the processes that torchrun or another launcher has started, and report errors once for all of them."""

from __future__ import annotations

import atexit
import datetime as dt
import hashlib
import os
import socket
import sys
import time
import types
import uuid
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from trimtab.core.settings import Settings
from trimtab.errors import PeerError, TrimtabError, UsageError
from trimtab.train.distributed.data_parallel import DataParallelGroup
from trimtab.train.distributed.devices import local_device
from trimtab.train.distributed.fsdp import FsdpGroup
from trimtab.train.distributed.process_group import PeerMemoryError, connection_lost
from trimtab.train.engine.setup import check_device
from trimtab.train.runtime.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TIMEOUT = dt.timedelta(minutes=30)


def join(settings: Settings, mesh: DeviceMesh | None = None) -> World:
    """The world of this process: alone, or with the other processes that the launcher has started.

    If torchrun, or another launcher that sets ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, has started this
    process, a process group is made, with gloo, and NCCL for GPUs. If the script has initialised :mod:`torch.distributed`
    before, that is used, and not destroyed at the end.

    Args:
        settings: of the run; they name the device and the sharding.
        mesh: with axes ``data`` and ``model``, if layers are split (:func:`~trimtab.train.distributed.tensor_parallel.mesh`).

    Raises:
        UsageError: the settings do not allow several processes, or the launcher's variables are missing or wrong.
    """
    if not dist.is_available():
        return World()
    if not dist.is_initialized():
        if _number_from_launcher("WORLD_SIZE", least=1, unset="1") == 1:
            return World()
        start(settings.device)
    if dist.get_world_size() == 1:
        return World()
    _refuse_conflicts(settings, mesh)
    sharded = settings.distributed.sharding != "replicate" or mesh is not None
    return FsdpGroup(settings, mesh) if sharded else DataParallelGroup(settings)


def start(device: str = "cpu") -> None:
    """Make the process group, which is destroyed when the interpreter ends.

    Raises:
        UsageError: the launcher's variables are missing or wrong, no connection can be made to their address, or ``device``
            does not exist.
    """
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UsageError(
            f"WORLD_SIZE is {os.environ.get('WORLD_SIZE', 'not set')}, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set. Start the script with torchrun, or set RANK to the number of "
            "the process (under srun that is SLURM_PROCID), and MASTER_ADDR and MASTER_PORT to the address of that of rank 0. "
            "To train in one process alone, unset WORLD_SIZE."
        )
    rank, size = _number_from_launcher("RANK"), _number_from_launcher("WORLD_SIZE", least=1)
    if rank >= size:
        raise UsageError(f"RANK is {rank}, but with WORLD_SIZE={size} ranks go from 0 to {size - 1}. Set both anew.")
    _number_from_launcher("MASTER_PORT", least=1)
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        check_device(device)
        torch.cuda.set_device(local_device(device).index or 0)
    try:
        store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
    except dist.DistNetworkError as error:
        raise UsageError(
            f"The processes cannot meet at MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}: "
            f"{error}. Give the address of the host of rank 0 and a port that nobody has there, or use torchrun."
        ) from error
    # torchrun keeps one store for all its attempts, with the addresses of processes that are gone. A connection to one would
    # never come about, and use up a restart. So each attempt has a prefix of its own.
    store = PrefixStore(f"attempt-{_attempt_name(store, rank, size)}", store)
    store.set_timeout(TIMEOUT)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    sys.excepthook = _report_uncaught
    atexit.register(_destroy_group)


def _number_from_launcher(name: str, *, least: int = 0, unset: str = "not set") -> int:
    """The environment variable ``name`` as a whole number.

    Raises:
        UsageError: it is none, or below ``least``.
    """
    text = os.environ.get(name, unset)
    if not text.strip().isdecimal() or int(text) < least:
        raise UsageError(
            f"{name} is {text!r} in the environment, where a launcher gives a whole number of at least {least}. "
            "Set it to one; or, to train in one process alone, unset WORLD_SIZE."
        )
    return int(text)


def _attempt_name(store: Store, rank: int, size: int) -> str:
    """A name that is equal in the processes of this attempt. (torchrun's count of restarts may differ between hosts.)

    Each process writes a random name. Rank 0 offers the list of all names until every process in it has answered. An offer with
    the name of a process of an earlier attempt is never answered by all.

    Raises:
        UsageError: not all of ``size`` processes came within ``TIMEOUT``.
    """
    own, end, answered = uuid.uuid4().hex, time.monotonic() + TIMEOUT.total_seconds(), ""
    store.set(f"trimtab/hello/{rank}", own)
    while time.monotonic() < end:
        if rank == 0:
            store.set("trimtab/offer", " ".join(store.get(f"trimtab/hello/{each}").decode() for each in range(size)))
        names = store.get("trimtab/offer").decode().split()
        if len(names) == size and names[rank] == own:  # an earlier attempt may have had another size
            name = hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]
            if name != answered:
                store.add(f"trimtab/here/{name}", 1)
                answered = name
            if store.add(f"trimtab/here/{name}", 0) == size:
                return name
        time.sleep(0.05)
    raise UsageError(
        f"Not all of {size} processes came within {TIMEOUT}. See whether all of them were started, with the same number of "
        "processes, and whether one of them says why it ended."
    )


def _destroy_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _refuse_conflicts(settings: Settings, mesh: DeviceMesh | None) -> None:
    sharded = settings.distributed.sharding != "replicate"
    if sharded and settings.distributed.communication == "powersgd":
        raise UsageError(
            "Settings distributed.communication='powersgd' needs sharding='replicate', because FSDP2 scatters gradients as it "
            "adds them up. Take 'bfloat16' or 'float16', or replicate the model."
        )
    if settings.precision.autocast == "float16" and settings.distributed.communication == "powersgd":
        raise UsageError(
            "Settings distributed.communication='powersgd' keeps what it leaves out for later updates, which with "
            "autocast='float16' scale their gradients otherwise. Take autocast='bfloat16', or communication='float16'."
        )
    if (sharded or (mesh is not None and mesh["data"].size() > 1)) and settings.memory_format == "channels_last":
        raise UsageError(
            "memory_format='channels_last' cannot be combined with a model that is shared out: FSDP2 takes parameters in "
            "their usual layout only. Leave memory_format out, or replicate the model."
        )
    there = settings.device.partition(":")[0]
    if mesh is not None and mesh.device_type != there:
        raise UsageError(
            f"Settings device is {settings.device!r}, but the mesh is of processes on {mesh.device_type!r}. Make it with the "
            "settings of the run: mesh(model=2, settings=settings)."
        )
    if mesh is not None and settings.distributed.communication is not None:
        raise UsageError("Settings distributed.communication cannot be combined with split layers; leave it at None.")
    if settings.data.exact_batchnorm and there != "cuda":
        raise UsageError(
            "exact_batchnorm over several processes is torch's SyncBatchNorm, which runs on GPUs only. Leave it off, or train "
            "on one process."
        )


def _report_uncaught(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Print an uncaught error: those of trimtab in one sentence, once for all processes, others with their traceback.

    An error that only says that another process failed is not printed.
    """
    atexit.unregister(_destroy_group)  # that waits for all processes
    if isinstance(error, (PeerError, PeerMemoryError)):
        return
    place = f"[rank {dist.get_rank()} on {socket.gethostname()}]" if dist.is_initialized() else ""
    if connection_lost(error):
        print(f"{place} Another process is gone; this one ends too.", file=sys.stderr)
    elif isinstance(error, TrimtabError):
        if _first_to_report(str(error)):
            print(f"{place} error[{error.code}]: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _first_to_report(sentence: str) -> bool:
    """True in the first process that reports ``sentence``; most errors come up in all of them."""
    if not dist.is_initialized():
        return True
    key = "trimtab/" + hashlib.sha256(sentence.encode()).hexdigest()
    try:
        return bool(dist.distributed_c10d._get_default_store().add(key, 1) == 1)
    except RuntimeError:  # the process with the store is gone
        return True
