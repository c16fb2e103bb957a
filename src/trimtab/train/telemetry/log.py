"""``trimtab.train.log``: figures from anywhere in a run, averaged over updates and processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real

import torch

from trimtab._internal.text import of_type
from trimtab.errors import UsageError

Sums = dict[str, tuple[float, int]]
"""Sum and number of values, by name."""


class Log:
    """The figures of one run since they were last taken. Tensors stay on their device until then."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[torch.Tensor | float, int]] = {}

    def add(self, name: str, value: torch.Tensor | float) -> None:
        """Add a value of the figure ``name``."""
        total, count = self._sums.get(name, (0.0, 0))
        if isinstance(value, torch.Tensor):
            value = value.detach()
            value = value if value.dtype == torch.float64 else value.float()  # sums of 16 bits would lose the later values
        else:
            value = float(value)
        self._sums[name] = (total + value, count + 1)

    def take(self) -> Sums:
        """The sums since the last call; waits for the device."""
        taken, self._sums = self._sums, {}
        return {name: (float(total), count) for name, (total, count) in taken.items()}

    @contextlib.contextmanager
    def separate(self) -> Iterator[Log]:
        """A block whose figures go into a log of their own, as those of a validation do."""
        kept, self._sums = self._sums, {}
        found = Log()
        try:
            yield found
        finally:
            found._sums, self._sums = self._sums, kept

    def current(self) -> None:
        """Have :func:`log` add to this log from now on."""
        _CURRENT[:] = [self]

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """A block after which :func:`log` no longer adds to this log."""
        try:
            yield
        finally:
            if [self] == _CURRENT:
                _CURRENT.clear()


_CURRENT: list[Log] = []
"""The log of the run that made the last update; empty if no run is under way."""


def log(name: str, value: torch.Tensor | float) -> None:
    """Log a figure from a loss, a model, a hook or a callback of a run.

    ``Progressed.logged`` has its mean over all calls since the last such event, on all processes; ``Validated.logged`` that
    over the validation. Values on a GPU are read then. Outside a run nothing happens, so that a model that logs can be used.

    Args:
        name: of the figure.
        value: a number, or a tensor with one number.

    Raises:
        UsageError: ``name`` is no string, or ``value`` is no number.
    """
    if not _CURRENT:
        return
    if not isinstance(name, str):
        raise UsageError(f"log() got the name {name!r}, {of_type(name)}. Give a string: log('accuracy', 0.9).")
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise UsageError(
                f"log({name!r}, ...) got a tensor of shape {tuple(value.shape)}. Give one number, such as its mean()."
            )
        value = value.detach().reshape(())
    elif not isinstance(value, Real):
        raise UsageError(f"log({name!r}, ...) got {of_type(value)}. Give a number, or a tensor with one.")
    _CURRENT[0].add(name, value)


def means(sums: Sequence[Sums]) -> Mapping[str, float]:
    """The mean of each figure over the ``sums`` of all processes."""
    found: Sums = {}
    for one in sums:
        for name, (total, count) in one.items():
            before, made = found.get(name, (0.0, 0))
            found[name] = before + total, made + count
    return {name: total / count for name, (total, count) in found.items()}
