"""What one forward pass keeps for its backward pass, module by module, and what each module costs to run again."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from trimtab.train.memory.activation_checkpointing import within_func
from trimtab.train.memory.peak_activations import Live, strided


@dataclasses.dataclass
class Call:
    """One call of a module; ``first`` and ``end`` are the range of what is kept in it, among :attr:`Trace.kept`."""

    module: nn.Module
    parent: Call | None
    first: int
    begun: int
    """How many operators had run."""
    inputs: list[tuple[int, int]]
    """Number and bytes of the storages that it gets."""
    end: int = 0
    ended: int = 0


@dataclasses.dataclass(frozen=True)
class Keep:
    """Something that an operator keeps for the backward pass."""

    number: int
    """Of its storage."""
    bytes: int
    live: int
    """Bytes alive at that moment, had nothing been kept so far."""
    call: Call | None
    """The innermost call that it happens in."""


@dataclasses.dataclass
class Trace:
    """A forward pass."""

    kept: list[Keep] = dataclasses.field(default_factory=list)
    calls: list[Call] = dataclasses.field(default_factory=list)
    written: dict[int, int] = dataclasses.field(default_factory=dict)
    seconds: dict[nn.Module, float] = dataclasses.field(default_factory=dict)
    """What the forward pass of each module takes, in all its calls."""


class DifferentiatedError(RuntimeError):
    """The forward pass needed what was not kept, because it has a backward pass of its own in it."""


def trace(model: nn.Module, forward: Callable[[], object], device: torch.device) -> Trace:
    """Run ``forward``, which calls ``model``, and note what it keeps.

    Nothing is kept for real, so it fits where training does not.

    Raises:
        DifferentiatedError: there is a backward pass within.
    """
    try:
        return _traced(model, forward, device)
    except RuntimeError as error:
        if within_func(error):
            raise DifferentiatedError from error
        raise


def _traced(model: nn.Module, forward: Callable[[], object], device: torch.device) -> Trace:
    found = Trace()
    found.seconds = _seconds(model, forward, device)
    with Live() as live, _calls_noted(model, live, found) as running:

        def keep(tensor: torch.Tensor) -> None:
            if tensor.layout == torch.strided and (size := live.counted(tensor)):
                found.kept.append(Keep(live.number(tensor), size, live.bytes, running[-1] if running else None))

        with torch.autograd.graph.saved_tensors_hooks(keep, _refuse):
            forward()
        found.written = live.written
    return found


def _forget(tensor: torch.Tensor) -> None:
    return None


def _refuse(nothing: None) -> torch.Tensor:
    raise DifferentiatedError


@contextlib.contextmanager
def _calls_noted(model: nn.Module, live: Live, found: Trace) -> Iterator[list[Call]]:
    """A block in which every call of a module within ``model`` is noted; it gets those that are under way."""
    running: list[Call] = []

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = [(live.number(tensor), live.counted(tensor)) for tensor in strided((args, kwargs))]
        running.append(Call(module, running[-1] if running else None, len(found.kept), live.operators, inputs))
        found.calls.append(running[-1])

    def end(module: nn.Module, args: Any, output: Any) -> None:
        call = running.pop()
        call.end, call.ended = len(found.kept), live.operators

    with _hooked(model, begin, end):
        yield running


def _seconds(model: nn.Module, forward: Callable[[], object], device: torch.device) -> dict[nn.Module, float]:
    """The better of two times of each module's forward pass, which keeps nothing, in seconds."""
    best: dict[nn.Module, float] = {}
    for _ in range(2):
        spent: dict[nn.Module, float] = defaultdict(float)
        began: list[float] = []

        def begin(module: nn.Module, args: Any, kwargs: Any, began: list[float] = began) -> None:
            _wait(device)
            began.append(time.perf_counter())

        def end(
            module: nn.Module, args: Any, output: Any, began: list[float] = began, spent: dict[nn.Module, float] = spent
        ) -> None:
            _wait(device)
            spent[module] += time.perf_counter() - began.pop()

        with torch.autograd.graph.saved_tensors_hooks(_forget, _refuse), _hooked(model, begin, end):
            forward()
        best = {module: min(seconds, best.get(module, seconds)) for module, seconds in spent.items()}
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def _hooked(model: nn.Module, begin: Callable[..., None], end: Callable[..., None]) -> Iterator[None]:
    """A block in which ``begin`` runs before and ``end`` after each module's ``forward``, inside of other hooks."""
    handles: list[Any] = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
        handles.append(module.register_forward_hook(end, prepend=True, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
