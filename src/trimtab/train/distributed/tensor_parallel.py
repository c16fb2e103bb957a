"""Tensor parallelism: layers split over processes, by torch's ``parallelize_module``."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from trimtab._internal.text import of_type
from trimtab.core.settings import Settings
from trimtab.core.technique import require
from trimtab.errors import UsageError
from trimtab.train.distributed.launch import start

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def mesh(model: int, settings: Settings = Settings()) -> DeviceMesh:
    """All processes as a mesh of ``data`` x ``model``; layers are split over ``model`` neighbours, which share a host.

    Args:
        model: the number of parts of each split layer.
        settings: those of the run, for the device.

    Raises:
        UsageError: the number of processes is no multiple of ``model``.
    """
    if not dist.is_initialized():
        start(settings.device)
    size = dist.get_world_size()
    if model < 1 or size % model:
        raise UsageError(
            f"Layers cannot be split in {model}: there are {size} processes, which is no multiple of it. Start a multiple of "
            "that many."
        )
    made: DeviceMesh = require("torch.distributed.device_mesh").init_device_mesh(
        settings.device.partition(":")[0], (size // model, model), mesh_dim_names=("data", "model")
    )
    return made


def split_layers(model: nn.Module, grid: DeviceMesh, *, columns: Sequence[str] = (), rows: Sequence[str] = ()) -> nn.Module:
    """Split linear layers and embeddings along the axis ``model`` of ``grid``, in place, and return the model.

    ``columns`` and ``rows`` are names of modules, as ``model.named_modules()`` has them, with ``*`` for any text. Of a pair of
    layers the first is split by its outputs (``columns``) and the second by its inputs (``rows``). The activations between them
    stay split, and only the output of the second is summed: ``columns=["*.linear1"], rows=["*.linear2"]`` for the feed-forward
    part of a transformer block. Attention is split by heads: queries, keys and values by ``columns``, the projection after them
    by ``rows``. The block must take the number of heads from its input, with ``view(batch, length, -1, size_of_a_head)``.

    Give ``grid`` to :func:`~trimtab.train.distributed.launch.join` too, and the world that it returns to
    ``Trainer(world=...)``: the processes that split a layer then get the same data.

    Source: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053

    Raises:
        UsageError: the model has no module of a name, or one that cannot be split, or not into equal parts.
    """
    styles = require("torch.distributed.tensor.parallel")
    parts = grid["model"].size()
    plan = {name: styles.ColwiseParallel() for name in _named(model, columns, parts, "out_features", "embedding_dim")}
    plan |= {name: styles.RowwiseParallel() for name in _named(model, rows, parts, "in_features")}
    split: nn.Module = styles.parallelize_module(model, grid["model"], plan)
    return split


def _named(model: nn.Module, patterns: Sequence[str], parts: int, *sizes: str) -> list[str]:
    """The names of modules that match ``patterns``; the attributes ``sizes`` of each must be multiples of ``parts``."""
    modules = dict(model.named_modules())
    found = []
    for pattern in patterns:
        names = fnmatch.filter(modules, pattern)
        if not names:
            raise UsageError(
                f"No module of {type(model).__name__} is called {pattern!r}; there are {', '.join(modules)[:200]}."
            )
        for name in names:
            if not isinstance(modules[name], (nn.Linear, nn.Embedding)):
                raise UsageError(
                    f"{name} is {of_type(modules[name])}; only Linear and Embedding can be split. Name those in it."
                )
            for size in sizes:
                if (count := getattr(modules[name], size, 0)) % parts:
                    raise UsageError(
                        f"{name} cannot be split in {parts} equal parts: its {size} is {count}. Make that a multiple of it, "
                        "or do not name this layer and the other of its pair."
                    )
        found += names
    return found
