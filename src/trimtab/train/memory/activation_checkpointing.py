"""Activation checkpointing: the backward pass runs the forward pass of a module again instead of keeping its activations.

Source: Chen et al. 2016, https://arxiv.org/abs/1604.06174; torch.utils.checkpoint, non-reentrant.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdRef

from trimtab.errors import UsageError, WorkloadError

_WITHIN_FUNC = (
    "torch.func differentiates here, through modules whose activations are to be computed again, and cannot. Leave "
    "MemorySettings(segments=...) out, and make micro-batches smaller: DataSettings(micro_batch=...)."
)
_CHANGED = (
    "The forward pass of {} cannot be computed again: an object that it was given, such as a cache or a list, has changed "
    "since. Leave activation_mb and segments out, or hand on tensors only."
)
_VALUES = (str, bytes, int, float, complex, bool, type(None))
Place = tuple[nn.Module, str]
"""A buffer, or a parameter that a forward pass changes: the module that has it and its name there."""


class Recomputed:
    """Recompute ``modules`` from now on, until :meth:`undo`.

    The second run has the autocast mode, the random generators and the buffers of the first. Its changes of buffers are
    dropped, so that the running statistics of BatchNorm move once per batch. Modules keep their class, their names and their
    hooks, which run outside; only ``forward`` is replaced.

    Args:
        modules: none may contain another.
        changing: buffers and parameters that a forward pass may change. Those of BatchNorm are known without.
        segments: the number of parts of each module, which must be an ``nn.Sequential`` if there is more than one. Each part
            keeps its input only, and the activations of one part at a time are in memory.

    Raises:
        WorkloadError: in the backward pass, where a list or an object that a module was given has changed in the meantime.
    """

    def __init__(self, modules: Iterable[nn.Module], changing: Iterable[torch.Tensor] = (), *, segments: int = 1) -> None:
        self.modules = list(modules)
        known = {id(buffer) for buffer in changing}
        self._own = [vars(module).get("forward") for module in self.modules]  # one that a hook or the user has put there
        for module in self.modules:
            forward = (
                _Segments(module, segments, known)
                if segments > 1
                else _Checkpointed(module.forward, buffers_of(module, known), type(module).__name__)
            )
            vars(module)["forward"] = forward  # not by setattr, which a module may override

    def undo(self) -> None:
        """Give the modules their own ``forward`` back."""
        for module, own in zip(self.modules, self._own, strict=True):
            vars(module).pop("forward", None)
            if own is not None:
                vars(module)["forward"] = own
        self.modules, self._own = [], []


class _Checkpointed:
    """``forward``, run again in the backward pass; without gradients, it is called as it is.

    It is an object so that a deep copy of the module has a deep copy of this, with the forward pass of the copied module.

    The compiler takes it into its graph if no buffers change but BatchNorm's, which the output does not depend on. At a graph
    break, torch runs it uncompiled.
    """

    def __init__(self, forward: Callable[..., Any], buffers: Sequence[Place], name: str) -> None:
        self.forward, self.buffers, self.name = forward, buffers, name
        self.compilable = all(_only_gathered(module) for module, _ in buffers)
        """Whether a second run within a graph is right; there it reads buffers as the first run has left them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        count, names = len(args), tuple(kwargs)  # and not args, which the graph would keep through run
        first: list[tuple[_State, list[Any]]] = []

        def run(*given: Any) -> Any:  # twice, or more often where a graph is kept
            named = dict(zip(names, given[count:], strict=True))
            if torch.compiler.is_compiling():
                if not self.compilable:
                    torch._dynamo.graph_break()
                return self.forward(*given[:count], **named)
            if not first:
                first.append((_State(self.buffers), contents(given)))
                return self.forward(*given[:count], **named)
            if contents(given) != first[0][1]:
                raise WorkloadError(_CHANGED.format(self.name))
            with first[0][0].restored():  # not by torch's context_fn, which the compiler does not take
                return self.forward(*given[:count], **named)

        given = (*args, *kwargs.values())  # by position, because torch looks for changes in place only there
        if torch.compiler.is_compiling():
            return checkpoint(run, *given, use_reentrant=False)
        try:
            return checkpoint(run, *given, use_reentrant=False)
        except RuntimeError as error:
            if within_func(error):
                raise WorkloadError(_WITHIN_FUNC) from error
            raise


