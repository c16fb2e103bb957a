"""Which of a model's outputs a score looks at."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from trimtab._batches import Batch
from trimtab._joined import joined, spared
from trimtab._ties import is_discrete
from trimtab._tree import flatten, names, unflatten
from trimtab.errors import UsageError, WorkloadError
from trimtab.workload import Evaluation, user_code


class Watched(torch.Tensor):
    """A copy of a tensor that tells when something is done with it; what comes of that is a plain tensor."""

    _plain: torch.Tensor
    _tell: Callable[[], None]

    @classmethod
    def of(cls, tensor: torch.Tensor, tell: Callable[[], None]) -> Watched:
        """``tensor``, which calls ``tell`` each time."""
        copy = tensor.detach().clone()
        watched = copy.as_subclass(cls)
        watched._plain, watched._tell = copy, tell
        return watched

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do ``func`` to the plain tensors."""
        args, kwargs = tree_map_only(Watched, _looked_at, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


def watched(value: Any, seen: set[str]) -> Any:
    """``value`` with copies of its tensors; the name of each is added to ``seen`` when something is done with it."""
    structure = flatten(value, "the output")[1]
    copies = [Watched.of(leaf, functools.partial(seen.add, name)) for name, leaf in _named(value)]
    return unflatten(structure, copies)


def unlooked(
    evaluation: Evaluation, outputs: Sequence[Any], batches: Sequence[Batch], counts: Sequence[int]
) -> tuple[str, ...]:
    """The floating-point outputs, by name, that the score does nothing with, so that it cannot judge them.

    ``outputs`` are the model's own for ``batches``, which hold ``counts`` examples. The score judges them once more.
    """
    every = [name for output in outputs for name, leaf in _named(output) if not is_discrete(leaf.dtype)]
    seen: set[str] = set()
    if len(set(every)) < 2:
        return ()
    try:
        with user_code("The score cannot be watched"):
            _judge(evaluation, outputs, batches, counts, seen, set(every))
    except (UsageError, WorkloadError):
        return ()
    # what sees nothing has a way of its own, which cannot be watched
    return tuple(name for name in dict.fromkeys(every) if name not in seen) if seen else ()


def _judge(
    evaluation: Evaluation,
    outputs: Sequence[Any],
    batches: Sequence[Batch],
    counts: Sequence[int],
    seen: set[str],
    every: set[str],
) -> None:
    """Fill ``seen`` with the outputs that are looked at, until these are ``every`` one."""
    if evaluation.metric is not None:
        whole, targets = joined(outputs, counts)(None), joined([batch.target for batch in batches], counts)(None)
        if not every <= {name for name, _ in _named(whole)}:
            raise UsageError("Joined, the outputs have other names. Give a score.")
        evaluation.metric(watched(whole, seen), targets)
        return
    assert evaluation.score is not None
    for output, batch in zip(outputs, batches, strict=True):
        if not every <= seen:
            evaluation.score(watched(output, seen), spared(batch.target))


def _named(value: Any) -> list[tuple[str, torch.Tensor]]:
    leaves, structure = flatten(value, "the output")
    return list(zip(names(structure, "output"), leaves, strict=True))


def _looked_at(tensor: Watched) -> torch.Tensor:
    tensor._tell()
    return tensor._plain
