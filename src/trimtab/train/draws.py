"""Who draws random numbers in a run: the generators that a loader or a model has, and datasets that draw from everybody's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trimtab.errors import WorkloadError
from trimtab.workload import user_code

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def generators_of(loader: Any) -> dict[str, Any]:
    """The generators of ``loader``, its sampler and its batch sampler, each once, by where they are.

    Those of its dataset too, unless that is read in other processes: each of these has a copy.
    """
    groups = getattr(loader, "batch_sampler", None)
    holders = {"loader": loader, "sampler": getattr(loader, "sampler", None), "batch_sampler": groups}
    holders["batch_sampler.sampler"] = getattr(groups, "sampler", None)
    if not (getattr(loader, "num_workers", 0) or getattr(loader, "workers", 0)):
        holders |= {f"dataset{depth}": dataset for depth, dataset in enumerate(datasets_of(loader))}
    return _held_by(holders)


def generators_within(what: str, module: Any) -> dict[str, Any]:
    """Those of ``module``, if it is one, and of the modules in it; ``what`` says what it is."""
    modules = module.named_modules() if isinstance(module, nn.Module) else ()
    return _held_by({f"{what}.{name}": inner for name, inner in modules})


def _held_by(holders: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for place, holder in holders.items():
        for name, value in getattr(holder, "__dict__", {}).items():
            if isinstance(value, _KINDS) and all(value is not other for other in found.values()):
                found[f"{place}.{name}"] = value
    return found


def datasets_of(loader: Any) -> list[Any]:
    """The dataset of ``loader``, and what that is a part of, as a ``Subset`` is, or made of, as a ``ConcatDataset`` is."""
    found: list[Any] = []
    waiting = _within(loader)
    while waiting:
        dataset = waiting.pop(0)
        if all(dataset is not other for other in found):
            found.append(dataset)
            waiting = _within(dataset) + waiting
    return found


def _within(holder: Any) -> list[Any]:
    """The datasets that ``holder`` names as its own, as torch's do."""
    one, several = getattr(holder, "dataset", None), getattr(holder, "datasets", ())
    parts = several.values() if isinstance(several, Mapping) else several if isinstance(several, (list, tuple)) else ()
    return [part for part in (one, *parts) if part is not None]


def states_of(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Where each of them stands, in plain values and tensors."""
    return {name: _state(generator) for name, generator in generators.items()}


def set_states(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Put back what :func:`states_of` gave; a generator that it does not know, or that is of another kind now, stays."""
    for name, generator in generators.items():
        if (state := states.get(name)) is not None and state["kind"] == type(generator).__name__:
            _set_state(generator, state["state"])


def draws(dataset: Any) -> bool:
    """Whether getting an example draws from a random generator of this process; they are put back."""
    count, before = len(dataset), _host_state()
    try:
        for index in sorted({0, count // 2, count - 1}):
            dataset[index]
        return bool(_comparable(_host_state()) != _comparable(before))
    finally:
        torch.default_generator.set_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def draws_in_workers(loader: DataLoader[Any]) -> bool:
    """Whether the workers of ``loader`` draw random numbers; where that cannot be found out, it is taken for granted."""
    if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        return True
    try:
        return drew_in_worker(loader)
    except WorkloadError:  # the run itself will say so
        return True


def drew_in_worker(loader: DataLoader[Any]) -> bool:
    """Whether a worker of ``loader`` has drawn random numbers for some examples.

    It is in a worker that they are read, because what a dataset opens in this process its workers would share.

    Raises:
        WorkloadError: they cannot be read there.
    """
    asked = DataLoader(
        _Asked(loader.dataset, loader.collate_fn),
        batch_size=None,
        num_workers=1,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        timeout=loader.timeout,
        generator=torch.Generator(),  # it would draw a seed from everybody's
    )
    with user_code("Some examples could not be read"):
        return bool(next(iter(asked)))


class _Asked(Dataset[bool]):
    """A dataset whose only example says whether another draws, joining what it gives included."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self.dataset, self.collate = dataset, collate

    def __len__(self) -> int:
        return 1

    def __getitem__(self, place: int) -> bool:
        return draws(_Joined(self.dataset, self.collate))


class _Joined:
    """Batches of one example."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self.dataset, self.collate = dataset, collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: int) -> Any:
        return self.collate([self.dataset[place]])


def _state(generator: Any) -> dict[str, Any]:
    if isinstance(generator, torch.Generator):
        state: Any = generator.get_state()
    elif isinstance(generator, random.Random):
        state = generator.getstate()
    else:
        state = _plain(_bits(generator).state)
    return {"kind": type(generator).__name__, "state": state}


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        bits = _bits(generator)
        bits.state = _like(state, bits.state)


def _bits(generator: Any) -> Any:
    """What draws for one of numpy's generators."""
    return generator._bit_generator if isinstance(generator, np.random.RandomState) else generator.bit_generator


def _plain(state: Any) -> Any:
    """``state`` with arrays as lists: their numbers may be larger than those of a tensor."""
    if isinstance(state, Mapping):
        return {name: _plain(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def _like(state: Any, now: Any) -> Any:
    """The inverse of :func:`_plain`, with arrays where ``now`` has them."""
    if isinstance(now, Mapping):
        return {name: _like(state[name], value) for name, value in now.items()}
    return np.asarray(state, now.dtype) if isinstance(now, np.ndarray) else state


def _host_state() -> tuple[Any, ...]:
    """Torch's CPU generator, numpy's and Python's: to ask for those of GPUs, a process that loads would need one."""
    return torch.default_generator.get_state(), np.random.get_state(), random.getstate()


def _comparable(state: Any) -> Any:
    if isinstance(state, (torch.Tensor, np.ndarray)):
        return state.tolist()
    return [_comparable(value) for value in state] if isinstance(state, tuple) else state
