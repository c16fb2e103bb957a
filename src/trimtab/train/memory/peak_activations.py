"""How much memory the tensors of a training step take, counted tensor by tensor."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trimtab.measure.profile import quiet
from trimtab.measure.timer import uncollected


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A block that counts the bytes of all storages that operators make in it, from their birth until they are freed.

    What was there before does not count, whatever is done to it, nor does what :meth:`leave_out` names. What an operator
    allocates and frees within itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0
        self.operators = 0
        """How many ran so far: the time of :attr:`written`."""
        self.written: dict[int, int] = {}
        """When a storage was last changed in place, by its number."""
        self._known: dict[int, tuple[int, int]] = {}
        self._next = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and count what it made."""
        kwargs = kwargs or {}
        for tensor in strided((args, kwargs)):
            self._meet(tensor, made=False)
        found = func(*args, **kwargs)
        self.operators += 1
        for tensor in strided(found):
            self._meet(tensor, made=True)
        for tensor in _changed(func, args, kwargs):
            self.written[self.number(tensor)] = self.operators
        return found

    def number(self, tensor: torch.Tensor) -> int:
        """What the storage of ``tensor`` is known by; no other one ever gets the same number."""
        return self._meet(tensor, made=False)[0]

    def counted(self, tensor: torch.Tensor) -> int:
        """The bytes that the storage of ``tensor`` counts for; 0 for one that was there before."""
        return self._meet(tensor, made=False)[1]

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` no longer."""
        number, size = self._meet(tensor, made=False)
        self.bytes -= size
        self._known[tensor.untyped_storage()._cdata] = (number, 0)

    def _meet(self, tensor: torch.Tensor, *, made: bool) -> tuple[int, int]:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = (self._next, storage.nbytes() if made else 0)
            self._next += 1
            self.bytes += known[1]
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._freed, key).atexit = False
        return known

    def _freed(self, key: int) -> None:
        self.bytes -= self._known.pop(key)[1]


def peak_activations(run: Callable[[], object], parameters: Iterable[torch.nn.Parameter], device: torch.device) -> int:
    """The highest memory that ``run``, a forward and backward pass, takes above what was there before, in bytes.

    Whatever is allocated counts: what waits for the backward pass, what is computed again in it, the gradients of activations,
    and what operators need for themselves, such as copies in the layout of a processor's convolutions. Gradients of
    ``parameters`` do not, because they are there whatever is recomputed. The figure is that of the device's allocator; on a GPU
    of a second run, with zeroed gradients in place, because libraries take at their first call what they keep for all others.

    Where torch's profiler is running already, which alone tells what the host's allocator does, it is that of :class:`Live`.
    """
    parameters = [p for p in parameters if p.requires_grad]
    with uncollected():  # garbage in rings, which was there before, must not be given back in the middle of the count
        return _peak(run, parameters, device)


def _peak(run: Callable[[], object], parameters: list[torch.nn.Parameter], device: torch.device) -> int:
    if device.type == "cuda":
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        run()  # cuBLAS's workspace stays, and cuDNN may try one algorithm after the other
        torch.cuda.synchronize(device)
        before = int(torch.cuda.memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    if torch._C._autograd._profiler_enabled():
        with Live() as live, _as_gradients_come(parameters, live.leave_out):
            run()
        peak: int = live.peak
        return peak
    return _allocated(run, parameters)


def _allocated(run: Callable[[], object], parameters: Iterable[torch.nn.Parameter]) -> int:
    """The peak by the host's allocator, less the gradients as they come."""
    mark = "trimtab: a gradient of bytes "

    def ready(gradient: torch.Tensor) -> None:
        with torch.profiler.record_function(f"{mark}{gradient.untyped_storage().nbytes()}"):
            pass

    recorded = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with quiet(), _as_gradients_come(parameters, ready), recorded as seen:
        run()
    level = peak = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            level += event.nbytes()
        elif event.name().startswith(mark):
            level -= int(event.name().removeprefix(mark))
        peak = max(peak, level)
    return peak


@contextlib.contextmanager
def _as_gradients_come(parameters: Iterable[torch.nn.Parameter], ready: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """A block in which ``ready`` is called with the gradient of each parameter that had none, as soon as it is there."""

    def hook(parameter: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout == torch.strided:
            ready(parameter.grad)

    handles = [p.register_post_accumulate_grad_hook(hook) for p in parameters if p.grad is None]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def strided(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested values that have a storage of their own kind: not sparse ones."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided)


def _changed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for place in _writes(func):
        value = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
        yield from strided(value)


@functools.cache
def _writes(func: Any) -> tuple[int | str, ...]:
    """Positions and names of the arguments that an operator changes in place."""
    arguments = func._schema.arguments
    places = [i for i, argument in enumerate(arguments) if argument.alias_info is not None and argument.alias_info.is_write]
    return (*(i for i in places if not arguments[i].kwarg_only), *(arguments[i].name for i in places))
