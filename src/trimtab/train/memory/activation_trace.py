"""Trace one forward pass: the tensors that each module saves for the backward pass, and the time of each module."""

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
from trimtab.train.memory.activation_checkpointing import find_mutable
from trimtab.train.memory.peak_activations import LiveStorages, strided

_DIFFERENTIATED = (
    "activation_mb cannot be kept where the model or the loss differentiates within the forward pass, as a gradient penalty "
    "does. Leave it out, and make micro-batches smaller: DataSettings(micro_batch=...)."
)


@dataclasses.dataclass
class Call:
    """One call of a module. The tensors saved in it are ``Trace.saved[first:end]``."""

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
class SavedTensor:
    """A tensor that an operator saves for the backward pass."""

    number: int
    """Of its storage."""
    bytes: int
    live: int
    """Bytes alive at that moment, without tensors saved before."""
    call: Call | None
    """The innermost call around it."""


@dataclasses.dataclass
class Trace:
    """A forward pass."""

    saved: list[SavedTensor] = dataclasses.field(default_factory=list)
    calls: list[Call] = dataclasses.field(default_factory=list)
    written: dict[int, int] = dataclasses.field(default_factory=dict)
    """By the number of a storage: how many operators had run when it was last changed in place."""
    mutable_inputs: set[nn.Module] = dataclasses.field(default_factory=set)
    """Modules that were given a list or an object."""
    seconds: dict[nn.Module, float] = dataclasses.field(default_factory=dict)
    """The time of each module's forward pass, in all its calls."""


def trace(model: nn.Module, forward: Callable[[], object], device: torch.device) -> Trace:
    """Run ``forward``, which calls ``model``, and record the tensors that it would save for the backward pass.

    No tensor is saved, so this needs less memory than training.

    Raises:
        WorkloadError: the forward pass contains a backward pass, which needs the tensors that are not saved.
    """
    found = Trace()
    try:
        found.seconds = _seconds(model, forward, device)
        with LiveStorages() as live, _recorded(model, live, found) as running:

            def record(tensor: torch.Tensor) -> None:
                if tensor.layout == torch.strided and (size := live.bytes_of(tensor)):
                    found.saved.append(SavedTensor(live.number(tensor), size, live.bytes, running[-1] if running else None))

            with torch.autograd.graph.saved_tensors_hooks(record, _refuse):
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
def _recorded(model: nn.Module, live: LiveStorages, found: Trace) -> Iterator[list[Call]]:
    """A block that records every call of a module within ``model``; yields the stack of running calls."""
    running: list[Call] = []

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        if find_mutable((*args, *kwargs.values())) is not None:
            found.mutable_inputs.add(module)
        inputs = [(live.number(tensor), live.bytes_of(tensor)) for tensor in strided((args, kwargs))]
        running.append(Call(module, running[-1] if running else None, len(found.saved), live.operators, inputs))
        found.calls.append(running[-1])

    def end(module: nn.Module, args: Any, output: Any) -> None:
        call = running.pop()
        call.end, call.ended = len(found.saved), live.operators

    with _hooked(model, begin, end):
        yield running


def _seconds(model: nn.Module, forward: Callable[[], object], device: torch.device) -> dict[nn.Module, float]:
    """The shorter of two times of each module's forward pass, in seconds, without saved tensors."""

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