class _Segments:
    """The forward pass of an ``nn.Sequential`` in ``count`` parts of about as many modules, each recomputed as one."""

    def __init__(self, chain: nn.Module, count: int, changing: set[int]) -> None:
        assert isinstance(chain, nn.Sequential)
        links = list(chain)  # not children(), which gives a module once that stands in the chain twice
        bounds = [round(i * len(links) / count) for i in range(count + 1)]
        parts = [nn.Sequential(*links[a:b]) for a, b in itertools.pairwise(bounds) if a < b]
        self.parts = [_Checkpointed(part, buffers_of(part, changing), "a segment") for part in parts]

    def __call__(self, x: Any) -> Any:
        """Run it."""
        for part in self.parts:
            x = part(x)
        return x


class _State:
    """Buffers, and the states of Python's and NumPy's random generators, as they are now. torch's checkpoint keeps torch's."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._buffers: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for module, name in places:
            held: dict[str, Any] = module._buffers if name in module._buffers else module._parameters
            self._buffers.append((held, name, _copied(held[name])))
        self._random = (random.getstate(), np.random.get_state())

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """A block with that state, after which the present one is back.

        Buffers are exchanged, not overwritten: the graph that is running backward may refer to them.
        """
        present = [held[name] for held, name, _ in self._buffers]
        drawn = (random.getstate(), np.random.get_state())
        for held, name, then in self._buffers:
            held[name] = then.clone()  # a graph that is kept may be run backward twice
        _set_random(*self._random)
        try:
            yield
        finally:
            for (held, name, _), value in zip(self._buffers, present, strict=True):
                held[name] = value
            _set_random(*drawn)


def contents(given: Sequence[Any]) -> list[Any]:
    """What containers and objects among the arguments ``given`` hold, to be compared later.

    Tensors in them count by identity and version. Those that are arguments themselves do not count: torch compares them.
    """
    known: dict[int, int] = {}
    return [None if isinstance(value, torch.Tensor) else _contents(value, known) for value in given]


def _contents(value: Any, known: dict[int, int]) -> Any:
    if isinstance(value, _VALUES):
        return repr(value)  # nan is not equal to nan
    if isinstance(value, torch.Tensor):
        return WeakIdRef(value), None if value.is_inference() else value._version
    if id(value) in known:
        return known[id(value)]
    known[id(value)] = len(known)
    if isinstance(value, Mapping):
        return {key: _contents(item, known) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return set(map(id, value))
    if isinstance(value, Sequence):
        return [_contents(item, known) for item in value]
    held = None if isinstance(value, (type, types.ModuleType, nn.Module)) else getattr(value, "__dict__", None)
    return {name: _contents(item, known) for name, item in held.items()} if held else id(value)


def within_func(error: RuntimeError) -> bool:
    """Whether ``error`` is that of ``grad``, ``jacrev`` and the like of torch.func about hooks on saved tensors."""
    return "torch.func" in str(error) and "saved tensor hooks" in str(error)


def longest_chain(model: nn.Module) -> nn.Sequential:
    """The ``nn.Sequential`` in ``model`` with most modules.

    Raises:
        UsageError: there is none of at least two.
    """
    chains = [m for m in model.modules() if isinstance(m, nn.Sequential) and type(m).forward is nn.Sequential.forward]
    found = max(chains, key=len, default=None)
    if found is None or len(found) < 2:
        raise UsageError(
            f"segments needs an nn.Sequential of at least two modules, and {type(model).__name__} has none. Give "
            "activation_mb, which works with any model."
        )
    return found


def buffers_of(module: nn.Module, changing: set[int]) -> list[Place]:
    """The buffers and parameters within ``module`` whose ``id`` is in ``changing``, and the buffers of BatchNorm."""
    return [
        (inner, name)
        for inner in module.modules()
        for held, known in ((inner._buffers, isinstance(inner, nn.modules.batchnorm._NormBase)), (inner._parameters, False))
        for name, value in held.items()
        if value is not None and (known or id(value) in changing)
    ]


def _only_gathered(module: nn.Module) -> bool:
    """Whether ``module`` is torch's own BatchNorm, which changes its buffers in training and does not read them."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and type(module).__module__.startswith("torch.nn.modules.")


def _copied(buffer: torch.Tensor) -> torch.Tensor:
    """A copy of ``buffer``; itself if it is lazy, because it has no values before the first run."""
    return buffer if is_lazy(buffer) else buffer.detach().clone()


def _set_random(python: Any, numpy: Any) -> None:
    random.setstate(python)
    np.random.set_state(numpy)
