"""Leave out a phase of a step, to measure the most that a remedy for it can save. Never applied outside of measurements."""

from __future__ import annotations

import builtins
import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from trimtab.probe.inside.roots import around_calls

FUNCTION = "__trimtab_reuse__"
"""As in :mod:`trimtab.probe.line_reuse`, which only the driver imports."""
_active: dict[str, str | None] = {"without": None}
_lines: set[str] = set()
"""Lines that are left out now."""
_installed: set[str] = set()


def switch(settings: Mapping[str, Any]) -> None:
    """Apply ``without`` and ``lines``."""
    phase = settings.get("without")
    _active["without"] = phase
    if settings.get("lines"):
        setattr(builtins, FUNCTION, _line_value)
    _lines.clear()
    _lines.update(settings["lines"] if phase == "lines" else ())
    if phase is not None and phase not in _installed:
        _installed.add(phase)
        _INSTALL[phase]()
    if phase == "logging":
        _silence_writers()  # the script may have imported them since


def _skip_during(phase: str, function: Callable[..., Any], instead: Callable[..., Any] = lambda *args, **kwargs: None) -> Any:
    """A function that calls ``instead`` while ``phase`` is left out, and ``function`` otherwise."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return instead(*args, **kwargs) if _active["without"] == phase else function(*args, **kwargs)

    return call


# data: repeat the last batch of the same data set


_ITERATORS = (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter)
_last: dict[int, Any] = {}
"""Id of a data set -> its last batch."""


def _replay_data() -> None:
    for kind in _ITERATORS:
        setattr(kind, "_next_data", _replaying(kind._next_data))  # noqa: B010 - mypy knows it as a method


def _replaying(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def replay(self: Any) -> Any:
        key = id(self._dataset)
        if _active["without"] != "data":
            return read(self)
        if key not in _last:
            _last[key] = read(self)
        elif self._num_yielded >= _batches(self):
            raise StopIteration
        return _pytree.tree_map(lambda leaf: leaf, _last[key])  # new containers, because scripts modify them

    return replay


def _batches(iterator: Any) -> float:
    """Batches per epoch; infinite for a stream."""
    try:
        return len(iterator._index_sampler)
    except TypeError:
        return float("inf")


# logging: skip writers, print and progress bars


_WRITERS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "torch.utils.tensorboard.writer": {"SummaryWriter": ("add_*", "flush")},
    "tensorboardX.writer": {"SummaryWriter": ("add_*", "flush")},
    "tqdm.std": {"tqdm": ("display", "refresh", "set_postfix", "set_postfix_str", "set_description")},
    "wandb.sdk.wandb_run": {"Run": ("log",)},
    "mlflow.tracking.fluent": {"": ("log_metric", "log_metrics", "log_param", "log_params")},
}
_silenced: set[tuple[str, str, str]] = set()


def _silence() -> None:
    builtins.print = _skip_during("logging", builtins.print)
    logging.Logger._log = _skip_during("logging", logging.Logger._log)  # type: ignore[method-assign]


def _silence_writers() -> None:
    for module, kinds in _WRITERS.items():
        for kind, patterns in kinds.items() if module in sys.modules else ():
            owner = getattr(sys.modules[module], kind, None) if kind else sys.modules[module]
            for name in dir(owner):
                fits = any(name == each or (each.endswith("*") and name.startswith(each[:-1])) for each in patterns)
                if fits and (module, kind, name) not in _silenced:
                    _silenced.add((module, kind, name))
                    setattr(owner, name, _skip_during("logging", getattr(owner, name)))


# synchronization: return the value that the same line read last


_values: dict[tuple[Any, int, str], Any] = {}


def _reuse_values() -> None:
    for name in ("item", "tolist", "__float__", "__int__"):
        setattr(torch.Tensor, name, _reused(name, getattr(torch.Tensor, name)))


def _reused(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def read(self: torch.Tensor) -> Any:
        if _active["without"] != "synchronization":
            return function(self)
        frame = sys._getframe(1)
        key = (frame.f_code, frame.f_lineno, name)
        if key not in _values:
            _values[key] = function(self)
        return _values[key]

    return read


# evaluation: end a loop over a loader after the first batch that a module in evaluation mode took


_evaluating: dict[str, Any] = {"reader": None, "call": False}
_trained_on: weakref.WeakSet[Any] = weakref.WeakSet()
"""Iterators whose batches a module in training mode took."""


def _end_evaluations() -> None:
    def note(module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        reader = _evaluating["reader"]
        if module.training and reader is not None:
            _trained_on.add(reader)
        _evaluating["call"] = not module.training
        return call(*args, **kwargs)

    around_calls(note)
    for kind in _ITERATORS:
        setattr(kind, "_next_data", _ending(kind._next_data))  # noqa: B010 - as above


def _ending(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def end(self: Any) -> Any:
        evaluates = _evaluating["reader"] is self and _evaluating["call"] and self not in _trained_on
        _evaluating.update(reader=self, call=False)
        if _active["without"] == "evaluation" and evaluates:
            raise StopIteration
        return read(self)

    return end


# saving: write empty files


def _empty_file(value: Any, f: Any = None, *args: Any, **kwargs: Any) -> None:
    if isinstance(f, (str, os.PathLike)):
        with open(f, "wb"):
            pass


def _save_nothing() -> None:
    torch.save = _skip_during("saving", torch.save, _empty_file)
    torch.serialization.save = torch.save


# lines: use the value again that the line had first


_line_values: dict[str, Any] = {}


def _line_value(site: str, compute: Callable[[], Any]) -> Any:
    """The value of the line ``site`` of a changed copy of the script, see :mod:`trimtab.probe.line_reuse`. An iterator, which
    can be read once only, is made again."""
    if site not in _lines:
        return compute()
    if site not in _line_values:
        value = compute()
        if isinstance(value, Iterator):
            return value
        _line_values[site] = _pytree.tree_map(_without_graph, value)
        return value
    return _pytree.tree_map(lambda leaf: leaf, _line_values[site])  # new containers, because scripts modify them


def _without_graph(leaf: Any) -> Any:
    """A tensor without its graph, which one backward pass uses up."""
    return leaf.detach() if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None else leaf


_INSTALL: Mapping[str, Callable[[], None]] = {
    "data": _replay_data,
    "logging": _silence,
    "synchronization": _reuse_values,
    "evaluation": _end_evaluations,
    "saving": _save_nothing,
    "lines": lambda: None,
}
