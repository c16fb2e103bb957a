"""Peak memory of the tensors of a training step, in bytes."""

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
from trimtab.measure.timer import gc_disabled


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A block that counts the bytes of all storages that operators allocate in it, until they are freed.

    Storages from before the block do not count, nor does the memory that an operator allocates and frees within itself.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0
        self.operators = 0
        """Number of operators that have run."""
        self.written: dict[int, int] = {}
        """By the number of a storage: :attr:`operators` when it was last changed in place."""
        self._known: dict[int, tuple[int, int]] = {}
        """By address: the number and the counted bytes of each storage that is there."""
        self._next = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and count the storages of its outputs."""
        kwargs = kwargs or {}
        for tensor in strided((args, kwargs)):
            self._entry(tensor, new=False)
        found = func(*args, **kwargs)
        self.operators += 1
        for tensor in strided(found):
            self._entry(tensor, new=True)
        for place in _writes(func):
            value = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
            for tensor in strided(value):
                self.written[self.number(tensor)] = self.operators
        return found

    def number(self, tensor: torch.Tensor) -> int:
        """A number of the storage of ``tensor``, which no other storage ever gets."""
        return self._entry(tensor, new=False)[0]

    def bytes_of(self, tensor: torch.Tensor) -> int:
        """The bytes that the storage of ``tensor`` counts for; 0 if it is from before the block."""
        return self._entry(tensor, new=False)[1]

    def exclude(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` no longer."""
        number, size = self._entry(tensor, new=False)
        self.bytes -= size
        self._known[tensor.untyped_storage()._cdata] = (number, 0)

    def _entry(self, tensor: torch.Tensor, *, new: bool) -> tuple[int, int]:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = (self._next, storage.nbytes() if new else 0)
            self._next += 1
            self.bytes += known[1]
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._freed, key).atexit = False
        return known

    def _freed(self, key: int) -> None:
        self.bytes -= self._known.pop(key)[1]


def peak_activations(run: Callable[[], object], parameters: Iterable[torch.nn.Parameter], device: torch.device) -> int:
    """The peak memory of ``run``, a forward and backward pass, in bytes above the level before it.

    Everything that the device's allocator gives out counts, temporary memory of operators included, except the gradients of
    ``parameters``, which recomputing does not change. A GPU is measured in a second run, because libraries allocate their
    workspaces in the first.

    The host's allocator is observed with torch's profiler. If that is running already, :class:`LiveStorages` counts instead.
    """
    parameters = [p for p in parameters if p.requires_grad]
    with gc_disabled():  # garbage from before, in reference cycles, must not be freed during the measurement
        if device.type == "cuda":
            return _gpu_peak(run, parameters, device)
        if not torch._C._autograd._profiler_enabled():
            return _host_peak(run, parameters)
        with LiveStorages() as live, _gradient_hooks(live.exclude, parameters):
            run()
        return int(live.peak)


def _gpu_peak(run: Callable[[], object], parameters: list[torch.nn.Parameter], device: torch.device) -> int:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    run()
    torch.cuda.synchronize(device)
    before = int(torch.cuda.memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def _host_peak(run: Callable[[], object], parameters: list[torch.nn.Parameter]) -> int:
    mark = "trimtab: a gradient of bytes "

    def ready(gradient: torch.Tensor) -> None:
        with torch.profiler.record_function(f"{mark}{gradient.untyped_storage().nbytes()}"):
            pass

    recorded = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with quiet(), _gradient_hooks(ready, parameters), recorded as seen:
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
def _gradient_hooks(ready: Callable[[torch.Tensor], None], parameters: list[torch.nn.Parameter]) -> Iterator[None]:
    """A block in which ``ready`` gets the gradient of each parameter that had none, as soon as it is computed."""

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
    """The tensors in nested values, without sparse ones, which have no storage."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided)


@functools.cache
def _writes(func: Any) -> tuple[int | str, ...]:
    """Positions and names of the arguments that an operator changes in place."""
    arguments = func._schema.arguments
    places = [i for i, argument in enumerate(arguments) if argument.alias_info is not None and argument.alias_info.is_write]
    return (*(i for i in places if not arguments[i].kwarg_only), *(arguments[i].name for i in places))
