"""Find the random generators that a loader or a model has, and save and restore their states."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def generators_of(loader: Any) -> dict[str, Any]:
    """The random generators of ``loader``, its sampler and its batch sampler, each once, by their place.

    Those of its dataset are included, unless worker processes read it: each worker has a copy.
    """
    groups = getattr(loader, "batch_sampler", None)
    holders = {"loader": loader, "sampler": getattr(loader, "sampler", None), "batch_sampler": groups}
    holders["batch_sampler.sampler"] = getattr(groups, "sampler", None)
    if not (getattr(loader, "num_workers", 0) or getattr(loader, "workers", 0)):
        holders |= {f"dataset{depth}": dataset for depth, dataset in enumerate(datasets_of(loader))}
    return _held_by(holders)


def generators_within(what: str, module: Any) -> dict[str, Any]:
    """The random generators of ``module`` and its submodules by place, which begins with ``what``; none if it is no module."""
    modules = module.named_modules() if isinstance(module, nn.Module) else ()
    return _held_by({f"{what}.{name}": inner for name, inner in modules})


def _held_by(holders: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for place, holder in holders.items():
        for name, value in getattr(holder, "__dict__", {}).items():
            kind: Any = type(value)
            if _is_generator(kind) and all(value is not other for other in found.values()):
                found[f"{place}.{name}"] = value
    return found


@functools.cache
def _is_generator(kind: Any) -> bool:
    """Whether objects of this type are random generators; known types are not asked again, which takes a microsecond each."""
    return issubclass(kind, _KINDS)


def datasets_of(loader: Any) -> list[Any]:
    """The dataset of ``loader``, and those that it wraps, as ``Subset`` and ``ConcatDataset`` do."""
    found: list[Any] = []
    waiting = _within(loader)
    while waiting:
        dataset = waiting.pop(0)
        if all(dataset is not other for other in found):
            found.append(dataset)
            waiting = _within(dataset) + waiting
    return found


def _within(holder: Any) -> list[Any]:
    """The values of ``holder.dataset`` and ``holder.datasets``, as torch's classes name them."""
    one, several = getattr(holder, "dataset", None), getattr(holder, "datasets", ())
    parts = several.values() if isinstance(several, Mapping) else several if isinstance(several, (list, tuple)) else ()
    return [part for part in (one, *parts) if part is not None]


def states_of(generators: Mapping[str, Any]) -> dict[str, Any]:
    """The state of each generator, as values, tensors and arrays that a checkpoint can hold."""
    return {name: _state(generator) for name, generator in generators.items()}


def set_states(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Restore ``states`` from :func:`states_of`; a generator without a state, or of another class now, is left alone."""
    for name, generator in generators.items():
        if (state := states.get(name)) is not None and state["kind"] == type(generator).__name__:
            _set_state(generator, state["state"])


def _state(generator: Any) -> dict[str, Any]:
    if isinstance(generator, torch.Generator):
        state: Any = generator.get_state()
    elif isinstance(generator, random.Random):
        state = generator.getstate()
    else:
        state = _bits(generator).state
    return {"kind": type(generator).__name__, "state": state}


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        _bits(generator).state = state


def _bits(generator: Any) -> Any:
    """The bit generator of one of numpy's generators."""
    return generator._bit_generator if isinstance(generator, np.random.RandomState) else generator.bit_generator
