"""Calls of the outermost modules, the *roots*: ``__call__`` of their classes is replaced, so that submodules stay as fast as
they are and nothing is put on an instance.

Roots are modules with parameters, and losses, that are no part of another module. They are looked for among all living objects,
which takes up to 0.4 s with large libraries loaded: before the first call of a module or batch of a loader, after the
first backward pass, and where nothing was called by then, again later.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch.nn.modules.loss import _Loss

from trimtab.probe.inside import clock, hooks, loaders
from trimtab.probe.inside.hooks import is_compiling
from trimtab.probe.inside.plan import MAIN

Wrapper = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

MOST_SCANS = 5

roots: dict[int, Any] = {}
"""id -> module. The modules are kept alive."""
called: set[int] = set()
_wrappers: list[Wrapper] = []
after: list[Callable[[Any], None]] = []
_classes: set[type] = set()
_inside = False
_scans = 0
_at_calls: list[Any] = []
"""The handle of the hook before calls of modules, until a root is called."""
_seen: set[int] = set()
"""Ids of all modules that the scans found."""


def _watch(cls: type) -> None:
    if cls in _classes:
        return
    _classes.add(cls)

    def make(original: Any) -> Callable[..., Any]:
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            global _inside
            if _inside or id(self) not in roots or is_compiling() or get_ident() != MAIN:
                return original(self, *args, **kwargs)
            depth = clock.enter(clock.FORWARD)
            _inside = True
            if not called:
                _stop_scanning()
            called.add(id(self))
            call = functools.partial(original, self)
            try:
                for wrapper in _wrappers[:-1]:
                    call = functools.partial(_bound, wrapper, self, call)
                return _wrappers[-1](self, call, args, kwargs) if _wrappers else call(*args, **kwargs)
            finally:
                _inside = False
                if after:
                    clock.switch(clock.PROBE, depth)
                    for callback in tuple(after):
                        callback(self)
                clock.leave(depth)

        return __call__

    hooks.replace(cls, "__call__", make)


def _bound(wrapper: Wrapper, module: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return wrapper(module, call, args, kwargs)


def scan() -> None:
    """Find the roots among all living modules. Earlier roots stay."""
    global _scans
    _scans += 1
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)]
    _seen.update(map(id, found))
    parts = {id(part) for module in found for part in module.__dict__.get("_modules", {}).values() if part is not None}
    for module in found:
        if id(module) not in parts:
            _add(module)


def _add(module: Any) -> None:
    state = module.__dict__
    if "_modules" not in state:
        return
    if issubclass(type(module), _Loss) or next(module.parameters(), None) is not None:
        roots[id(module)] = module
        _watch(type(module))


def add_children() -> None:
    """If no root was called, as with a ``LightningModule``, add the children of the roots as roots."""
    if not called & {key for key, module in roots.items() if not issubclass(type(module), _Loss)}:
        for module in list(roots.values()):
            for child in module.__dict__.get("_modules", {}).values():
                if child is not None and id(child) not in roots:
                    _add(child)


@functools.cache
def _install() -> None:
    seen: set[int] = set()

    def at_batch(loader: loaders.Loader, batch: Any) -> None:
        if loader.number not in seen:
            seen.add(loader.number)
            scan()
        if _scans >= MOST_SCANS:
            loaders.at_batches.remove(at_batch)

    backwards = 0

    def after_backward(place: Any) -> None:
        nonlocal backwards
        backwards += 1
        if backwards == 1 or (backwards in (2, 5) and not called):
            scan()
        if backwards in (2, 5):
            add_children()
        if backwards == 5:
            hooks.after_backward.remove(after_backward)

    loaders.on_batch(at_batch)
    hooks.around_backward(after=after_backward)
    _scan_at_first_call()


def _scan_at_first_call() -> None:
    """Scan before a module is called that no scan has seen, until a root is called: for scripts without a loader and a backward
    pass."""

    def before(module: Any, inputs: Any) -> None:
        if is_compiling() or get_ident() != MAIN:
            return
        if _scans >= MOST_SCANS:
            _stop_scanning()
        elif id(module) not in _seen:
            clock.enter(clock.PROBE)
            scan()
            clock.leave()

    warnings.filterwarnings("ignore", "Using `torch.compile.*global hooks")
    _at_calls.append(torch.nn.modules.module.register_module_forward_pre_hook(before))


def _stop_scanning() -> None:
    while _at_calls:
        _at_calls.pop().remove()


def around_calls(wrapper: Wrapper) -> None:
    """Replace each call of an outermost module by ``wrapper(module, call, args, kwargs)``, which calls
    ``call(*args, **kwargs)`` and returns the output. Later registrations are outermost."""
    _install()
    _wrappers.append(wrapper)


def after_calls(callback: Callable[[Any], None]) -> None:
    """Call ``callback(module)`` after each call of an outermost module."""
    _install()
    after.append(callback)
