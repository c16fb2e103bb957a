"""Record the inputs of the calls of a module while the user's program runs."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trimtab._internal.text import of_type
from trimtab._internal.user_code import user_code
from trimtab.core.dynamic_dims import Dims, find_dims
from trimtab.core.signature import TensorSpec, input_names, parameter_names, specs
from trimtab.errors import UsageError, WorkloadError
from trimtab.tensors.structure import Structure, described, first_difference, flatten, unflatten


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a model: positional and keyword arguments. As an item of data it is never split into examples."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """The recorded ``calls`` in order; ``seen`` is the number of all calls; ``dims`` are the axes whose sizes differed."""

    calls: tuple[Call, ...]
    seen: int
    dims: Dims


def record(
    module: nn.Module,
    run: Callable[[], Any],
    *,
    keep: Callable[[Call], bool] | None = None,
    most_calls: int = 64,
    most_mb: float = 512.0,
) -> Recording:
    """Run ``run()`` and record the inputs of each call of ``module``, before the module can modify them. If ``run`` returns an
    iterator, such as a generator, it is exhausted.

    Inputs are detached and copied to the CPU. At most ``most_calls`` calls and ``most_mb`` megabytes are kept, spread evenly
    over all calls, with the first call always among them. ``keep`` returns for each call whether it counts.

    Raises:
        UsageError: the module was not called or was in training mode; its inputs cannot be passed to other runtimes; or its
            calls have different structures.
        WorkloadError: ``keep`` raised an error.
        Exception: any error of ``run``. The hook is removed in every case.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise UsageError(
            "TorchScript modules take no hooks, so their calls cannot be recorded. Capture the module it was made from, or "
            "save the inputs yourself and give them as Workload(inputs=...)."
        )
    if not isinstance(module, nn.Module):
        raise UsageError(f"capture records the calls of an nn.Module, but was given {of_type(module)}. Give a module.")
    recorder = _Recorder(parameter_names(module.forward, 0), keep, most_calls, most_mb)
    hook = module.register_forward_pre_hook(recorder, with_kwargs=True, prepend=True)
    try:
        if isinstance(found := run(), Iterator):
            collections.deque(found, maxlen=0)  # exhaust a generator: it runs only while it is consumed
    finally:
        hook.remove()
    return recorder.finish(type(module).__name__)


