"""Hooks on optimizers, backward passes and gradients: torch's global hooks where they exist, replaced functions elsewhere.

Nothing is put on an instance, so that whatever the script saves or copies is what it is without the probe. A hook is installed
by the first registration that needs it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trimtab.probe.inside import clock
from trimtab.probe.inside.plan import MAIN
from trimtab.probe.inside.sites import Place, caller, site

is_compiling: Callable[[], bool] = torch.compiler.is_compiling
"""While Dynamo compiles, tensors of replaced functions are fake. A hook that read one would end the compilation."""


def replace(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Set ``owner.name`` to ``make(original)``. Does nothing if ``owner`` has no such function."""
    original = getattr(owner, name, None)
    if original is None:
        return
    made: Any = make(original)
    try:
        functools.update_wrapper(made, original)
        setattr(owner, name, made)
    except (AttributeError, TypeError):
        return


class Optimizer:
    """Facts about one optimizer of the script, with a weak reference to it."""

    def __init__(self, optimizer: torch.optim.Optimizer, place: Place | None, index: int) -> None:
        self.ref = weakref.ref(optimizer)
        self.name = type(optimizer).__name__
        self.place, self.index = place, index
        self.number = len(optimizers)

    @functools.cached_property
    def site(self) -> str:
        return site(self.place)


optimizers: list[Optimizer] = []
"""In the order of creation."""
_by_id: dict[int, Optimizer] = {}


def optimizer_entry(optimizer: torch.optim.Optimizer) -> Optimizer:
    """The entry of ``optimizer``. An optimizer whose creation was not seen gets the line that steps it as its place."""
    found = _by_id.get(id(optimizer))
    if found is None or found.ref() is not optimizer:
        place = caller(sys._getframe(1))
        found = Optimizer(optimizer, place, sum(other.place == place for other in optimizers))
        optimizers.append(found)
        _by_id[id(optimizer)] = found
    return found


_after_step: list[Callable[[Optimizer], None]] = []
_depths: list[int] = []
_closures: list[int] = []
"""Per running ``step()``: depth of the clock, and the ns of its closure, which count as passes and not as the optimizer."""


@functools.cache
def _install_optimizers() -> None:
    def make(original: Any) -> Callable[..., Any]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            optimizer_entry(self)

        return __init__

    def pre(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if get_ident() != MAIN or is_compiling():
            return None
        _depths.append(clock.enter(clock.OPTIMIZER))
        _closures.append(0)
        closure = kwargs.get("closure") if "closure" in kwargs else args[1] if len(args) > 1 else None
        if not callable(closure):
            return None

        def watched() -> Any:
            clock.enter(clock.OTHER)
            try:
                return closure()
            finally:
                _closures[-1] += clock.leave()

        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def post(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if get_ident() != MAIN or is_compiling() or not _depths:
            return
        ns = clock.switch(clock.PROBE, _depths.pop())
        entry = optimizer_entry(optimizer)
        clock.add(("optimizer", entry.number), ns - _closures.pop())
        for callback in _after_step:
            callback(entry)
        clock.leave()

    replace(torch.optim.Optimizer, "__init__", make)
    register_optimizer_step_pre_hook(pre)
    register_optimizer_step_post_hook(post)


def on_optimizer_step(after: Callable[[Optimizer], None]) -> None:
    """Call ``after`` each ``step()`` of any optimizer, third-party ones too."""
    _install_optimizers()
    _after_step.append(after)


_losses: list[Callable[[float], None]] = []
_before_backward: list[Callable[[Any], None]] = []
after_backward: list[Callable[[Place | None], None]] = []
tensor_item = torch.Tensor.item
"""The original ``Tensor.item``, which is not timed."""


def scalar(tensors: Any) -> torch.Tensor | None:
    """The loss among the arguments of a backward pass: the first tensor, or its mean if it has several elements."""
    first = tensors[0] if isinstance(tensors, (tuple, list)) and tensors else tensors
    if not isinstance(first, torch.Tensor):
        return None
    return first if first.numel() == 1 else first.detach().mean()


@functools.cache
def _install_backward() -> None:
    def make(original: Any) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or get_ident() != MAIN:
                return original(*args, **kwargs)
            depth = clock.enter(clock.PROBE)
            place = caller(sys._getframe(1)) if after_backward else None
            tensors = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
            for callback in _before_backward:
                callback(tensors)
            if _losses:
                loss = scalar(tensors)
                value = float(tensor_item(loss)) if loss is not None else float("nan")
                for record in _losses:
                    record(value)
            clock.switch(clock.BACKWARD)
            try:
                return original(*args, **kwargs)
            finally:
                if after_backward and sys.exc_info()[0] is None:
                    clock.switch(clock.PROBE, depth)
                    for ended in tuple(after_backward):
                        ended(place)
                clock.leave(depth)

        return backward

    replace(torch.autograd, "backward", make)
    replace(torch.autograd, "grad", make)


def on_backward(callback: Callable[[float], None]) -> None:
    """Call ``callback`` with the loss as each backward pass begins."""
    _install_backward()
    _losses.append(callback)


def around_backward(before: Callable[[Any], None] | None = None, after: Callable[[Place | None], None] | None = None) -> None:
    """Call ``before(tensors)``, and ``after(place)`` with the line of the script, without reading the loss."""
    _install_backward()
    if before is not None:
        _before_backward.append(before)
    if after is not None:
        after_backward.append(after)


@functools.cache
def watch_gradients() -> None:
    """Count ``zero_grad`` and gradient clipping as phases."""

    def zero(original: Any) -> Callable[..., Any]:
        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or get_ident() != MAIN:
                return original(self, *args, **kwargs)
            filled = not (args[0] if args else kwargs.get("set_to_none", True))
            clock.enter(clock.ZERO_GRAD)
            try:
                return original(self, *args, **kwargs)
            finally:
                ns = clock.leave()
                owner = _by_id.get(id(self))
                clock.add(("zero", owner.number if owner else -1, filled), ns)
                if filled:
                    clock.add(("call", "zero_grad", caller(sys._getframe(1))), ns)

        return zero_grad

    def clip(original: Any) -> Callable[..., Any]:
        def clip_grad(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or get_ident() != MAIN:
                return original(*args, **kwargs)
            clock.enter(clock.OPTIMIZER)
            try:
                return original(*args, **kwargs)
            finally:
                place = caller(sys._getframe(1))
                clock.add(("call", original.__name__, place), clock.leave())

        return clip_grad

    replace(torch.optim.Optimizer, "zero_grad", zero)
    replace(torch.nn.Module, "zero_grad", zero)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        original = getattr(torch.nn.utils, name)
        made = functools.update_wrapper(clip(original), original)
        setattr(torch.nn.utils, name, made)
        setattr(torch.nn.utils.clip_grad, name, made)
