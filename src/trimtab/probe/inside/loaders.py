"""Hooks on ``DataLoader``: where and with which arguments loaders are made, and how long the script waits for them."""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from trimtab.probe.inside import clock
from trimtab.probe.inside.hooks import replace
from trimtab.probe.inside.plan import MAIN
from trimtab.probe.inside.sites import Place, caller, site


class Loader:
    """Facts about one loader of the script, with a weak reference to it."""

    def __init__(self, loader: Any, place: Place | None, index: int) -> None:
        self.ref = weakref.ref(loader)
        self.place, self.index = place, index
        self.number = len(loaders)
        self.dataset_id = 0
        self.dataset = ""
        """Class name."""

    @functools.cached_property
    def site(self) -> str:
        return site(self.place)


loaders: list[Loader] = []
"""In the order of creation."""
_by_id: dict[int, Loader] = {}
_by_iterator: dict[int, tuple[weakref.ref[Any], Loader]] = {}
"""By the id of the iterator. A ``WeakKeyDictionary`` would make a weak reference for each batch."""
_arguments: list[Callable[[str, dict[str, Any]], None]] = []
_epochs: list[Callable[[Loader], None]] = []
at_batches: list[Callable[[Loader, Any], None]] = []
after_batches: list[Callable[[Loader], None]] = []


def entry_of(loader: Any) -> Loader:
    """The entry of a ``DataLoader``. A loader whose creation was not seen gets the current line as its place."""
    found = _by_id.get(id(loader))
    if found is None or found.ref() is not loader:
        place = caller(sys._getframe(1))
        found = Loader(loader, place, sum(other.place == place for other in loaders))
        dataset = getattr(loader, "dataset", None)
        found.dataset, found.dataset_id = type(dataset).__name__, id(dataset)
        loaders.append(found)
        _by_id[id(loader)] = found
    return found


@functools.cache
def _install_init() -> None:
    names = list(inspect.signature(DataLoader.__init__).parameters)[1:]

    def make(original: Any) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            if _arguments and len(args) <= len(names):
                given = {**dict(zip(names, args, strict=False)), **kwargs}
                where = site(caller(sys._getframe(1)))
                for callback in _arguments:
                    callback(where, given)
                args, kwargs = (), given
            original(self, *args, **kwargs)
            if get_ident() == MAIN:
                entry_of(self)

        return __init__

    replace(DataLoader, "__init__", make)


@functools.cache
def _install_iteration() -> None:
    _install_init()

    def iteration(original: Any) -> Callable[..., Any]:
        def __iter__(self: Any) -> Any:
            if get_ident() != MAIN:
                return original(self)
            clock.enter(clock.PROBE)
            entry = entry_of(self)
            for callback in _epochs:
                callback(entry)
            clock.switch(clock.DATA)
            try:
                iterator = original(self)
            finally:
                clock.add(("epoch", entry.number), clock.leave())
            key = id(iterator)
            _by_iterator[key] = weakref.ref(iterator, lambda _: _by_iterator.pop(key, None)), entry
            return iterator

        return __iter__

    def following(original: Any) -> Callable[..., Any]:
        def __next__(self: Any) -> Any:
            if get_ident() != MAIN:
                return original(self)
            depth = clock.enter(clock.DATA)
            try:
                batch = original(self)
            except BaseException:
                clock.leave(depth)
                raise
            ns = clock.switch(clock.PROBE, depth)
            found = _by_iterator.get(id(self))
            if found is not None:
                entry = found[1]
                clock.add(("loader", entry.number), ns)
                for callback in tuple(at_batches):
                    callback(entry, batch)
                for ended in tuple(after_batches):
                    ended(entry)
            clock.leave()
            return batch

        return __next__

    replace(DataLoader, "__iter__", iteration)
    replace(_BaseDataLoaderIter, "__next__", following)


def on_arguments(callback: Callable[[str, dict[str, Any]], None]) -> None:
    """Call ``callback(site, arguments)`` before a ``DataLoader`` is made; it may change the arguments, which are all named."""
    _install_init()
    _arguments.append(callback)


def on_epoch(callback: Callable[[Loader], None]) -> None:
    """Call ``callback`` before an iterator of a loader is made."""
    _install_iteration()
    _epochs.append(callback)


def on_batch(callback: Callable[[Loader, Any], None] | None = None, after: Callable[[Loader], None] | None = None) -> None:
    """Call ``callback(loader, batch)`` for each batch before the script gets it, then ``after(loader)``."""
    _install_iteration()
    if callback is not None:
        at_batches.append(callback)
    if after is not None:
        after_batches.append(after)