class _Recorder:
    """The forward hook. It does not raise, because the program could catch the error and go on; :meth:`finish` raises it."""

    def __init__(self, parameters: Sequence[str], keep: Callable[[Call], bool] | None, most_calls: int, most_mb: float) -> None:
        self._parameters = parameters
        self._keep = keep
        self._most_calls, self._most_bytes = most_calls, most_mb * 1e6
        self._kept: list[tuple[int, list[torch.Tensor]]] = []
        self._structures: dict[Structure, int] = {}
        self._shapes: dict[tuple[TensorSpec, ...], None] = {}
        self._stride = 1
        self._seen = self._left_out = 0
        self._problem: UsageError | WorkloadError | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._problem is not None:
            return
        try:
            self._note(module, Call(tuple(args), dict(kwargs)))
        except (UsageError, WorkloadError) as error:
            self._problem = error

    def _note(self, module: nn.Module, call: Call) -> None:
        number = self._seen + self._left_out + 1
        if not self._is_wanted(call, number):
            self._left_out += 1
            return
        if any(getattr(part, "training", False) for part in module.modules()):
            raise UsageError(
                f"The {type(module).__name__} was in training mode when it was called (call {number}), where dropout and batch "
                "statistics change what it computes. Call .eval() on the whole program before capture."
            )
        first = next(iter(self._structures), None)
        call = call if first is None else rearranged(call, first, self._parameters)
        leaves, structure = flatten((call.args, dict(call.kwargs)), f"Call {number} of the {type(module).__name__}")
        self._structures.setdefault(structure, number)
        index, self._seen = self._seen, self._seen + 1
        if structure != (first or structure):
            return
        names = input_names(self._names(structure), structure)
        self._shapes.setdefault(specs(leaves, names))
        if index % self._stride == 0:
            self._kept.append((index, [_copied(leaf) for leaf in leaves]))
            self._thin()

    def _is_wanted(self, call: Call, number: int) -> bool:
        if self._keep is None:
            return True
        with user_code(f"keep raised when it was asked about call {number}", "It gets a Call, with its args and kwargs."):
            return bool(self._keep(call))

    def _names(self, structure: Structure) -> tuple[str, ...]:
        count = len(structure.items[0].items)
        return (*self._parameters, *(f"input_{i}" for i in range(len(self._parameters), count)))

    def _thin(self) -> None:
        """Drop every second kept call until the limits hold, and record later calls at the new rate."""
        while len(self._kept) > 1 and (len(self._kept) > self._most_calls or self._bytes() > self._most_bytes):
            self._stride *= 2
            self._kept = [(index, leaves) for index, leaves in self._kept if index % self._stride == 0]

    def _bytes(self) -> int:
        return sum(leaf.nbytes for _, leaves in self._kept for leaf in leaves)

    def finish(self, name: str) -> Recording:
        """The recording. Raises the error that the hook stored, if there is one."""
        if self._problem is not None:
            raise self._problem
        if not self._seen:
            raise UsageError(_not_called(name, self._left_out))
        (structure, first), *others = self._structures.items()
        if others:
            other, number = others[0]
            raise UsageError(
                f"The {name} was called in {len(self._structures)} different forms: "
                f"{difference(structure, other, first, number)}. One form can be optimised at a time: choose the calls with "
                "keep=lambda call: ..., or pass numbers that change as tensors."
            )
        calls = tuple(Call(*unflatten(structure, leaves)) for _, leaves in self._kept)
        return Recording(calls=calls, seen=self._seen, dims=find_dims(list(self._shapes)))


def difference(first: Structure, other: Structure, one: int, two: int) -> str:
    """The first difference between the structures of calls number ``one`` and ``two``, as text."""
    found = first_difference(_arguments(first), _arguments(other), "")
    assert found is not None
    where, mine, yours = found
    if mine.kind == yours.kind and (unshared := sorted({*mine.keys} ^ {*yours.keys})):
        present, absent = (one, two) if unshared[0] in mine.keys else (two, one)
        return f"{where and f'{where}.'}{unshared[0]} is given in call {present} and missing in call {absent}"
    return f"{where or 'the call'} is {described(mine)} in call {one} and {described(yours)} in call {two}"


def _arguments(structure: Structure) -> Structure:
    """The arguments of a call by name, those by position by number."""
    args, kwargs = structure.items
    numbered = tuple(f"argument {i}" for i in range(len(args.items)))
    return Structure("dict", (*numbered, *kwargs.keys), (*args.items, *kwargs.items))


def rearranged(call: Call, like: Structure, parameters: Sequence[str]) -> Call:
    """``call`` with its arguments passed by position and keyword as in structure ``like``, as far as their names are known."""
    positional, keyword = (len(like.items[0].items), like.items[1].keys)
    args, rest = list(call.args), dict(call.kwargs)
    for name in parameters[len(args) : positional]:
        if name not in rest:
            break
        args.append(rest.pop(name))
    for name in parameters[positional : len(args)]:
        rest[name] = args.pop(positional)
    ordered = {name: rest.pop(name) for name in keyword if name in rest}
    return Call(tuple(args), ordered | rest)


def _copied(leaf: torch.Tensor) -> torch.Tensor:
    """A CPU copy that is not an inference tensor, even if the program runs in inference mode."""
    with torch.inference_mode(mode=False), torch.no_grad():
        return leaf.detach().clone().cpu()


def _not_called(name: str, left_out: int) -> str:
    if left_out:
        return f"keep refused all {left_out} calls of the {name}. Let at least one through."
    return (
        f"The {name} was never called while run() ran. Check that it is the very object that the program calls (not a copy), "
        "that it is called as module(...) and not as module.forward(...), and that neither it nor what calls it was compiled "
        "or scripted before."
    )
