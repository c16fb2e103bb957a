"""One forward pass, traced: what it keeps for its backward pass, module by module, and how long each module takes."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from trimtab.errors import WorkloadError
from trimtab.train.memory.activation_checkpointing import changeable
from trimtab.train.memory.peak_activations import Live, strided

_DIFFERENTIATED = (
    "activation_mb cannot be kept where the model or the loss differentiates within the forward pass, as a gradient penalty "
    "does. Leave it out, and make micro-batches smaller: DataSettings(micro_batch=...)."
)


@dataclasses.dataclass
class Call:
    """One call of a module. What is kept in it is ``Trace.kept[first:end]``."""

    module: nn.Module
    parent: Call | None
    first: int
    begun: int
    """The number of operators that had run before it."""
    inputs: list[tuple[int, int]]
    """Number and bytes of each storage among its arguments."""
    end: int = 0
    ended: int = 0
    """The number of operators that had run after it."""


@dataclasses.dataclass(frozen=True)
class Keep:
    """A tensor that an operator keeps for the backward pass."""

    number: int
    """Of its storage."""
    bytes: int
    live: int
    """Bytes alive at that moment, if nothing had been kept before."""
    call: Call | None
    """The innermost call around it."""


@dataclasses.dataclass
class Trace:
    """A forward pass."""

    kept: list[Keep] = dataclasses.field(default_factory=list)
    calls: list[Call] = dataclasses.field(default_factory=list)
    written: dict[int, int] = dataclasses.field(default_factory=dict)
    """By the number of a storage: how many operators had run when it was last changed in place."""
    changeable: set[nn.Module] = dataclasses.field(default_factory=set)
    """Modules that were given a list or an object."""
    seconds: dict[nn.Module, float] = dataclasses.field(default_factory=dict)
    """The time of each module's forward pass, in all its calls."""


def trace(model: nn.Module, forward: Callable[[], object], device: torch.device) -> Trace:
    """Run ``forward``, which calls ``model``, and record what it would keep.

    Nothing is kept, so this needs less memory than training.

    Raises:
        WorkloadError: there is a backward pass within, which needs what is not kept.
    """
    found = Trace()
    try:
        found.seconds = _seconds(model, forward, device)
        with Live() as live, _recorded(model, live, found) as running:

            def keep(tensor: torch.Tensor) -> None:
                if tensor.layout == torch.strided and (size := live.counted(tensor)):
                    found.kept.append(Keep(live.number(tensor), size, live.bytes, running[-1] if running else None))

            with torch.autograd.graph.saved_tensors_hooks(keep, _refuse):
                forward()
            found.written = live.written
    except RuntimeError as error:
        if "torch.func" in str(error) and "saved tensor hooks" in str(error):  # its grad, jacrev and the like take no hooks
            raise WorkloadError(_DIFFERENTIATED) from error
        raise
    return found


def _refuse(nothing: None) -> torch.Tensor:
    raise WorkloadError(_DIFFERENTIATED)


@contextlib.contextmanager
def _recorded(model: nn.Module, live: Live, found: Trace) -> Iterator[list[Call]]:
    """A block that records every call of a module within ``model``; it gets the list of calls that are under way."""
    running: list[Call] = []

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        if changeable((*args, *kwargs.values())) is not None:
            found.changeable.add(module)
        inputs = [(live.number(tensor), live.counted(tensor)) for tensor in strided((args, kwargs))]
        running.append(Call(module, running[-1] if running else None, len(found.kept), live.operators, inputs))
        found.calls.append(running[-1])

    def end(module: nn.Module, args: Any, output: Any) -> None:
        call = running.pop()
        call.end, call.ended = len(found.kept), live.operators

    with _hooked(model, begin, end):
        yield running


def _seconds(model: nn.Module, forward: Callable[[], object], device: torch.device) -> dict[nn.Module, float]:
    """The shorter of two times of each module's forward pass, in seconds, with nothing kept."""

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def once() -> dict[nn.Module, float]:
        spent: dict[nn.Module, float] = defaultdict(float)
        began: list[float] = []

        def end(module: nn.Module, *_: Any) -> None:
            spent[module] += clock() - began.pop()

        with (
            torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _refuse),
            _hooked(model, lambda *_: began.append(clock()), end),
        ):
            forward()
        return spent

    first, second = once(), once()
    return {module: min(seconds, first.get(module, seconds)) for module, seconds in second.items()}


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
